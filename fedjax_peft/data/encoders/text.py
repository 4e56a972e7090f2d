"""Texts, or pairs of texts, each with one class."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encoders.base import (
    STAND_IN_WORDS,
    Encoder,
    StandIn,
    balanced_classes,
    needing,
    texts_in,
    texts_of,
)
from fedjax_peft.data.table import Table, label_ids, label_names, require
from fedjax_peft.data.text import tokenize
from fedjax_peft.support.errors import InputError, nearest

_COLUMNS = ("text", "text_pair", "label")


def encode_classes(
    table: Table, names: Sequence[str], tokenizer: Any, *, max_length: int, name: str
) -> Dataset:
    """Returns texts, or pairs of texts, each with its class.

    The table has columns ``text`` and ``label``, and ``text_pair`` for pairs. Other arguments are
    those of :class:`Encode`.

    Returns:
      The columns of :func:`fedjax_peft.data.tokenize` and ``labels`` int32 ``[n]``.

    Raises:
      InputError: a row (counted from 1) without a text, or with a label that is none of the names.
    """
    texts, *pairs = _texts(table)
    labels = label_ids(table, names)
    columns = tokenize(tokenizer, texts, *pairs, max_length=max_length)
    return Dataset({**columns, "labels": labels}, tuple(names), name)


def _check(table: Table, names: Sequence[str]) -> None:
    label_ids(table, names)
    _texts(table)


def _texts(table: Table) -> list[Sequence[str]]:
    """Returns the texts, and the second texts if there are any."""
    columns = ["text", "text_pair"] if "text_pair" in table.columns else ["text"]
    return [require(table, column, str, "a text") for column in columns]


def _words(table: Table) -> list[str]:
    return [text for texts in _texts(table) for text in texts]


def _check_splits(tables: Mapping[str, Table], renamed: Mapping[str, str]) -> None:
    """Raises InputError for a split without texts and labels, or without the second texts.

    ``text_pair`` is the one column that may be missing. If its name is misspelt, or only one split
    has it, a run would train on single texts without any message, so that is an error.
    """
    for table in tables.values():
        if not {"text", "label"} & {*table.columns}:
            raise InputError(
                f"{table.lacks('text')} It has no 'label' either. Say which columns have the texts"
                ' and the labels: columns = {text = "...", label = "..."}.'
            )
    names = [name for name, ours in renamed.items() if ours == "text_pair"]
    paired = any("text_pair" in table.columns for table in tables.values())
    for table in tables.values():
        further = {*table.columns} - {*_COLUMNS}
        close = difflib.get_close_matches("text_pair", further, n=1, cutoff=0.8)
        if "text_pair" not in table.columns and (names or paired or close):
            name = names[0] if names else "text_pair"
            raise InputError(
                f"{table.lacks(name)} It is the second text of a pair. {nearest(name, further)}"
            )


def _stand_in(rng: np.random.Generator, n: int, wanted: StandIn) -> dict[str, Any]:
    """Returns rows in which every second word depends on the class."""
    count = len(wanted.names)
    labels = balanced_classes(rng, n, count)
    columns: dict[str, Any] = {}
    for column in ("text", "text_pair"):
        if column == "text" or column in wanted.columns:
            words = rng.integers(2 * count, STAND_IN_WORDS, (n, 9))
            words[:, ::2] = 2 * labels[:, None] + rng.integers(0, 2, (n, 5))
            columns[column] = texts_of(rng, words)
    return columns | {"label": [wanted.names[label] for label in labels]}


TEXT = Encoder(
    columns=_COLUMNS,
    encode=encode_classes,
    label_column="label",
    needed=needing(*_COLUMNS),
    class_names=label_names,
    check_splits=_check_splits,
    check=_check,
    texts=texts_in("text"),
    words=_words,
    stand_in=_stand_in,
)
