"""Partitions of ``flwr-datasets``, the package of the Flower project."""

from typing import Any, Protocol

import numpy as np

from fedjax_peft.contracts.part import data_part
from fedjax_peft.data.dataset import Clients, Dataset, DataT
from fedjax_peft.data.partition.dealing import Pool
from fedjax_peft.support.errors import InputError

_ROW = "fedjax_peft_row"
"""The column by which the rows of a partition are found again."""


class Partitioner(Protocol):
    """What is used of a partitioner of ``flwr-datasets``."""

    dataset: Any
    """A ``datasets.Dataset``; it can be set once."""

    @property
    def num_partitions(self) -> int:
        """The number of clients."""

    def load_partition(self, partition_id: int) -> Any:
        """Returns the rows of one client, from 0, as a ``datasets.Dataset``."""


@data_part
def from_flwr(data: DataT, partitioner: Partitioner) -> Clients[DataT]:
    """Returns the clients that a partitioner of ``flwr-datasets`` makes of a data set.

    Client i has the rows of its partition i; a row that no partition has belongs to nobody. The
    partitioner's own seed decides, and its columns are ``label`` (the number of the class) and the
    keys of ``data.meta``:

    ``fp.partition.from_flwr(data, DirichletPartitioner(10, partition_by="label", alpha=0.5))``

    ``flwr-datasets`` is not installed with this library.

    Args:
      data: a data set, or integer labels ``[examples]``.
      partitioner: a new one, which has no data yet.

    Raises:
      InputError: the partitioner has data, divides columns instead of rows, or gives a row to two
        clients.
    """
    import datasets

    pool, kind = Pool.of(data), type(partitioner).__name__
    rows = {name: values[pool.first] for name, values in _columns(data).items()}
    try:
        partitioner.dataset = datasets.Dataset.from_dict({**rows, _ROW: np.arange(len(pool))})
    except ValueError as error:
        raise InputError(f"The {kind} has data already: make a new one for each call.") from error
    clients = int(partitioner.num_partitions)
    owner = np.full(len(pool), -1)
    for client in range(clients):
        part = partitioner.load_partition(client)
        if _ROW not in part.column_names:
            raise InputError(f"The {kind} divides columns among clients, not examples.")
        own = np.asarray(part[_ROW][:], np.int64)
        if len(np.unique(own)) < len(own) or (owner[own] >= 0).any():
            raise InputError(f"The {kind} gives an example twice, then to client {client}.")
        owner[own] = client
    return pool.clients(owner, clients)


def _columns(data: Dataset | np.ndarray) -> dict[str, np.ndarray]:
    """Returns the columns to partition by: one value for each example."""
    if not isinstance(data, Dataset):
        return {"label": np.asarray(data)}
    keys = {name: np.asarray(values) for name, values in data.meta.items()}
    if "labels" in data.columns:
        keys.setdefault("label", data.columns["labels"])
    return {name: values for name, values in keys.items() if values.ndim == 1}
