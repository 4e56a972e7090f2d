"""Block-wise 8-bit integers with the largest absolute value as scale.

    C(x_i) = m · round(127 · x_i / m) / 127,      m = max |x| over the block

Block-wise quantisation (Dettmers et al. 2022, 8-bit optimizers), here with evenly spaced values
instead of the paper's dynamic ones.
Checked against a NumPy transcription.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Key, PyTree, Transform
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part
from fedjax_peft.transforms.compressing import by_block, compressor, wire_with_scales


@part
def int8(block: Count = 64, *, error_feedback: bool = False) -> Transform:
    """Rounds every entry to the nearest of 255 evenly spaced values, block by block.

    On the wire: 8 bits for each entry, and a float32 scale for each block.

    Args:
      block: consecutive entries that share a scale.
      error_feedback: whether clients add what was lost to their next change.

    Raises:
      InputError: ``block`` is not a positive integer.
    """

    def code(blocks: Array) -> Array:
        largest = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
        ratio = blocks / jnp.where(largest > 0, largest, 1.0)
        return jnp.round(127 * ratio) / 127 * largest

    def encode(update: PyTree, memory: PyTree, key: Key) -> tuple[PyTree, PyTree]:
        return jax.tree.map(lambda x: by_block(code, x, block), update), memory

    def wire(template: PyTree, wires: PyTree) -> PyTree:
        return jax.tree.map(lambda x, w: wire_with_scales(x, w, 8, block), template, wires)

    return compressor("int8", encode, wire, feedback=error_feedback)
