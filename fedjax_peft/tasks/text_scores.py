"""Scores of generated texts: plain functions of strings, without a model.

* :func:`exact_match`, :func:`overlap_f1`: SQuAD's (Rajpurkar et al. 2016), over the words of
  normalised answers.
* :func:`rouge_l`: the F-measure of the longest common subsequence of words (Lin 2004), without
  stemming.
* :func:`gsm8k_match`: the number after ``####``, as the authors of GSM8K (Cobbe et al. 2021) read
  answers.
* :func:`pass_at_k`: the unbiased estimator of Chen et al. (2021), eq. 1.
* :func:`perplexity`: the exponential of the mean loss of a token.

``SCORES`` maps the name of a metric to a function of (answer, gold answer). The first three have a
further argument ``tokenizer``, the name of a rule for words (:mod:`fedjax_peft.tasks.words`). The
rule ``unicode`` is right for every script. For English both rules give the same numbers.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedjax_peft.support.errors import InputError
from fedjax_peft.tasks.words import answer_words, rouge_words

_NUMBER = re.compile(r"#### (\-?[0-9\.\,]+)")


def exact_match(answer: str, gold: str, tokenizer: str = "unicode") -> float:
    """Returns 1 if the answers differ at most in case, punctuation, articles and spaces, else 0."""
    words, of_gold = answer_words(answer, gold, tokenizer)
    return float(words == of_gold)


def overlap_f1(answer: str, gold: str, tokenizer: str = "unicode") -> float:
    """Returns the F1 of the words of two normalized answers; 1 if both are empty."""
    words, of_gold = answer_words(answer, gold, tokenizer)
    if not words or not of_gold:
        return float(words == of_gold)
    common = sum((Counter(words) & Counter(of_gold)).values())
    return 2 * common / (len(words) + len(of_gold))


def rouge_l(answer: str, gold: str, tokenizer: str = "unicode") -> float:
    """Returns the F-measure of the longest common subsequence of words; 0 without words."""
    words, of_gold = rouge_words(answer, gold, tokenizer)
    if not words or not of_gold:
        return 0.0
    common = _longest_common(words, of_gold)
    return 2 * common / (len(words) + len(of_gold))


def _longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    """Returns the length of the longest common subsequence, row by row of the usual table."""
    numbers = {word: i for i, word in enumerate(dict.fromkeys([*a, *b]))}
    of_b = np.array([numbers[word] for word in b])
    row = np.zeros(len(b) + 1, np.int64)
    for word in a:
        # Along b the table never falls, so a running maximum gives the step from the left.
        found = np.maximum(row[1:], np.where(of_b == numbers[word], row[:-1] + 1, 0))
        row[1:] = np.maximum.accumulate(found)
    return int(row[-1])


def final_number(text: str) -> str | None:
    """Returns the first number after ``####`` without its commas; None: there is none."""
    found = _NUMBER.search(text)
    return None if found is None else found.group(1).strip().replace(",", "")


def gsm8k_match(answer: str, gold: str) -> float:
    """Returns 1 if both texts have a number after ``####`` and the numbers are equal, else 0.

    The numbers are compared as strings without commas, as GSM8K's authors do: ``18.0`` is not
    ``18``.

    Raises:
      InputError: the gold answer has no number.
    """
    number = final_number(gold)
    if number is None:
        raise InputError(f"The gold answer {gold[-40:]!r} has no number after '#### '.")
    return float(final_number(answer) == number)


SCORES: Mapping[str, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "f1": overlap_f1,
    "rouge_l": rouge_l,
    "gsm8k": gsm8k_match,
}
"""Metric -> (answer, gold answer) -> a number from 0 to 1; higher is better."""
OF_WORDS = ("exact_match", "f1", "rouge_l")
"""The metrics that compare words, and have the argument ``tokenizer``."""


def best_score(
    score: Callable[[str, str], float], answer: str, golds: str | Sequence[str]
) -> float:
    """Returns the best score of an answer over its gold answers (one, or several)."""
    if isinstance(golds, str):
        golds = [golds]
    return max(score(answer, gold) for gold in golds)


def mean_score(
    score: Callable[[str, str], float], answers: Sequence[str], golds: Sequence[str | Sequence[str]]
) -> float:
    """Returns the mean of :func:`best_score` over answers; NaN without answers.

    Args:
      score: such as :func:`rouge_l`.
      answers: n answers.
      golds: n gold answers, or n lists of them.
    """
    found = [best_score(score, a, g) for a, g in zip(answers, golds, strict=True)]
    return float(np.mean(found)) if found else math.nan


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns the estimated probability that one of ``k`` samples is correct.

    ``1 - C(n - c, k) / C(n, k)`` for c correct ones among n samples: the unbiased estimator of Chen
    et al. (2021), eq. 1, as the product that they compute.

    Raises:
      InputError: ``k`` is not from 1 to ``samples``, or ``correct`` not from 0 to ``samples``.
    """
    if not 1 <= k <= samples:
        raise InputError(f"k = {k} must be from 1 to the number of samples, {samples}.")
    if not 0 <= correct <= samples:
        raise InputError(f"{correct} correct samples of {samples} cannot be.")
    if samples - correct < k:
        return 1.0
    return float(1 - np.prod(1 - k / np.arange(samples - correct + 1, samples + 1)))


def pass_rate(samples: Sequence[Sequence[str]], check: Callable[[str, int], bool], k: int) -> float:
    """Returns the mean of :func:`pass_at_k` over problems; NaN without problems.

    Args:
      samples: completions of each problem, at least ``k`` of each.
      check: your own checker: (completion, index of the problem) -> whether it is correct. It may
        run the completion as a program: do so in a sandbox.
      k: how many samples a user would look at.
    """
    rates = [
        pass_at_k(len(texts), sum(bool(check(text, problem)) for text in texts), k)
        for problem, texts in enumerate(samples)
    ]
    return float(np.mean(rates)) if rates else math.nan


def perplexity(loss: float) -> float:
    """Returns the exponential of the mean loss of a token; infinite for a model that diverged."""
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(loss)))
