"""Weights that are wider than the dtype in which a model computes.

A number of bfloat16 has 8 significant bits. A change of a bfloat16 weight by less than half a unit
in the last place, 0.2 to 0.4 % of the weight, is rounded away. :func:`split` writes a float32
weight as a sum of two narrow ones, so that two products in the narrow dtype use nearly all of its
bits: ``x W ≈ x W_high + x W_low``.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def is_wider(x: Array, dtype: Any) -> bool:
    """Returns whether an array has more bits than the floating-point ``dtype``."""
    return jnp.finfo(x.dtype).bits > jnp.finfo(dtype).bits


def split(x: Array, dtype: Any) -> tuple[Array, Array]:
    """Returns ``x`` as a sum of two arrays of ``dtype``: ``x`` rounded, and the rounded remainder.

    Args:
      x: float32 ``[...]``.
      dtype: narrower than float32. In bfloat16 the sum differs from ``x`` by at most 2⁻¹⁸ of ``x``,
        and by at most 2⁻⁹ of the remainder. If ``x`` is a bfloat16 weight plus a small change, this
        is 0.2 % of the change.
    """
    # Not by astype: XLA may remove a conversion and its inverse; the remainder would be zero.
    high = _rounded(x, dtype)
    return high.astype(dtype), (x - high).astype(dtype)


def effective(x: Array, dtype: Any) -> Array:
    """Returns the sum of ``split(x, dtype)`` in the dtype of ``x``.

    An array that is not wider than ``dtype`` is returned unchanged.
    """
    if not is_wider(x, dtype):
        return x
    high = _rounded(x, dtype)
    return high + _rounded(x - high, dtype)


def _rounded(x: Array, dtype: Any) -> Array:
    """Returns the nearest numbers of ``dtype``, in the dtype of ``x``."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant)
