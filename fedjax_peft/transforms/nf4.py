"""4-bit NormalFloat, block by block (NF4; QLoRA, Dettmers et al. 2023, Section 3, Appendix E).

    C(x_i) = m · q_j,      j = argmin_j |x_i / m - q_j|,      m = max |x| over the block

The 16 values q are quantiles of a normal distribution; 0 is one of them. ``double`` quantisation
of the scales is not used.
Checked against a NumPy transcription and the values that the paper prints.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft.contracts import Key, PyTree, Transform
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part
from fedjax_peft.transforms.compressing import by_block, compressor, wire_with_scales

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The values of NF4 (QLoRA, Appendix E)."""


@part
def nf4(block: Count = 64, *, error_feedback: bool = False) -> Transform:
    """Rounds every entry to the nearest of the 16 values of NF4, block by block (QLoRA).

    On the wire: 4 bits for each entry, and a float32 scale for each block.

    Args:
      block: consecutive entries that share a scale; 64 in the paper.
      error_feedback: whether clients add what was lost to their next change.

    Raises:
      InputError: ``block`` is not a positive integer.
    """
    values = np.array(NF4, np.float32)
    middles = (values[1:] + values[:-1]) / 2

    def code(blocks: Array) -> Array:
        largest = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
        ratio = blocks / jnp.where(largest > 0, largest, 1.0)
        nearest = jnp.sum(ratio[..., None] > middles[None, None], axis=-1)
        return jnp.asarray(values)[nearest] * largest

    def encode(update: PyTree, memory: PyTree, key: Key) -> tuple[PyTree, PyTree]:
        return jax.tree.map(lambda x: by_block(code, x, block), update), memory

    def wire(template: PyTree, wires: PyTree) -> PyTree:
        return jax.tree.map(lambda x, w: wire_with_scales(x, w, 4, block), template, wires)

    return compressor("nf4", encode, wire, feedback=error_feedback)
