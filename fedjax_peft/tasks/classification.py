"""Classification of texts or images: cross entropy, accuracy and macro F1."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft.tasks.common import cross_entropy, real_rows, right
from fedjax_peft.typing import Batch, Metrics, Outputs, Task

__all__ = ["classification"]


def classification() -> Task:
    """Returns the task: batches have int ``labels`` ``[batch]`` and bool ``mask`` ``[batch]``.

    With an int column ``classes`` ``[batch]``, an example's label is one of the head's first so
    many classes and the others are ruled out: tasks of fewer classes can share a program with
    larger ones (:func:`fedjax_peft.data.combine`).

    The score is ``macro_f1``, the mean F1 of the classes that are labelled or predicted at all.
    """
    return Task(_loss, _metrics, _predict, _score)


def _logits(outputs: Outputs, batch: Batch) -> jax.Array:
    logits = outputs.logits.astype(jnp.float32)
    if "classes" not in batch:
        return logits
    own = jnp.arange(logits.shape[-1])[None] < batch["classes"][:, None]
    return jnp.where(own, logits, -jnp.inf)


def _loss(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array]:
    labels = batch["labels"]
    return cross_entropy(_logits(outputs, batch), labels, real_rows(batch, labels))


def _metrics(outputs: Outputs, batch: Batch) -> Metrics:
    labels = batch["labels"]
    accuracy = right(_logits(outputs, batch), labels, real_rows(batch, labels))
    return {"loss": _loss(outputs, batch), "accuracy": accuracy}


def _predict(outputs: Outputs, batch: Batch) -> dict[str, jax.Array]:
    return {"label": jnp.argmax(_logits(outputs, batch), axis=-1).astype(jnp.int32)}


def _score(
    means: Mapping[str, float], predictions: Mapping[str, Any], data: Any
) -> dict[str, float]:
    del means
    gold, predicted = data.columns["labels"], predictions["label"]
    classes = int(max(gold.max(initial=0), predicted.max(initial=0))) + 1
    hits = np.bincount(gold[gold == predicted], minlength=classes)
    both = np.bincount(gold, minlength=classes) + np.bincount(predicted, minlength=classes)
    return {"macro_f1": float(np.mean(2 * hits[both > 0] / both[both > 0]))}
