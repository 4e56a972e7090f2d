"""Weights & Biases."""

from typing import Any, Literal

from fedjax_peft.contracts.part import part
from fedjax_peft.simulation.rows import Row
from fedjax_peft.simulation.trackers.base import TrackedRun, Tracker, needs, scalars


@part
def wandb(
    *,
    project: str = "fedjax_peft",
    entity: str | None = None,
    mode: Literal["online", "offline"] | None = None,
) -> Tracker:
    """Weights & Biases: a run for each run, and a group for each sweep.

    The steps are the rounds. A resumed run continues the same W&B run.

    Args:
      project: the project of the W&B runs.
      entity: the user or team; by default the one that is logged in.
      mode: ``offline`` writes to ``wandb/`` in the run directory, for ``wandb sync``; by default
        the environment's ``WANDB_MODE``, or else ``online``.

    Raises:
      InputError: the package ``wandb`` is missing.
    """
    needs("wandb", "wandb")

    def take(row: Row, run: TrackedRun, /) -> None:
        remote = run.opened(lambda: _start(run, project, entity, mode), lambda made: made.finish())
        if row["round"] >= remote.step:  # W&B has the earlier rounds of a resumed run
            remote.log(scalars(row), step=row["round"])

    return take


def _start(run: TrackedRun, project: str, entity: str | None, mode: Any) -> Any:
    """Returns the W&B run; it never asks for a password, which a thread could not show."""
    import os

    import wandb as library

    online = (mode or os.environ.get("WANDB_MODE", "online")) == "online"
    if online and not library.login(prompt=False):
        raise PermissionError("Nobody is logged in. Log in once: wandb login")
    return library.init(
        project=project,
        entity=entity,
        id=run.id,
        name=run.name,
        group=run.group,
        config=dict(run.config),
        dir=run.out,
        mode=mode,
        resume="allow",
        reinit="create_new",  # the points of a sweep can run side by side
        settings=library.Settings(silent=True),
    )
