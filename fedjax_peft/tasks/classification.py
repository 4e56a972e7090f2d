"""Sequence classification: cross entropy and accuracy."""

import jax
import jax.numpy as jnp
import optax

from fedjax_peft.typing import Batch, Metrics, Outputs, Task

__all__ = ["classification"]


def _mask(batch: Batch) -> jax.Array:
    labels = batch["labels"]
    return batch.get("mask", jnp.ones(labels.shape, bool)).astype(jnp.float32)


def _loss(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array]:
    mask = _mask(batch)
    logits = outputs.logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    # where, not a product: a padded row must not bring in a NaN.
    return jnp.sum(jnp.where(mask > 0, losses, 0.0)), jnp.sum(mask)


def _metrics(outputs: Outputs, batch: Batch) -> Metrics:
    mask = _mask(batch)
    right = (jnp.argmax(outputs.logits, axis=-1) == batch["labels"]).astype(jnp.float32)
    return {"loss": _loss(outputs, batch), "accuracy": (jnp.sum(right * mask), jnp.sum(mask))}


def classification() -> Task:
    """Returns the task: batches have int ``labels`` ``[batch]`` and bool ``mask`` ``[batch]``."""
    return Task(_loss, _metrics)
