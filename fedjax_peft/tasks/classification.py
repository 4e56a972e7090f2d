"""Sequence classification: cross entropy and accuracy."""

import jax
import jax.numpy as jnp
import optax

from fedjax_peft.typing import Batch, Metrics, Outputs, Task

__all__ = ["classification"]


def _mask(batch: Batch) -> jax.Array:
    labels = batch["labels"]
    return batch.get("mask", jnp.ones(labels.shape, bool)).astype(jnp.float32)


def _logits(outputs: Outputs, batch: Batch) -> jax.Array:
    logits = outputs.logits.astype(jnp.float32)
    if "classes" not in batch:
        return logits
    own = jnp.arange(logits.shape[-1])[None] < batch["classes"][:, None]
    return jnp.where(own, logits, -jnp.inf)


def _loss(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array]:
    mask, logits = _mask(batch), _logits(outputs, batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    # where, not a product: a padded row must not bring in a NaN.
    return jnp.sum(jnp.where(mask > 0, losses, 0.0)), jnp.sum(mask)


def _metrics(outputs: Outputs, batch: Batch) -> Metrics:
    mask = _mask(batch)
    right = (jnp.argmax(_logits(outputs, batch), axis=-1) == batch["labels"]).astype(jnp.float32)
    return {"loss": _loss(outputs, batch), "accuracy": (jnp.sum(right * mask), jnp.sum(mask))}


def classification() -> Task:
    """Returns the task: batches have int ``labels`` ``[batch]`` and bool ``mask`` ``[batch]``.

    With an int column ``classes`` ``[batch]``, an example's label is one of the head's first so
    many classes and the others are ruled out: tasks of fewer classes can share a program with
    larger ones (:func:`fedjax_peft.data.combine`).
    """
    return Task(_loss, _metrics)
