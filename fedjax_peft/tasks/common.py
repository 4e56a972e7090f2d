"""Sums and counts of losses and correct predictions: over examples, tokens, or span ends."""

from typing import TypeAlias

import jax
import jax.numpy as jnp

from fedjax_peft.contracts import Batch

SumAndCount: TypeAlias = tuple[jax.Array, jax.Array]
"""Of losses or of correct predictions; parts of a batch add up."""


def real_rows(batch: Batch, labels: jax.Array) -> jax.Array:
    """Returns which rows of the batch are real, bool, broadcast to the shape of ``labels``."""
    mask = batch.get("mask", jnp.ones(labels.shape[:1], bool)).astype(bool)
    return jnp.broadcast_to(jnp.expand_dims(mask, range(1, labels.ndim)), labels.shape)


def cross_entropy(logits: jax.Array, labels: jax.Array, counted: jax.Array) -> SumAndCount:
    """Returns (sum, count) of the cross entropy in float32.

    Args:
      logits: ``[..., classes]``.
      labels: int ``[...]``; ignored where ``counted`` is False.
      counted: bool ``[...]``.
    """
    import optax  # here, so that loading data does not wait for it

    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return total(losses, counted)


def correct(logits: jax.Array, labels: jax.Array, counted: jax.Array) -> SumAndCount:
    """Returns (sum, count) of correct predictions, for the arguments of :func:`cross_entropy`."""
    return total(jnp.argmax(logits, axis=-1) == labels, counted)


def total(values: jax.Array, counted: jax.Array) -> SumAndCount:
    """Returns (sum, count) of the values where ``counted`` is True, as float32 scalars."""
    # where, not a product: a NaN in a padded row must not reach the sum.
    sums = jnp.sum(jnp.where(counted, values.astype(jnp.float32), 0.0))
    return sums, jnp.sum(counted.astype(jnp.float32))
