"""``Outputs.readout``: the head of a language model as a function that is also a pytree."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


def readout(head: nnx.Module) -> jax.tree_util.Partial:
    """Returns hidden states ``[..., width]`` -> logits of an output layer, such as ``lm_head``."""
    return jax.tree_util.Partial(_call, *nnx.split(head))


def tied_readout(table: nnx.Module) -> jax.tree_util.Partial:
    """Returns hidden states ``[..., width]`` -> products with a table of token embeddings."""
    return jax.tree_util.Partial(_attend, *nnx.split(table))


def capped(read: jax.tree_util.Partial, cap: float) -> jax.tree_util.Partial:
    """Returns a readout with soft-capped logits: ``cap * tanh(logits / cap)`` (Gemma 2)."""
    return jax.tree_util.Partial(_capped, read, jnp.float32(cap))


def _call(graph: Any, state: Any, hidden: Array) -> Array:
    return nnx.merge(graph, state)(hidden)


def _attend(graph: Any, state: Any, hidden: Array) -> Array:
    return nnx.merge(graph, state).attend(hidden)


def _capped(read: jax.tree_util.Partial, cap: Array, hidden: Array) -> Array:
    return cap * jnp.tanh(read(hidden) / cap)
