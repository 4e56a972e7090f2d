"""Partitions independent of labels and keys."""

import numpy as np

from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import data_part
from fedjax_peft.data.dataset import Clients, DataT
from fedjax_peft.data.partition.dealing import Pool, check_clients
from fedjax_peft.numerics.random import host_rng


@data_part
def iid(data: DataT, clients: Count, *, seed: int = 0) -> Clients[DataT]:
    """Deals out the examples at random, in sizes that differ by at most one example.

    Args:
      data: a data set, or integer labels ``[examples]``.
      clients: number of clients, at most the number of examples.
      seed: the seed of the random stream.

    Raises:
      InputError: ``clients`` out of range.
    """
    pool = Pool.of(data)
    check_clients(len(pool), clients)
    owner = host_rng(seed, "partition").permutation(len(pool)) % clients
    return pool.clients(owner, clients)


@data_part
def pooled(data: DataT) -> Clients[DataT]:
    """Gives all examples to one client, for training without federation (``centralised``).

    Args:
      data: a data set, or integer labels ``[examples]``.

    Raises:
      InputError: no examples.
    """
    pool = Pool.of(data)
    check_clients(len(pool), 1)
    return pool.clients(np.zeros(len(pool), np.int64), 1)
