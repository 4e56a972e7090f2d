"""Supervised fine-tuning of a language model: cross entropy of the tokens of the answers."""

import functools
from collections.abc import Callable
from typing import Any, Literal

from fedjax_peft.contracts import Sampling
from fedjax_peft.contracts.arguments import Count, FromZero, NotNegative, PositiveShare
from fedjax_peft.contracts.part import part
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encoders.conversations import CONVERSATIONS
from fedjax_peft.support.errors import InputError
from fedjax_peft.tasks.base import Means, Predictions, Scores, Task, prompted
from fedjax_peft.tasks.likelihood import objective
from fedjax_peft.tasks.text_scores import OF_WORDS, perplexity

_WHOLE = ("exact_match", "gsm8k")
"""The scores that read an answer up to its end."""


@part
def instruction_tuning(
    metric: Literal["exact_match", "f1", "rouge_l", "gsm8k"] | None = None,
    max_new_tokens: Count = 64,
    temperature: NotNegative = 0.0,
    top_p: PositiveShare = 1.0,
    top_k: FromZero = 0,
    tokenizer: Literal["unicode", "rouge_score"] = "unicode",
) -> Task:
    """Instruction tuning: the model learns the answers of conversations, and can write its own.

    Batches have ``input_ids``, ``attention_mask`` and ``loss_mask``, ``[batch, length]``. The model
    predicts each token whose ``loss_mask`` is True from the true tokens before it: the tokens of
    all answers, and the tokens that end them. The tokens of prompts are read only. Loss and
    ``accuracy`` are means over the predicted tokens, so a long answer counts more than a short one;
    the score is ``perplexity``.

    With a ``metric``, an evaluation also generates an answer to each prompt (the conversation
    before its last answer) and compares it with the answer of the data. It then scores
    ``exact_match``, ``f1`` and ``rouge_l`` (:mod:`fedjax_peft.tasks.text_scores`), from 0 to 1.

    Args:
      metric: the headline metric of generated answers; ``gsm8k`` compares the numbers after
        ``####``. None: nothing is generated, which is quicker, and the headline is ``accuracy``.
      max_new_tokens: the largest number of tokens in a generated answer. With the metric
        ``exact_match`` or ``gsm8k``, a run warns if gold answers of its test data are longer.
      temperature: the temperature of generated answers, see
        :class:`fedjax_peft.contracts.Sampling`; 0: the most likely token.
      top_p: likewise.
      top_k: likewise.
      tokenizer: the rule by which scores find words (:mod:`fedjax_peft.tasks.words`). ``unicode``
        is for every script, and gives English texts the numbers of ``rouge_score``, which finds
        words of a to z and 0 to 9 only. Rows name the rule that the gold answers needed.
    """
    generate, how = None, Sampling(max_new_tokens, temperature, top_p, top_k)
    if metric is not None:
        from fedjax_peft.tasks.completions import completing  # needs the models, which load slowly

        generate = completing(how)
    scored = objective("loss_mask")
    return Task(
        scored.loss,
        scored.metrics,
        score=_scores(metric, tokenizer),
        headline=metric or "accuracy",
        generate=generate,
        lower_is_better=("loss", "perplexity"),
        name="instruction_tuning",
        encoder=CONVERSATIONS,
        head="causal_lm",
        check=_checking(metric, max_new_tokens, tokenizer),
        loss_and_metrics=scored.loss_and_metrics,
        inputs=prompted(how, conversations=True),
        words=None if metric is None else _words(tokenizer),
    )


@functools.cache  # the same function for the same metric, so that its program is found again
def _scores(metric: str | None, tokenizer: str) -> Callable[[Means, Predictions, Any], Scores]:
    names = () if metric is None else tuple(dict.fromkeys([metric, *OF_WORDS]))

    def score(means: Means, predictions: Predictions, data: Any) -> Scores:
        scores = {"perplexity": perplexity(means["loss"])}
        if names:
            from fedjax_peft.tasks.completions import score_completions

            scores |= score_completions(names, predictions, data, tokenizer)
        return scores

    return score


@functools.cache  # likewise
def _words(tokenizer: str) -> Callable[[Dataset], str | None]:
    def words(data: Dataset) -> str | None:
        from fedjax_peft.tasks.completions import words_of_golds

        return words_of_golds(data, tokenizer)

    return words


@functools.cache  # likewise
def _checking(
    metric: str | None, max_new_tokens: int, tokenizer: str
) -> Callable[[Dataset, str], None]:
    """Returns ``Task.check``; with a metric it also looks at the gold answers of evaluations."""

    def check(data: Dataset, which: str) -> None:
        _check(data, which)
        if metric is not None and which != "training":  # only evaluations generate
            from fedjax_peft.tasks.completions import check_golds, warn_of_long_answers

            check_golds(tokenizer, data, which)
            if metric in _WHOLE:
                warn_of_long_answers(max_new_tokens, data, which)

    return check


def _check(data: Dataset, which: str) -> None:
    mask = data.columns.get("loss_mask")
    if mask is None:
        raise InputError(
            f"The {which} data have no column 'loss_mask', which marks the tokens of the answers."
            " load_dataset makes it, for conversations."
        )
    if not mask.any():
        raise InputError(
            f"No example of the {which} data has a token to learn: max_length is too small for the"
            " prompts, so that all answers are cut off."
        )
