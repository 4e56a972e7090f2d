"""The way back from a run directory to a :class:`fedjax_peft.Run`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_peft import algorithms, tasks, tree
from fedjax_peft.config import config as configs
from fedjax_peft.errors import InputError
from fedjax_peft.models.base import Model
from fedjax_peft.roles import assign_roles
from fedjax_peft.rows import read_metrics, seen_clients
from fedjax_peft.simulation import recipe, record
from fedjax_peft.simulation.checkpoint import read_checkpoint
from fedjax_peft.simulation.client_models import (
    ClientModels,
    check_clients,
    check_global,
    read_clients,
    untrained_note,
)
from fedjax_peft.simulation.run import Run
from fedjax_peft.tasks import Task
from fedjax_peft.typing import Algorithm, Params, PyTree

__all__ = [
    "TrainedModels",
    "algorithm_of",
    "base_model",
    "inputs_of",
    "load_clients",
    "load_models",
    "load_run",
    "load_trained",
    "restore",
]


def load_run(
    directory: str | Path, *, model: Model | None = None, algorithm: Algorithm | None = None
) -> Run:
    """Returns a run from its directory: metrics, parameters, ``predict``, ``export``, ``plot``.

    A run of a config file needs nothing else. Of a run that ``simulate`` made in Python, the model
    is made again if ``load_model`` or ``random_model`` had made it and the library's methods were
    attached. The algorithm, which is functions, is not kept: without it the global model is
    loaded, if all leaves are shared.

    Args:
      directory: of the run; it may be unfinished, and then holds its last checkpoint.
      model: as given to ``simulate``, where it cannot be made again.
      algorithm: as given to ``simulate``, for the models of the clients of a run made in Python.

    Raises:
      InputError: no run, one without a checkpoint, a model that cannot be made again or does not
        fit, or private leaves without the ``algorithm``.
    """
    directory = Path(directory)
    config = record.read_config(directory)
    rows = read_metrics(directory / "metrics.jsonl")
    learned, labels = record.read_params(directory)
    model = base_model(directory, config, labels) if model is None else model
    _check_leaves(directory, model, learned)
    known = algorithm is not None or "model" in config
    algorithm = algorithm_of(directory, config, model) if algorithm is None else algorithm
    if known:
        _, server, client_state = restore(directory, model, algorithm)
        params = {**model.trainable, **algorithm.server.model(server)}
    else:
        moved = {name: x for name, x in learned.items() if name in model.frozen}
        wide = model.wide | set(moved)  # what was added there is not rounded
        model = model.replace(frozen={**model.frozen, **moved}, wide=wide)
        params = {name: jnp.asarray(x) for name, x in learned.items() if name not in moved}
        names = assign_roles(model.kinds, algorithm.roles)
        server, client_state = tree.select(params, names["shared"]), {}
    ranks = config.get("client_ranks")
    length = inputs_of(directory, config)[1]
    return Run(model, algorithm, params, client_state, server, rows, directory, ranks, length)


def base_model(directory: Path, config: dict[str, Any], labels: tuple[str, ...]) -> Model:
    """Returns the model of a run with the values that it started from.

    Raises:
      InputError: the model of a run made in Python that cannot be made again.
    """
    if "model" in config:
        return configs.build_model(configs.resolve_recorded(config), labels)
    return recipe.make_model(directory)


def algorithm_of(directory: Path, config: dict[str, Any], model: Model) -> Algorithm:
    """Returns the algorithm of a run; of one made in Python, what its global model needs of it.

    Raises:
      InputError: a run made in Python whose clients keep leaves to themselves.
    """
    if "model" in config:
        return configs.build_algorithm(configs.resolve_recorded(config))
    name = config.get("algorithm", "the algorithm")
    rows = read_metrics(directory / "metrics.jsonl")
    roles = rows[0].get("roles") if rows else None
    if not isinstance(roles, dict) or roles.get("private", 1):
        raise InputError(
            f"The clients of {directory} keep leaves to themselves, and how they predict is part of"
            f" {name!r}, an object of Python that the run does not keep. Give it:"
            " fp.load_run(directory, algorithm=...)."
        )
    learned, _ = record.read_params(directory)
    # As the server of a trained model it adds nothing: what was learned is in the leaves already.
    moved = any(leaf in model.frozen for leaf in learned)
    plain = algorithms.fedavg(optax.identity())
    server = plain.server._replace(frozen_delta=(lambda state: {}) if moved else None)
    return plain._replace(name=str(name), server=server)


def inputs_of(directory: Path, config: dict[str, Any]) -> tuple[Task, int | None]:
    """Returns a run's task, and the tokens of its texts (None if they are no texts)."""
    if "model" in config:
        return configs.task_of(config), config.get("data", {}).get("max_length")
    if not (directory / recipe.NAME).exists():
        return tasks.classification(), None
    metadata = recipe.load_recipe(directory)
    head = (metadata["model"] or {}).get("head", "classification")
    return tasks.for_head(tasks.head_kind(head)), metadata["max_length"]


def restore(directory: Path, model: Model, algorithm: Algorithm) -> tuple[int, PyTree, PyTree]:
    """Returns the round of the newest checkpoint, the server's state, and what the clients keep.

    Raises:
      InputError: no checkpoint can be restored.
    """
    names = assign_roles(model.kinds, algorithm.roles)
    shared, private = (tree.select(model.trainable, names[role]) for role in ("shared", "private"))
    kept = jax.eval_shape(algorithm.init_client_state, shared, private)
    template = jax.eval_shape(algorithm.server.init, shared)
    round_index, (server, stacked) = read_checkpoint(directory / "checkpoints", template, kept)
    return round_index, server, stacked


def _check_leaves(directory: Path, model: Model, learned: Params) -> None:
    """Raises InputError if what a run has learned is not of this model."""
    ours = {name: x.shape for name, x in {**model.frozen, **model.trainable}.items()}
    theirs = {name: x.shape for name, x in learned.items()}
    wrong = sorted(n for n in theirs if ours.get(n) != theirs[n])
    wrong += sorted(model.trainable.keys() - theirs.keys())
    if wrong:
        raise InputError(
            f"The trained leaves in {directory} do not fit the model: {wrong[0]!r} is"
            f" {theirs.get(wrong[0], 'missing')} there, and {ours.get(wrong[0], 'missing')} in it."
        )


class TrainedModels(NamedTuple):
    """The models of a run on disk that somebody has chosen."""

    model: Model
    algorithm: Algorithm
    chosen: list[int]
    """The numbers of the clients; none if the global model was chosen."""
    params: Callable[[int | None], Params]
    """One of the clients, or None -> the trainable leaves of its model, or of the global one."""
    note: str | None = None
    """Which of the chosen clients never trained, if any."""


def load_models(directory: str | Path, clients: str | Sequence[int] | None) -> TrainedModels:
    """Returns models of a run directory.

    Args:
      directory: of the run.
      clients: whose models: numbers, or text for :func:`read_clients`; None is the global model.

    Raises:
      InputError: as :func:`load_trained`, :func:`load_clients` and :func:`check_global`.
    """
    if clients is None:
        model, params, config = load_trained(directory)
        algorithm = algorithm_of(Path(directory), config, model)
        advice = "Choose a client's model, such as --client 0, or --clients all for all of them."
        check_global(model, algorithm, advice)
        return TrainedModels(model, algorithm, [], lambda _: params)
    run = load_clients(directory)
    if isinstance(clients, str):
        chosen = read_clients(clients, run.client_state)
    else:
        check_clients(clients, run.client_state)
        chosen = [*clients]
    note = untrained_note(chosen, run.seen)

    def params_of(client: int | None) -> Params:
        return run.params if client is None else run.client_params(client)

    return TrainedModels(run.model, run.algorithm, chosen, params_of, note)


def load_clients(directory: str | Path) -> ClientModels:
    """Returns the models of a run directory's clients, from its newest checkpoint.

    Raises:
      InputError: as :func:`load_trained`; a run that keeps nothing private, or whose checkpoints
        cannot be read.
    """
    model, params, config = load_trained(directory)
    algorithm = algorithm_of(Path(directory), config, model)
    names = assign_roles(model.kinds, algorithm.roles)
    shared, private = (tree.select(model.trainable, names[role]) for role in ("shared", "private"))
    check_clients([], jax.eval_shape(algorithm.init_client_state, shared, private))
    round_index, server, stacked = restore(Path(directory), model, algorithm)
    rows = read_metrics(Path(directory) / "metrics.jsonl")
    seen = seen_clients(row for row in rows if row["round"] <= round_index)
    return ClientModels(model, algorithm, params, server, stacked, config.get("client_ranks"), seen)


def load_trained(directory: str | Path) -> tuple[Model, Params, dict[str, Any]]:
    """Returns the model of a run directory, its trained global leaves, and the run's config.

    Raises:
      InputError: no run, one without a checkpoint yet, or one made in Python whose model cannot be
        made again.
    """
    directory = Path(directory)
    config = record.read_config(directory)
    learned, labels = record.read_params(directory)
    model = base_model(directory, config, labels)
    # Some algorithms move frozen weights too.
    moved = {name: value for name, value in learned.items() if name in model.frozen}
    params = {name: value for name, value in learned.items() if name not in moved}
    frozen = tree.select(model.frozen, moved)
    for had, has in ((model.trainable, params), (frozen, moved)):
        if {n: x.shape for n, x in had.items()} != {n: x.shape for n, x in has.items()}:
            raise InputError(
                f"The trained leaves in {directory} do not fit the model of its config."
            )
    frozen = {**model.frozen, **moved}
    return model.replace(frozen=frozen, wide=frozenset(moved)), params, config
