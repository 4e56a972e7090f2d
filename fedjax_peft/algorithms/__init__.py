"""Federated algorithms: one file per paper, each a tuple of pure functions."""

from fedjax_peft.algorithms.apfl import apfl
from fedjax_peft.algorithms.centralised import centralised
from fedjax_peft.algorithms.ditto import ditto
from fedjax_peft.algorithms.fedavg import fedavg
from fedjax_peft.algorithms.fedbabu import fedbabu
from fedjax_peft.algorithms.feddyn import feddyn
from fedjax_peft.algorithms.fedex import fedex
from fedjax_peft.algorithms.fedmatch import fedmatch
from fedjax_peft.algorithms.fedmcp import fedmcp
from fedjax_peft.algorithms.fednova import fednova
from fedjax_peft.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedyogi

# Not in __all__: its server optimizer is an object, which a config file cannot name.
from fedjax_peft.algorithms.fedopt import fedopt as fedopt
from fedjax_peft.algorithms.fedper import fedper
from fedjax_peft.algorithms.fedprox import fedprox
from fedjax_peft.algorithms.fedrep import fedrep
from fedjax_peft.algorithms.fedsa import fedsa
from fedjax_peft.algorithms.ffa import ffa
from fedjax_peft.algorithms.flora import flora
from fedjax_peft.algorithms.fra_ffa import fra_ffa
from fedjax_peft.algorithms.hetlora import hetlora
from fedjax_peft.algorithms.local import local
from fedjax_peft.algorithms.moon import moon
from fedjax_peft.algorithms.pfedme import pfedme
from fedjax_peft.algorithms.rolora import rolora
from fedjax_peft.algorithms.scaffold import scaffold

__all__ = [
    "apfl",
    "centralised",
    "ditto",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedbabu",
    "feddyn",
    "fedex",
    "fedmatch",
    "fedmcp",
    "fednova",
    "fedper",
    "fedprox",
    "fedrep",
    "fedsa",
    "fedyogi",
    "ffa",
    "flora",
    "fra_ffa",
    "hetlora",
    "local",
    "moon",
    "pfedme",
    "rolora",
    "scaffold",
]
