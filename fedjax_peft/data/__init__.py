"""Federated data sets: columns, encoders, tokenisation and partition among clients.

``load_dataset`` and the catalogue are in :mod:`fedjax_peft.data.sources` and
:mod:`fedjax_peft.data.catalog`: they import the tasks, which import the encoders from here.
"""

from fedjax_peft.data import partition
from fedjax_peft.data.combine import combine
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.data.text import tokenize

__all__ = ["Clients", "Dataset", "combine", "partition", "tokenize"]
