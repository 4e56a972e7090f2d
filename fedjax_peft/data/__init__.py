"""Federated data sets: the catalogue, columns, encoders, tokenisation, partition among clients.

``load_dataset`` is in :mod:`fedjax_peft.tasks.sources`, because it finds the task of the data. The
names are imported at first use, because the catalogue is read without JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_peft.data import partition
    from fedjax_peft.data.dataset import Clients, Dataset
    from fedjax_peft.data.text import tokenize

__all__ = ["Clients", "Dataset", "partition", "tokenize"]

_PUBLIC = {"Clients": "dataset", "Dataset": "dataset", "tokenize": "text"}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
