"""Predictions of a model for texts: logits, embeddings, tags and answers."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from fedjax_peft import tasks
from fedjax_peft.contracts import Batch, Outputs, Params
from fedjax_peft.data.catalog import DATASETS, OWN
from fedjax_peft.data.classes import in_classes, numbered, with_all_names
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encode import encode
from fedjax_peft.data.formats import tabular
from fedjax_peft.data.formats.files import lines
from fedjax_peft.data.formats.objects import KINDS, as_table, is_table, texts_of
from fedjax_peft.data.naming import prepare, rename_columns
from fedjax_peft.data.table import Table
from fedjax_peft.data.text import tokenize
from fedjax_peft.models.base import Model
from fedjax_peft.models.passes import over_batches
from fedjax_peft.numerics.measures.representation import Pooling, pool
from fedjax_peft.support.checks import check_choice
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import read_text
from fedjax_peft.tasks.base import Inputs, Task
from fedjax_peft.tasks.by_class import ByClass
from fedjax_peft.tasks.classification import class_logits

Output: TypeAlias = Literal["logits", "probabilities", "labels"]
"""What :func:`predict` returns for each text."""


def predict(
    model: Model,
    params: Params,
    texts: Sequence[str] | Dataset | Any,
    pairs: Sequence[str] | None = None,
    *,
    output: Output = "logits",
    max_length: int = 128,
    batch_size: int = 64,
) -> np.ndarray:
    """Returns what a model predicts for texts, in order; see :meth:`fedjax_peft.Run.predict`.

    Args:
      model: a model with a classification head, and a tokenizer unless ``texts`` is a data set.
      params: its trainable leaves.
      texts: the texts; or a DataFrame or list of dicts with a column ``text``, and perhaps
        ``text_pair``; or an encoded data set.
      pairs: a second text for each text, for tasks on pairs.
      output: ``logits`` or ``probabilities``, float32 ``[texts, classes]``, or ``labels``, the
        names of the classes ``[texts]``.
      max_length: tokens per text; longer texts are cut.
      batch_size: texts per batch.

    Raises:
      InputError: the model has no tokenizer, or no classes of whole texts.
    """
    check_choice("output", output, get_args(Output))
    names = np.array(model.labels, str)
    if isinstance(texts, Dataset):
        if pairs is not None:
            raise InputError("A data set has its second texts already: leave pairs out.")
        columns: Mapping[str, np.ndarray] = texts.columns
    else:
        tokenizer = model.require_tokenizer()
        texts, pairs = texts_of(texts, pairs)
        if not len(texts):
            return names[:0] if output == "labels" else np.zeros((0, len(names)), np.float32)
        columns = tokenize(tokenizer, texts, pairs, max_length=max_length)
    function = _logits if output == "logits" else _class_logits
    logits = over_batches(model, params, columns, function, batch_size)["logits"]
    if output == "labels":
        names = names if len(names) else np.array(numbered(logits.shape[1]))
        return names[logits.argmax(axis=1)]
    return logits if output == "logits" else _softmax(logits)


def _logits(outputs: Outputs, batch: Batch) -> dict[str, Any]:
    return {"logits": outputs.logits}


def _class_logits(outputs: Outputs, batch: Batch) -> dict[str, Any]:
    if outputs.logits.ndim != 2:
        raise InputError(
            "This model does not choose one class for a text, so it has no labels and no"
            ' probabilities of texts. output="logits" returns what it computes; `fedjax-peft'
            " predict` writes tags and answers, and run.generate completes texts."
        )
    return {"logits": class_logits(outputs, batch)}


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def scores_by_class(
    model: Model,
    params: Params,
    data: Dataset | Any,
    *,
    task: Task,
    max_length: int = 128,
    batch_size: int = 64,
) -> ByClass:
    """Returns the scores of each class on labelled examples.

    Args:
      model: a model with a head for the task.
      params: its trainable leaves.
      data: a data set; or a table (a DataFrame, a list of dicts) with the columns of the task, such
        as ``text`` and ``label``.
      task: the task of the run.
      max_length: tokens per text of a table.
      batch_size: examples per batch.

    Raises:
      InputError: the task has no classes, or the data do not fit the model.
    """
    by_class, predict_rows = task.by_class, task.predict
    if by_class is None or predict_rows is None:
        raise InputError(
            f"The task {task.name!r} has no classes to score: there are scores by class for"
            " classification (of texts and images) and tagging."
        )
    if not isinstance(data, Dataset):
        if not is_table(data):
            raise InputError(f"Scores by class need labelled examples: an fp.Dataset, {KINDS}.")
        tokenizer = model.require_tokenizer()
        entry = OWN._replace(task=task, label_names=model.labels or None)
        table = prepare(rename_columns(as_table(data, "the table"), entry, None), entry)
        data = encode(task, table, model.labels, tokenizer, max_length=max_length, name="table")
    task.check(data, "given")
    data = with_all_names(in_classes(data, model.labels, "given"), model.labels)
    return by_class(over_batches(model, params, data.columns, predict_rows, batch_size), data)


def embed(
    model: Model,
    texts: Sequence[str] | Any,
    *,
    pooling: Pooling = "mean",
    max_length: int = 128,
    batch_size: int = 64,
) -> np.ndarray:
    """Returns one vector for each text: its pooled last hidden states, float32 ``[texts, width]``.

    These are the hidden states of Hugging Face's bare model, so it does not matter which head the
    model has. The function can be the argument ``embed`` of
    :func:`fedjax_peft.data.cluster.kmeans`.

    Args:
      model: a model with a tokenizer, such as ``run.trained``.
      texts: the texts; or a DataFrame or list of dicts with a column ``text``.
      pooling: ``mean``: the mean over a text's tokens; ``cls``: its first token, or the last one in
        a decoder.
      max_length: tokens per text; longer texts are cut.
      batch_size: texts per batch.

    Raises:
      InputError: the model has no tokenizer, there are no texts, or an unknown pooling.
    """
    check_choice("pooling", pooling, get_args(Pooling))
    tokenizer = model.require_tokenizer()
    texts, _ = texts_of(texts, None)
    if not len(texts):
        raise InputError("There is no text to embed.")
    columns = tokenize(tokenizer, texts, max_length=max_length)
    return over_batches(model, model.trainable, columns, _pooled(pooling), batch_size)["pooled"]


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
        from fedjax_peft.tasks.generation import generate

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
    predictions = over_batches(model, params, data.columns, predict_rows, batch_size)
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


def read_inputs(
    path: str | Path, task: Task, data: Mapping[str, Any] | None = None
) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns the rows of a file, as :func:`answer` needs them, and their lines or row numbers.

    Args:
      path: JSON lines, or any other file of a table that training reads.
      data: the table ``[data]`` of the run's config, whose names of columns and form of csv files
        hold for this file too.

    Raises:
      InputError: the file cannot be read, or a row lacks a field.
    """
    inputs, data = _inputs(task), data or {}
    renamed = {ours: [theirs] for ours, theirs in (data.get("columns") or {}).items()}
    for theirs, ours in DATASETS.get(data.get("name", ""), OWN).columns.items():
        renamed.setdefault(ours, []).append(theirs)
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    for number, where, lacks, item in _items(Path(path), data):
        row = {}
        for field in inputs.fields:
            names = [*renamed.get(field.name, ()), field.name]
            found = [n for n in names if isinstance(item, Mapping) and item.get(n) is not None]
            if not found and not field.required and isinstance(item, Mapping):
                continue
            if not found or not isinstance(item[found[0]], field.kind):
                what, name = "a list" if field.kind is list else "a string", (found or names)[0]
                raise InputError(f'{where} {lacks} {what} "{name}".')
            row[field.name] = item[found[0]]
        rows.append(row)
        numbers.append(number)
        for name in row.keys() ^ rows[0].keys():
            raise InputError(f'{where}: either all lines or none must have "{name}".')
    return rows, numbers


def _items(path: Path, data: Mapping[str, Any]) -> Iterator[tuple[int, str, str, Any]]:
    """Yields (number, its name and its lack of a field in messages, fields) of each row."""
    if tabular.kind(path) is not None and ".jsonl" not in map(str.lower, path.suffixes):
        table = tabular.read_file(path, alone=True, form=tabular.csv_form(data.get("csv")))
        for number, *values in table.numbered(*table.columns.values()):
            item = dict(zip(table.columns, values, strict=True))
            yield number, table.place(number), "does not have", item
        return
    try:  # not splitlines, because JSON strings can contain other line separators
        packed = path.suffix.lower() == ".gz"
        content = [x for _, x in lines(path)] if packed else read_text(path).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The input {str(path)!r} cannot be read: {error}.") from None
    for number, line in enumerate(content, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield number, where, "is not a JSON object with", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where} is not JSON: {error}.") from None
