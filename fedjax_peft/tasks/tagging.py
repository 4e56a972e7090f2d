"""Tagging of words (named entities): cross entropy of tokens, F1 of entities."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft.contracts import Batch, Metrics, Outputs
from fedjax_peft.contracts.part import part
from fedjax_peft.data.dataset import IGNORE, Dataset
from fedjax_peft.data.encoders.tags import TAGS
from fedjax_peft.support.libraries import limit_blas_threads
from fedjax_peft.tasks.base import Field, Inputs, Means, Predictions, Scores, Task, check_labels
from fedjax_peft.tasks.by_class import ByClass, of_entities
from fedjax_peft.tasks.common import SumAndCount, cross_entropy, loss_and_accuracy, real_rows


@part
def tagging() -> Task:
    """Tagging: one label for each word, such as the kind of entity that it belongs to.

    Batches have int ``labels`` ``[batch, length]``. The label of a token that is not the first of a
    word is ``IGNORE``. Loss and accuracy are means over the other tokens. The score is ``f1``,
    ``precision`` and ``recall`` of whole entities, by ``seqeval`` as in CoNLL's evaluation: an
    I- tag of another type than the tag before it begins an entity. Words that ``max_length`` cuts
    off do not count; ``lost_entities`` is the share of the gold entities that are cut off.
    """
    return Task(
        _loss,
        _metrics,
        _predict,
        _score,
        headline="f1",
        lower_is_better=("loss", "lost_entities"),
        name="tagging",
        encoder=TAGS,
        head="token_classification",
        inputs=_INPUTS,
        check=_CHECK,
        by_class=_by_type,
    )


def _counted(batch: Batch) -> jax.Array:
    return (batch["labels"] != IGNORE) & real_rows(batch, batch["labels"])


def _loss(outputs: Outputs, batch: Batch) -> SumAndCount:
    return cross_entropy(outputs.logits, batch["labels"], _counted(batch))


def _metrics(outputs: Outputs, batch: Batch) -> Metrics:
    return loss_and_accuracy(outputs.logits, batch["labels"], _counted(batch))


def _predict(outputs: Outputs, batch: Batch) -> dict[str, jax.Array]:
    return {"tag": jnp.argmax(outputs.logits, axis=-1).astype(jnp.int32)}


def _score(means: Means, predictions: Predictions, data: Any) -> Scores:
    limit_blas_threads()  # seqeval loads scipy
    from seqeval.metrics.sequence_labeling import get_entities, precision_recall_fscore_support

    labels = data.columns["labels"]
    gold = _tags(data.label_names, labels, labels)
    predicted = _tags(data.label_names, predictions["tag"], labels)
    precision, recall, f1, _ = precision_recall_fscore_support(
        gold, predicted, average="micro", zero_division=0
    )
    whole = [list(data.references[unit]) for unit in data.meta["unit"]]
    there, seen = len(get_entities(whole)), len(get_entities(gold))
    lost = 1 - seen / there if there else 0
    scores = {"f1": f1, "precision": precision, "recall": recall, "lost_entities": lost}
    return {name: float(score) for name, score in scores.items()}


def _by_type(predictions: Predictions, data: Any) -> ByClass:
    """Returns the counts of entities by type, as seqeval counts them."""
    limit_blas_threads()
    from seqeval.metrics.sequence_labeling import get_entities

    labels, names = data.columns["labels"], data.label_names
    gold, predicted = (_tags(names, tags, labels) for tags in (labels, predictions["tag"]))
    types = dict.fromkeys(kind for kind, _, _ in get_entities([[name] for name in names]))
    return of_entities(get_entities(gold), get_entities(predicted), [*types])


def _tags(names: Sequence[str], tags: np.ndarray, labels: np.ndarray) -> list[list[str]]:
    """Returns the names of the tags of each sentence's words, those that have a label."""
    seen = labels != IGNORE
    return [[names[tag] for tag in row[own]] for row, own in zip(tags, seen, strict=True)]


def _unlabelled(columns: dict[str, list[Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    return {**columns, "tags": [[names[0]] * len(words) for words in columns["tokens"]]}


def _answers(predictions: Predictions, data: Dataset) -> list[dict[str, Any]]:
    """Returns one tag for each word; the first tag, O, for a word that is cut off."""
    result = []
    rows = zip(data.references, data.meta["word"], predictions["tag"], strict=True)
    for words, word_of_token, tags in rows:
        found, first = np.zeros(len(words), int), word_of_token >= 0
        found[word_of_token[first]] = tags[first]
        result.append({"tags": [data.label_names[tag] for tag in found]})
    return result


_INPUTS = Inputs((Field("tokens", list),), _unlabelled, _answers)
_CHECK = check_labels("tagging")
