"""Federated algorithms: one file per paper, each a tuple of pure functions."""

from fedjax_peft.algorithms.fedavg import fedavg, local

__all__ = ["fedavg", "local"]
