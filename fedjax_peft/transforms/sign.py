"""Signs, scaled by the mean absolute value (EF-SignSGD, Karimireddy et al. 2019, Algorithm 1).

    C(x) = (‖x‖₁ / d) · sign(x)        for each leaf, d entries

Decision: the sign of 0 is +1, because a bit has two values.
Checked against a NumPy transcription.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Key, PyTree, Transform
from fedjax_peft.contracts.part import part
from fedjax_peft.transforms.compressing import compressor, wire_with_scales


@part
def sign(*, error_feedback: bool = True) -> Transform:
    """Sends the signs of the entries, and the mean absolute value of each leaf (EF-SignSGD).

    On the wire: 1 bit for each entry, and a float32 scale for each leaf.

    Args:
      error_feedback: whether clients add what was lost to their next change. Without it, the error
        does not average out.
    """

    def leaf(x: Array) -> Array:
        scale = jnp.mean(jnp.abs(x)) if x.size else 0.0
        return jnp.where(x >= 0, scale, -scale)

    def encode(update: PyTree, memory: PyTree, key: Key) -> tuple[PyTree, PyTree]:
        return jax.tree.map(leaf, update), memory

    def wire(template: PyTree, wires: PyTree) -> PyTree:
        return jax.tree.map(lambda x, w: wire_with_scales(x, w, 1, None), template, wires)

    return compressor("sign", encode, wire, feedback=error_feedback)
