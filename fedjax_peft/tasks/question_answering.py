"""Answers as spans of a context: cross entropy of both ends, and SQuAD's exact match and F1."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft.contracts import Batch, Metrics, Outputs
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encoders.spans import SPANS, SPANS_OR_NONE, span_text
from fedjax_peft.data.table import brief
from fedjax_peft.support.errors import InputError
from fedjax_peft.tasks.base import Field, Inputs, Means, Predictions, Scores, Task
from fedjax_peft.tasks.common import SumAndCount, cross_entropy, real_rows, total
from fedjax_peft.tasks.text_scores import exact_match, overlap_f1
from fedjax_peft.tasks.words import beyond_latin, has_words

_HEADLINES = {"squad": "f1", "fednlp_raw": "raw_f1"}


@part
def question_answering(
    n_best: Count = 20,
    max_answer_length: Count = 30,
    metric: Literal["squad", "fednlp_raw"] = "squad",
    unanswerable: bool = False,
) -> Task:
    """Question answering: where in a context does the answer start and end?

    Batches have ``start_positions`` and ``end_positions`` ``[batch]``. Logits are
    ``[batch, length, 2]``. The loss is the mean of the cross entropies of start and end over the
    real tokens; accuracy is the share of windows whose start and end are both correct.

    The score counts questions, not windows: the answer to a question is the span with the largest
    sum of start and end logit in any of its windows. ``exact_match`` and ``f1`` are SQuAD's (the
    best over the gold answers, then the mean over questions), from 0 to 1. ``raw_exact_match`` and
    ``raw_f1`` are the metrics of FedNLP and of FeDeRA (Yan et al. 2024): means over all pairs of a
    question and one of its gold answers. They do not take the best gold answer, so a model cannot
    reach 1 where gold answers differ. Answers in other scripts than Latin are compared by the rule
    ``unicode`` (:mod:`fedjax_peft.tasks.words`), and rows then name it as ``tokenizer``.

    Args:
      n_best: how many starts and ends of each window are combined.
      max_answer_length: the largest number of tokens in an answer.
      metric: which F1 is the headline, SQuAD's or FedNLP's; both are always computed.
      unanswerable: whether contexts may lack an answer, as in SQuAD 2. Such a question is labelled
        with the first token ([CLS]); the answer is empty where that token's logits are above those
        of the best span in every window; and an empty answer is right (Rajpurkar et al. 2018, with
        the threshold 0).
    """
    predict = _bound(_predict_or_none if unanswerable else _predict, n_best)
    score = _bound(_score, max_answer_length)
    return Task(
        _loss,
        _metrics,
        predict,
        score,
        headline=_HEADLINES[metric],
        name="question_answering",
        encoder=SPANS_OR_NONE if unanswerable else SPANS,
        head="span_classification",
        inputs=Inputs(
            (Field("question", str), Field("context", str)),
            _unlabelled,
            _bound(_answers, max_answer_length),
        ),
        check=_check,
        words=_words,
    )


def _words(data: Dataset) -> str | None:
    golds = (gold for question in data.references for gold in question.answers)
    return "unicode" if any(map(beyond_latin, golds)) else None


@functools.cache  # the same function for the same argument, so that its program is found again
def _bound(function: Callable[..., Any], first: Any) -> Callable[..., Any]:
    return functools.partial(function, first)


def _ends(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns start and end logits ``[batch, 2, length]``, their labels, and which labels count."""
    logits = jnp.swapaxes(outputs.logits.astype(jnp.float32), 1, 2)
    # Finite, so that the softmax of a row without any token is uniform and not NaN.
    real = batch["attention_mask"].astype(bool)[:, None, :]
    logits = jnp.where(real, logits, jnp.finfo(jnp.float32).min)
    labels = jnp.stack([batch["start_positions"], batch["end_positions"]], axis=1)
    return logits, labels, real_rows(batch, labels)


def _loss(outputs: Outputs, batch: Batch) -> SumAndCount:
    losses, ends = cross_entropy(*_ends(outputs, batch))
    return losses / 2, ends / 2


def _metrics(outputs: Outputs, batch: Batch) -> Metrics:
    logits, labels, counted = _ends(outputs, batch)
    both = jnp.all(jnp.argmax(logits, axis=-1) == labels, axis=1)
    return {"loss": _loss(outputs, batch), "accuracy": total(both, counted[:, 0])}


def _predict(n_best: int, outputs: Outputs, batch: Batch) -> dict[str, jax.Array]:
    """Returns the most likely starts and ends in the context and their logits.

    All arrays are ``[batch, n_best]``. Where the context has fewer tokens, further logits are -inf.
    """
    best = {}
    for end, name in enumerate(("start", "end")):
        logits = outputs.logits[..., end].astype(jnp.float32)
        logits = jnp.where(batch["context_mask"], logits, -jnp.inf)
        values, tokens = jax.lax.top_k(logits, min(n_best, logits.shape[1]))
        missing = ((0, 0), (0, n_best - values.shape[1]))
        best[name] = jnp.pad(tokens, missing)
        best[f"{name}_logit"] = jnp.pad(values, missing, constant_values=-jnp.inf)
    return best


def _predict_or_none(n_best: int, outputs: Outputs, batch: Batch) -> dict[str, jax.Array]:
    """Returns those of :func:`_predict`, and ``none_logit`` ``[batch]``: of no answer."""
    none = outputs.logits[:, 0].astype(jnp.float32).sum(axis=-1)
    return {**_predict(n_best, outputs, batch), "none_logit": none}


def _score(max_answer_length: int, means: Means, predictions: Predictions, data: Any) -> Scores:
    if "offsets" not in data.meta:
        raise InputError(
            f"The data set {data.name!r} has no meta 'offsets', so its answers cannot be scored."
            " fedjax_peft.load_dataset makes it."
        )
    best, raw = [], []
    for unit, answer in answers(predictions, data, max_answer_length).items():
        golds = data.references[unit].answers
        pairs = [(exact_match(answer, gold), overlap_f1(answer, gold)) for gold in golds]
        best.append(np.max(pairs, axis=0))
        raw += pairs
    scores = (*np.mean(best, axis=0), *np.mean(raw, axis=0))
    names = ("exact_match", "f1", "raw_exact_match", "raw_f1")
    return {name: float(score) for name, score in zip(names, scores, strict=True)}


def answers(predictions: Predictions, data: Any, max_answer_length: int = 30) -> dict[int, str]:
    """Returns question number -> answer.

    It is empty if no window has a span, or if each window finds no answer more likely.

    Args:
      predictions: of each window, by the task's ``predict``: ``[windows, n_best]``.
      data: the windows, by :func:`fedjax_peft.data.encoders.spans.encode_spans`.
      max_answer_length: the largest number of tokens in an answer.
    """
    scores, starts, ends = _best_spans(max_answer_length, predictions)
    none: dict[int, float] = {}  # the least of all windows: one that has an answer decides
    for unit, logit in zip(data.meta["unit"], predictions.get("none_logit", ()), strict=False):
        none[int(unit)] = min(float(logit), none.get(int(unit), np.inf))
    best: dict[int, str] = {}
    for row in np.argsort(-scores, kind="stable"):  # windows without a span, -inf, come last
        unit = int(data.meta["unit"][row])
        if unit not in best:
            has_span = scores[row] > -np.inf and scores[row] >= none.get(unit, -np.inf)
            best[unit] = span_text(data, row, starts[row], ends[row]) if has_span else ""
    return best


def _best_spans(
    max_answer_length: int, predictions: Predictions
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns score (-inf if there is none), start and end of each window's best span, ``[n]``."""
    start, end = predictions["start"][:, :, None], predictions["end"][:, None, :]
    with np.errstate(invalid="ignore"):  # the model may have diverged
        scores = predictions["start_logit"][:, :, None] + predictions["end_logit"][:, None, :]
    valid = (start <= end) & (end < start + max_answer_length) & np.isfinite(scores)
    scores = np.where(valid, scores, -np.inf).reshape(len(scores), -1)
    best = np.argmax(scores, axis=1)
    rows, n_best = np.arange(len(scores)), start.shape[1]
    return scores[rows, best], start[rows, best // n_best, 0], end[rows, 0, best % n_best]


def _unlabelled(columns: dict[str, list[Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    return {**columns, "id": list(range(len(columns["question"])))}


def _answers(
    max_answer_length: int, predictions: Predictions, data: Dataset
) -> list[dict[str, Any]]:
    found = answers(predictions, data, max_answer_length)
    return [{"answer": found[unit]} for unit in range(len(data.references))]


def _check(data: Dataset, which: str) -> None:
    unknown = next((question.id for question in data.references if not question.answers), None)
    if unknown is not None:
        raise InputError(f"The {which} data have questions without an answer: {unknown!r}.")
    if which == "training":
        return
    for question in data.references:
        if any(question.answers) and not any(map(has_words, question.answers)):
            raise InputError(
                f"The {which} data have a question whose gold answer {brief(question.answers[0])}"
                f" has no word, so that no answer can be scored: {question.id!r}. Remove it."
            )
