"""The key-value cache of generation, and what a decoder attends to with and without one.

A decoder asks :func:`view` for the positions of its tokens and for what they attend to. That is the
same call for plain rows, for rows that pack several texts, and for generation. In generation the
batch has a :class:`Cache`; every attention layer then exchanges its new keys and values for all of
them through a :class:`Store`, and :meth:`View.continued` collects what the layers stored::

    x = embed.tokens(ids) if continues(batch) else embed(ids)
    seen = view(batch, x.shape[1])
    states, cache = seen.continued(self.layers, x, seen.mask)
    return Encoded(tuple(states), ..., cache=cache)

A block is called with a store after its other arguments; in attention: ``k, v = store(k, v)``.

The capacity is static, so one compiled step serves all tokens. Slots are filled from the left: the
prompts of a batch are padded on the left, and all rows write the same slot at a step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Batch
from fedjax_peft.models.blocks import Blocks
from fedjax_peft.models.layers import prepend
from fedjax_peft.support.errors import InputError

Exchange: TypeAlias = Callable[[Array, Array], tuple[Array, Array]]
"""New keys and values of a layer -> those of all tokens so far."""


class Cache(NamedTuple):
    """The keys and values of all tokens so far; a plain pytree."""

    layers: tuple[tuple[Array, Array], ...]
    """For each layer, keys and values ``[batch, slots, heads, width]``, after the rotation
    where there is one. Empty before the first call, which makes them: no caller needs to know
    their shapes."""
    real: Array
    """bool ``[batch, slots]``: the slots with a token that is not padding."""
    used: Array
    """The number of slots filled so far, an int32 scalar."""


def empty(batch: int, slots: int) -> Cache:
    """Returns the cache before the first call.

    Args:
      slots: the capacity: tokens of a prompt, its padding, and the tokens to be generated. The
        learned tokens of prompt tuning are not counted; the first call adds slots for them.
    """
    return Cache((), jnp.zeros((batch, slots), bool), jnp.int32(0))


def continues(batch: Batch) -> bool:
    """Returns whether a batch goes on with a filled cache: a prompt then came at the first call."""
    cache = batch.get("cache")
    return cache is not None and bool(Cache(*cache).layers)


def keep(key: Array, value: Array) -> tuple[Array, Array]:
    """Returns keys and values as they are: the store of a layer without a cache."""
    return key, value


class Store:
    """The part of a cache that belongs to one layer; it lives for one call of the model."""

    def __init__(self, layer: tuple[Array, Array] | None, slots: int, used: Array):
        self.layer = layer
        self.slots = slots
        self.used = used

    def __call__(self, key: Array, value: Array) -> tuple[Array, Array]:
        """Returns the keys and values of all slots, ``[batch, slots, heads, width]``.

        Args:
          key: of the new tokens, ``[batch, length, heads, width]``; ``value`` has the same form.
        """
        stored = []
        for i, new in enumerate((key, value)):
            if self.layer is None:
                shape = (new.shape[0], self.slots, *new.shape[2:])
                before = jnp.zeros(shape, new.dtype)
            else:
                before = self.layer[i]
            stored.append(jax.lax.dynamic_update_slice_in_dim(before, new, self.used, axis=1))
        self.layer = (stored[0], stored[1])
        return self.layer


class View(NamedTuple):
    """The positions of the tokens of a call, and what they attend to."""

    positions: Array
    """int32 ``[batch or 1, length]``, a prompt's included."""
    mask: Array
    """bool ``[batch, 1, length, keys]``: which tokens (last axis) a token attends to."""
    distance: Array
    """int32 ``[batch or 1, length, keys]``: how far a key lies before the token, for
    :func:`window`: in slots, or in real tokens with a cache."""
    before: Cache | None = None
    """The cache with the slots of this call marked, but without its keys and values."""

    @property
    def slots(self) -> int:
        """The number of keys: of the tokens of this call, or the capacity of the cache."""
        return self.mask.shape[-1]

    def continued(self, blocks: Blocks, x: Array, *arguments: Any) -> tuple[list[Array], Cache]:
        """Returns the hidden states before the first block and after each, and the new cache.

        Args:
          x: ``[batch, length, width]``, the input of the first block.
        """
        assert self.before is not None
        old, used = self.before.layers, self.before.used - self.mask.shape[2]
        states, layers = [x], []
        for i, block in enumerate(blocks.each()):
            store = Store(old[i] if old else None, self.slots, used)
            states.append(block(states[-1], *arguments, store))
            layers.append(store.layer)
        kept = tuple(layer for layer in layers if layer is not None)
        return states, self.before._replace(layers=kept)


def view(batch: Batch, length: int) -> View:
    """Returns positions and mask of a decoder's tokens.

    Plain rows: positions count all tokens, padding and a prompt included. Packed rows
    (``segment_ids``): a token attends to its own segment, and ``position_ids`` start anew in each.
    With a ``cache``: positions count real tokens only, as in Hugging Face's ``generate``, so the
    padding on the left takes none.

    Args:
      batch: columns ``input_ids`` and ``attention_mask`` ``[batch, length]``; optionally
        ``position_ids``, ``segment_ids`` (int32, 0 for padding), and ``cache``.
      length: the tokens after embedding, which may be more: those of a prompt come first.
    """
    prompt = length - batch["input_ids"].shape[1]
    real = prepend(batch["attention_mask"].astype(bool), prompt)
    given = batch.get("position_ids")
    segments = batch.get("segment_ids")
    old = batch.get("cache")
    if segments is not None and (prompt or old is not None):
        raise InputError(
            "Rows of several texts (packed, or of preferences) cannot have "
            + ("a cache." if old is not None else "learned tokens before them: use another method.")
        )
    if old is not None:
        return _cached(Cache(*old), real, given, prompt)
    slots = jnp.arange(length, dtype=jnp.int32)
    distance = (slots[:, None] - slots[None, :])[None]
    mask = real[:, None, None, :] & (distance >= 0)[:, None]
    if segments is not None:
        mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])
    positions = slots[None] if given is None else _after(given, prompt)
    return View(positions, mask, distance)


def _cached(old: Cache, real: Array, given: Array | None, prompt: int) -> View:
    """Returns the view of new tokens, ``real`` ``[batch, length]``, after those of a cache."""
    length = real.shape[1]
    before = old.real if old.layers else prepend(old.real, prompt, False)
    slots = before.shape[1]
    now = jax.lax.dynamic_update_slice_in_dim(before, real, old.used, axis=1)
    own = old.used + jnp.arange(length, dtype=jnp.int32)
    causal = own[:, None] >= jnp.arange(slots, dtype=jnp.int32)[None, :]
    mask = now[:, None, None, :] & causal[None, None]
    counted = jnp.sum(before, axis=1, dtype=jnp.int32)[:, None]
    places = counted + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    distance = places[:, :, None] - (jnp.cumsum(now, axis=1, dtype=jnp.int32) - 1)[:, None, :]
    positions = jnp.where(real, places, 0) if given is None else _after(given, prompt)
    return View(positions, mask, distance, Cache(old.layers, now, old.used + length))


def _after(positions: Array, prompt: int) -> Array:
    """Returns given positions ``[batch, length]`` after those of a prompt."""
    if not prompt:
        return positions
    ahead = jnp.broadcast_to(jnp.arange(prompt, dtype=positions.dtype), (len(positions), prompt))
    return jnp.concatenate([ahead, positions + prompt], axis=1)


def window(seen: View, size: int) -> Array:
    """Returns the mask of attention to the last ``size`` tokens, the token itself included.

    Without a cache, slots are counted, as Hugging Face does. With one, real tokens are: they lie
    side by side, but for the padding between a prompt and its text, which takes no room here.
    """
    return seen.mask & (seen.distance < size)[:, None]
