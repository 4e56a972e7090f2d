"""Federated data sets: sources, tokenisation and partition among clients."""

from fedjax_peft.data import partition
from fedjax_peft.data.catalog import DATASETS
from fedjax_peft.data.combine import combine
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.data.sources import load_dataset
from fedjax_peft.data.text import tokenize

__all__ = ["DATASETS", "Clients", "Dataset", "combine", "load_dataset", "partition", "tokenize"]
