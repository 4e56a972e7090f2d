"""Prefix tuning (Li and Liang 2021): learned keys and values in every attention layer."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterParam
from fedjax_peft.models.layers import Mask, PrefixSlot
from fedjax_peft.numerics.random import stream
from fedjax_peft.peft.base import Adapted, Defaults, Method, replace_module
from fedjax_peft.peft.prompt import places
from fedjax_peft.support.errors import InputError


class Prefix(Adapted):
    """Puts learned keys and values, ``[tokens, heads * width]`` each, before those of the text."""

    def __init__(self, base: PrefixSlot, key: Array, value: Array):
        self.base = base
        self.prefix_key = AdapterParam(key)
        self.prefix_value = AdapterParam(value)

    def __call__(self, key: Array, value: Array, mask: Mask) -> tuple[Array, Array, Mask]:
        """Returns keys, values and mask with the prefix in front; every query attends to it.

        Args:
          key: ``[batch, length, heads, width]``, and ``value`` alike.
          mask: bool ``[batch or 1, heads or 1, queries or 1, length]``, or None: everything.
        """
        first_key, first_value = self.prefix_key[...], self.prefix_value[...]
        key, value = _before(first_key, key), _before(first_value, value)
        if mask is None:
            return key, value, mask
        ahead = jnp.ones((*mask.shape[:-1], first_key.shape[0]), bool)
        return key, value, jnp.concatenate([ahead, mask], axis=-1)


def _before(rows: Array, x: Array) -> Array:
    """Returns ``x`` ``[batch, length, heads, width]`` with ``rows`` before it in every example.

    Args:
      rows: ``[tokens, heads * width]``.
    """
    batch, _, heads, width = x.shape
    shape = (batch, rows.shape[0], heads, width)
    first = jnp.broadcast_to(rows.astype(x.dtype).reshape(1, *shape[1:]), shape)
    return jnp.concatenate([first, x], axis=1)


@part
def prefix_tuning(tokens: Count = 8) -> Method:
    """Learned keys and values in every attention layer (prefix tuning, Li and Liang 2021).

    Initial values are N(0, 1), as in Hugging Face PEFT. The text keeps its positions: the first
    token stays at position 0, and the longest text is as long as without a prefix. (PEFT passes the
    prefix as a cache of past tokens, so there the text starts at position ``tokens``.)

    Args:
      tokens: the length of the prefix.

    Raises:
      InputError: an impossible option here; a model whose attention has no place for a prefix
        (DeBERTa's has none), or one already adapted, when it is attached.
    """

    def attach(module: nnx.Module, defaults: Defaults, key: Key, head: Sequence[str]) -> nnx.Module:
        slots = places(module, PrefixSlot, Prefix)
        if not slots:
            raise InputError(
                "Prefix tuning needs attention layers with a place for a prefix"
                " (layers.PrefixSlot), and this model has none."
            )
        for path, slot in slots.items():
            rows = jax.random.normal(stream(key, path), (2, tokens, slot.width))
            replace_module(module, path, Prefix(slot, rows[0], rows[1]))
        return module

    # `projection` is in the descriptions of recorded models, which are compared with this one.
    return Method("prefix_tuning", {"tokens": tokens, "projection": None}, attach)
