"""Scores of texts, against ``rouge_score``, the authors' formulas, and numbers by hand."""

import math
import re
from itertools import combinations

import numpy as np
import pytest
from closeness import approx
from rouge_score.rouge_scorer import RougeScorer

from fedjax_peft.support.errors import InputError
from fedjax_peft.tasks.text_scores import (
    SCORES,
    best_score,
    exact_match,
    final_number,
    gsm8k_match,
    mean_score,
    pass_at_k,
    pass_rate,
    perplexity,
    rouge_l,
)

WORDS = [*"abc", "The", "cat,", "Red-hot", "3,000", "°C", "café", "naïve.", "don't", "!"]


def test_rouge_l_is_that_of_rouge_score():
    reference = RougeScorer(["rougeL"], use_stemmer=False)
    rng = np.random.default_rng(0)
    for _ in range(200):
        answer, gold = (" ".join(rng.choice(WORDS, rng.integers(0, 14))) for _ in range(2))
        expected = reference.score(gold, answer)["rougeL"].fmeasure
        assert rouge_l(answer, gold) == approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        ("the cat sat", "the cat on the mat", 2 * 2 / 8),
        ("a b c d", "d c b a", 2 / 8),
        ("", "a", 0.0),
        ("a", "", 0.0),
        ("!!", "??", 0.0),
    ],
)
def test_rouge_l_by_hand(answer, gold, score):
    assert rouge_l(answer, gold) == approx(score)


def authors_answer(completion):
    """GSM8K's reading of an answer, after the description of its repository (dataset.py)."""
    match = re.compile(r"#### (\-?[0-9\.\,]+)").search(completion)
    return match.group(1).strip().replace(",", "") if match else "[invalid]"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("So she has 9 * 2 = 18.\n#### 18", 1),
        ("#### 18\n#### 19", 1),
        ("#### 18.0", 0),
        ("####18", 0),
        ("The answer is 18", 0),
        ("#### 1,8", 1),
        ("#### -18", 0),
        ("", 0),
    ],
)
def test_numbers_of_gsm8k(answer, right):
    gold = "9 eggs at $2\n#### 18"
    assert gsm8k_match(answer, gold) == right
    valid = authors_answer(answer) != "[invalid]"
    assert (valid and authors_answer(answer) == authors_answer(gold)) == bool(right)


def test_gold_answers_without_a_number_are_refused():
    assert final_number("none") is None
    with pytest.raises(InputError, match="has no number"):
        gsm8k_match("#### 3", "three")


def test_the_best_of_several_gold_answers_counts():
    assert best_score(rouge_l, "a b", ["x", "a c"]) == 0.5
    assert best_score(rouge_l, "a b", "a c") == 0.5
    assert mean_score(exact_match, ["a b", "c"], [["x", "b"], "d"]) == 0.5
    assert math.isnan(mean_score(exact_match, [], []))
    assert set(SCORES) == {"exact_match", "f1", "rouge_l", "gsm8k"}


@pytest.mark.parametrize(("n", "c"), [(5, 0), (5, 1), (5, 2), (6, 5), (4, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n, c):
    correct = [i < c for i in range(n)]
    for k in range(1, n + 1):
        subsets = [any(subset) for subset in combinations(correct, k)]
        assert pass_at_k(n, c, k) == approx(np.mean(subsets), abs=1e-12)
    for impossible in ((n, c, 0), (n, c, n + 1), (n, n + 1, 1), (n, -1, 1)):
        with pytest.raises(InputError):
            pass_at_k(*impossible)


def test_pass_rate_asks_the_users_checker():
    samples = [["1", "2", "3"], ["4", "5", "6"]]
    asked = []

    def check(text, problem):
        asked.append((problem, text))
        return int(text) % 2 == problem

    assert pass_rate(samples, check, 1) == approx((1 / 3 + 1 / 3) / 2)
    assert pass_rate(samples, check, 3) == 1
    assert asked[:6] == [(p, text) for p in (0, 1) for text in samples[p]]


def test_perplexity():
    assert perplexity(math.log(7)) == approx(7)
    assert perplexity(1e6) == math.inf
