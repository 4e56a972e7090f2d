"""Blocks of entries that share a scale."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Wire
from fedjax_peft.transforms.compressing import FLOAT


def by_block(code: Callable[[Array], Array], x: Array, block: int | None) -> Array:
    """Returns a leaf whose blocks of consecutive entries were coded one by one.

    Args:
      code: float32 ``[blocks, block]`` -> the same shape; the last block is filled with zeros.
      block: entries in a block; None: the whole leaf is one block.
    """
    size = x.size if block is None else block
    flat = x.astype(jnp.float32).reshape(-1)
    flat = jnp.pad(flat, (0, -x.size % max(size, 1)))
    return code(flat.reshape(-1, max(size, 1))).reshape(-1)[: x.size].reshape(x.shape)


def wire_with_scales(x: Array, wire: Wire, bits: int, block: int | None) -> Wire:
    """Returns the size of a leaf with this number of bits an entry and a scale for each block."""
    scales = 1 if block is None else -(-x.size // block)
    return wire._replace(bits=bits, extra=wire.extra + FLOAT * scales)
