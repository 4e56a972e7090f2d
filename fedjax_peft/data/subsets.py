"""Random subsets: some rows of a split, equal shares of sources, some users of a federation."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from fedjax_peft.data.table import Table, require
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.errors import InputError


def draw_rows(table: Table, size: int | None, part: str, seed: int) -> Sequence[int]:
    """Returns the rows of a random subset in order. A larger subset contains a smaller one.

    Args:
      size: number of rows; None: all.
      part: the name of the split, for the random stream and for messages.

    Raises:
      InputError: the split has fewer rows.
    """
    n = len(table)
    if size is None:
        return range(n)
    if not 1 <= size <= n:
        raise InputError(
            f"{part}_examples is {size}, but {table.origin} has {n} examples: take from 1 to {n}."
        )
    rows: list[int] = np.sort(host_rng(seed, f"subset:{part}").permutation(n)[:size]).tolist()
    return rows


def equal_shares(table: Table, share: int, seed: int) -> Table:
    """Returns equally many random rows of each source.

    Args:
      table: with a column ``source``.
      share: the largest number of rows of a source; the smallest source may have fewer.
    """
    sources = np.array(require(table, "source", (int, str), "a name or a number")[:])
    names, counts = np.unique(sources, return_counts=True)
    kept = []
    for name in names:
        own = np.flatnonzero(sources == name)
        order = host_rng(seed, f"share:{name}").permutation(len(own))
        kept.append(own[order[: min(share, counts.min())]])
    return table.take(np.sort(np.concatenate(kept)).tolist())


def draw_users(
    names: Iterable[str], size: Callable[[str], int], count: int, least: int, seed: int
) -> list[str]:
    """Returns ``count`` users with at least ``least`` training examples each, drawn at random.

    Users are tried in a random order that depends on the names and the seed only, so a larger draw
    contains a smaller one. ``size`` is called for the users that are tried, and for no others.

    Args:
      size: user -> number of its training examples.

    Raises:
      InputError: a number that is not positive, or too few users.
    """
    for key, value in (("users", count), ("user_examples", least)):
        if value < 1:
            raise InputError(f"{key} = {value} must be at least 1.")
    known = sorted(names)
    drawn: list[str] = []
    for i in host_rng(seed, "users").permutation(len(known)):
        if size(known[i]) >= least:
            drawn.append(known[i])
            if len(drawn) == count:
                return drawn
    raise InputError(
        f"users = {count} asks for users with at least {least} training examples that are in all"
        f" splits, and there are {len(drawn)} (of {len(known)} users in all splits)."
    )


def keep_users(tables: Mapping[str, Table], count: int, least: int, seed: int) -> dict[str, Table]:
    """Returns the splits with the rows of ``count`` drawn users only (:func:`draw_users`).

    Args:
      tables: splits with a column ``client``; users are drawn out of those in all splits.

    Raises:
      InputError: there is no column ``client``, or there are too few users.
    """
    for table in tables.values():
        if "client" not in table.columns:
            raise InputError(f"users = {count} draws users, but {table.lacks('client')}")
    rows = {split: rows_by_client(table) for split, table in tables.items()}
    everywhere = set.intersection(*map(set, rows.values()))
    drawn = draw_users(everywhere, lambda user: len(rows["train"][user]), count, least, seed)
    return {
        split: table.take(sorted(row for user in drawn for row in rows[split][user]))
        for split, table in tables.items()
    }


def rows_by_client(table: Table) -> dict[str, list[int]]:
    """Returns client -> its rows, in the order of the clients' first rows."""
    rows: dict[str, list[int]] = {}
    for row, client in enumerate(table.columns["client"]):
        rows.setdefault(str(client), []).append(row)
    return rows
