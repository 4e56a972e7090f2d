"""Tables to data sets: the task's encoder, and the further columns as keys to partition by."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np

from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encoders.base import Encoded, Encoder
from fedjax_peft.data.table import Table, brief, require
from fedjax_peft.support.errors import InputError

Kind = TypeVar("Kind", bound=Encoded)
_KEYS = ("client", "source")
"""Columns that only a partition reads. A value in them that cannot be a key is an error."""
_LONG = 256
"""Characters. A column with a longer text is content and not a key."""


def encoder_of(task: Encoded) -> Encoder:
    """Returns the encoder of a task.

    Raises:
      InputError: the task has none, because it was made for data that are arrays already.
    """
    if task.encoder is None:
        raise InputError(
            f"The task {task.name!r} has no encoder, so no table can be read for it. Give it one:"
            " Task(encoder=Encoder(columns, encode), ...)."
        )
    return task.encoder


def with_options(task: Kind, **options: Any) -> Kind:
    """Returns a task whose encoder has these options, so that it reads further rows alike."""
    if not options:
        return task
    encoder = encoder_of(task)
    function: Any = encoder.encode
    bound = _bound(function, tuple(sorted(options.items())))
    changed: Any = task
    return cast(Kind, changed._replace(encoder=encoder._replace(encode=bound)))


@functools.cache  # equal tasks stay equal, so that their programs are found again
def _bound(function: Any, options: tuple[tuple[str, Any], ...]) -> Any:
    return functools.partial(function, **dict(options))


def encode(
    task: Encoded,
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
      task: gives the encoder; it becomes ``Dataset.task`` of the result.
      **options: for the encoder.

    Raises:
      InputError: a row that cannot be used (its number is in the message), or no tokenizer.
    """
    encoder = encoder_of(task)
    if tokenizer is None and encoder.needs_tokenizer:
        raise InputError(f"The data set {name!r} is of texts, which need a tokenizer.")
    data = encoder.encode(table, names, tokenizer, max_length=max_length, name=name, **options)
    unit = data.meta.get("unit", np.arange(len(data)))
    found, faults = _keys(table, encoder.columns)
    keys = {key: x[unit] for key, x in found.items() if key not in data.meta}
    notes = (*table.notes, *data.notes)
    return replace(data, task=task, meta={**data.meta, **keys}, notes=notes, no_keys=faults)


def _keys(table: Table, columns: Sequence[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns the further columns of whole numbers or short texts, and why others are no keys."""
    keys, faults = {}, {name: table.lacks(name) for name in table.unread}
    for name, values in table.columns.items():
        if name in columns:
            continue
        if name in _KEYS:
            values = [str(x) for x in require(table, name, (int, str), "a name or a number")]
        odd = next(((row, x) for row, x in table.numbered(values) if not _is_key(x)), None)
        if odd is None:
            plain = np.array(values)
            # Names beside numbers are names; so are numbers that no integer of NumPy can hold.
            same = plain.dtype.kind in "iu" or all(type(value) is str for value in values)
            keys[name] = plain if same else np.array([str(value) for value in values])
        else:
            what = "a whole number or a short text"
            faults[name] = f"{table.place(odd[0])} has {brief(odd[1])} there in place of {what}."
    return keys, faults


def _is_key(value: Any) -> bool:
    return type(value) is int or (type(value) is str and len(value) <= _LONG)
