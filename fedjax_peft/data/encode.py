"""Tables to data sets: what each task reads of a row, and its encoder."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.table import Table, label_ids, label_names, require
from fedjax_peft.data.text import tokenize
from fedjax_peft.errors import InputError

__all__ = ["COLUMNS", "ENCODERS", "class_names", "encode", "encode_classes"]

COLUMNS = {
    "classification": ("text", "text_pair", "label"),
    "tagging": ("tokens", "tags"),
    "question_answering": ("id", "question", "context", "answers", "answer_starts"),
    "next_token": ("text",),
    "image_classification": ("image", "label"),
}
"""What a task reads of a row. Further columns are keys to partition by."""
_KEYS = ("client", "source")
"""Columns that nothing but a partition wants: a value that cannot be a key is an error there."""
_LONG = 256
"""Characters. A column of longer texts is content, not a key."""


def class_names(task: str, table: Table) -> tuple[str, ...]:
    """Returns the names of the classes or tags of a training split, empty where there are none."""
    if task == "tagging":
        from fedjax_peft.data.encoders.tags import tag_names

        return tag_names(table)
    return label_names(table) if "label" in COLUMNS[task] else ()


def encode(
    task: str,
    table: Table,
    names: Sequence[str],
    tokenizer: Any,
    *,
    max_length: int,
    name: str,
    **options: Any,
) -> Dataset:
    """Returns a split as arrays, with the table's further columns as ``meta``.

    Args:
      task: a key of :data:`ENCODERS`.
      table: one split.
      names: of the classes or tags.
      tokenizer: a fast tokenizer of ``transformers``; None will do for images.
      max_length: tokens per example.
      name: of the data set.
      **options: for the encoder of the task.

    Raises:
      InputError: rows that cannot be used (named), or no tokenizer.
    """
    if tokenizer is None and task != "image_classification":
        raise InputError(f"The data set {name!r} is of texts, which need a tokenizer.")
    data = ENCODERS[task](table, names, tokenizer, max_length=max_length, name=name, **options)
    unit = data.meta.get("unit", np.arange(len(data)))
    keys = {key: x[unit] for key, x in _keys(table, COLUMNS[task]).items() if key not in data.meta}
    return replace(data, meta={**data.meta, **keys})


def _keys(table: Table, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the further columns that are all whole numbers, or all short texts."""
    keys = {}
    for name, values in table.columns.items():
        if name in columns:
            continue
        if name in _KEYS:
            values = [str(x) for x in require(table, name, (int, str), "a name or a number")]
        if _are_all(values, int) or (_are_all(values, str) and max(map(len, values)) <= _LONG):
            keys[name] = np.array(values)
    return keys


def _are_all(values: Sequence[Any], kind: type) -> bool:
    return len(values) > 0 and all(type(value) is kind for value in values)


def encode_classes(
    table: Table, names: Sequence[str], tokenizer: Any, *, max_length: int, name: str
) -> Dataset:
    """Returns texts, or pairs of them, each with its class.

    Args:
      table: columns ``text``, perhaps ``text_pair``, and ``label``.
      names: of the classes.
      tokenizer: a fast tokenizer of ``transformers``.
      max_length: tokens per example.
      name: of the data set.

    Returns:
      The columns of :func:`fedjax_peft.data.tokenize` and ``labels`` int32 ``[n]``.

    Raises:
      InputError: a row (named from 1) without a text, or with a label that is none of the names.
    """
    texts = require(table, "text", str, "a text")
    paired = "text_pair" in table.columns
    pairs = require(table, "text_pair", str, "a text") if paired else None
    labels = label_ids(table, names)
    columns = tokenize(tokenizer, texts, pairs, max_length=max_length)
    return Dataset({**columns, "labels": labels}, tuple(names), name)


def _encode_tags(*args: Any, **options: Any) -> Dataset:
    from fedjax_peft.data.encoders.tags import encode_tags

    return encode_tags(*args, **options)


def _encode_spans(*args: Any, **options: Any) -> Dataset:
    from fedjax_peft.data.encoders.spans import encode_spans

    return encode_spans(*args, **options)


def _encode_language(*args: Any, **options: Any) -> Dataset:
    from fedjax_peft.data.encoders.language import encode_language

    return encode_language(*args, **options)


def _encode_images(*args: Any, **options: Any) -> Dataset:
    from fedjax_peft.data.encoders.pixels import encode_images

    return encode_images(*args, **options)


ENCODERS: dict[str, Callable[..., Dataset]] = {
    "classification": encode_classes,
    "tagging": _encode_tags,
    "question_answering": _encode_spans,
    "next_token": _encode_language,
    "image_classification": _encode_images,
}
"""Task -> its encoder, ``(table, names, tokenizer, *, max_length, name, ...) -> Dataset``."""
