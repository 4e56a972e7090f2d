"""Partitions in which clients differ in their classes or in their sizes."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from fedjax_peft.contracts.arguments import Count, FromZero, Positive
from fedjax_peft.contracts.part import data_part
from fedjax_peft.data.dataset import Clients, DataT
from fedjax_peft.data.partition.dealing import Pool, apportion, check_clients, deal, draw, fill_up
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.errors import InputError


@data_part
def dirichlet(
    data: DataT,
    clients: Count,
    alpha: Positive,
    *,
    by: str | None = None,
    mode: Literal["client_prior", "class_wise"] = "client_prior",
    min_size: FromZero = 1,
    seed: int = 0,
) -> Clients[DataT]:
    """Label skew by a Dirichlet distribution: with a smaller alpha, a client has fewer labels.

    ``client_prior``: client i draws its label shares ``p_i ~ Dir(alpha * prior)``, where ``prior``
    is the label distribution of the data, and takes ``p_i * size`` examples of each label. Clients
    draw from the pool one after the other. If too few examples of a label are left, the rest comes
    from the other labels, in proportion to their remaining examples; late clients are therefore
    more mixed than their ``p_i``. Sizes differ by at most one example. The distribution is that of
    Hsu et al. 2019; the filling is that of FedNLP (Lin et al. 2022), which FeDeRA (Yan et al. 2024)
    uses.

    ``class_wise``: label c draws its client shares ``q_c ~ Dir(alpha, ..., alpha)`` and its
    examples are divided by them (Yurochkin et al. 2019). Sizes are unequal, and for small alpha
    most clients would be empty. Clients below ``min_size`` therefore get random examples of the
    largest clients, which are cut to a common level. With ``min_size=0`` clients can stay empty.

    Counts are the shares rounded by largest remainders. Nothing is drawn again.

    Args:
      data: a data set, or integer labels ``[examples]``.
      clients: number of clients, at most the number of examples.
      alpha: concentration; towards infinity every client has the prior.
      by: a key of ``data.meta`` whose values take the place of labels, such as ``"tag_set"`` or
        ``"cluster"``; None: the labels.
      mode: ``client_prior`` (every client draws its label shares; equal sizes) or ``class_wise``
        (every label draws its client shares; unequal sizes), see above.
      min_size: least number of examples of a client.
      seed: the seed of the random stream.

    Raises:
      InputError: an argument out of range, or no such key.
    """
    pool = Pool.of(data)
    classes, names = pool.distinct(by)
    check_clients(len(pool), clients, min_size)
    rng = host_rng(seed, "partition")
    if mode == "client_prior":
        class_sizes = np.bincount(classes, minlength=len(names))
        counts = _client_prior(class_sizes, _sizes(len(pool), clients), alpha, rng)
        owner = deal(classes, counts, rng)
    else:
        owner = _class_wise(classes, clients, alpha, min_size, rng)
    return pool.clients(owner, clients)


@data_part
def label_share(
    data: DataT, shares: Sequence[Sequence[float]], *, by: str | None = None, seed: int = 0
) -> Clients[DataT]:
    """Label skew by a table: which share of each label goes to which client.

    ``shares[c][k]`` is the part of label c's examples that client k gets, rounded by largest
    remainders. ``[[.9, .1], [.1, .9]]`` is the two-client split of SST-2 in the FRA-LoRA paper.

    Args:
      data: a data set, or integer labels ``[examples]``.
      shares: one row per label, in label order, and one column per client; rows sum to 1.
      by: a key of ``data.meta`` whose sorted values take the place of labels; None: the labels.
      seed: the seed of the random stream.

    Raises:
      InputError: a table that does not fit the labels, or that leaves a client without examples.
    """
    pool = Pool.of(data)
    classes, names = pool.classes(by)
    table = _share_table(shares, len(names))
    counts = apportion(table, np.bincount(classes, minlength=len(names))).T
    empty = np.flatnonzero(counts.sum(1) == 0)
    if len(empty):
        raise InputError(f"The share table leaves client {empty[0]} without any example.")
    owner = deal(classes, counts, host_rng(seed, "partition"))
    return pool.clients(owner, len(counts))


@data_part
def pathological(
    data: DataT,
    clients: Count,
    classes_per_client: Count = 2,
    *,
    by: str | None = None,
    seed: int = 0,
) -> Clients[DataT]:
    """Label skew by shards: each client has examples of a few classes only, usually two.

    As in the split of MNIST by McMahan et al. 2017, every class is cut into equal shards, and every
    client takes ``classes_per_client`` shards. Here a shard never has two classes, and a client
    never takes two shards of the same class. The number of shards of a class is about proportional
    to its size: repeatedly, the class with the largest shards gets one shard more. A client has
    fewer classes only if there are too few examples for all shards. Classes of equal size give
    clients of equal size.

    Args:
      data: a data set, or integer labels ``[examples]``.
      clients: number of clients, at most the number of examples.
      classes_per_client: how many classes a client has; together the clients must hold them all.
      by: a key of ``data.meta`` whose values take the place of labels; None: the labels.
      seed: the seed of the random stream.

    Raises:
      InputError: an argument out of range, or more classes than clients can hold.
    """
    pool = Pool.of(data)
    classes, names = pool.distinct(by)
    check_clients(len(pool), clients)
    if classes_per_client > len(names):
        given = f"classes_per_client = {classes_per_client}"
        raise InputError(f"{given} is more than the {len(names)} classes of the data.")
    if clients * classes_per_client < len(names):
        raise InputError(
            f"{clients} clients with {classes_per_client} classes each cannot hold all"
            f" {len(names)} classes. Use more clients or more classes for each."
        )
    class_sizes = np.bincount(classes, minlength=len(names))
    rng = host_rng(seed, "partition")
    shards = _shards(class_sizes, clients, clients * classes_per_client)
    takes = _take_shards(shards, clients, rng)
    counts = apportion(takes.T / shards[:, None], class_sizes).T
    return pool.clients(deal(classes, counts, rng), clients)


@data_part
def quantity(
    data: DataT, clients: Count, alpha: Positive, *, min_size: FromZero = 1, seed: int = 0
) -> Clients[DataT]:
    """Quantity skew: client sizes by a Dirichlet distribution, independent of labels.

    Shares of the data are drawn from ``Dir(alpha, ..., alpha)`` over the clients (NIID-Bench, Li et
    al. 2022, and FedNLP; both call it beta). Clients below ``min_size`` are filled up from the
    largest ones, as in :func:`dirichlet`.

    Args:
      data: a data set, or integer labels ``[examples]``.
      clients: number of clients, at most the number of examples.
      alpha: concentration; towards infinity all sizes are equal.
      min_size: least number of examples of a client.
      seed: the seed of the random stream.

    Raises:
      InputError: an argument out of range.
    """
    pool = Pool.of(data)
    check_clients(len(pool), clients, min_size)
    alike = np.zeros(len(pool), np.int64)
    owner = _class_wise(alike, clients, alpha, min_size, host_rng(seed, "partition"))
    return pool.clients(owner, clients)


@data_part
def zipf(
    data: DataT,
    clients: Count,
    exponent: Positive = 1.0,
    *,
    min_size: FromZero = 1,
    seed: int = 0,
) -> Clients[DataT]:
    """Quantity skew by Zipf's law: a few clients are large and most are small; labels are IID.

    Every client has ``min_size`` examples. The rest is divided in proportion to ``k ** -exponent``
    for client k, counted from 1, rounded by largest remainders. So the first client is the largest.
    The sizes are not random; the seed decides which examples a client has. The form is our choice,
    for federations of very many clients.

    Args:
      data: a data set, or integer labels ``[examples]``.
      clients: number of clients, at most the number of examples.
      exponent: the larger, the more the first clients have.
      min_size: least number of examples of a client.
      seed: the seed of the random stream.

    Raises:
      InputError: an argument out of range.
    """
    pool = Pool.of(data)
    check_clients(len(pool), clients, min_size)
    shares = np.arange(1, clients + 1, dtype=np.float64)[None] ** -exponent
    rest = np.array([len(pool) - clients * min_size])
    (more,) = apportion(shares / shares.sum(), rest)
    owner = np.repeat(np.arange(clients), min_size + more)
    return pool.clients(host_rng(seed, "partition").permutation(owner), clients)


def _share_table(shares: Sequence[Sequence[float]], classes: int) -> np.ndarray:
    """Returns the checked table, float64 ``[classes, clients]``."""
    if len({len(row) for row in shares}) != 1:
        raise InputError("All rows of a share table need the same length, the number of clients.")
    table = np.array(shares, np.float64)
    if len(table) != classes:
        raise InputError(
            f"The share table has {len(table)} rows, but the data have {classes} labels."
        )
    for label, row in enumerate(table):
        if not (np.all(row >= 0) and abs(row.sum() - 1) < 1e-6):
            raise InputError(
                f"Row {label} of the share table, {row.tolist()}, must hold shares from 0 to 1"
                f" that sum to 1; it sums to {row.sum():.6g}."
            )
    return table / table.sum(axis=1, keepdims=True)


def _sizes(n: int, clients: int) -> np.ndarray:
    """Returns client sizes that differ by at most one, int64 ``[clients]``, and sum to n."""
    sizes = np.full(clients, n // clients)
    sizes[: n % clients] += 1
    return sizes


def _class_wise(
    classes: np.ndarray, clients: int, alpha: float, min_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns owners, int ``[examples]``: each class is divided by shares of its own."""
    class_sizes = np.bincount(classes)
    shares = draw(np.full((len(class_sizes), clients), alpha), rng)
    owner = deal(classes, apportion(shares, class_sizes).T, rng)
    return fill_up(owner, clients, min_size, rng)


def _client_prior(
    class_sizes: np.ndarray, sizes: np.ndarray, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Returns counts ``[clients, classes]``, drawn from the pool client by client."""
    prior = class_sizes / class_sizes.sum()
    shares = draw(np.tile(alpha * prior, (len(sizes), 1)), rng)
    counts = apportion(shares, sizes)
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


def _shards(class_sizes: np.ndarray, clients: int, wanted: int) -> np.ndarray:
    """Returns the number of shards of each class, int ``[classes]``; their sum is ``wanted``.

    Each class starts with one shard. A class has at most as many shards as it has examples, and at
    most as many as there are clients; the sum is smaller if these limits require it.
    """
    most = np.minimum(class_sizes, clients)
    of = np.repeat(np.arange(len(most)), most)
    before = np.arange(len(of)) - np.repeat(np.cumsum(most) - most, most)
    # The size of the shards of a class before it gets one more: the largest is cut first.
    urgency = np.where(before == 0, np.inf, class_sizes[of] / np.maximum(before, 1))
    return np.bincount(of[np.argsort(-urgency, kind="stable")[:wanted]], minlength=len(most))


def _take_shards(shards: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Returns which client takes a shard of which class, bool ``[clients, classes]``.

    The numbers of shards of two clients differ by at most one. One client after the other takes
    shards of the classes with most shards left, at random among equals. By the theorem of Gale and
    Ryser no shard is left at the end.
    """
    takes = np.zeros((clients, len(shards)), np.bool_)
    left = shards.astype(np.float64)
    for row, number in zip(takes, _sizes(shards.sum(), clients), strict=True):
        order = np.argsort(left + rng.random(len(left)))
        row[order[len(left) - number :]] = True
        left -= row
    return takes
