"""Sums over what is counted: examples, labelled tokens, or ends of answers."""

import jax
import jax.numpy as jnp
import optax

from fedjax_peft.typing import Batch

__all__ = ["cross_entropy", "real_rows", "right", "total"]


def real_rows(batch: Batch, like: jax.Array) -> jax.Array:
    """Returns which rows of the batch are real, bool, broadcast to the shape of ``like``."""
    mask = batch.get("mask", jnp.ones(like.shape[:1], bool)).astype(bool)
    return jnp.broadcast_to(jnp.expand_dims(mask, range(1, like.ndim)), like.shape)


def cross_entropy(
    logits: jax.Array, labels: jax.Array, counted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns (sum, count) of the cross entropy in float32.

    Args:
      logits: ``[..., classes]``.
      labels: int ``[...]``; may be anything where it does not count.
      counted: bool ``[...]``.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return total(losses, counted)


def right(logits: jax.Array, labels: jax.Array, counted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (sum, count) of correct predictions, for arguments as of :func:`cross_entropy`."""
    return total(jnp.argmax(logits, axis=-1) == labels, counted)


def total(values: jax.Array, counted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (sum, count) of the values that count, two float32 scalars."""
    # where, not a product: a padded row must not bring in a NaN.
    sums = jnp.sum(jnp.where(counted, values.astype(jnp.float32), 0.0))
    return sums, jnp.sum(counted.astype(jnp.float32))
