"""Predictions of a model for texts: logits, embeddings, tags and answers."""

import functools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_peft import tasks
from fedjax_peft.contracts import Batch, Outputs, Params
from fedjax_peft.data.encode import encode
from fedjax_peft.data.table import Table
from fedjax_peft.data.text import tokenize
from fedjax_peft.engine.compilation import programs
from fedjax_peft.models.base import Model
from fedjax_peft.numerics.measures.representation import Pooling, check_pooling, pool
from fedjax_peft.support.checks import check_count
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import read_text
from fedjax_peft.tasks.base import Inputs, Task


def predict(
    model: Model,
    params: Params,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    max_length: int = 128,
    batch_size: int = 64,
) -> np.ndarray:
    """Returns the logits of texts, float32 ``[texts, classes]``, in order.

    Args:
      model: a model with a tokenizer and a classification head.
      params: its trainable leaves.
      texts: the texts.
      pairs: a second text for each text, for tasks on pairs.
      max_length: tokens per text; longer texts are cut.
      batch_size: texts per batch.

    Raises:
      InputError: the model has no tokenizer.
    """
    tokenizer = model.require_tokenizer()
    if not len(texts):
        return np.zeros((0, len(model.labels)), np.float32)
    columns = tokenize(tokenizer, texts, pairs, max_length=max_length)
    return _over_batches(model, params, columns, _logits, batch_size)["logits"]


def _logits(outputs: Outputs, batch: Batch) -> dict[str, Any]:
    return {"logits": outputs.logits}


def embed(
    model: Model,
    texts: Sequence[str],
    *,
    pooling: Pooling = "mean",
    max_length: int = 128,
    batch_size: int = 64,
) -> np.ndarray:
    """Returns one vector for each text: its pooled last hidden states, float32 ``[texts, width]``.

    These are the hidden states of Hugging Face's bare model, so it does not matter which head the
    model has. It can be the ``embed`` of :func:`fedjax_peft.data.cluster.kmeans`.

    Args:
      model: a model with a tokenizer, such as ``run.trained``.
      texts: the texts.
      pooling: ``mean``: the mean over a text's tokens; ``cls``: its first token, or the last one in
        a decoder.
      max_length: tokens per text; longer texts are cut.
      batch_size: texts per batch.

    Raises:
      InputError: the model has no tokenizer, there are no texts, or an unknown pooling.
    """
    check_pooling(pooling)
    tokenizer = model.require_tokenizer()
    if not len(texts):
        raise InputError("There is no text to embed.")
    columns = tokenize(tokenizer, texts, max_length=max_length)
    return _over_batches(model, model.trainable, columns, _pooled(pooling), batch_size)["pooled"]


@functools.cache  # one function, so that its program is found again
def _pooled(pooling: Pooling) -> Callable[[Outputs, Batch], dict[str, Any]]:
    return lambda outputs, batch: {"pooled": pool(outputs, batch, pooling)}


def answer(
    model: Model,
    params: Params,
    rows: Sequence[Mapping[str, Any]],
    *,
    task: Task,
    max_length: int = 128,
    batch_size: int = 64,
) -> list[dict[str, Any]]:
    """Returns the prediction of a model for each row, in order.

    Args:
      model: a model with a tokenizer and a head for the task.
      params: its trainable leaves.
      rows: dicts with the fields of ``task.inputs``.
      task: the task, which defines the fields of a row and of a prediction, such as ``label`` and
        ``logits`` for classification, or ``completion`` for a language model.
      max_length: tokens per text, or per prompt, which loses its beginning.
      batch_size: texts per batch.

    Raises:
      InputError: the model has no tokenizer, or a row cannot be read.
    """
    tokenizer = model.require_tokenizer()
    inputs = _inputs(task)
    if not rows:
        return []
    names = [field.name for field in inputs.fields if field.name in rows[0]]
    if inputs.sampling is not None:
        from fedjax_peft.models.generation import generate

        if not names:
            fields = " or ".join(f'"{field.name}"' for field in inputs.fields)
            raise InputError(f"A row needs {fields}, to complete it.")
        prompts, how = [row[names[0]] for row in rows], inputs.sampling._asdict()
        how |= {"max_length": max_length, "batch_size": batch_size}
        texts = generate(model, params, prompts, task=task, **how)
        return [{"completion": text} for text in texts]
    columns = {name: [row[name] for row in rows] for name in names}
    table = Table("The input", inputs.unlabelled(columns, model.labels))
    data = encode(task, table, model.labels, tokenizer, max_length=max_length, name="input")
    predict_rows = inputs.predict or task.predict
    if predict_rows is None:
        raise InputError(f"The task {task.name!r} has inputs, but no predict function.")
    predictions = _over_batches(model, params, data.columns, predict_rows, batch_size)
    return inputs.answers(predictions, data)


def _inputs(task: Task) -> Inputs:
    """Returns the inputs of a task: the fields of rows without labels."""
    if task.inputs is None:
        known = [make().name for make in map(tasks.find, tasks.__all__) if make().inputs]
        raise InputError(
            f"This run's model is for the task {task.name!r}, which predict does not support. It"
            f" supports {', '.join(known)}. Use the model in Python for other tasks."
        )
    return task.inputs


def _over_batches(
    model: Model,
    params: Params,
    columns: Mapping[str, np.ndarray],
    function: Callable[[Outputs, Batch], Mapping[str, Any]],
    batch_size: int,
) -> dict[str, np.ndarray]:
    """Returns the values of ``function(outputs, batch)`` for all rows, each ``[rows, ...]``."""
    check_count("the predictions", "batch_size", batch_size)
    forward: Any = weakref.ref(model.apply)  # the program is dropped with the model

    def run(f: Params, p: Params, batch: Batch) -> Mapping[str, Any]:
        return function(forward()(f, p, batch, None, False), batch)

    compiled = programs.get(model.apply, ("predict", function), lambda: jax.jit(run))
    frozen, n = model.compute_frozen(), len(columns["input_ids"])
    parts = []
    for start in range(0, n, batch_size):
        batch = {name: column[start : start + batch_size] for name, column in columns.items()}
        missing = max(start + batch_size - n, 0)
        padded = {
            name: np.pad(c, ((0, missing), *[(0, 0)] * (c.ndim - 1)), mode="edge")
            for name, c in batch.items()
        }
        part = jax.device_get(compiled(frozen, params, padded))
        parts.append({name: x[: batch_size - missing] for name, x in part.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def read_inputs(path: str | Path, task: Task) -> list[dict[str, Any]]:
    """Returns the rows of a JSON-lines file, as :func:`answer` needs them."""
    inputs = _inputs(task)
    rows: list[dict[str, Any]] = []
    try:
        content = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The input {str(path)!r} cannot be read: {error}.") from None
    # Not splitlines, because JSON strings can contain other line separators.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} is not JSON: {error}.") from None
        row = {}
        for field in inputs.fields:
            if not field.required and isinstance(item, Mapping) and field.name not in item:
                continue
            what = "a list" if field.kind is list else "a string"
            if not isinstance(item, Mapping) or not isinstance(item.get(field.name), field.kind):
                raise InputError(f'{where} is not a JSON object with {what} "{field.name}".')
            row[field.name] = item[field.name]
        rows.append(row)
        for name in row.keys() ^ rows[0].keys():
            raise InputError(f'{where}: either all lines or none must have "{name}".')
    return rows
