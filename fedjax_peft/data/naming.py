"""Our column names, and class names instead of numbers, in the tables of every source."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedjax_peft.data.catalog import Source
from fedjax_peft.data.encode import encoder_of
from fedjax_peft.data.table import Table, named
from fedjax_peft.support.errors import InputError, nearest


def rename_columns(table: Table, entry: Source, chosen: Mapping[str, str] | None) -> Table:
    """Returns a table with our column names, in the order of its columns.

    Args:
      chosen: the user's map, which goes before the entry's: our name -> the name in the file.

    Raises:
      InputError: the user's map names a column that is not there.
    """
    table = _chosen(table, chosen) if chosen else table
    ours: dict[str, str] = {}
    for name in reversed(list(entry.columns)):  # so that the first one stays
        if name in table.columns:
            ours[entry.columns[name]] = name
    new = {theirs: name for name, theirs in ours.items()}
    columns = {
        new.get(name, name): values
        for name, values in table.columns.items()
        if name in new or name not in ours
    }
    orders = (table.orders.get(ours.get(name, name)) for name in ("label", "tags"))
    names = entry.label_names or table.label_names or next(filter(None, orders), None)
    return replace(table, columns=columns, label_names=names)


def _chosen(table: Table, chosen: Mapping[str, str]) -> Table:
    for ours, theirs in chosen.items():
        if theirs not in table.columns:
            raise InputError(
                f"columns = {{{ours} = {theirs!r}}}: {table.lacks(theirs)}"
                f" {nearest(theirs, table.columns)}"
            )
    taken = {*chosen, *chosen.values()}
    first = {ours: table.columns[name] for ours, name in chosen.items()}
    others = {name: values for name, values in table.columns.items() if name not in taken}
    orders = {ours: table.orders.get(name, ()) for ours, name in chosen.items()}
    return replace(table, columns=first | others, orders={**table.orders, **orders})


def prepare(table: Table, entry: Source, **options: Any) -> Table:
    """Returns a table with class names instead of numbers, in the form that the encoder reads.

    Args:
      **options: for the encoder's ``prepare``; those that are None are left out.

    Raises:
      InputError: the encoder does not have an option, or a row cannot be used.
    """
    encoder = encoder_of(entry.find_task())
    # All values at once: one by one is a hundred times slower from a table of ``datasets``.
    columns = {name: list(values[:]) for name, values in table.columns.items()}
    column = encoder.label_column
    if entry.label_names is not None and column in columns:
        columns[column] = [named(value, entry.label_names) for value in columns[column]]
    given = {name: value for name, value in options.items() if value is not None}
    for name in given.keys() - inspect.signature(encoder.prepare).parameters.keys():
        raise InputError(f"{name} = {given[name]!r} means nothing to {table.origin}.")
    return encoder.prepare(replace(table, columns=columns), **given)
