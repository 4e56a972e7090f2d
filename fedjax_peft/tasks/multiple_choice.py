"""Multiple choice by likelihood: the answer is the choice that a language model finds most likely.

This is the form of MMLU and HellaSwag. The score of a choice is the sum of the log-probabilities of
its tokens after the question; a long choice has a small one. Divided by the number of characters of
the choice it is the ``acc_norm`` of EleutherAI's harness.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft.contracts import Batch, Outputs
from fedjax_peft.contracts.part import part
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encoders.choices import Style, choices_encoder, scores_by_unit
from fedjax_peft.support.errors import InputError
from fedjax_peft.tasks.base import Field, Inputs, Means, Predictions, Scores, Task
from fedjax_peft.tasks.likelihood import next_tokens, objective, token_scores


@part
def multiple_choice(style: Style = "text") -> Task:
    """Multiple choice: the most likely of a question's choices is the answer.

    An example is one choice, with its tokens in ``loss_mask``. The loss is the mean cross entropy
    of the tokens of right choices. The other choices of a question are examples too, whose loss
    counts nothing: an evaluation needs their likelihood.

    The score counts questions: ``accuracy`` is the share of questions whose most likely choice is
    right; ``accuracy_norm`` divides the log-likelihoods by the choices' numbers of characters.
    Questions are compared only where all their choices were evaluated together; a partition keeps
    them together.

    Args:
      style: ``text``: a choice is its text after the question (HellaSwag). ``letters``: the choices
        stand in the question, and a choice is its letter (MMLU).
    """
    scored = objective("loss_mask", "is_answer", accuracy=False)  # the score counts questions
    return Task(
        scored.loss,
        scored.metrics,
        _predict,
        _score,
        name="multiple_choice",
        encoder=choices_encoder(style),
        head="causal_lm",
        inputs=Inputs((Field("question", str), Field("choices", list)), _unlabelled, _answers),
        check=_check,
        loss_and_metrics=scored.loss_and_metrics,
    )


def _predict(outputs: Outputs, batch: Batch) -> dict[str, jax.Array]:
    """Returns the log-likelihood of each example's choice, ``[batch]``."""
    targets, counted = next_tokens(batch, batch["loss_mask"])
    scores = token_scores(outputs, targets, counted)
    return {"log_likelihood": jnp.sum(scores.log_likelihood, axis=1)}


def _score(means: Means, predictions: Predictions, data: Any) -> Scores:
    sums = np.asarray(predictions["log_likelihood"], np.float64)
    lengths = np.maximum(data.meta["characters"], 1)
    found = {}
    for name, scores in (("accuracy", sums), ("accuracy_norm", sums / lengths)):
        right = [
            float(np.argmax(own) == data.references[unit].answer)
            for unit, own in scores_by_unit(scores, data).items()
        ]
        found[name] = float(np.mean(right)) if right else float("nan")
    return found


def _unlabelled(columns: dict[str, list[Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    return {**columns, "answer": [0] * len(columns["question"])}


def _answers(predictions: Predictions, data: Dataset) -> list[dict[str, Any]]:
    found = []
    scores = scores_by_unit(np.asarray(predictions["log_likelihood"], np.float64), data)
    for unit, own in scores.items():
        choice = data.references[unit].choices[int(np.argmax(own))]
        found.append({"choice": choice, "log_likelihoods": [float(x) for x in own]})
    return found


def _check(data: Dataset, which: str) -> None:
    missing = {"loss_mask", "is_answer"} - data.columns.keys()
    if missing:
        raise InputError(
            f"The {which} data are for multiple choice, but have no column {missing.pop()!r}."
            " load_dataset makes it, from question, choices and answer."
        )
