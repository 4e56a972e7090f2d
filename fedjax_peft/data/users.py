"""Drawing users: which users of a large federated data set an experiment reads."""

from collections.abc import Callable, Iterable, Mapping

from fedjax_peft.data.table import Table
from fedjax_peft.support.errors import InputError

__all__ = ["draw_users", "keep_users"]


def draw_users(
    names: Iterable[str], size: Callable[[str], int], count: int, least: int, seed: int
) -> list[str]:
    """Returns ``count`` users with at least ``least`` training examples each, drawn at random.

    Users are tried in a random order that depends on the names and the seed only, so a larger draw
    contains a smaller one. ``size`` is called for the users that are tried, and for no others.

    Args:
      names: of all users that may be drawn.
      size: user -> number of its training examples.
      count: of users to draw.
      least: training examples of a drawn user.
      seed: of the draw.

    Raises:
      InputError: a number that is not positive, or too few users.
    """
    for key, value in (("users", count), ("user_examples", least)):
        if value < 1:
            raise InputError(f"{key} = {value} must be at least 1.")
    from fedjax_peft.numerics.random import host_rng  # imports JAX, which the catalogue does not

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
      count: of users to draw.
      least: training rows of a drawn user.
      seed: of the draw.

    Raises:
      InputError: there is no column ``client``, or there are too few users.
    """
    rows: dict[str, dict[str, list[int]]] = {}
    for split, table in tables.items():
        if "client" not in table.columns:
            raise InputError(
                f"users = {count} keeps the rows of some users, but {table.origin} has no column"
                f" 'client', only: {', '.join(table.columns)}."
            )
        own = rows.setdefault(split, {})
        for row, user in enumerate(table.columns["client"]):
            own.setdefault(str(user), []).append(row)
    everywhere = set.intersection(*map(set, rows.values()))
    drawn = draw_users(everywhere, lambda user: len(rows["train"][user]), count, least, seed)
    return {
        split: table.take(sorted(row for user in drawn for row in rows[split][user]))
        for split, table in tables.items()
    }
