"""Tables that a program holds: data frames, rows as dicts, and data sets of ``datasets``."""

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import numpy as np

from fedjax_peft.data.formats.json_rows import columns_of
from fedjax_peft.data.formats.tabular import dates_as_texts, from_datasets
from fedjax_peft.data.table import Table, is_missing
from fedjax_peft.support.errors import InputError

KINDS = "a DataFrame, a list of dicts, or a datasets.Dataset"
"""What is a table, for messages."""


def is_table(value: Any) -> bool:
    """Returns whether an object is a table: :data:`KINDS`."""
    rows = isinstance(value, list | tuple) and len(value) and isinstance(value[0], Mapping)
    return bool(rows) or _is_frame(value) or _is_dataset(value)


def as_table(value: Any, origin: str) -> Table:
    """Returns an object as a table; the number of a row is its place, from 1.

    Args:
      value: for which :func:`is_table` holds.

    Raises:
      InputError: two columns of one name, or a row that is no dict.
    """
    if _is_dataset(value):
        return from_datasets(value, origin)
    if not _is_frame(value):
        odd = next((i for i, row in enumerate(value, 1) if not isinstance(row, Mapping)), None)
        if odd is not None:
            raise InputError(f"Row {odd} of {origin} is {value[odd - 1]!r:.60}, and no dict.")
        return Table(origin, _as_in_files(columns_of(value)))
    names = [str(name) for name in value.columns]
    if twins := {name for name in names if names.count(name) > 1}:
        raise InputError(f"{origin} has two columns {min(twins)!r}: keep one of them.")
    # A column of pandas has `tolist`, one of polars `to_list`.
    series = [value[name] for name in value.columns]
    lists = [x.tolist() if hasattr(x, "tolist") else x.to_list() for x in series]
    kinds: Any = zip(names, (getattr(x, "dtype", None) for x in series), strict=True)
    orders = {
        name: tuple(map(str, kind.categories))
        for name, kind in kinds
        if getattr(kind, "ordered", 0)
    }
    return Table(origin, _as_in_files(dict(zip(names, lists, strict=True))), orders=orders)


def _as_in_files(columns: dict[str, Any]) -> dict[str, Any]:
    """Returns columns with None in place of missing values, and with texts in place of dates."""
    columns = {name: _with_none(values) for name, values in columns.items()}
    dates = [
        name
        for name, values in columns.items()
        if all(one is None or isinstance(one, date) for one in values)
    ]
    return columns | {name: dates_as_texts(columns[name]) for name in dates}


def _with_none(values: list[Any]) -> list[Any]:
    """Returns a column with None in place of NaN, NA and NaT; one of floats keeps its NaN."""
    absent = [is_missing(x) and not isinstance(x, str | list | tuple) for x in values]
    present = [x for x, gone in zip(values, absent, strict=True) if not gone]
    if present and all(isinstance(x, float | np.floating) for x in present):
        return values
    return [None if gone else x for x, gone in zip(values, absent, strict=True)]


def splits_of(value: Any) -> dict[str, Table] | None:
    """Returns the splits of a table (``all``), or of a dict of tables; None for another object."""
    if is_table(value):
        return {"all": as_table(value, "the table")}
    if isinstance(value, Mapping) and value and all(map(is_table, value.values())):
        return {str(name): as_table(x, f"the table {str(name)!r}") for name, x in value.items()}
    return None


def texts_of(texts: Any, pairs: Sequence[str] | None) -> tuple[Sequence[str], Sequence[str] | None]:
    """Returns texts, and perhaps second texts, that are given as lists or in a table.

    Raises:
      InputError: a single text, or a table without a column ``text``.
    """
    if isinstance(texts, str):
        raise InputError(f"The texts are one text, {texts!r:.60}: give a list of texts.")
    if not is_table(texts):
        return texts, pairs
    table = as_table(texts, "the table")
    if "text" not in table.columns:
        raise InputError(f"{table.lacks('text')} Rename the column of the texts.")
    found = table.columns["text"][:], table.columns.get("text_pair")
    return found[0], pairs if found[1] is None else found[1][:]


def _is_frame(value: Any) -> bool:
    return hasattr(value, "columns") and (hasattr(value, "iloc") or hasattr(value, "to_dicts"))


def _is_dataset(value: Any) -> bool:
    return hasattr(value, "features") and hasattr(value, "with_format")
