"""Prefix tuning (Li and Liang 2021): learned keys and values in every attention layer."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key
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

    def learned(self) -> tuple[Array, Array]:
        """Returns the prefix's keys and values, ``[tokens, heads * width]``."""
        return self.prefix_key[...], self.prefix_value[...]

    def __call__(self, key: Array, value: Array, mask: Mask) -> tuple[Array, Array, Mask]:
        """Returns keys, values and mask with the prefix in front; every query attends to it.

        Args:
          key: ``[batch, length, heads, width]``, and ``value`` alike.
          mask: bool ``[batch or 1, heads or 1, queries or 1, length]``, or None: everything.
        """
        first_key, first_value = self.learned()
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


class Encoder(nnx.Module):
    """``tanh(E W + b)``, ``[tokens, hidden]``: the common input of all layers' projections."""

    def __init__(self, tokens: int, width: int, hidden: int, key: Key):
        self.embedding = AdapterParam(jax.random.normal(stream(key, "embedding"), (tokens, width)))
        self.kernel, self.bias = _dense(width, hidden, key)

    def __call__(self) -> Array:
        return jnp.tanh(self.embedding[...] @ self.kernel[...] + self.bias[...][None])


class ProjectedPrefix(Prefix):
    """A prefix that a small network computes; all layers share one encoder."""

    def __init__(self, base: PrefixSlot, encoder: Encoder, key: Key):
        self.base = base
        self.encoder = encoder
        self.kernel, self.bias = _dense(encoder.bias.shape[0], 2 * base.width, key)

    def learned(self) -> tuple[Array, Array]:
        """Returns the prefix's keys and values, ``[tokens, heads * width]``."""
        both = self.encoder() @ self.kernel[...] + self.bias[...][None]
        key, value = jnp.split(both, 2, axis=-1)
        return key, value


def _dense(n_in: int, n_out: int, key: Key) -> tuple[AdapterParam, AdapterParam]:
    """Returns a kernel and a bias, uniform in ±1/sqrt(in) as in torch's Linear."""

    def uniform(name: str, *shape: int) -> AdapterParam:
        bound = n_in**-0.5
        values = jax.random.uniform(stream(key, name), shape, minval=-bound, maxval=bound)
        return AdapterParam(values)

    return uniform("kernel", n_in, n_out), uniform("bias", n_out)


def prefix_tuning(tokens: int = 8, *, projection: int | None = None) -> Method:
    """Learned keys and values in every attention layer (prefix tuning, Li and Liang 2021).

    Initial values are N(0, 1), as in Hugging Face PEFT. The text keeps its positions: the first
    token stays at position 0, and the longest text is as long as without a prefix. (PEFT passes the
    prefix as a cache of past tokens, so there the text starts at position ``tokens``.)

    Args:
      tokens: the length of the prefix.
      projection: width of the hidden layer of a network that computes all prefixes, as with PEFT's
        ``prefix_projection``; by default the prefixes themselves are trained. The network makes
        centralised training more stable, but it has many times as many parameters to send.

    Raises:
      InputError: an impossible option here; a model whose attention has no place for a prefix
        (DeBERTa's has none), or one already adapted, when it is attached.
    """
    for name, value in {"tokens": tokens, "projection": projection}.items():
        if value is not None and value < 1:
            raise InputError(f"{name} = {value} must be at least 1.")

    def attach(module: nnx.Module, defaults: Defaults, key: Key, head: Sequence[str]) -> nnx.Module:
        slots = _slots(module)
        if projection is not None:
            widths = {slot.width for slot in slots.values()}
            if len(widths) > 1:
                raise InputError(
                    f"A projected prefix needs attention layers of one width, not of {widths}."
                )
            encoder = Encoder(tokens, widths.pop(), projection, stream(key, "encoder"))
        for path, slot in slots.items():
            own = stream(key, path)
            if projection is not None:
                new: Prefix = ProjectedPrefix(slot, encoder, own)
            else:
                rows = jax.random.normal(own, (2, tokens, slot.width))
                new = Prefix(slot, rows[0], rows[1])
            replace_module(module, path, new)
        return module

    return Method("prefix_tuning", {"tokens": tokens, "projection": projection}, attach)


def _slots(module: nnx.Module) -> dict[str, PrefixSlot]:
    found = places(module, PrefixSlot, Prefix)
    if not found:
        raise InputError(
            "Prefix tuning needs attention layers with a place for a prefix (layers.PrefixSlot),"
            " and this model has none."
        )
    return found
