"""The methods that a file of Hugging Face PEFT holds layer by layer, each with its own tensors."""

from collections.abc import Callable

from fedjax_peft.peft.base import Layout, Method
from fedjax_peft.peft.hira import LAYOUT as HIRA
from fedjax_peft.peft.hira import hira
from fedjax_peft.peft.miss import LAYOUT as MISS
from fedjax_peft.peft.miss import miss
from fedjax_peft.peft.oft import LAYOUT as OFT
from fedjax_peft.peft.oft import oft
from fedjax_peft.peft.shira import LAYOUT as SHIRA
from fedjax_peft.peft.shira import shira
from fedjax_peft.peft.vera import LAYOUT as VERA
from fedjax_peft.peft.vera import vera

LAYOUTS: dict[str, tuple[Layout, Callable[..., Method]]] = {
    "hira": (HIRA, hira),
    "miss": (MISS, miss),
    "oft": (OFT, oft),
    "shira": (SHIRA, shira),
    "vera": (VERA, vera),
}
"""Name of a method -> its layout, and the function that makes it."""
