"""Clients for data sets without users, in place of TensorFlow Federated's natural clients.

27 clients differ in their classes. FedAdapters' "non-IID" takes 9 of 27 natural clients, its "IID"
merges the 27 into 9: each client then has three times as many examples. ``small_users`` is the
client that a small GPT-2 is pretrained on.
"""

import numpy as np

from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.data.partition import dirichlet
from fedjax_peft.numerics.random import host_rng

__all__ = ["merged_from_27", "nine_of_27", "small_users"]


def nine_of_27(data: Dataset, alpha: float, *, seed: int = 0) -> Clients[Dataset]:
    """Returns the first 9 of 27 clients with few classes; the other examples are left out.

    Args:
      data: with labels.
      alpha: of the Dirichlet distribution over the classes; smaller: fewer classes.
      seed: of the partition.
    """
    return Clients(data, dirichlet(data, 27, alpha, seed=seed).indices[:9])


def merged_from_27(data: Dataset, alpha: float, *, seed: int = 0) -> Clients[Dataset]:
    """Returns the same 27 clients, merged at random into 9 groups of 3.

    Args:
      data: with labels.
      alpha: as for :func:`nine_of_27`.
      seed: of the partition and of the groups.
    """
    parts = dirichlet(data, 27, alpha, seed=seed).indices
    groups = host_rng(seed, "groups").permutation(27).reshape(9, 3)
    merged = [np.sort(np.concatenate([parts[i] for i in group])) for group in groups]
    return Clients(data, tuple(merged))


def small_users(data: Dataset, below: int) -> Clients[Dataset]:
    """Returns one client with the examples of all users who have fewer than ``below`` texts.

    A federation of users with ``user_examples = below`` has none of these users.

    Args:
      data: texts with a ``client``.
      below: number of texts.
    """
    _, first = np.unique(data.meta["unit"], return_index=True)
    users, texts = np.unique(data.meta["client"][first], return_counts=True)
    small = np.isin(data.meta["client"], users[texts < below])
    return Clients(data, (np.flatnonzero(small).astype(np.int32),))
