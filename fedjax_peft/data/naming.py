"""Our column names, and class names instead of numbers, in the tables of every source."""

import inspect
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedjax_peft.data.catalog import Source
from fedjax_peft.data.encode import encoder_of
from fedjax_peft.data.encoders.base import Encoder
from fedjax_peft.data.spelling import (
    as_named,
    look,
    may_number,
    plain,
    spelled,
    text_of,
    whole_number,
)
from fedjax_peft.data.table import Table, named
from fedjax_peft.support.errors import InputError, nearest, users_level


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
    orders = {name: table.orders.get(ours.get(name, name)) for name in ("label", "tags")}
    names = entry.label_names or table.label_names or next(filter(None, orders.values()), None)
    for name, theirs in orders.items():
        if entry.label_names and theirs and (other := _respelled(theirs, entry.label_names)):
            columns[name] = [_replaced(value, other) for value in columns[name]]
    # Ordered categories may be numbers.
    listed = None if names is None else tuple(text_of(name) or str(name) for name in names)
    return replace(table, columns=columns, label_names=listed)


def _respelled(theirs: Sequence[str], ours: Sequence[str]) -> dict[str, str]:
    """Returns a source's names that we do not know -> our names of the same numbers.

    The hub's CIFAR-100 calls its class 26 "cra", which is "crab" everywhere else.
    """
    pairs = zip(theirs, ours, strict=False) if len(theirs) == len(ours) else ()
    return {there: here for there, here in pairs if there not in ours and here not in theirs}


def _replaced(value: Any, names: Mapping[str, str]) -> Any:
    """Returns the other name of a class, if it has one; of every class in a list."""
    if isinstance(value, list):
        return [_replaced(one, names) for one in value]
    return names.get(value, value)


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
    encoder = encoder_of(entry.task)
    # All values at once: one by one is a hundred times slower from a table of ``datasets``.
    columns = {name: list(values[:]) for name, values in table.columns.items()}
    column = encoder.label_column
    if column in columns:
        columns[column] = [*spelled(columns[column])]
    if entry.label_names is not None and column in columns:
        columns[column] = _named(columns[column], entry.label_names)
    given = {name: value for name, value in options.items() if value is not None}
    for name in given.keys() - inspect.signature(encoder.prepare).parameters.keys():
        raise InputError(f"{name} = {given[name]!r} means nothing to {table.origin}.")
    return encoder.prepare(replace(table, columns=columns), **given)


def with_names(table: Table, encoder: Encoder, names: Sequence[str]) -> Table:
    """Returns a table whose labels are spelled as the names of the classes."""
    column = encoder.label_column or ""
    labels = table.columns.get(column, ())
    spelled_so = as_named(labels, names)
    if spelled_so is labels:
        return table
    return replace(table, columns={**table.columns, column: spelled_so})


def _named(labels: list[Any], names: Sequence[str]) -> list[Any]:
    """Returns labels with names in the place of numbers; a number that is a name is this name."""
    known = {*names}

    def name(label: Any) -> Any:
        if not isinstance(label, str):
            return named(label, names)
        return label if label in known else named(plain(label), names)

    return [name(label) for label in labels]


def check_spellings(table: Table, encoder: Encoder) -> None:
    """Warns of labels that look like one, by name and count.

    Args:
      table: all rows whose labels made the list of classes, prepared.

    Raises:
      InputError: some rows have the names of classes, and others seem to have their numbers.
    """
    labels = table.columns.get(encoder.label_column or "", ())
    parts = (x if isinstance(x, list) else (x,) for x in labels)
    counts = Counter(x for some in parts for x in some if isinstance(x, str))
    kinds = {name: plain(name) for name in counts}
    tagged = any(isinstance(x, list) for x in labels)
    numbers = {kind for kind in kinds.values() if whole_number(kind)}
    classes = len({*kinds.values()} - numbers)
    if table.label_names is None and not tagged and may_number(classes, numbers):
        of_kind = {kinds.get(x) in numbers: i for i, x in reversed([*enumerate(labels)])}
        name, number = (_row(table, of_kind[kind]) for kind in (False, True))
        raise InputError(
            f"The labels of {table.origin} are names in some rows, such as {name}, and numbers in"
            f" others, such as {number}:"
            f" {_counted(counts, counts)}. If the numbers are those of the names, list the names in"
            " the order of their numbers: label_names = [...]. If each is a class of its own, list"
            " all of them."
        )
    alike: dict[str, list[str]] = defaultdict(list)
    for name in sorted(counts):
        alike[look(name)].append(name)
    for several in (group for group in alike.values() if len(group) > 1):
        listed = table.label_names is not None
        classes = len(several) if listed else len({kinds[name] for name in several})
        what = "one class" if classes == 1 else f"{classes} classes. If they are one, correct them"
        warnings.warn(
            f"In {table.origin}, the labels {_counted(several, counts)} differ in spaces, case or"
            f" invisible characters only, and count as {what}.",
            stacklevel=users_level(),
        )


def _row(table: Table, index: int) -> str:
    """Returns the name of a row in messages, with its client if there are clients."""
    owners = table.columns.get("client")
    whose = "" if owners is None else f" of client {owners[index]!r}"
    return f"row {table.row_numbers[index]}{whose}"


def _counted(names: Iterable[str], counts: Mapping[str, int]) -> str:
    """Returns names with their numbers of rows; in ASCII, so that unlike ones do not look alike."""
    listed = sorted(names)
    more = f" and {len(listed) - 12} more" if len(listed) > 12 else ""
    return ", ".join(f"{name!a} ({counts[name]:,})" for name in listed[:12]) + more
