"""Federated algorithms: one file per paper, each a tuple of pure functions."""

from fedjax_peft.algorithms.afl import afl
from fedjax_peft.algorithms.apfl import apfl
from fedjax_peft.algorithms.centralised import centralised
from fedjax_peft.algorithms.ditto import ditto
from fedjax_peft.algorithms.fedalt import fedalt
from fedjax_peft.algorithms.fedask import fedask
from fedjax_peft.algorithms.fedavg import fedavg
from fedjax_peft.algorithms.fedbabu import fedbabu
from fedjax_peft.algorithms.feddpa import feddpa_f, feddpa_t
from fedjax_peft.algorithms.feddyn import feddyn
from fedjax_peft.algorithms.fedex import fedex
from fedjax_peft.algorithms.fedkseed import fedkseed
from fedjax_peft.algorithms.fedlease import fedlease
from fedjax_peft.algorithms.fedmatch import fedmatch
from fedjax_peft.algorithms.fedmcp import fedmcp
from fedjax_peft.algorithms.fedmezo import fedmezo
from fedjax_peft.algorithms.fedmomentum import fedmomentum
from fedjax_peft.algorithms.fednova import fednova
from fedjax_peft.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedyogi

# Not in __all__: its server optimizer is an object, which a config file cannot name.
from fedjax_peft.algorithms.fedopt import fedopt as fedopt
from fedjax_peft.algorithms.fedper import fedper
from fedjax_peft.algorithms.fedplora import fedplora
from fedjax_peft.algorithms.fedprox import fedprox
from fedjax_peft.algorithms.fedrep import fedrep
from fedjax_peft.algorithms.fedrot import fedrot
from fedjax_peft.algorithms.fedsa import fedsa
from fedjax_peft.algorithms.fedsb import fedsb
from fedjax_peft.algorithms.fedsvd import fedsvd
from fedjax_peft.algorithms.ffa import ffa
from fedjax_peft.algorithms.flora import flora
from fedjax_peft.algorithms.fra_ffa import fra_ffa
from fedjax_peft.algorithms.fslora import fslora
from fedjax_peft.algorithms.gossip import gossip
from fedjax_peft.algorithms.hetlora import hetlora
from fedjax_peft.algorithms.hierfavg import hierfavg
from fedjax_peft.algorithms.hilora import hilora
from fedjax_peft.algorithms.ifca import ifca
from fedjax_peft.algorithms.local import local
from fedjax_peft.algorithms.lora_a2 import lora_a2
from fedjax_peft.algorithms.moon import moon
from fedjax_peft.algorithms.pfedlora import pfedlora
from fedjax_peft.algorithms.pfedme import pfedme
from fedjax_peft.algorithms.q_fedavg import q_fedavg
from fedjax_peft.algorithms.ravan import ravan
from fedjax_peft.algorithms.rolora import rolora
from fedjax_peft.algorithms.scaffold import scaffold
from fedjax_peft.algorithms.slora import slora

__all__ = [
    "afl",
    "apfl",
    "centralised",
    "ditto",
    "fedadagrad",
    "fedadam",
    "fedalt",
    "fedask",
    "fedavg",
    "fedavgm",
    "fedbabu",
    "feddpa_f",
    "feddpa_t",
    "feddyn",
    "fedex",
    "fedkseed",
    "fedlease",
    "fedmatch",
    "fedmcp",
    "fedmezo",
    "fedmomentum",
    "fednova",
    "fedper",
    "fedplora",
    "fedprox",
    "fedrep",
    "fedrot",
    "fedsa",
    "fedsb",
    "fedsvd",
    "fedyogi",
    "ffa",
    "flora",
    "fra_ffa",
    "fslora",
    "gossip",
    "hetlora",
    "hierfavg",
    "hilora",
    "ifca",
    "local",
    "lora_a2",
    "moon",
    "pfedlora",
    "pfedme",
    "q_fedavg",
    "ravan",
    "rolora",
    "scaffold",
    "slora",
]
