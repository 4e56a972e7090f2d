"""TensorBoard: an event file with the numbers of a run."""

from pathlib import Path
from typing import Any

from fedjax_peft.contracts.part import part
from fedjax_peft.simulation.rows import Row
from fedjax_peft.simulation.trackers.base import TrackedRun, Tracker, needs, scalars
from fedjax_peft.support.files import naming


@part
def tensorboard(*, folder: str = "tensorboard") -> Tracker:
    """TensorBoard: event files in the run directory, for ``tensorboard --logdir runs``.

    A resumed run adds a file, which hides the points that older files have from its first round on.

    Args:
      folder: the folder of the event files; a relative path is in the run directory.

    Raises:
      InputError: the package ``tensorboardX`` is missing.
    """
    needs("tensorboardX", "tensorboard")

    def take(row: Row, run: TrackedRun, /) -> None:
        step = row["round"]
        writer = run.opened(lambda: _writer(run.path(folder), step), lambda made: made.close())
        for name, value in scalars(row).items():
            writer.add_scalar(name, value, step)

    return take


def _writer(folder: Path, first_step: int) -> Any:
    """Returns the writer of a new event file, which hides older points from ``first_step`` on."""
    from tensorboardX import SummaryWriter

    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        several = f".{len([*folder.iterdir()])}"  # files of one second need different names
        return SummaryWriter(
            str(folder), purge_step=first_step, filename_suffix=several, flush_secs=5
        )
