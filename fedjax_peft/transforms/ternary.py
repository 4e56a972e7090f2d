"""Entries of three values (TernGrad, Wen et al. 2017, Equations 1 and 2).

    C(x_i) = m · sign(x_i) · b_i,      b_i ~ Bernoulli(|x_i| / m),      m = max |x| of the leaf

E[C(x)] = x. The paper's optional clipping of x at 2.5 standard deviations is not used: it is
biased.
Checked against a NumPy transcription, and the mean over many keys.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Key, PyTree, Transform
from fedjax_peft.contracts.part import part
from fedjax_peft.transforms.compressing import FLOAT, compressor, keys_of


@part
def ternary(*, error_feedback: bool = False) -> Transform:
    """Makes every entry 0, or plus or minus the largest entry of its leaf, at random (TernGrad).

    The result is unbiased. On the wire: a byte for every five entries (3^5 = 243 of its 256
    values), and a float32 scale for each leaf.

    Args:
      error_feedback: whether clients add what was lost to their next change.
    """

    def leaf(x: Array, key: Key) -> Array:
        largest = jnp.max(jnp.abs(x), initial=0.0)
        share = jnp.abs(x) / jnp.where(largest > 0, largest, 1.0)
        return jnp.where(jax.random.uniform(key, x.shape) < share, jnp.sign(x) * largest, 0.0)

    def encode(update: PyTree, memory: PyTree, key: Key) -> tuple[PyTree, PyTree]:
        return jax.tree.map(leaf, update, keys_of(key, update)), memory

    def wire(template: PyTree, wires: PyTree) -> PyTree:
        return jax.tree.map(
            lambda _, w: w._replace(bits=Fraction(8, 5), extra=w.extra + FLOAT), template, wires
        )

    return compressor("ternary", encode, wire, feedback=error_feedback)
