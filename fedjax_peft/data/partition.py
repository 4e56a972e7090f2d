"""Partitions: who owns which example. Pure functions of (data, settings, seed).

Every example goes to exactly one client. Randomness comes from the stream ``partition`` of the
seed. A client's rows are in ascending order. Inside, a partition is one array ``owner``, the client
of each example, so that it covers the data exactly by its form; the label-aware ones first make a
table ``counts[clients, classes]`` and then deal the shuffled examples by it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

import numpy as np

from fedjax_peft.data.dataset import Clients, Dataset, DataT
from fedjax_peft.errors import InputError, nearest
from fedjax_peft.random import host_rng

__all__ = ["dirichlet", "iid", "label_share", "pooled"]


def iid(data: DataT, clients: int, *, seed: int = 0) -> Clients[DataT]:
    """Uniformly at random, in equal sizes (to one example).

    Args:
      data: a data set, or integer labels ``[examples]``.
      clients: number of clients, at most the number of examples.
      seed: of the random stream.

    Raises:
      InputError: ``clients`` out of range.
    """
    _check_clients(len(data), clients)
    owner = host_rng(seed, "partition").permutation(len(data)) % clients
    return _clients(data, owner, clients)


def dirichlet(
    data: DataT,
    clients: int,
    alpha: float,
    *,
    mode: Literal["client_prior", "class_wise"] = "client_prior",
    fednlp_exact: bool = False,
    min_size: int = 1,
    seed: int = 0,
) -> Clients[DataT]:
    """Label skew by a Dirichlet distribution: the smaller alpha, the fewer labels a client has.

    ``client_prior``: client i draws its label shares ``p_i ~ Dir(alpha * prior)``, where ``prior``
    is the label distribution of the data, and takes ``p_i * size`` examples of each label. Clients
    draw from the pool one after the other; where a label has run out, the shortage is filled from
    the other labels in proportion to what is left of them, so late clients are more mixed than
    their ``p_i``. Sizes are equal (to one example). The distribution is that of Hsu et al. 2019,
    the filling that of FedNLP (Lin et al. 2022), which FeDeRA (Yan et al. 2024) uses.

    ``class_wise``: label c draws its client shares ``q_c ~ Dir(alpha, ..., alpha)`` and its
    examples are divided by them (Yurochkin et al. 2019). Sizes are unequal, and for small alpha
    most clients would be empty: clients below ``min_size`` are filled up with random examples of
    the largest clients, which are cut to a common level. With ``min_size=0`` clients can stay
    empty.

    Shares are turned into counts by largest remainders, without any redrawing.

    Args:
      data: a data set with ``labels``, or integer labels ``[examples]``.
      clients: number of clients, at most the number of examples.
      alpha: concentration, positive; towards infinity every client has the prior.
      mode: see above.
      fednlp_exact: sizes as in FedNLP: all clients have ``examples // clients`` and the last one
        also the remainder. Only for ``client_prior``.
      min_size: least number of examples of a client.
      seed: of the random stream.

    Raises:
      InputError: an argument out of range.
    """
    labels = _labels(data)
    _check_clients(len(labels), clients, min_size)
    if not 0 < alpha < np.inf:
        raise InputError(f"alpha of a Dirichlet partition must be positive, not {alpha}.")
    if fednlp_exact and mode != "client_prior":
        raise InputError(f"fednlp_exact is about the mode 'client_prior', not {mode!r}.")
    rng = host_rng(seed, "partition")
    _, classes, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)
    if mode == "client_prior":
        counts = _client_prior(class_sizes, _sizes(len(labels), clients, fednlp_exact), alpha, rng)
        owner = _deal(classes, counts, rng)
    elif mode == "class_wise":
        shares = _dirichlet(np.full((len(class_sizes), clients), alpha), rng)
        owner = _deal(classes, _apportion(shares, class_sizes).T, rng)
        owner = _fill_up(owner, clients, min_size, rng)
    else:
        known = ["client_prior", "class_wise"]
        raise InputError(f"There is no Dirichlet mode {mode!r}. {nearest(mode, known)}")
    return _clients(data, owner, clients)


def label_share(data: DataT, shares: Sequence[Sequence[float]], *, seed: int = 0) -> Clients[DataT]:
    """Label skew by a table: which share of each label goes to which client.

    ``shares[c][k]`` is the part of label c's examples that client k gets, rounded by largest
    remainders. ``[[.9, .1], [.1, .9]]`` is the two-client split of SST-2 in the FRA-LoRA paper.

    Args:
      data: a data set with ``labels``, or integer labels ``[examples]``.
      shares: one row per label, in label order, and one column per client; rows sum to 1.
      seed: of the random stream.

    Raises:
      InputError: a table that does not fit the labels, or that leaves a client without examples.
    """
    labels = _labels(data)
    classes = len(data.label_names) if isinstance(data, Dataset) else int(labels.max()) + 1
    table = _share_table(shares, classes)
    counts = _apportion(table, np.bincount(labels, minlength=classes)).T
    empty = np.flatnonzero(counts.sum(1) == 0)
    if len(empty):
        raise InputError(f"The share table leaves client {empty[0]} without any example.")
    owner = _deal(labels, counts, host_rng(seed, "partition"))
    return _clients(data, owner, len(counts))


def pooled(data: DataT) -> Clients[DataT]:
    """One client with everything, for training without federation (``algorithms.centralised``).

    Args:
      data: a data set, or integer labels ``[examples]``.

    Raises:
      InputError: no examples.
    """
    _check_clients(len(data), 1)
    return _clients(data, np.zeros(len(data), np.int64), 1)


def _check_clients(n: int, clients: int, min_size: int = 1) -> None:
    if clients < 1:
        raise InputError(f"A partition needs at least 1 client, not {clients}.")
    if min_size < 0:
        raise InputError(f"min_size of a partition must not be negative, but is {min_size}.")
    if n < clients * max(1, min_size):
        raise InputError(
            f"{n} examples are too few for {clients} clients with at least {max(1, min_size)}"
            " each. Use fewer clients or more examples."
        )


def _labels(data: Dataset | np.ndarray) -> np.ndarray:
    labels = np.asarray(data.labels if isinstance(data, Dataset) else data)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise InputError(
            "A partition by label needs one integer label per example, not an array of shape"
            f" {labels.shape} and type {labels.dtype}."
        )
    if not len(labels) or labels.min() < 0:
        raise InputError("A partition by label needs examples, with labels from 0 up.")
    return labels


def _share_table(shares: Sequence[Sequence[float]], classes: int) -> np.ndarray:
    """Returns the checked table, float64 ``[classes, clients]``."""
    if len({len(row) for row in shares}) != 1:
        raise InputError("All rows of a share table need the same length, the number of clients.")
    table = np.array(shares, np.float64)
    if len(table) != classes:
        raise InputError(
            f"The share table has {len(table)} rows, but the data have {classes} labels. It needs"
            " one row per label and one column per client."
        )
    for label, row in enumerate(table):
        if not (np.all(row >= 0) and abs(row.sum() - 1) < 1e-6):
            raise InputError(
                f"Row {label} of the share table, {row.tolist()}, must hold shares from 0 to 1"
                f" that sum to 1; it sums to {row.sum():.6g}."
            )
    return table / table.sum(axis=1, keepdims=True)


def _sizes(n: int, clients: int, remainder_last: bool) -> np.ndarray:
    """Returns equal client sizes, int64 ``[clients]``, that sum to n."""
    sizes = np.full(clients, n // clients)
    if remainder_last:
        sizes[-1] += n % clients
    else:
        sizes[: n % clients] += 1
    return sizes


def _dirichlet(concentration: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns one Dirichlet draw per row of ``concentration``, same shape.

    A Gamma(a) variable is Gamma(a + 1) * U^(1/a), which is taken in logarithms: for small ``a``
    the variables themselves all underflow to 0. Minus the logarithm of U is exponential.
    """
    a = np.maximum(concentration, 1e-300)  # so that 1 / a is finite
    log_gamma = np.log(rng.standard_gamma(a + 1)) - rng.standard_exponential(a.shape) / a
    weights = np.exp(log_gamma - log_gamma.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def _apportion(shares: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Returns whole numbers ``[rows, n]`` near ``shares * totals`` whose rows sum to ``totals``.

    Largest remainders: round down, then give what is left to the largest fractions (the first of
    equal ones).
    """
    quotas = shares * totals[:, None]
    counts = np.floor(quotas).astype(np.int64)
    order = np.argsort(counts - quotas, axis=1, kind="stable")
    extra = np.arange(quotas.shape[1]) < (totals - counts.sum(axis=1))[:, None]
    np.put_along_axis(counts, order, np.take_along_axis(counts, order, axis=1) + extra, axis=1)
    return counts


def _client_prior(
    class_sizes: np.ndarray, sizes: np.ndarray, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Returns counts ``[clients, classes]``, drawn from the pool client by client."""
    prior = class_sizes / class_sizes.sum()
    shares = _dirichlet(np.tile(alpha * prior, (len(sizes), 1)), rng)
    counts = _apportion(shares, sizes)
    left = class_sizes.copy()
    for row, size in zip(counts, sizes, strict=True):
        np.minimum(row, left, out=row)
        left -= row
        shortage = size - row.sum()
        if shortage:
            fill = _proportional(left, shortage)
            row += fill
            left -= fill
    return counts


def _proportional(stock: np.ndarray, amount: int) -> np.ndarray:
    """Returns ``amount`` units taken from ``stock`` in proportion to it, by largest remainders.

    Whole-number arithmetic throughout, so that no class gives more than it has.
    """
    taken, remainder = np.divmod(stock * amount, stock.sum())
    extra = amount - taken.sum()
    taken[np.argsort(-remainder, kind="stable")[:extra]] += 1
    return taken


def _deal(classes: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
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


def _fill_up(
    owner: np.ndarray, clients: int, min_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns owners such that each client has ``min_size`` examples, taken from the largest."""
    sizes = np.bincount(owner, minlength=clients)
    need = np.maximum(min_size - sizes, 0)
    total = need.sum()
    if not total:
        return owner
    # The lowest level to which the large clients can be cut without giving more than is needed;
    # the few examples still missing come from the first clients at that level.
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


def _clients(data: DataT, owner: np.ndarray, clients: int) -> Clients[DataT]:
    """Returns the clients of an owner array, int ``[examples]`` with values below ``clients``."""
    sizes = np.bincount(owner, minlength=clients)
    if len(owner) != len(data) or len(sizes) != clients:
        raise AssertionError(f"{len(owner)} owners of {len(data)} examples, {len(sizes)} clients")
    order = np.argsort(owner, kind="stable").astype(np.int32)
    return Clients(data, tuple(np.split(order, np.cumsum(sizes)[:-1])))
