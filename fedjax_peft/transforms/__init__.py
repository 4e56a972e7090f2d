"""Upload transforms: one file per transform, each a tuple of pure functions (see ``Transform``)."""

# Not in __all__, which lists the names that a config file can give.
from fedjax_peft.transforms.chain import chain as chain
from fedjax_peft.transforms.clip import clip_norm
from fedjax_peft.transforms.compressing import error_feedback as error_feedback
from fedjax_peft.transforms.downlink import downlink as downlink
from fedjax_peft.transforms.flasc import flasc
from fedjax_peft.transforms.int8 import int8
from fedjax_peft.transforms.nf4 import nf4
from fedjax_peft.transforms.power_sgd import power_sgd
from fedjax_peft.transforms.quantize import quantize
from fedjax_peft.transforms.random_k import random_k
from fedjax_peft.transforms.sign import sign
from fedjax_peft.transforms.ternary import ternary
from fedjax_peft.transforms.top_directions import top_directions
from fedjax_peft.transforms.top_k import top_k

__all__ = [
    "clip_norm",
    "flasc",
    "int8",
    "nf4",
    "power_sgd",
    "quantize",
    "random_k",
    "sign",
    "ternary",
    "top_directions",
    "top_k",
]
