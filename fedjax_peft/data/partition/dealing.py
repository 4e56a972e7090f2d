"""Shared parts of the partitions: the pool that is dealt out, and whole numbers from shares.

A partition is one array ``owner``, the client of each example, so every example has exactly one
owner. Partitions with skew first make a table ``counts[clients, classes]``, and then deal out the
shuffled examples by it.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Generic

import numpy as np

from fedjax_peft.data import keys
from fedjax_peft.data.dataset import Clients, Dataset, DataT
from fedjax_peft.numerics.ragged import Ragged
from fedjax_peft.support.errors import InputError


@dataclass(frozen=True, eq=False)
class Pool(Generic[DataT]):
    """The units that a partition deals out; without ``meta["unit"]``, every example is a unit."""

    data: DataT
    first: np.ndarray
    """The first row of each unit, int ``[units]``."""
    unit: np.ndarray
    """The unit of each row, int ``[examples]``."""

    @classmethod
    def of(cls, data: DataT) -> "Pool[DataT]":
        """Returns the pool of a data set, or of an array with one value for each example.

        Raises:
          InputError: the data are something else, such as the dict of a data set's splits.
        """
        if not isinstance(data, Dataset | np.ndarray):
            raise InputError(
                f"The data of a partition are of the type {type(data).__name__}, and must be a"
                " fp.Dataset, or an array with a label for each example. Of a dict of splits give"
                " one: data['train']."
            )
        if isinstance(data, Dataset) and "unit" in data.meta:
            _, first, unit = np.unique(data.meta["unit"], return_index=True, return_inverse=True)
            return cls(data, first, unit)
        every = np.arange(len(data))
        return cls(data, every, every)

    def __len__(self) -> int:
        return len(self.first)

    def classes(self, by: str | None) -> tuple[np.ndarray, tuple[str, ...]]:
        """Returns the class of each unit and all class names: :func:`keys.classes`."""
        values, names = keys.classes(self.data, by)
        return values[self.first], names

    def distinct(self, by: str | None) -> tuple[np.ndarray, tuple[str, ...]]:
        """Returns the class of each unit and the names of those that occur."""
        values, names = keys.distinct(self.data, by)
        occurring, values = np.unique(values[self.first], return_inverse=True)
        return values, tuple(names[i] for i in occurring)

    def clients(
        self, owner: np.ndarray, clients: int, names: tuple[str, ...] = ()
    ) -> Clients[DataT]:
        """Returns the clients of an owner array, int ``[units]`` below ``clients``; -1: nobody."""
        owners = owner[self.unit]
        sizes = np.bincount(owners + 1, minlength=clients + 1)
        order = np.argsort(owners, kind="stable").astype(np.int32)
        own = order[sizes[0] :]  # the first rows belong to nobody
        return Clients(self.data, Ragged(own, sizes[1:]), names)


def check_clients(n: int, clients: int, min_size: int = 1) -> None:
    """Raises InputError if n examples are too few for the clients."""
    if n < clients * max(1, min_size):
        raise InputError(
            f"{n} examples are too few for {clients} clients with at least {max(1, min_size)}"
            " each. Use fewer clients or more examples."
        )


def draw(concentration: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns one Dirichlet draw per row of ``concentration``, same shape.

    A Gamma(a) variable is Gamma(a + 1) * U^(1/a). It is computed in logarithms, because for small
    ``a`` the variables underflow to 0. -log(U) is exponential.
    """
    a = np.maximum(concentration, 1e-300)  # so that 1 / a is finite
    log_gamma = np.log(rng.standard_gamma(a + 1)) - rng.standard_exponential(a.shape) / a
    weights = np.exp(log_gamma - log_gamma.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def apportion(shares: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Returns whole numbers ``[rows, n]`` near ``shares * totals`` whose rows sum to ``totals``.

    Largest remainders: round down, then add 1 where the fractions are largest (of equal fractions,
    the first).
    """
    quotas = shares * totals[:, None]
    counts = np.floor(quotas).astype(np.int64)
    order = np.argsort(counts - quotas, axis=1, kind="stable")
    extra = np.arange(quotas.shape[1]) < (totals - counts.sum(axis=1))[:, None]
    np.put_along_axis(counts, order, np.take_along_axis(counts, order, axis=1) + extra, axis=1)
    return counts


def deal(classes: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the owner of each example, int64 ``[examples]``.

    Args:
      classes: class of each example, int ``[examples]``.
      counts: int ``[clients, classes]``; its columns sum to the sizes of the classes.
      rng: shuffles the examples of each class.
    """
    shuffled = rng.permutation(len(classes))
    by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
    owner = np.empty(len(classes), np.int64)
    owner[by_class] = np.repeat(np.tile(np.arange(len(counts)), counts.shape[1]), counts.T.ravel())
    return owner


def fill_up(owner: np.ndarray, clients: int, min_size: int, rng: np.random.Generator) -> np.ndarray:
    """Returns owners with at least ``min_size`` examples each, taken from the largest clients."""
    sizes = np.bincount(owner, minlength=clients)
    need = np.maximum(min_size - sizes, 0)
    total = need.sum()
    if not total:
        return owner
    # The lowest level to which the large clients can be cut without giving more than needed. The
    # few examples that are still missing come from the first clients at that level.
    level = bisect_left(
        range(sizes.max()), True, key=lambda cut: np.maximum(sizes - cut, 0).sum() <= total
    )
    give = np.maximum(sizes - level, 0)
    give[np.flatnonzero(sizes >= level)[: total - give.sum()]] += 1
    shuffled = rng.permutation(len(owner))
    grouped = shuffled[np.argsort(owner[shuffled], kind="stable")]
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    position = np.arange(len(owner)) - starts  # within the client's own shuffled list
    moved = grouped[position < np.repeat(give, sizes)]
    filled = owner.copy()
    filled[rng.permutation(moved)] = np.repeat(np.arange(clients), need)
    return filled
