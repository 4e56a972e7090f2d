"""Multi-head attention, in one of three forms of the same function; the softmax is in float32.

* ``auto``: ``cudnn`` where it can serve, else ``whole``.

* ``whole``: the scores of all examples are one array ``[batch, heads, length, length]``.
* ``blocks``: the scores of a few examples at a time, in a loop, and computed a second time for the
  gradient (as Dao et al. 2022, arXiv:2205.14135, by examples instead of tiles). No array of all
  scores exists. On a CPU it takes about as long as ``whole``.
* ``cudnn``: the fused kernel of cuDNN through ``jax.nn.dot_product_attention``, where it can serve.
  This library's tests, which have no GPU, compile it and do not run it. It is not differentiable
  twice. On an H100 its gradients for long texts differed in the last bits from run to run. Sessions
  now ask the compiler for operations that repeat (:mod:`fedjax_peft.engine.program`), which was not
  run on a GPU yet; your own ``jax.jit`` does not ask.

:func:`choose` decides, from the platform that the program is compiled for
(:class:`fedjax_peft.contracts.Platform`), not from the devices of this process. Every form can be
vmapped and differentiated.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.custom_batching import custom_vmap

from fedjax_peft.contracts import Platform
from fedjax_peft.models.layers import Dropout, Mask, PrefixSlot, linear

AttentionForm: TypeAlias = Literal["auto", "whole", "blocks", "cudnn"]
"""How attention is computed, see :mod:`fedjax_peft.models.attention`."""
FORMS: tuple[str, ...] = get_args(AttentionForm)

_AT_ONCE = 1 << 20
"""Scores of a block: 4 MB in float32, which fit into a processor's cache with their gradient. For
fewer scores in all, a loop would save little memory."""
_FEWEST = 2
"""Examples of a block at least: XLA compiles the products of a single example to slower ones."""
_WIDEST = 128
"""The widest head that cuDNN's kernel serves on all GPUs."""
_OLDEST = 8.0
"""The least compute capability of a GPU that has the kernel: Ampere's."""


class Attending(nnx.Module):
    """A module that calls :func:`attention`; the base class of all of them."""

    form: AttentionForm = "auto"
    """Set by :func:`fedjax_peft.models.blocks.set_options`."""
    platform: Platform = Platform()
    """What the program is compiled for; set by the forward pass (:mod:`fedjax_peft.models.base`).
    """


class EncoderAttention(Attending):
    """Attention of an encoder; subclasses give the projections their family's names."""

    names = ("query", "key", "value")
    """Of the projections to queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float, dtype: Any, *, bias: bool = True):
        self.heads = heads
        for name in self.names:
            setattr(self, name, linear(width, width, dtype, bias=bias))
        self.prefix = PrefixSlot(width)
        self.dropout = Dropout(dropout)

    def attend(self, x: Array, mask: Mask, queries: int | None) -> Array:
        """Returns the heads' outputs side by side, ``[batch, queries, width]``.

        Args:
          x: ``[batch, length, width]``.
          mask: bool, broadcastable to ``[batch, heads, queries, length]``; None: all is seen.
          queries: how many tokens to compute, from the first; None: all.
        """
        query, key, value = (getattr(self, name) for name in self.names)
        asking = x[:, :queries]
        k, v, mask = self.prefix(
            split_heads(key(x), self.heads), split_heads(value(x), self.heads), mask
        )
        q = split_heads(query(asking), self.heads)
        h = attention(q, k, v, mask, self.dropout, form=self.form, platform=self.platform)
        return h.reshape(asking.shape)


def split_heads(x: Array, heads: int) -> Array:
    """Returns ``[..., width]`` as ``[..., heads, width of a head]``."""
    return x.reshape(*x.shape[:-1], heads, -1)


def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    drop: Dropout,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    form: AttentionForm = "auto",
    platform: Platform = Platform(),
) -> Array:
    """Returns multi-head attention ``[batch, length, heads, width]``.

    Args:
      query: ``[batch, length, heads, width]``; ``key`` and ``value`` have the same form. They may
        have fewer heads, of which each serves several consecutive heads of the query (grouped-query
        attention, Ainslie et al. 2023).
      mask: bool, broadcastable to ``[batch, heads, query length, key length]``; None: everything
        is seen. A token that sees nothing gets the mean of all values.
      drop: applied to the attention probabilities. Its mask is the same in all forms.
      scale: of the scores; None: ``1 / sqrt(width)``.
      softcap: the scores become ``softcap * tanh(scores / softcap)`` (Gemma 2); None: they do not.
      form: see :func:`choose`.
    """
    batch, length, heads, width = query.shape
    keys = key.shape[1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    chosen = choose(
        form,
        platform=platform,
        dtype=query.dtype,
        shape=(batch, heads, length, keys),
        width=width,
        plain=softcap is None and not drop.drops,
    )
    if chosen == "cudnn" and not platform.only_planned:
        return _fused(query, key, value, mask, scale)
    attend = partial(_attend, drop=drop, scale=scale, softcap=softcap)
    if chosen == "whole":
        return attend(query, key, value, mask, 0)
    return _in_blocks(attend, query, key, value, mask, _rows(heads, length, keys))


def choose(
    form: AttentionForm,
    *,
    platform: Platform,
    dtype: Any,
    shape: tuple[int, int, int, int],
    width: int,
    plain: bool,
) -> AttentionForm:
    """Returns the form in which one attention is computed; ``whole`` where another cannot serve.

    Args:
      shape: of the scores, ``(batch, heads, query length, key length)``.
    """
    batch, heads, queries, keys = shape
    if form == "blocks":
        return "blocks" if batch > _rows(heads, queries, keys) else "whole"
    served = (
        form != "whole"
        and platform.capability >= _OLDEST
        and dtype in (jnp.bfloat16, jnp.float16)
        and plain
        and width % 8 == 0
        and width <= _WIDEST
        # JAX 0.10 refuses odd lengths in training, with a mask and without one.
        and queries % 2 == 0
        and keys % 2 == 0
    )
    return "cudnn" if served else "whole"


def _rows(heads: int, queries: int, keys: int) -> int:
    """Returns the number of examples of a block."""
    return max(_AT_ONCE // (heads * queries * keys), _FEWEST)


def _attend(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    row: Array | int,
    *,
    drop: Dropout,
    scale: float,
    softcap: float | None,
) -> Array:
    """Returns the attention of consecutive examples, the first of them number ``row`` of the batch.

    Heads come before lengths: in this order XLA's products on a CPU are up to twice as fast.
    """
    groups = query.shape[2] // key.shape[2]
    if groups > 1:
        key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (query * scale, key, value))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    probabilities = drop(jax.nn.softmax(scores, axis=-1).astype(v.dtype), row)
    return jnp.swapaxes(jnp.einsum("bhqk,bhkd->bhqd", probabilities, v), 1, 2)


def _in_blocks(
    attend: Callable[..., Array],
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    rows: int,
) -> Array:
    """Returns the attention of all examples, of at most ``rows`` at a time."""
    batch = query.shape[0]
    blocks = -(-batch // rows)
    rows = -(-batch // blocks)  # blocks of about the same size; the last one is filled up
    shared = mask is not None and mask.shape[0] == 1

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, blocks * rows - batch)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(blocks, rows, *x.shape[1:])

    def one(block: tuple[Array, Array, Array, Array | None, Array]) -> Array:
        q, k, v, own, row = block
        return attend(q, k, v, mask if shared else own, row)

    own = None if mask is None or shared else split(mask)
    parts = (split(query), split(key), split(value), own, rows * jnp.arange(blocks))
    # The loop keeps the two computations apart by itself, so there is no need to prevent CSE.
    done = jax.lax.map(jax.checkpoint(one, prevent_cse=False), parts)
    return done.reshape(blocks * rows, *done.shape[2:])[:batch]


def _fused(query: Array, key: Array, value: Array, mask: Array | None, scale: float) -> Array:
    """Returns the attention by cuDNN's kernel."""
    if mask is None:
        return _kernel(query, key, value, None, scale)
    batch, queries = query.shape[:2]
    mask = jnp.broadcast_to(mask, (batch, mask.shape[1], queries, key.shape[1]))
    return _masked(query, key, value, mask, scale)


def _kernel(query: Array, key: Array, value: Array, mask: Array | None, scale: float) -> Array:
    result: Array = jax.nn.dot_product_attention(
        query, key, value, mask=mask, scale=scale, implementation=_IMPLEMENTATION
    )
    return result


_IMPLEMENTATION: Any = "cudnn"
"""Tests that have no GPU take JAX's own form of the same function."""


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _masked(query: Array, key: Array, value: Array, mask: Array, scale: float) -> Array:
    """Returns the kernel's attention with a mask ``[batch, 1, queries, keys]``.

    Vmapped over lanes, JAX's own rule asks for a copy of the mask for each head. So lanes become
    further examples of the batch here, in both passes.
    """
    return _as_examples(partial(_kernel, scale=scale))(query, key, value, mask)


def _masked_forward(q: Array, k: Array, v: Array, mask: Array, scale: float) -> tuple[Array, Any]:
    def forward(q: Array, k: Array, v: Array, mask: Array) -> Array:
        return jax.vjp(lambda q, k, v: _kernel(q, k, v, mask, scale), q, k, v)[0]

    return _as_examples(forward)(q, k, v, mask), (q, k, v, mask)


def _masked_backward(scale: float, kept: Any, change: Array) -> tuple[Array, Array, Array, None]:
    def pull(q: Array, k: Array, v: Array, mask: Array, change: Array) -> Any:
        # Its forward pass is the same instruction as the one above, so it is computed once.
        return jax.vjp(lambda q, k, v: _kernel(q, k, v, mask, scale), q, k, v)[1](change)

    return (*_as_examples(pull)(*kept, change), None)


_masked.defvjp(_masked_forward, _masked_backward)


def _as_examples(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of arrays ``[batch, ...]`` that a vmap calls once, with a larger batch."""
    made = custom_vmap(function)

    @made.def_vmap
    def call(size: int, batched: Sequence[bool], *arrays: Array) -> Any:
        filled = [
            x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
            for x, has_axis in zip(arrays, batched, strict=True)
        ]
        found = made(*(x.reshape(-1, *x.shape[2:]) for x in filled))
        found = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), found)
        return found, jax.tree.map(lambda _: True, found)

    return made
