"""Differential privacy: one file per mechanism, each a wrapper of any algorithm (``Privacy``)."""

# Not in __all__, which lists the mechanisms that a config file can name.
from fedjax_peft.privacy.accounting import epsilon as epsilon
from fedjax_peft.privacy.accounting import gaussian_event as gaussian_event
from fedjax_peft.privacy.accounting import noise_multiplier as noise_multiplier
from fedjax_peft.privacy.adaptive import adaptive
from fedjax_peft.privacy.audit import canaries as canaries
from fedjax_peft.privacy.central import central
from fedjax_peft.privacy.correlated import correlated
from fedjax_peft.privacy.distributed import distributed
from fedjax_peft.privacy.example import example
from fedjax_peft.privacy.laplace import laplace
from fedjax_peft.privacy.local import local
from fedjax_peft.privacy.paper import paper_noise

__all__ = [
    "adaptive",
    "central",
    "correlated",
    "distributed",
    "example",
    "laplace",
    "local",
    "paper_noise",
]
