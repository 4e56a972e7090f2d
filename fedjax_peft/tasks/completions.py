"""Completions in the evaluation of a run: ``Task.generate``, and the scores of what it gives.

The evaluated rows have the columns ``prompt_ids`` and ``prompt_mask`` ``[rows, length]``, padded on
the left, and optionally ``end_ids`` ``[rows, n]``, the tokens that end a completion (negative:
none). The data set has a ``tokenizer``, and in ``references`` the gold completions of each unit:
one string, or several. Rows without ``prompt_ids`` (clients' own training examples) have no
completions, and no score.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft.contracts import Batch, Key, Outputs, Sampling
from fedjax_peft.data.table import brief
from fedjax_peft.data.tokens import whole
from fedjax_peft.models.decoding import NO_TOKEN, check_sampling, decode
from fedjax_peft.numerics.random import stream
from fedjax_peft.support.errors import InputError, check_known, users_level
from fedjax_peft.tasks.base import Predictions, Scores
from fedjax_peft.tasks.text_scores import OF_WORDS, SCORES, mean_score
from fedjax_peft.tasks.words import has_words, rule_for


@functools.cache  # the same function for the same settings, so that its program is found again
def completing(
    how: Sampling, seed: int = 0
) -> Callable[[Callable[[Batch], Outputs], Batch], dict[str, jax.Array]]:
    """Returns a ``Task.generate`` that completes prompts: ``completions`` ``[batch, tokens]``.

    The random numbers of a row depend on the seed and on its prompt, so the packing of rows into
    batches changes nothing, and equal prompts have equal completions.

    Args:
      how: how tokens are chosen.
      seed: the seed of the random numbers.

    Raises:
      InputError: an impossible setting.
    """
    how = check_sampling(how)

    def generate(forward: Callable[[Batch], Outputs], batch: Batch) -> dict[str, jax.Array]:
        if "prompt_ids" not in batch:
            return {}
        ids, mask = batch["prompt_ids"], batch["prompt_mask"].astype(bool)
        keys = None if how.temperature == 0 else _row_keys(stream(seed, "completions"), ids, mask)
        given = {"ends": batch.get("end_ids"), "real": batch.get("mask")}
        return {"completions": decode(forward, ids, mask, how, keys, **given)}

    return generate


def _row_keys(key: Key, ids: jax.Array, mask: jax.Array) -> Key:
    """Returns a key for each prompt, ``[batch]``, from its tokens (padding changes nothing)."""
    # A polynomial of the tokens, counted from the right, modulo 2^32.
    powers = np.array([pow(16777619, i, 1 << 32) for i in reversed(range(ids.shape[1]))], np.uint32)
    terms = (ids.astype(jnp.uint32) + 1) * powers[None]
    hashed = jnp.sum(jnp.where(mask, terms, 0), axis=1, dtype=jnp.uint32)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, hashed)


def decoded(tokenizer: Any, completions: Sequence[Sequence[int]] | np.ndarray) -> list[str]:
    """Returns the texts of completions, ``[rows, tokens]``, without special tokens."""
    rows = [[int(token) for token in row if token != NO_TOKEN] for row in completions]
    return list(tokenizer.batch_decode(rows, skip_special_tokens=True))


def completed_texts(predictions: Predictions, data: Any) -> tuple[list[str], list[Any]]:
    """Returns the completions of a score's predictions, and the gold completions, row by row.

    Raises:
      InputError: the data set has no tokenizer or no references.
    """
    if data.tokenizer is None or not len(data.references):
        lacks = "tokenizer" if data.tokenizer is None else "references (gold completions)"
        raise InputError(
            f"The data set {data.name!r} has no {lacks}, so its completions cannot be scored."
            " fedjax_peft.load_dataset gives it both."
        )
    return decoded(data.tokenizer, predictions["completions"]), _golds(data)


def _golds(data: Any) -> list[Any]:
    """Returns the gold completions of each row: one string, or several."""
    units = data.meta.get("unit", np.arange(len(data)))
    return [data.references[int(unit)] for unit in units]


def _choices(data: Any) -> list[list[str]]:
    """Returns the gold completions of each row that is completed and scored."""
    if data.tokenizer is None or not len(data.references) or "prompt_ids" not in data.columns:
        return []
    return [[gold] if isinstance(gold, str) else list(gold) for gold in _golds(data)]


def words_of_golds(data: Any, tokenizer: str) -> str | None:
    """Returns the rule for words that scores need; None if the data have no completions."""
    choices = _choices(data)
    return rule_for((gold for choice in choices for gold in choice), tokenizer) if choices else None


def check_golds(tokenizer: str, data: Any, which: str) -> None:
    """Raises InputError if a row has no gold completion with a word, so that no score is fair.

    Args:
      tokenizer: the rule for words.
      data: the evaluated :class:`fedjax_peft.data.Dataset`.
      which: the role of the data, such as ``test``.
    """
    choices = _choices(data)
    rows = [
        (row, choice[0] if choice else "")
        for row, choice in enumerate(choices, 1)
        if not any(has_words(gold, tokenizer) for gold in choice)
    ]
    if rows:
        row, gold = rows[0]
        remedy = "Remove them, or leave metric out."
        if tokenizer != "unicode":
            remedy = f"tokenizer = {tokenizer!r} knows a to z and 0 to 9 only: use 'unicode'."
        raise InputError(
            f"The gold answers of {len(rows):,} of {len(choices):,} {which} examples have no word,"
            " so that generated answers cannot be scored. The first is"
            f" {brief(gold)}, of example {row}. {remedy}"
        )


def warn_of_long_answers(max_new_tokens: int, data: Any, which: str) -> None:
    """Warns of gold completions that have too many tokens, so that no completion can equal them.

    Args:
      max_new_tokens: the largest number of tokens in a completion.
      data: the evaluated :class:`fedjax_peft.data.Dataset`. Without a tokenizer, references or
        prompts nothing can be said, and there is no warning.
      which: the role of the data, such as ``test``.
    """
    choices = _choices(data)
    texts = list(dict.fromkeys(text for choice in choices for text in choice))
    sizes = dict(zip(texts, map(len, whole(data.tokenizer, texts)), strict=True))
    shortest = [min(map(sizes.__getitem__, choice), default=0) for choice in choices]
    too_long = [size for size in shortest if size > max_new_tokens]
    if too_long:
        warnings.warn(
            f"The gold answers of {len(too_long):,} of {len(choices):,} {which} examples have more"
            f" than max_new_tokens = {max_new_tokens} tokens, so no generated answer can equal"
            f" them. The longest has {max(too_long):,} tokens: raise max_new_tokens.",
            stacklevel=users_level(),
        )


def score_completions(
    metrics: Sequence[str], predictions: Predictions, data: Any, tokenizer: str = "unicode"
) -> Scores:
    """Returns the scores of completions, from 0 to 1; none if there are no completions.

    Args:
      metrics: names in :data:`fedjax_peft.tasks.text_scores.SCORES`.
      predictions: what :func:`completing` gave, in numpy.
      data: the evaluated :class:`fedjax_peft.data.Dataset`.
      tokenizer: the rule for words (:mod:`fedjax_peft.tasks.words`).

    Raises:
      InputError: an unknown metric, or data without a tokenizer or references.
    """
    for metric in metrics:
        check_known("metric", metric, SCORES)
    if "completions" not in predictions:
        return {}
    texts, golds = completed_texts(predictions, data)
    how = {m: {"tokenizer": tokenizer} if m in OF_WORDS else {} for m in metrics}
    return {m: mean_score(functools.partial(SCORES[m], **how[m]), texts, golds) for m in metrics}
