"""Partitions by a key of the data, such as the user, the speaker or the task."""

from collections.abc import Sequence

import numpy as np

from fedjax_peft.contracts.arguments import Count, FromZero
from fedjax_peft.contracts.part import data_part
from fedjax_peft.data.dataset import Clients, DataT
from fedjax_peft.data.partition.dealing import Pool
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.errors import InputError, nearest


@data_part
def natural(
    data: DataT,
    by: str = "client",
    clients: Count | None = None,
    *,
    min_size: FromZero = 1,
    names: Sequence[str] | None = None,
    seed: int = 0,
) -> Clients[DataT]:
    """One client for each user, or for each value of another key, such as the task.

    The values are the names of the clients, which are sorted by them. With ``clients``, ``names``
    or a ``min_size`` above 1, the examples of all other users are left out.

    Args:
      data: a data set with ``by`` in its ``meta``, or the values themselves ``[examples]``.
      by: the key.
      clients: the number of users to draw at random, out of those with at least ``min_size``
        examples; None: all.
      min_size: least number of examples of a client.
      names: take exactly these instead, in this order: ``names=train.names`` gives the test split
        to the same clients. A client may then be empty only with ``min_size=0``.
      seed: the seed of the random stream.

    Raises:
      InputError: no such key, too few clients with ``min_size`` examples, or a name that the data
        do not have or that comes twice.
    """
    pool = Pool.of(data)
    values, known = pool.distinct(by)
    sizes = np.bincount(values, minlength=len(known))
    if names is None:
        chosen = _draw(sizes, clients, min_size, host_rng(seed, "partition"))
        names = [known[i] for i in chosen]
    elif clients is None:
        _check_names(names, dict(zip(known, sizes.tolist(), strict=True)), by, min_size)
    else:
        raise InputError("names say which clients to take, so clients cannot say how many to draw.")
    place = {name: i for i, name in enumerate(names)}
    owner = np.array([place.get(name, -1) for name in known])[values]
    return pool.clients(owner, len(names), tuple(names))


@data_part
def grouped(
    data: DataT,
    groups: Count,
    of: Count | None = None,
    *,
    by: str = "client",
    min_size: FromZero = 1,
    seed: int = 0,
) -> Clients[DataT]:
    """Merges users at random into groups; each group is one client.

    The numbers of users of two groups differ by at most one. FedAdapters merges 27 users into 9
    groups. Clients differ less than users do, but they are not IID. Examples of users that are not
    drawn or have too few examples are left out.

    Args:
      data: as for :func:`natural`.
      groups: number of clients.
      of: the number of users to draw, out of those with at least ``min_size`` examples; None:
        all.
      by: the key of the users.
      min_size: least number of examples of a user.
      seed: the seed of the random stream.

    Raises:
      InputError: no such key, or fewer users than groups or than ``of``.
    """
    pool = Pool.of(data)
    values, known = pool.distinct(by)
    rng = host_rng(seed, "partition")
    chosen = _draw(np.bincount(values, minlength=len(known)), of, min_size, rng)
    if not 1 <= groups <= len(chosen):
        raise InputError(f"{len(chosen)} clients cannot be merged into {groups} groups.")
    group = np.full(len(known), -1)
    group[chosen] = rng.permutation(len(chosen)) % groups
    return pool.clients(group[values], groups)


def _draw(
    sizes: np.ndarray, clients: int | None, min_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns the numbers of users with enough examples, ascending: all, or ``clients`` drawn."""
    enough = np.flatnonzero(sizes >= min_size)
    wanted = max(1, len(enough)) if clients is None else clients
    if not 1 <= wanted <= len(enough):
        raise InputError(
            f"{wanted} clients with at least {min_size} examples are asked for, and there are"
            f" {len(enough)} (of {len(sizes)} in all)."
        )
    return enough if clients is None else np.sort(rng.choice(enough, clients, replace=False))


def _check_names(names: Sequence[str], sizes: dict[str, int], by: str, min_size: int) -> None:
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise InputError(f"The client {twice!r} comes twice in names.")
    for name in names:
        size = sizes.get(name, 0)
        if size < min_size:
            advice = f" {nearest(name, sizes)}" if name not in sizes else ""
            raise InputError(
                f"The {by} {name!r} has {size} examples, and min_size is {min_size}.{advice}"
            )
