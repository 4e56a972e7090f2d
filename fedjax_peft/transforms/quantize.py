"""Uniform quantisation with stochastic rounding (QSGD, Alistarh et al. 2017, Section 3.1).

    C(x_i) = m · sign(x_i) · ξ_i / s,      s = 2^(b-1) - 1 levels beside 0
    ξ_i    = ⌊u_i⌋ + Bernoulli(u_i - ⌊u_i⌋),      u_i = s · |x_i| / m

m is a scale for each leaf or block. With stochastic rounding, E[C(x)] = x. An entry is an integer
from -s to s, which takes b bits; the scale is a float32.

Decisions: m is the largest entry, so that no level is unused; ``norm="l2"`` is the paper's
Euclidean norm. Entries have a fixed number of bits; the paper's Elias code, whose length depends
on the data, is not used.
Checked against a NumPy transcription, and the mean over many keys.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from annotated_types import Ge, Le
from jax import Array

from fedjax_peft.contracts import Key, PyTree, Transform
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part
from fedjax_peft.transforms.compressing import by_block, compressor, keys_of, wire_with_scales


@part
def quantize(
    bits: Annotated[int, Ge(2), Le(16)] = 8,
    *,
    stochastic: bool = True,
    norm: Literal["max", "l2"] = "max",
    block: Count | None = None,
    error_feedback: bool = False,
) -> Transform:
    """Rounds every entry to one of ``2^bits - 1`` evenly spaced values (QSGD).

    On the wire: ``bits`` for each entry, and a float32 scale for each leaf or block.

    Args:
      bits: bits for each entry.
      stochastic: round up or down at random, so that the result is unbiased; False: to the nearest.
      norm: what the largest value is: the largest entry (``max``) or the Euclidean norm (``l2``).
      block: consecutive entries that share a scale; None: all entries of a leaf.
      error_feedback: whether clients add what was lost to their next change.
    """
    levels = 2 ** (bits - 1) - 1

    def leaf(x: Array, key: Key) -> Array:
        def code(blocks: Array) -> Array:
            largest = jnp.max(jnp.abs(blocks), axis=1, keepdims=True, initial=0.0)
            ratio = blocks / jnp.where(largest > 0, largest, 1.0)
            length = jnp.ones(())
            if norm == "l2":
                length = jnp.sqrt(jnp.sum(ratio**2, axis=1, keepdims=True))
                ratio = ratio / jnp.where(length > 0, length, 1.0)
            steps = levels * jnp.abs(ratio)
            above = jax.random.uniform(key, steps.shape) if stochastic else jnp.full((), 0.5)
            steps = jnp.minimum(jnp.floor(steps + above), levels)
            return jnp.sign(blocks) * (steps / levels) * length * largest

        return by_block(code, x, block)

    def encode(update: PyTree, memory: PyTree, key: Key) -> tuple[PyTree, PyTree]:
        return jax.tree.map(leaf, update, keys_of(key, update)), memory

    def wire(template: PyTree, wires: PyTree) -> PyTree:
        return jax.tree.map(lambda x, w: wire_with_scales(x, w, bits, block), template, wires)

    return compressor("quantize", encode, wire, feedback=error_feedback)
