"""Asynchronous servers: one file per method, each a wrapper of any algorithm (``Asynchronous``)."""

from fedjax_peft.asynchronous.fedasync import fedasync
from fedjax_peft.asynchronous.fedbuff import fedbuff
from fedjax_peft.asynchronous.semi_synchronous import semi_synchronous

__all__ = ["fedasync", "fedbuff", "semi_synchronous"]
