"""What a run on disk has learned, and what it predicts."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_peft import tasks, tree
from fedjax_peft.algorithms.representation import pool
from fedjax_peft.data.encode import encode
from fedjax_peft.data.table import Table
from fedjax_peft.data.text import tokenize
from fedjax_peft.errors import InputError
from fedjax_peft.files import read_text
from fedjax_peft.models.base import Model
from fedjax_peft.peft.ranks import of_client
from fedjax_peft.run import history, loading, record
from fedjax_peft.tasks.question_answering import answers
from fedjax_peft.typing import Algorithm, Batch, Outputs, Params, PyTree

__all__ = [
    "INPUTS",
    "ClientModels",
    "TrainedModels",
    "answer",
    "check_clients",
    "check_format",
    "check_global",
    "client_leaves",
    "embed",
    "load_clients",
    "load_models",
    "load_trained",
    "predict",
    "read_clients",
    "read_inputs",
    "untrained_note",
]


def load_trained(directory: str | Path) -> tuple[Model, Params, dict[str, Any]]:
    """Returns the model of a run directory, its trained global leaves, and the run's config.

    Raises:
      InputError: no run, one without a checkpoint yet, or one made in Python whose model cannot be
        made again.
    """
    directory = Path(directory)
    config = record.read_config(directory)
    learned, labels = record.read_params(directory)
    model = loading.base_model(directory, config, labels)
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
    seen: Collection[int] = ()
    """The clients that have trained; the others have their initial models."""

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
    algorithm = loading.algorithm_of(Path(directory), config, model)
    names = tree.assign_roles(model.kinds, algorithm.roles)
    shared, private = (tree.select(model.trainable, names[role]) for role in ("shared", "private"))
    check_clients([], jax.eval_shape(algorithm.keep, shared, private))
    number, server, stacked = loading.restore(Path(directory), model, algorithm)
    rows = history.read_metrics(Path(directory) / "metrics.jsonl")
    seen = history.seen_clients(row for row in rows if row["round"] <= number)
    return ClientModels(model, algorithm, params, server, stacked, config.get("client_ranks"), seen)


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
        algorithm = loading.algorithm_of(Path(directory), config, model)
        advice = "Choose a client's model, such as --client 0, or --clients all for all of them."
        check_global(model, algorithm, advice)
        return TrainedModels(model, algorithm, [], lambda _: params)
    run = load_clients(directory)
    if isinstance(clients, str):
        chosen = read_clients(clients, run.private)
    else:
        check_clients(clients, run.private)
        chosen = [*clients]
    note = untrained_note(chosen, run.seen)

    def params_of(client: int | None) -> Params:
        return run.params if client is None else run.client_params(client)

    return TrainedModels(run.model, run.algorithm, chosen, params_of, note)


def check_global(model: Model, algorithm: Algorithm, advice: str) -> None:
    """Raises InputError if some leaves are private, so that no model is all the federation's.

    Args:
      model: what was trained.
      algorithm: what was run.
      advice: how to choose a client's model.
    """
    private = tree.assign_roles(model.kinds, algorithm.roles)["private"]
    trained = sum(kind != "fixed" for kind in model.kinds.values())
    if private:
        raise InputError(
            f"In this run {len(private)} of the {trained} trained leaves are private to"
            f" the clients, such as {sorted(private)[0]!r}. The global model has only the initial"
            f" values of these, so it is not what was trained. {advice}"
        )


def untrained_note(clients: Iterable[int], seen: Collection[int]) -> str | None:
    """Returns a sentence about the clients that never trained, or None if there are none."""
    never = [client for client in clients if client not in seen]
    if not never:
        return None
    shown = ", ".join(map(str, never[:8])) + (f" and {len(never) - 8} more" if never[8:] else "")
    one = len(never) == 1
    return (
        f"{'client' if one else 'clients'} {shown} never trained in this run:"
        f" what {'it keeps' if one else 'they keep'} private still has its initial values."
    )


def check_clients(clients: Sequence[int], private: PyTree) -> None:
    """Raises InputError for a client that there is not, or if clients have nothing of their own.

    Args:
      clients: their numbers.
      private: what they keep, ``[clients, ...]``.
    """
    leaves = jax.tree.leaves(private)
    if not leaves:
        raise InputError(
            "This run keeps nothing private to its clients: they all have the global model. Leave"
            " the client out."
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
    _check_tokenizer(model)
    if not len(texts):
        return np.zeros((0, len(model.labels)), np.float32)
    columns = tokenize(model.tokenizer, texts, pairs, max_length=max_length)
    said = _over_batches(
        model, params, columns, lambda outputs, batch: {"logits": outputs.logits}, batch_size
    )
    return said["logits"]


def embed(
    model: Model, texts: Sequence[str], *, max_length: int = 128, batch_size: int = 64
) -> np.ndarray:
    """Returns the mean of each text's last hidden states, float32 ``[texts, width]``.

    For :func:`fedjax_peft.data.cluster.kmeans`, whose ``embed`` it can be.

    Raises:
      InputError: a model without a tokenizer, or no texts.
    """
    _check_tokenizer(model)
    if not len(texts):
        raise InputError("There is no text to embed.")
    columns = tokenize(model.tokenizer, texts, max_length=max_length)

    def pooled(outputs: Outputs, batch: Batch) -> dict[str, Any]:
        return {"mean": pool(outputs, batch, "mean")}

    return _over_batches(model, model.trainable, columns, pooled, batch_size)["mean"]


INPUTS: dict[str, dict[str, type]] = {
    "classification": {"text": str, "text_pair": str},
    "tagging": {"tokens": list},
    "question_answering": {"question": str, "context": str},
}
"""Task -> the fields of a line that :func:`answer` reads; ``text_pair`` may be missing."""


def answer(
    model: Model,
    params: Params,
    rows: Sequence[Mapping[str, Any]],
    *,
    task: str,
    max_length: int = 128,
    batch_size: int = 64,
) -> list[dict[str, Any]]:
    """Returns what a model says of each row, in order.

    Args:
      model: with a head for the task.
      params: its trainable leaves.
      rows: with the fields that :data:`INPUTS` names.
      task: ``classification`` (the result has ``label`` and ``logits``), ``tagging`` (``tags``, one
        for each word; O where a word is cut off) or ``question_answering`` (``answer``).
      max_length: tokens per text.
      batch_size: texts at a time.

    Raises:
      InputError: a model without a tokenizer, or a row that cannot be read.
    """
    _check_tokenizer(model)
    if not rows:
        return []
    columns = {key: [row[key] for row in rows] for key in INPUTS[task] if key in rows[0]}
    if task == "classification":
        texts, pairs = columns["text"], columns.get("text_pair")
        sizes = {"max_length": max_length, "batch_size": batch_size}
        logits = predict(model, params, texts, pairs, **sizes)
        return [
            {"label": model.labels[int(row.argmax())], "logits": row.tolist()} for row in logits
        ]
    outside = model.labels[0]
    if task == "tagging":
        columns["tags"] = [[outside] * len(words) for words in columns["tokens"]]
    else:
        columns["id"] = list(range(len(rows)))
    table = Table("The input", columns)
    data = encode(task, table, model.labels, model.tokenizer, max_length=max_length, name="input")
    of_task = tasks.for_data(data)
    assert of_task.predict is not None
    said = _over_batches(model, params, data.columns, of_task.predict, batch_size)
    if task == "question_answering":
        found = answers(said, data)
        return [{"answer": found[i]} for i in range(len(rows))]
    result = []
    for words, of_tokens, tags in zip(
        columns["tokens"], data.meta["word"], said["tag"], strict=True
    ):
        named = [outside] * len(words)
        for word, tag in zip(of_tokens[of_tokens >= 0], tags[of_tokens >= 0], strict=True):
            named[word] = model.labels[tag]
        result.append({"tags": named})
    return result


def _check_tokenizer(model: Model) -> None:
    if model.tokenizer is None:
        raise InputError("This model has no tokenizer, so it cannot read text.")


def _over_batches(
    model: Model,
    params: Params,
    columns: Mapping[str, np.ndarray],
    function: Callable[[Outputs, Batch], Mapping[str, Any]],
    batch_size: int,
) -> dict[str, np.ndarray]:
    """Returns what a function of outputs and batch says of every row, ``[rows, ...]``."""
    said = jax.jit(lambda f, p, batch: function(model.apply(f, p, batch, None, False), batch))
    frozen, n = model.compute_frozen(), len(columns["input_ids"])
    parts = []
    for start in range(0, n, batch_size):
        batch = {name: column[start : start + batch_size] for name, column in columns.items()}
        missing = max(start + batch_size - n, 0)
        padded = {
            name: np.pad(c, ((0, missing), *[(0, 0)] * (c.ndim - 1)), mode="edge")
            for name, c in batch.items()
        }
        part = jax.device_get(said(frozen, params, padded))
        parts.append({name: x[: batch_size - missing] for name, x in part.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def read_inputs(path: str | Path, task: str) -> list[dict[str, Any]]:
    """Returns the rows of a JSON-lines file, to be given to :func:`answer`.

    Raises:
      InputError: a task that is not for texts, or a line without the fields that it needs (all or
        none with ``text_pair``); the line is named.
    """
    if task not in INPUTS:
        raise InputError(
            f"This run's model is for the task {task!r}; predict reads texts for"
            f" {', '.join(INPUTS)}. Others can be used in Python."
        )
    rows: list[dict[str, Any]] = []
    try:
        content = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The input {str(path)!r} cannot be read: {error}.") from None
    # split, not splitlines: JSON strings may hold other line separators raw.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} is not JSON: {error}.") from None
        row = {}
        for field, kind in INPUTS[task].items():
            if field == "text_pair" and isinstance(item, Mapping) and field not in item:
                continue
            what = "a list" if kind is list else "a string"
            if not isinstance(item, Mapping) or not isinstance(item.get(field), kind):
                raise InputError(f'{where} is not an object with {what} "{field}".')
            row[field] = item[field]
        rows.append(row)
        if row.keys() != rows[0].keys():
            raise InputError(f'{where}: either all lines have a "text_pair" or none.')
    return rows
