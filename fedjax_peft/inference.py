"""What a model predicts: logits, embeddings, tags and answers of texts."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_peft import tasks
from fedjax_peft.data.encode import encode
from fedjax_peft.data.table import Table
from fedjax_peft.data.text import tokenize
from fedjax_peft.errors import InputError
from fedjax_peft.files import read_text
from fedjax_peft.measures.representation import pool
from fedjax_peft.models.base import Model
from fedjax_peft.tasks.question_answering import answers
from fedjax_peft.typing import Batch, Outputs, Params

__all__ = ["INPUTS", "answer", "embed", "predict", "read_inputs"]


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
