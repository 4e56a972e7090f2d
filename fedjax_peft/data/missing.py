"""Rows without a label or a text: left out with a count on request, and named otherwise."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedjax_peft.data.encoders.base import Encoder
from fedjax_peft.data.table import Table, is_missing
from fedjax_peft.support.errors import InputError, users_level


def without_missing(table: Table, encoder: Encoder, drop: bool, *, warn: bool = True) -> Table:
    """Returns a table without the rows that lack what the encoder needs, such as a label or a text.

    A value is missing if it is None, NaN, a blank text or an empty list. A note of the table, and a
    warning, count the rows of each column. Without ``drop`` all rows stay. A warning then counts
    the blank texts, which are used as they are; a later check refuses what cannot be used.

    Raises:
      InputError: no row is left.
    """
    if not drop and not warn:
        return table
    needed = [*encoder.needed(table.columns.keys())]
    columns = {name: table.columns[name][:] for name in needed}
    table = replace(table, columns={**table.columns, **columns})  # of a file, read once
    lacking = {
        name: [i for i, value in enumerate(values) if is_missing(value)]
        for name, values in columns.items()
    }
    if not drop:
        _warn_of_blanks(
            table, {n: rows for n, rows in lacking.items() if n != encoder.label_column}
        )
        return table
    dropped = {i for rows in lacking.values() for i in rows}
    if not dropped:
        return table
    counts = ", ".join(f"{len(rows):,} without {n!r}" for n, rows in lacking.items() if rows)
    kept = [i for i in range(len(table)) if i not in dropped]
    note = (
        f"{len(dropped):,} of {len(table):,} rows of {table.origin} are left out (drop_missing):"
        f" {counts}. The first is row {table.row_numbers[min(dropped)]}."
    )
    if not kept:
        raise InputError(f"No row of {table.origin} has all of {', '.join(needed)}: {counts}.")
    warnings.warn(note, stacklevel=users_level())
    return replace(table.take(kept), notes=(*table.notes, note))


def _warn_of_blanks(table: Table, lacking: Mapping[str, Sequence[int]]) -> None:
    """Warns of the blank texts in each column."""
    for name, rows in lacking.items():
        blank = [i for i in rows if isinstance(table.columns[name][i], str)]
        if blank:
            warnings.warn(
                f"{len(blank):,} of {len(table):,} rows of {table.origin} have a blank {name!r},"
                f" the first is row {table.row_numbers[blank[0]]}: they are used as empty texts."
                " To leave out rows without a label or a text, set drop_missing = true.",
                stacklevel=users_level(),
            )
