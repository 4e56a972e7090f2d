"""Sums and counts of losses and correct predictions: over examples, tokens, or span ends."""

from typing import TypeAlias

import jax
import jax.numpy as jnp

from fedjax_peft.contracts import Batch, Metrics

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
      labels: int ``[...]``; ignored where ``counted`` is False. The loss of a class that there is
        not is NaN.
      counted: bool ``[...]``.
    """
    logits = logits.astype(jnp.float32)
    logits = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    # A comparison, not an index: its derivative is no scatter, and half as many operations.
    of_label = (
        jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]
    )
    picked = jnp.sum(jnp.where(of_label, logits, 0.0), axis=-1)
    picked = jnp.where((labels >= 0) & (labels < logits.shape[-1]), picked, jnp.nan)
    return total(jnp.log(jnp.sum(jnp.exp(logits), axis=-1)) - picked, counted)


def loss_and_accuracy(logits: jax.Array, labels: jax.Array, counted: jax.Array) -> Metrics:
    """Returns the metrics of predicted classes, for the arguments of :func:`cross_entropy`."""
    right = total(jnp.argmax(logits, axis=-1) == labels, counted)
    return {"loss": cross_entropy(logits, labels, counted), "accuracy": right}


def total(values: jax.Array, counted: jax.Array) -> SumAndCount:
    """Returns (sum, count) of the values where ``counted`` is True, as float32 scalars."""
    # where, not a product: a NaN in a padded row must not reach the sum.
    sums = jnp.sum(jnp.where(counted, values.astype(jnp.float32), 0.0))
    return sums, jnp.sum(counted.astype(jnp.float32))
