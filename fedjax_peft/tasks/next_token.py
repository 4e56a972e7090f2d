"""Language modelling: cross entropy and accuracy of each next token."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedjax_peft.data.encoders.language import LANGUAGE
from fedjax_peft.tasks.base import Task
from fedjax_peft.tasks.common import correct, cross_entropy, real_rows
from fedjax_peft.typing import Batch, Metrics, Outputs

__all__ = ["next_token"]


def next_token() -> Task:
    """Returns the task: batches have ``input_ids`` and ``attention_mask`` ``[batch, length]``.

    The model predicts each real token of a block, except the first, from the true tokens before it.
    The end-of-text token is predicted too. Loss and accuracy are means over these tokens; the score
    is ``perplexity``.
    """
    return Task(
        _loss,
        _metrics,
        score=_score,
        lower_is_better=("loss", "perplexity"),
        name="next_token",
        encoder=LANGUAGE,
        head="causal_lm",
    )


def _targets(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns logits ``[batch, length - 1, vocabulary]``, their labels, and which labels count."""
    real = batch["attention_mask"][:, 1:].astype(bool)
    return outputs.logits[:, :-1], batch["input_ids"][:, 1:], real & real_rows(batch, real)


def _loss(outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array]:
    return cross_entropy(*_targets(outputs, batch))


def _metrics(outputs: Outputs, batch: Batch) -> Metrics:
    return {"loss": _loss(outputs, batch), "accuracy": correct(*_targets(outputs, batch))}


def _score(
    means: Mapping[str, float], predictions: Mapping[str, Any], data: Any
) -> dict[str, float]:
    del predictions, data
    with np.errstate(over="ignore"):  # the model may have diverged
        return {"perplexity": float(np.exp(np.float64(means["loss"])))}
