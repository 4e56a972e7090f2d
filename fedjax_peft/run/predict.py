"""What a run on disk has learned, and what it predicts."""

import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedjax_peft import tree
from fedjax_peft.data.text import tokenize
from fedjax_peft.errors import InputError
from fedjax_peft.models.base import Model
from fedjax_peft.peft.ranks import of_client
from fedjax_peft.run import config as configs
from fedjax_peft.run import record
from fedjax_peft.typing import Algorithm, Params, PyTree

__all__ = [
    "ClientModels",
    "check_clients",
    "check_format",
    "client_leaves",
    "load_clients",
    "load_trained",
    "predict",
    "read_clients",
    "read_inputs",
]


def load_trained(directory: str | Path) -> tuple[Model, Params, dict[str, Any]]:
    """Returns the model of a run directory, its trained global leaves, and the run's config.

    Raises:
      InputError: no run, one without a checkpoint yet, or one made in Python (its config does not
        say how to make the model again; use ``Run.export`` and ``Run.predict`` there).
    """
    directory = Path(directory)
    config = record.read_config(directory)
    if "model" not in config:
        raise InputError(
            f"{directory} was made by fp.simulate in Python, so its config does not say how to"
            " make the model again: use run.export() and run.predict() there."
        )
    learned, labels = record.read_params(directory)
    model = configs.build_model(configs.resolve(config), labels)
    # Some algorithms move frozen weights too.
    moved = {name: value for name, value in learned.items() if name in model.frozen}
    params = {name: value for name, value in learned.items() if name not in moved}
    frozen = tree.select(model.frozen, moved)
    for had, has in ((model.trainable, params), (frozen, moved)):
        if {n: x.shape for n, x in had.items()} != {n: x.shape for n, x in has.items()}:
            raise InputError(
                f"The trained leaves in {directory} do not fit the model of its config."
            )
    return model.replace(frozen={**model.frozen, **moved}), params, config


class ClientModels(NamedTuple):
    """A run whose clients have models of their own."""

    model: Model
    algorithm: Algorithm
    params: Params
    """The global model's trainable leaves."""
    server: PyTree
    """The server's state."""
    private: PyTree
    """What the clients keep, ``[clients, ...]``."""
    client_ranks: Sequence[int] | None = None

    def client_params(self, client: int) -> Params:
        """Returns the trainable leaves of one client's model, as ``Run.client_params`` does."""
        one = tree.take(self.private, client)
        return client_leaves(
            self.algorithm, self.params, self.server, one, self.client_ranks, client
        )


def client_leaves(
    algorithm: Algorithm,
    params: Params,
    server: PyTree,
    kept: PyTree,
    ranks: Sequence[int] | None,
    client: int,
) -> Params:
    """Returns all trainable leaves of a client's model.

    Args:
      algorithm: what was run.
      params: the global model's leaves.
      server: the server's state.
      kept: what the client keeps.
      ranks: as given to ``simulate``.
      client: its number.
    """
    own = algorithm.model(algorithm.server.broadcast(server), kept)
    return of_client({**params, **own}, ranks, client)


def check_format(format: str, *, moved: bool) -> None:
    """Raises InputError for an adapter's format if the server has moved frozen weights too."""
    if moved and format != "merged":
        raise InputError(
            f"This algorithm has folded what it learned into the frozen weights, which the format"
            f" {format!r} does not hold: export with the format 'merged'."
        )


def load_clients(directory: str | Path) -> ClientModels:
    """Returns the models of a run directory's clients, from its newest checkpoint.

    Raises:
      InputError: as :func:`load_trained`; a run that keeps nothing private, or whose checkpoints
        cannot be read.
    """
    model, params, config = load_trained(directory)
    algorithm = configs.build_algorithm(configs.resolve(config))
    names = tree.assign_roles(model.kinds, algorithm.roles)
    shared, private = (tree.select(model.trainable, names[role]) for role in ("shared", "private"))
    kept = jax.eval_shape(algorithm.keep, shared, private)
    check_clients([], kept)
    server, stacked = _restore(
        Path(directory) / "checkpoints", jax.eval_shape(algorithm.server.init, shared), kept
    )
    return ClientModels(model, algorithm, params, server, stacked, config.get("client_ranks"))


def check_clients(clients: Sequence[int], private: PyTree) -> None:
    """Raises InputError for a client that there is not, or if clients have nothing of their own.

    Args:
      clients: their numbers.
      private: what they keep, ``[clients, ...]``.
    """
    leaves = jax.tree.leaves(private)
    if not leaves:
        raise InputError(
            "This run keeps nothing private to its clients: they all have the global model, which"
            " is what an export that names no client writes."
        )
    for client in clients:
        n = leaves[0].shape[0]
        if not 0 <= client < n:
            raise InputError(f"There is no client {client}: the run has {n}, 0 to {n - 1}.")


def read_clients(text: str, private: PyTree) -> list[int]:
    """Returns the clients that ``all`` or ``0,3,7`` names.

    Raises:
      InputError: anything else, or a client that there is not.
    """
    if text == "all":
        return list(range(jax.tree.leaves(private)[0].shape[0]))
    try:
        clients = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise InputError(
            f"--clients {text!r} is neither 'all' nor numbers such as 0,3,7."
        ) from None
    check_clients(clients, private)
    return clients


def _restore(directory: Path, server: PyTree, private: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the server's state and what the clients keep, ``[clients, ...]``.

    How many clients there are is read off the checkpoint, and nothing on disk is changed.

    Args:
      directory: of the checkpoints.
      server: shapes of the server's state.
      private: shapes of what one client keeps.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    reasons = []
    with (
        _quiet("absl"),  # orbax warns of what read_only means
        ocp.CheckpointManager(
            directory.resolve(),
            options=ocp.CheckpointManagerOptions(read_only=True),
            item_handlers=ocp.StandardCheckpointHandler(),
        ) as manager,
    ):
        for number in sorted(manager.all_steps(), reverse=True):
            try:
                _, stored = manager.item_metadata(number).tree
                clients = jax.tree.leaves(stored)[0].shape[0]
                stacked = jax.eval_shape(functools.partial(tree.broadcast, n=clients), private)
                like = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
                    (server, stacked),
                )
                return manager.restore(number, args=ocp.args.StandardRestore(like))
            except Exception as error:  # orbax raises many kinds
                reasons.append(f"round {number}: {(str(error) or repr(error)).splitlines()[0]}")
    why = "; ".join(reasons) or "there is none"
    raise InputError(f"No checkpoint in {directory} can be restored: {why}.")


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keeps a logger's warnings back in the block."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def predict(
    model: Model,
    params: Params,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    max_length: int = 128,
    batch_size: int = 64,
) -> np.ndarray:
    """Returns float32 logits ``[texts, classes]``, in order.

    Raises:
      InputError: a model without a tokenizer.
    """
    if model.tokenizer is None:
        raise InputError("This model has no tokenizer, so it cannot read text.")
    if not len(texts):
        return np.zeros((0, len(model.labels)), np.float32)
    columns = tokenize(model.tokenizer, texts, pairs, max_length=max_length)
    forward = jax.jit(lambda f, p, batch: model.apply(f, p, batch, None, False).logits)
    frozen = model.compute_frozen()
    rows = []
    for start in range(0, len(texts), batch_size):
        batch = {name: column[start : start + batch_size] for name, column in columns.items()}
        missing = batch_size - len(batch["input_ids"])
        padded = {n: np.pad(c, ((0, missing), (0, 0)), mode="edge") for n, c in batch.items()}
        rows.append(np.asarray(forward(frozen, params, padded))[: batch_size - missing])
    return np.concatenate(rows)


def read_inputs(path: str | Path) -> tuple[list[str], list[str] | None]:
    """Returns the texts (and second texts) of a JSON-lines file.

    Raises:
      InputError: a line that is not an object with a string ``text`` (all or none with
        ``text_pair``); the line is named.
    """
    texts: list[str] = []
    pairs: list[str] = []
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The input {str(path)!r} cannot be read: {error}.") from None
    # split, not splitlines: JSON strings may hold other line separators raw.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            item = json.loads(line)
        except ValueError as error:
            raise InputError(f"{where} is not JSON: {error}.") from None
        if not isinstance(item, Mapping) or not isinstance(item.get("text"), str):
            raise InputError(f'{where} is not an object with a string "text".')
        if not isinstance(item.get("text_pair", ""), str):
            raise InputError(f'{where}: "text_pair" must be a string.')
        texts.append(item["text"])
        if "text_pair" in item:
            pairs.append(item["text_pair"])
        if pairs and len(pairs) != len(texts):
            raise InputError(f'{where}: either all lines have a "text_pair" or none.')
    return texts, pairs or None
