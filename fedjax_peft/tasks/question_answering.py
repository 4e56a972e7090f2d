"""Answers as spans of a context: cross entropy of both ends, and SQuAD's exact match and F1."""

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft.data.encoders.spans import span_text
from fedjax_peft.errors import InputError, nearest
from fedjax_peft.tasks.common import cross_entropy, real_rows, total
from fedjax_peft.typing import Batch, Metrics, Outputs, Task

__all__ = ["answers", "exact_match", "normalized", "overlap_f1", "question_answering"]

_HEADLINES = {"squad": "f1", "fednlp_raw": "raw_f1"}
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def question_answering(
    n_best: int = 20,
    max_answer_length: int = 30,
    metric: Literal["squad", "fednlp_raw"] = "squad",
) -> Task:
    """Returns the task: batches have ``start_positions`` and ``end_positions`` ``[batch]``.

    Logits are ``[batch, length, 2]``. The loss is the mean of the cross entropies of start and end
    over the real tokens; accuracy is the share of windows with both ends right.

    The score is of questions, not windows: the answer is the span with the largest sum of start and
    end logit in any window. ``exact_match`` and ``f1`` are SQuAD's (the best over the gold answers,
    mean over questions), as shares of 1. ``raw_exact_match`` and ``raw_f1`` are those that FedNLP
    prints, and FeDeRA (Yan et al. 2024) after it: means over all pairs of a question and one of its
    gold answers, without the best, so that no model can reach 1.

    Args:
      n_best: how many starts and ends of each window are combined.
      max_answer_length: tokens of an answer, at most.
      metric: whose F1 is the headline; both are always computed.

    Raises:
      InputError: an unknown metric, or a number below 1.
    """
    if metric not in _HEADLINES:
        raise InputError(f"There is no metric {metric!r}. {nearest(metric, _HEADLINES)}")
    if min(n_best, max_answer_length) < 1:
        raise InputError(
            f"n_best={n_best} and max_answer_length={max_answer_length} must be at least 1."
        )
    predict, score = _bound(_predict, n_best), _bound(_score, max_answer_length)
    return Task(_loss, _metrics, predict, score, _HEADLINES[metric])


@functools.cache  # the same function every time, so that its program is recognised
def _bound(function: Callable[..., Any], first: Any) -> Callable[..., Any]:
    return functools.partial(function, first)


def _ends(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns logits ``[batch, 2, length]`` of start and end, and their labels and which count."""
    logits = jnp.swapaxes(outputs.logits.astype(jnp.float32), 1, 2)
    # Finite: a row without any token is as good as uniform, not NaN.
    real = batch["attention_mask"].astype(bool)[:, None, :]
    logits = jnp.where(real, logits, jnp.finfo(jnp.float32).min)
    labels = jnp.stack([batch["start_positions"], batch["end_positions"]], axis=1)
    return logits, labels, real_rows(batch, labels)


def _loss(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array]:
    losses, ends = cross_entropy(*_ends(outputs, batch))
    return losses / 2, ends / 2


def _metrics(outputs: Outputs, batch: Batch) -> Metrics:
    logits, labels, counted = _ends(outputs, batch)
    both = jnp.all(jnp.argmax(logits, axis=-1) == labels, axis=1)
    return {"loss": _loss(outputs, batch), "accuracy": total(both, counted[:, 0])}


def _predict(n_best: int, outputs: Outputs, batch: Batch) -> dict[str, jax.Array]:
    """Returns the likeliest starts and ends in the context and their logits, ``[batch, n_best]``.

    Where the context has fewer tokens, the other logits are -inf.
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


def _score(
    max_answer_length: int, means: Mapping[str, float], predictions: Mapping[str, Any], data: Any
) -> dict[str, float]:
    del means
    if "offsets" not in data.meta:
        raise InputError(
            f"The data set {data.name!r} does not say where its tokens are in the contexts (meta"
            " 'offsets'), so there are no answers to score. fedjax_peft.load_dataset makes it."
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


def answers(
    predictions: Mapping[str, Any], data: Any, max_answer_length: int = 30
) -> dict[int, str]:
    """Returns the answer to each question, by its number; empty where no window has a span.

    Args:
      predictions: what :func:`question_answering` predicts of each window, ``[windows, n_best]``.
      data: the windows, made by :func:`fedjax_peft.data.encoders.spans.encode_spans`.
      max_answer_length: tokens of an answer, at most.
    """
    scores, starts, ends = _best_spans(max_answer_length, predictions)
    best: dict[int, str] = {}
    for row in np.argsort(-scores, kind="stable"):  # windows without a span, -inf, come last
        unit = int(data.meta["unit"][row])
        if unit not in best:
            has_span = scores[row] > -np.inf
            best[unit] = span_text(data, row, starts[row], ends[row]) if has_span else ""
    return best


def _best_spans(
    max_answer_length: int, predictions: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the best span of each window: score (-inf: there is none), start and end, ``[n]``."""
    start, end = predictions["start"][:, :, None], predictions["end"][:, None, :]
    with np.errstate(invalid="ignore"):  # of a model that has diverged
        scores = predictions["start_logit"][:, :, None] + predictions["end_logit"][:, None, :]
    valid = (start <= end) & (end < start + max_answer_length) & np.isfinite(scores)
    scores = np.where(valid, scores, -np.inf).reshape(len(scores), -1)
    best = np.argmax(scores, axis=1)
    rows, n_best = np.arange(len(scores)), start.shape[1]
    return scores[rows, best], start[rows, best // n_best, 0], end[rows, 0, best % n_best]


def exact_match(answer: str, gold: str) -> float:
    """Returns 1 if the two are the same but for case, punctuation, articles and spaces, else 0."""
    return float(normalized(answer) == normalized(gold))


def overlap_f1(answer: str, gold: str) -> float:
    """Returns the F1 of the words of two normalized answers; two empty ones agree."""
    words, of_gold = normalized(answer).split(), normalized(gold).split()
    if not words or not of_gold:
        return float(words == of_gold)
    common = sum((Counter(words) & Counter(of_gold)).values())
    return 2 * common / (len(words) + len(of_gold))


def normalized(answer: str) -> str:
    """Returns an answer in lower case, without ASCII punctuation, articles and further spaces."""
    plain = answer.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())
