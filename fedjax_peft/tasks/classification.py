"""Classification of texts, or of pairs of texts: cross entropy, accuracy and macro F1."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft.contracts import Batch, Metrics, Outputs
from fedjax_peft.contracts.part import part
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encoders.text import TEXT
from fedjax_peft.tasks.base import Field, Inputs, Means, Predictions, Scores, Task, check_labels
from fedjax_peft.tasks.by_class import ByClass, of_labels
from fedjax_peft.tasks.common import SumAndCount, cross_entropy, loss_and_accuracy, real_rows


@part
def classification() -> Task:
    """Classification of texts: one label for each example.

    Batches have int ``labels`` ``[batch]`` and bool ``mask`` ``[batch]``. They may have an int
    column ``classes`` ``[batch]``. An example's label is then one of the head's first ``classes``
    classes, and the logits of the others are masked. Data sets with different numbers of classes
    can thus share a head (:func:`fedjax_peft.data.combine`).

    The score is ``macro_f1``: the mean F1 of the classes that occur as a label or as a prediction.
    """
    return Task(
        _loss,
        _metrics,
        _predict,
        _score,
        name="classification",
        encoder=TEXT,
        head="classification",
        inputs=_INPUTS,
        check=_CHECK,
        by_class=_by_class,
    )


def class_logits(outputs: Outputs, batch: Batch) -> jax.Array:
    """Returns float32 logits ``[batch, classes]``; -inf for a class that an example cannot have."""
    logits = outputs.logits.astype(jnp.float32)
    if "classes" not in batch:
        return logits
    own = jnp.arange(logits.shape[-1])[None] < batch["classes"][:, None]
    return jnp.where(own, logits, -jnp.inf)


def _loss(outputs: Outputs, batch: Batch) -> SumAndCount:
    labels = batch["labels"]
    return cross_entropy(class_logits(outputs, batch), labels, real_rows(batch, labels))


def _metrics(outputs: Outputs, batch: Batch) -> Metrics:
    labels = batch["labels"]
    return loss_and_accuracy(class_logits(outputs, batch), labels, real_rows(batch, labels))


def _predict(outputs: Outputs, batch: Batch) -> dict[str, jax.Array]:
    return {"label": jnp.argmax(class_logits(outputs, batch), axis=-1).astype(jnp.int32)}


def _score(means: Means, predictions: Predictions, data: Any) -> Scores:
    gold, predicted = data.columns["labels"], predictions["label"]
    classes = int(max(gold.max(initial=0), predicted.max(initial=0))) + 1
    hits = np.bincount(gold[gold == predicted], minlength=classes)
    both = np.bincount(gold, minlength=classes) + np.bincount(predicted, minlength=classes)
    return {"macro_f1": float(np.mean(2 * hits[both > 0] / both[both > 0]))}


def _by_class(predictions: Predictions, data: Any) -> ByClass:
    return of_labels(data.columns["labels"], predictions["label"], data.label_names)


def _unlabelled(columns: dict[str, list[Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    return {**columns, "label": [names[0]] * len(columns["text"])}


def _all_logits(outputs: Outputs, batch: Batch) -> dict[str, jax.Array]:
    return {"logits": outputs.logits}


def _answers(predictions: Predictions, data: Dataset) -> list[dict[str, Any]]:
    return [
        {"label": data.label_names[int(row.argmax())], "logits": row.tolist()}
        for row in predictions["logits"]
    ]


_INPUTS = Inputs(
    (Field("text", str), Field("text_pair", str, required=False)),
    _unlabelled,
    _answers,
    _all_logits,
)
_CHECK = check_labels("classification")
