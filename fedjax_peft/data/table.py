"""One split of a data set before tokenisation, and the checks that every split passes."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedjax_peft.data.spelling import as_named, plain, text_of, whole_number
from fedjax_peft.support.errors import InputError, nearest


class MissingColumn(InputError):
    """A table lacks a column that its task reads."""


@dataclass(frozen=True)
class Table:
    """Columns of Python values. Their names do not depend on the source.

    The encoder of a task says which columns it reads, such as ``text`` and ``label``
    (:class:`fedjax_peft.data.encoders.base.Encoder`). An image is uint8 ``[height, width]`` or
    ``[height, width, 3]``; tags are lists of str in IOB2 form.

    Further columns, such as ``client`` or ``source``, are keys to partition by.
    """

    origin: str
    """The file or the split on the hub, for messages."""
    columns: Mapping[str, Sequence[Any]]
    label_names: tuple[str, ...] | None = None
    """All class or tag names in order, if the source lists them."""
    numbers: Sequence[int] | None = None
    """The row numbers in the origin, for messages; None: 1, 2, ..."""
    notes: tuple[str, ...] = ()
    """Sentences on what was done to the rows; row 0 of a run has them."""
    orders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The names of the classes of each column for which the source lists them, in order."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """The columns that could not be read, and why."""

    @classmethod
    def of_rows(cls, origin: Any, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> "Table":
        """Returns the table of rows, each a value for every name."""
        return cls(str(origin), {name: [row[i] for row in rows] for i, name in enumerate(names)})

    @classmethod
    def joined(cls, origin: str, tables: Sequence["Table"]) -> "Table":
        """Returns the rows of tables with the same columns, and the class names of the first."""
        first = tables[0]
        columns = {
            name: [value for table in tables for value in table.columns[name]]
            for name in first.columns
        }
        numbers = [number for table in tables for number in table.row_numbers]
        notes = tuple(dict.fromkeys(note for table in tables for note in table.notes))
        return replace(first, origin=origin, columns=columns, numbers=numbers, notes=notes)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def take(self, rows: Iterable[int]) -> "Table":
        """Returns some of the rows, in the given order."""
        rows = list(rows)
        columns = {name: _picked(column, rows) for name, column in self.columns.items()}
        row_numbers = self.row_numbers
        return replace(self, columns=columns, numbers=[row_numbers[i] for i in rows])

    @property
    def row_numbers(self) -> Sequence[int]:
        """The number of each row in the origin, from 1. Messages use it."""
        return range(1, len(self) + 1) if self.numbers is None else self.numbers

    def numbered(self, *columns: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
        """Yields (row number, values of the given columns) for each row."""
        return zip(self.row_numbers, *columns, strict=True)

    def place(self, row: int) -> str:
        """Returns the name of a row in messages."""
        return f"Row {row} of {self.origin}"

    def error(self, row: int, fault: str) -> InputError:
        """Returns the error of a row: its place, and what is wrong with it."""
        return InputError(f"{self.place(row)} {fault}")

    def lacks(self, name: str) -> str:
        """Returns a sentence for messages: there is no such column, only others."""
        if name in self.unread:
            return f"The column {name!r} of {self.origin} could not be read: {self.unread[name]}."
        return f"{self.origin} has no column {name!r}, only: {', '.join(self.columns)}."


def _picked(column: Sequence[Any], rows: list[int]) -> list[Any]:
    """Returns some values of a column; one by one is slow from a column of ``datasets``."""
    listed = isinstance(column, list | tuple | range | np.ndarray)
    return [column[i] for i in rows] if listed else list(column[rows])  # type: ignore[call-overload]


_DROP = " To leave out rows without a label or a text, set drop_missing = true."


def is_missing(value: Any) -> bool:
    """Returns whether a value is None, NaN, pandas' NA or NaT, a blank text, or an empty list."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, float | np.floating):
        return bool(np.isnan(value))
    empty = isinstance(value, list | tuple) and not value
    return value is None or empty or type(value).__name__ in ("NAType", "NaTType")


def require(table: Table, name: str, kind: type | tuple[type, ...], what: str) -> Sequence[Any]:
    """Returns a column after a check that all its values have a type.

    Args:
      what: the type in words, for the message: "a text".

    Raises:
      InputError: there is no such column, or a value has another type (with its row, from 1).
    """
    for row, value in table.numbered(_column(table, name)[:]):  # a column of datasets at once
        if not isinstance(value, kind) or isinstance(value, bool):
            advice = _DROP if kind is str and is_missing(value) else ""
            raise table.error(
                row, f"has {brief(value)} in place of {what} in the column {name!r}.{advice}"
            )
    return table.columns[name]


def label_names(table: Table) -> tuple[str, ...]:
    """Returns the class names of a training split, in the order of its source, or else sorted.

    Names that are all whole numbers are sorted by number.
    """
    if table.label_names is not None:
        return table.label_names
    # Of two spellings of one name, the first one: "True" and "true".
    names = [
        *{plain(name): name.strip() for name in sorted({*_labels(table)}, reverse=True)}.values()
    ]
    if all(map(whole_number, names)):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def label_ids(table: Table, names: Sequence[str]) -> np.ndarray:
    """Returns the labels as indices into ``names``, int32 ``[rows]``.

    Raises:
      InputError: a label is neither text nor a whole number, or is not in ``names`` (with its
        row, from 1).
    """
    ids = {name: i for i, name in enumerate(names)}
    labels = as_named(_labels(table), names)
    for row, name in table.numbered(labels):
        if name not in ids:
            advice = nearest(name, ids)
            raise table.error(
                row, f"has the label {name!r}, which is none of the classes. {advice}"
            )
    return np.array([ids[name] for name in labels], np.int32)


def _labels(table: Table) -> list[str]:
    """Returns the labels of all rows as names."""
    labels = _column(table, "label")
    for row, value in table.numbered(labels):
        if text_of(value) is None:
            what = "neither a whole number nor a class name"
            advice = _DROP if is_missing(value) else ""
            raise table.error(row, f"has the label {brief(value)}: {what}.{advice}")
    return [text_of(value) or "" for value in labels]


def _column(table: Table, name: str) -> Sequence[Any]:
    if name not in table.columns:
        close = difflib.get_close_matches(name, table.columns)
        advice = f" {nearest(name, table.columns)}" if close else ""
        raise MissingColumn(
            f"{table.lacks(name)}{advice} To use another column for it, name it:"
            f' columns = {{{name} = "..."}}.'
        )
    return table.columns[name]


def named(value: Any, names: Sequence[str]) -> Any:
    """Returns the name of a class that may be given by its number, also as text in a csv file.

    Lists are named one by one. Any other value, such as -1 ("unlabelled"), stays.
    """
    if isinstance(value, list):
        return [named(x, names) for x in value]
    number = str(value)
    short = number.isascii() and number.isdecimal() and len(number) < 10
    known = short and int(number) < len(names)
    return names[int(number)] if known else value


def brief(value: Any) -> str:
    """Returns the ``repr`` of a value, of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
