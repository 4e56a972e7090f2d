"""Shares of a table's rows that are held out: for ``test``, and of ``train`` for ``validation``."""

from collections.abc import Iterable, Sequence

import numpy as np

from fedjax_peft.data.encoders.base import Encoder
from fedjax_peft.data.subsets import rows_by_client
from fedjax_peft.data.table import Table
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.errors import InputError

_FIFTH = 5
"""Without a test split, one row in five is held out as one (80/20, as in FeDeRA)."""


def hold_out_test(table: Table, seed: int, share: float | None) -> dict[str, Table]:
    """Returns ``train`` and ``test``; ``test`` has a share of the rows, by default a fifth.

    If the rows have a column ``client``, the last rows of each client are held out, because
    neighbouring rows can overlap (windows of a text). Otherwise random rows are held out.

    Args:
      share: between 0 and 1; None: a fifth.

    Raises:
      InputError: no row would be held out.
    """
    n = len(table)

    def count(rows: int) -> int:
        return rows // _FIFTH if share is None else _rounded(share, rows)

    if "client" in table.columns:
        rows = list(rows_by_client(table).values())
        held = _ends(rows, map(count, map(len, rows)))
    else:
        held = set(host_rng(seed, "split").permutation(n)[: count(n)].tolist())
    if not held:
        whose = "each client's rows" if "client" in table.columns else "its rows"
        part = "a fifth" if share is None else f"a share of {share}"
        raise InputError(
            f"{table.origin} has {n} rows and no test split: {part} of {whose} is less than one."
        )
    return _parted(table, held, "test")


def hold_out_validation(
    table: Table, encoder: Encoder, seed: int, share: float
) -> dict[str, Table]:
    """Returns ``train`` and ``validation``, which has a share of the rows of a training split.

    Where the rows have a column ``client``, the last rows of each client are held out, as in
    :func:`hold_out_test`. Otherwise random rows are held out of every class, or, without classes,
    of every ``source``. A client, class or source holds out its share, rounded up or down to a
    whole row, and always keeps a row for training. Rows with the same value of the encoder's
    ``group_column`` stay together: whole groups are held out, as close to the share as they allow.

    Args:
      encoder: says which columns are the classes and the groups.

    Raises:
      InputError: no row would be held out.
    """
    rng = host_rng(seed, "validation split")
    if "client" in table.columns:
        rows = list(rows_by_client(table).values())
        sizes = np.array([len(own) for own in rows])
        held = _ends(rows, np.minimum(_apportioned(sizes, share, rng), sizes - 1))
    else:
        held = _drawn(_strata(table, encoder), _groups(table, encoder), share, rng)
    if not held:
        given = f"validation_share = {share} of {table.origin}"
        raise InputError(f"{given} holds out none of {len(table)} rows: choose a larger share.")
    return _parted(table, held, "validation")


def _parted(table: Table, held: set[int], part: str) -> dict[str, Table]:
    return {
        "train": table.take(row for row in range(len(table)) if row not in held),
        part: table.take(sorted(held)),
    }


def _rounded(share: float, rows: int) -> int:
    """Returns a share of some rows, of which at least one is left."""
    return min(round(share * rows), rows - 1)


def _ends(rows: Sequence[Sequence[int]], counts: Iterable[int]) -> set[int]:
    """Returns the last rows of each client, as many as ``counts`` says."""
    pairs = zip(rows, counts, strict=True)
    return {row for own, count in pairs for row in own[len(own) - count :]}


def _drawn(
    strata: np.ndarray, groups: np.ndarray, share: float, rng: np.random.Generator
) -> set[int]:
    """Returns random rows, a share of every stratum, in whole groups.

    Args:
      strata: the stratum of each row, int ``[rows]``.
      groups: the group of each row, int ``[rows]``. A group belongs to the stratum of its first
        row.
    """
    _, first, sizes = np.unique(groups, return_index=True, return_counts=True)
    order = rng.permutation(len(sizes))
    stratum = strata[first][order]
    wanted = _apportioned(np.bincount(strata[first], weights=sizes), share, rng)
    held = np.zeros(len(sizes), bool)
    for number, target in enumerate(wanted):
        own = order[stratum == number]
        middle = np.cumsum(sizes[own]) - sizes[own] / 2
        held[own[:-1]] = middle[:-1] < target  # the last group stays for training
    return set(np.flatnonzero(held[groups]).tolist())


def _apportioned(sizes: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Returns the share of each stratum's rows, rounded up or down, int ``[strata]``.

    The strata with the largest fractions are rounded up, so that the sum is the rounded share of
    all rows. Equal fractions are ordered at random.
    """
    exact = share * sizes
    result = np.floor(exact).astype(np.int64)
    missing = round(share * sizes.sum()) - int(result.sum())
    order = rng.permutation(len(sizes))
    up = order[np.argsort((result - exact)[order], kind="stable")][:missing]
    result[up] += 1
    return result


def _strata(table: Table, encoder: Encoder) -> np.ndarray:
    """Returns the class of each row, or else its source, int ``[rows]``; without both, zeros."""
    for name in (encoder.label_column, "source"):
        values = table.columns.get(name or "")
        if values is not None and all(isinstance(value, int | str) for value in values):
            return _numbers(str(value) for value in values)
    return np.zeros(len(table), np.int64)


def _groups(table: Table, encoder: Encoder) -> np.ndarray:
    """Returns the group of each row, int ``[rows]``; without groups, every row is one."""
    values = table.columns.get(encoder.group_column or "")
    return np.arange(len(table)) if values is None else _numbers(map(str, values))


def _numbers(values: Iterable[str]) -> np.ndarray:
    """Returns the number of each value, in the order of their first rows."""
    known: dict[str, int] = {}
    return np.array([known.setdefault(value, len(known)) for value in values], np.int64)
