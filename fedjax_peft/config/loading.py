"""Loading runs and trained models from run directories."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import safetensors.numpy
from safetensors import SafetensorError

from fedjax_peft import algorithms
from fedjax_peft.config import config as configs
from fedjax_peft.contracts import Algorithm, Attack, Federation, Params, Privacy, PyTree
from fedjax_peft.contracts.part import OWN, unrecorded
from fedjax_peft.data.classes import class_numbers, has_names
from fedjax_peft.data.vocabulary import read_vocabulary, word_tokenizer
from fedjax_peft.models.base import Model
from fedjax_peft.models.stored_head import HeadWarning
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.roles import assign_roles
from fedjax_peft.simulation.client_models import (
    check_clients,
    check_global,
    check_here,
    choose_client,
    is_deployed,
    read_client,
    read_clients,
    untrained_note,
)
from fedjax_peft.simulation.origin import base_seed, with_origin
from fedjax_peft.simulation.rows import read_metrics, seen_clients
from fedjax_peft.simulation.run import Run
from fedjax_peft.simulation.session import wrapped
from fedjax_peft.simulation.storage import record
from fedjax_peft.simulation.storage.checkpoint import read_checkpoint
from fedjax_peft.simulation.storage.fingerprint import changed_base
from fedjax_peft.simulation.trained_rows import read_rows
from fedjax_peft.support.errors import InputError, first_line
from fedjax_peft.tasks import Task


def load_run(
    directory: str | Path,
    *,
    model: Model | None = None,
    algorithm: Algorithm | None = None,
    privacy: Privacy | None = None,
    attack: Attack | None = None,
) -> Run:
    """Returns a run from its directory, with metrics, parameters, ``predict`` and ``export``.

    Usually, only the directory is needed. Of a run that was started from Python, ``config.toml``
    says what is not recorded (``not_recorded``): a module of your own, a part that was changed by
    hand. Without an algorithm, only the global model is loaded, and all leaves must be shared.

    Args:
      directory: the run's directory; of an unfinished run, the last checkpoint is loaded.
      model: the model given to ``simulate``, if it is not recorded.
      algorithm: the algorithm given to ``simulate``, likewise.
      privacy: the mechanism given to ``simulate``, if any; needed with ``algorithm``.
      attack: the attack given to ``simulate``, if any; likewise.

    Raises:
      InputError: the directory is not a run or has no checkpoint; the model cannot be rebuilt or
        does not fit; or leaves are private and ``algorithm`` is missing.
    """
    directory = Path(directory)
    config, model, learned = _recorded(directory, model)
    rows = read_metrics(directory / "metrics.jsonl")
    # A start from examples cannot be made again from the config alone.
    fixed = {name: jnp.asarray(learned[name]) for name, k in model.kinds.items() if k == "fixed"}
    model = model.replace(trainable={**model.trainable, **fixed})
    has_algorithm = algorithm is not None or OWN not in config["algorithm"]
    if algorithm is None:
        algorithm = algorithm_of(directory, config, model)
    else:
        algorithm = _as_run(directory, algorithm, privacy, attack)
    if has_algorithm:
        _, server, client_state, kept = restore(directory, model, algorithm)
        params = {**model.trainable, **algorithm.server.model(server)}
    else:
        model, params = _with_learned(model, learned)
        names = assign_roles(model.kinds, algorithm.roles)
        server, client_state, kept = tree.select(params, names["shared"]), {}, {}
    ranks = config.get("system", {}).get("client_ranks")
    task, length = inputs_of(config)
    return Run(
        *(model, algorithm, params, client_state, server, rows, directory),
        *(ranks, length, task, partial(read_rows, directory), kept),
    )


def base_model(directory: Path, config: dict[str, Any], labels: tuple[str, ...]) -> Model:
    """Returns the model of a run with its initial values.

    Raises:
      InputError: the run was started from Python, and its model is not recorded; or the base
        weights are other ones now.
    """
    table = config["model"]
    if "name" in table:  # the run has the values that were changed after the model was made
        table = {key: x for key, x in table.items() if key != OWN}
    if missing := unrecorded({"model": table, "peft": config["peft"]}):
        raise InputError(
            f"The model of {directory} cannot be made again from what the run keeps"
            f" ({', '.join(map(': '.join, missing.items()))}). {_ADVICE}"
        )
    words = read_vocabulary(directory)
    resolved = {**configs.resolve_recorded({**config, "model": table})}
    resolved["seed"] = base_seed(directory, config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadWarning)  # the run has trained the head
        model = with_origin(configs.build_model(resolved, labels, words), directory)
    if changed := changed_base(directory, model.frozen):
        raise InputError(
            f"The base weights of {model.name!r} are not those that the run in {directory} began"
            f" with ({changed!r} differs): they were changed after loading, or the checkpoint is"
            f" another one now. {_ADVICE}"
        )
    return model.replace(tokenizer=word_tokenizer(words)) if words else model


_ADVICE = "Give the model: fp.load_run(directory, model=...)."


def algorithm_of(directory: Path, config: dict[str, Any], model: Model) -> Algorithm:
    """Returns the algorithm of a run; of one that is not recorded, one that loads its global model.

    Raises:
      InputError: the algorithm is not recorded, and the clients have private leaves; or a part of
        it is not.
    """
    if OWN not in config["algorithm"]:
        return _made_again(directory, configs.resolve_recorded(config))
    rows = read_metrics(directory / "metrics.jsonl")
    roles = rows[0].get("roles") if rows else None
    if not isinstance(roles, dict) or roles.get("private", 1):
        raise InputError(
            f"The clients of {directory} have private leaves. How they predict is defined by"
            f" {config['algorithm'][OWN]!r}, a Python object that is not recorded in the directory."
            " Pass it: fp.load_run(directory, algorithm=...)."
        )
    learned, _ = record.read_params(directory)
    # The recorded leaves already contain the sums, so this server adds nothing to frozen leaves.
    changed = any(leaf in model.frozen for leaf in learned)
    plain = algorithms.fedavg(optax.identity())
    server = plain.server._replace(frozen_delta=(lambda state: {}) if changed else None)
    return plain._replace(name=config["algorithm"][OWN], server=server)


def _made_again(directory: Path, config: dict[str, Any]) -> Algorithm:
    """Returns the algorithm of a resolved config.

    An optax optimizer of the user's is not recorded. Where clients keep no state of it, no model
    depends on it, and another one takes its place.
    """
    missing = unrecorded([config["optimizer"], config["schedule"]])
    others: dict[str, Any] = {}
    if missing and not _keeps(config):
        others["optimizer"], config = optax.identity(), {**config, "schedule": {}}
    try:
        algorithm = configs.build_algorithm(config, **others)
        privacy, attack = configs.build_privacy(config), configs.build(config, "attack")
        return _as_run(directory, algorithm, privacy, attack)
    except InputError as error:
        raise InputError(
            f"The algorithm of {directory} cannot be made again: {error} Pass it:"
            " fp.load_run(directory, algorithm=...)."
        ) from None


def _keeps(config: dict[str, Any]) -> bool:
    """Returns whether the clients of a resolved config keep their optimizer's state."""
    optimizer = config["optimizer"]
    kept = optimizer.get("keep") or optimizer.get("name") == "kept"
    return kept or config["algorithm"].get("fresh_optimizer") is False  # of 'centralised'


def _as_run(
    directory: Path, algorithm: Algorithm, privacy: Privacy | None, attack: Attack | None
) -> Algorithm:
    """Returns the algorithm of a run with its mechanism of privacy and its attack."""
    if privacy is None and attack is None:
        return algorithm
    rows = read_metrics(directory / "metrics.jsonl")
    facts = rows[0].get("federation") if rows else None
    facts = facts if isinstance(facts, dict) else {}
    if not {*Federation._fields} - {*Federation._field_defaults} <= facts.keys():
        raise InputError(f"{directory} does not say which clients it had: its row 0 is damaged.")
    known = {name: _tuples(facts[name]) for name in Federation._fields if name in facts}
    return wrapped(algorithm, (attack, privacy), Federation(**known)).algorithm


def _tuples(value: Any) -> Any:
    """Returns a value of JSON with tuples in place of lists, as before it was recorded."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def inputs_of(config: dict[str, Any]) -> tuple[Task, int | None]:
    """Returns the task of a run, and the tokens per text (None for data that are not texts)."""
    data = config["data"]
    return configs.task_of(config), data.get("max_length", data.get("packing"))


def restore(
    directory: Path, model: Model, algorithm: Algorithm
) -> tuple[int, PyTree, PyTree, dict[str, PyTree]]:
    """Returns the newest checkpoint: its round, and the states of server, clients and the others.

    Raises:
      InputError: no checkpoint can be restored.
    """
    names = assign_roles(model.kinds, algorithm.roles)
    shared, private = (tree.select(model.trainable, names[role]) for role in ("shared", "private"))
    client_state = jax.eval_shape(algorithm.init_client_state, shared, private)
    if is_deployed(directory):
        client_state = {}  # real clients have it
    template = jax.eval_shape(algorithm.server.init, shared)
    path = directory / "checkpoints"
    round_index, states = read_checkpoint(path, template, client_state)
    return round_index, *states


def _with_learned(model: Model, learned: Params) -> tuple[Model, Params]:
    """Returns the model with the frozen leaves that a run has changed, and the trained leaves."""
    merged = {name: x for name, x in learned.items() if name in model.frozen}
    params = {name: jnp.asarray(x) for name, x in learned.items() if name not in merged}
    wide = model.wide | merged.keys()  # these leaves stay float32, so that the sums are exact
    return model.replace(frozen={**model.frozen, **merged}, wide=wide), params


def _recorded(directory: Path, model: Model | None = None) -> tuple[dict[str, Any], Model, Params]:
    """Returns the config of a run, its model with initial values, and the learned leaves.

    Raises:
      InputError: the directory is no run, or the leaves do not fit the model.
    """
    config = record.read_config(directory)
    learned, labels = record.read_params(directory)
    model = _named(base_model(directory, config, labels) if model is None else model, labels)
    expected = {name: x.shape for name, x in {**model.frozen, **model.trainable}.items()}
    recorded = {name: x.shape for name, x in learned.items()}
    wrong = sorted(n for n in recorded if expected.get(n) != recorded[n])
    wrong += sorted(model.trainable.keys() - recorded.keys())
    if wrong:
        name = wrong[0]
        raise InputError(
            f"The trained leaves in {directory} do not fit the model: {name!r} is"
            f" {recorded.get(name, 'missing')} in the directory and"
            f" {expected.get(name, 'missing')} in the model."
        )
    return config, model, learned


def _named(model: Model, labels: tuple[str, ...]) -> Model:
    """Returns the user's model with the recorded names: the learned leaves have their order."""
    if not (model.labels and has_names(labels)):
        return model
    class_numbers(labels, model.labels, "The model", "the run", remedy="Give the run's model.")
    return model.replace(labels=labels)


class TrainedModels(NamedTuple):
    """Selected models of a run on disk."""

    model: Model
    algorithm: Algorithm
    chosen: list[int]
    """The selected clients; empty for the global model."""
    params: Callable[[int | None], Params]
    """Client -> the trainable leaves of its model; None -> those of the global model."""
    note: str | None = None
    """A note on selected clients that never trained, if there are any."""
    names: Sequence[str] = ()
    """The names of the selected clients; empty if they have none."""

    @property
    def first(self) -> int | None:
        """The first selected client; None: the global model."""
        return self.chosen[0] if self.chosen else None


def load_models(directory: str | Path, clients: str | Sequence[int | str] | None) -> TrainedModels:
    """Returns selected models of a run.

    Args:
      clients: the clients, each as a number or a name, or as one text for :func:`read_clients`;
        None selects the global model.
    """
    if clients is None:
        model, params, config = load_trained(directory)
        algorithm = algorithm_of(Path(directory), config, model)
        advice = "Select a client's model, such as --client 0, or all of them: --clients all."
        check_global(model, algorithm, choose_client(Path(directory), advice))
        return TrainedModels(model, algorithm, [], lambda _: params)
    run = load_clients(directory)
    names = run.client_names
    if isinstance(clients, str):
        chosen = read_clients(clients, run.client_state, names)
    else:
        chosen = [read_client(str(client), run.client_state, names) for client in clients]
    note = untrained_note(chosen, seen_clients(run.metrics))

    def params_of(client: int | None) -> Params:
        return run.params if client is None else run.client_params(client)

    named = [names[client] for client in chosen if client < len(names)]
    return TrainedModels(run.model, run.algorithm, chosen, params_of, note, named)


def load_real_client(directory: str | Path, folder: Path) -> TrainedModels:
    """Returns the model of a real client, from the folder in which it keeps its state.

    Args:
      directory: of the server's run.
      folder: ``client-N`` in the ``state`` of the client's SuperNode.

    Raises:
      InputError: there is no client's model, or that of another run.
    """
    model, params, config = load_trained(directory)
    path = folder / "model.safetensors"
    if not path.is_file():
        raise InputError(
            f"{folder} has no model.safetensors, the model of a real client: give the folder"
            " client-N in the `state` of its SuperNode. Where all clients have the global model,"
            " there is none: leave --client-folder out."
        )
    try:
        own = safetensors.numpy.load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}.") from None
    shapes = {name: x.shape for name, x in params.items()}
    if wrong := sorted(name for name, x in own.items() if shapes.get(name) != x.shape):
        raise InputError(
            f"{path} does not fit {directory}: its leaf {wrong[0]!r} is {own[wrong[0]].shape}, and"
            f" {shapes.get(wrong[0], 'missing')} in the run. Give the run that the client was in."
        )
    algorithm = algorithm_of(Path(directory), config, model)
    together = {**params, **{name: jnp.asarray(x) for name, x in own.items()}}
    return TrainedModels(model, algorithm, [], lambda _: together)


def load_clients(directory: str | Path) -> Run:
    """Returns a run whose clients have private leaves, up to its newest checkpoint."""
    check_here(Path(directory))
    model, params, config = load_trained(directory)
    algorithm = algorithm_of(Path(directory), config, model)
    round_index, server, stacked, _ = restore(Path(directory), model, algorithm)
    check_clients([], stacked)
    rows = read_metrics(Path(directory) / "metrics.jsonl")
    done = [row for row in rows if row["round"] <= round_index]
    ranks = config.get("system", {}).get("client_ranks")
    return Run(model, algorithm, params, stacked, server, done, Path(directory), ranks)


def load_trained(directory: str | Path) -> tuple[Model, Params, dict[str, Any]]:
    """Returns the model of a run, its trained global leaves, and the run's config.

    Raises:
      InputError: the directory is not a run or has no checkpoint yet; or the run was made in Python
        and its model cannot be rebuilt.
    """
    config, model, learned = _recorded(Path(directory))
    return *_with_learned(model, learned), config
