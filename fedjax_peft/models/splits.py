"""The leaves of a module that several devices share: tensor parallelism as data.

The form is that of Megatron (Shoeybi et al. 2019, section 3): the first of two matrices is split by
its outputs and the second by its inputs, so that one sum over the devices follows the second. The
projections to queries, keys and values come first in attention, the wider matrix first in the
feed-forward layer. A table of tokens is split by rows. LoRA's factors follow their kernels.
"""

from typing import Literal, TypeAlias

from fedjax_peft.contracts import Splits

Side: TypeAlias = Literal["outputs", "inputs", "rows"]
"""What the devices share of a layer: its outputs, its inputs, or the rows of its table."""

_KERNEL = r"kernel(?:\.codes)?"
_SCALED = r"kernel(?:\.codes|\.scale_codes)?"
"""A kernel, or the arrays of a quantised one that have its two axes. The codes of scales are in the
order of the outputs: a device that has some inputs of each would need all of them."""
_LEAVES: dict[Side, tuple[tuple[str, int], ...]] = {
    "outputs": ((_SCALED, 1), ("bias", 0), ("lora_b", 1), ("lora_magnitude", 0)),
    "inputs": ((_KERNEL, 0), ("lora_a", 0)),
    "rows": (("embedding", 0),),
}
"""(leaf, axis) for each side; kernels are ``[in, out]``. Other leaves are whole."""


def splits_of(*modules: tuple[str, Side]) -> Splits:
    """Returns the axes on which devices share the leaves of some modules.

    Args:
      *modules: (regular expression of the module's path, side). An adapter that wraps the module
        is found too.
    """
    return tuple(
        (rf"{module}\.(?:base\.)?{leaf}", axis)
        for module, side in modules
        for leaf, axis in _LEAVES[side]
    )
