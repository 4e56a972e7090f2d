"""Language modelling: cross entropy and accuracy of each next token."""

from typing import Any

from fedjax_peft.contracts import Sampling
from fedjax_peft.contracts.part import part
from fedjax_peft.data.encoders.language import LANGUAGE
from fedjax_peft.tasks.base import Means, Predictions, Scores, Task, prompted
from fedjax_peft.tasks.likelihood import objective
from fedjax_peft.tasks.text_scores import perplexity


@part
def next_token() -> Task:
    """Next token: the model predicts every token of a text from those before it.

    Batches have ``input_ids`` and ``attention_mask`` ``[batch, length]``. The model predicts each
    real token of a block, except the first, from the true tokens before it. The end-of-text token
    is predicted too. Loss and accuracy are means over these tokens; the score is ``perplexity``.
    """
    scored = objective("attention_mask")
    return Task(
        scored.loss,
        scored.metrics,
        score=_score,
        lower_is_better=("loss", "perplexity"),
        name="next_token",
        encoder=LANGUAGE,
        head="causal_lm",
        inputs=prompted(Sampling()),
        loss_and_metrics=scored.loss_and_metrics,
    )


def _score(means: Means, predictions: Predictions, data: Any) -> Scores:
    return {"perplexity": perplexity(means["loss"])}
