"""How much clients differ in their classes: histograms, and divergences of all pairs."""

import math
from typing import Any

import numpy as np

from fedjax_peft.data import keys
from fedjax_peft.data.dataset import Clients
from fedjax_peft.support.errors import InputError

__all__ = ["histograms", "jeffreys", "js_divergence", "mean_pairwise", "sorted_order"]


def histograms(clients: Clients[Any], by: str | None = None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns how many examples of each class each client has, and the names of the classes.

    Args:
      clients: a federation.
      by: a key of ``data.meta`` whose values are the classes; None: the labels.

    Returns:
      int ``[clients, classes]``, and as many names as there are classes.

    Raises:
      InputError: no such key, or not one value of it for each example.
    """
    values, names = keys.classes(clients.data, by)
    shape = len(clients), len(names)
    owner = np.repeat(np.arange(len(clients)), clients.sizes)
    cells = owner * len(names) + values[clients.rows]
    return np.bincount(cells, minlength=math.prod(shape)).reshape(shape), names


def js_divergence(table: Any, base: float = 2, sqrt: bool = False) -> np.ndarray:
    """Returns the Jensen-Shannon divergence of each pair of rows, float64 ``[rows, rows]``.

    In base 2 it lies between 0 and 1; it is 1 if two rows have no class in common. FeDeRA names it
    for its heat maps (Yan et al. 2024, appendix A.4), but prints the formula of :func:`jeffreys`.
    FedNLP plots the square root, which is a distance, with natural logarithms.

    Args:
      table: counts or shares, not negative, ``[rows, classes]``.
      base: the base of the logarithm.
      sqrt: return the square root.

    Raises:
      InputError: the table is not a table of counts, or the base is not above 1.
    """
    if not 1 < base < math.inf:
        raise InputError(f"The base of the logarithm must be above 1, but is {base}.")

    shares, rows = _shares(table), []
    for p in shares:  # row by row, so that memory holds one table at a time
        middle = (p + shares) / 2
        rows.append((_relative_entropy(p, middle) + _relative_entropy(shares, middle)) / 2)
    result = np.maximum(np.stack(rows) / math.log(base), 0)  # rounding can make it negative
    return np.sqrt(result) if sqrt else result


def jeffreys(table: Any, eps: float = 1e-6) -> np.ndarray:
    """Returns half of Jeffreys' divergence of each pair of rows, float64 ``[rows, rows]``.

    ``(KL(p | q) + KL(q | p)) / 2`` with natural logarithms: the formula that FeDeRA prints
    (appendix A.4). It has no upper bound. For rows without a common class it is infinite, or about
    ``log(1 / eps)``.

    Args:
      table: counts or shares, not negative, ``[rows, classes]``.
      eps: added to every share before they are divided by their sum.

    Raises:
      InputError: the table is not a table of counts, or ``eps`` is negative.
    """
    if not 0 <= eps < math.inf:
        raise InputError(f"eps must not be negative, but is {eps}.")

    shares = _shares(_shares(table) + eps)
    both = [_relative_entropy(p, shares) + _relative_entropy(shares, p) for p in shares]
    return np.stack(both) / 2


def sorted_order(distances: np.ndarray) -> np.ndarray:
    """Returns the rows by their total distance to all others, largest first, as FedNLP draws them.

    Args:
      distances: ``[rows, rows]``.

    Returns:
      int ``[rows]``; rows of equal totals keep their order.
    """
    return np.argsort(-distances.sum(axis=1), kind="stable")


def mean_pairwise(distances: np.ndarray) -> float:
    """Returns the mean distance of two different rows of ``[rows, rows]``; 0 for a single one."""
    n = len(distances)
    return float((distances.sum() - np.trace(distances)) / max(1, n * (n - 1)))


def _shares(table: Any) -> np.ndarray:
    """Returns the checked table with rows that sum to 1, float64 ``[rows, classes]``."""
    counts = np.asarray(table, np.float64)
    if counts.ndim != 2 or not counts.size:
        raise InputError(f"A table of counts has rows and columns, not the shape {counts.shape}.")
    usable = np.all((counts >= 0) & np.isfinite(counts), axis=1) & (counts.sum(axis=1) > 0)
    if not usable.all():
        row = int(np.argmin(usable))
        raise InputError(
            f"Row {row} of the table of counts, {counts[row].tolist()}, must hold numbers from 0"
            " up, not all of them 0: a client without examples has no distribution to compare."
        )
    return counts / counts.sum(axis=1, keepdims=True)


def _relative_entropy(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Returns KL(p | q) in nats over the last axis, where ``0 log 0`` is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p > 0, p * np.log(p / q), 0).sum(axis=-1)
