"""Scores of texts, against ``rouge_score``, the authors' formulas, and numbers by hand."""

import math
import re
import types
import unicodedata
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import regex
from closeness import approx
from internals import exact_match, mean_score, rouge_l
from rouge_score.rouge_scorer import RougeScorer

import fedjax_peft as fp
from fedjax_peft.tasks.text_scores import (
    OF_WORDS,
    SCORES,
    best_score,
    final_number,
    gsm8k_match,
    overlap_f1,
    pass_at_k,
    pass_rate,
    perplexity,
)
from fedjax_peft.tasks.words import has_words, rule_for

ENGLISH = [*"abc", "The", "cat,", "Red-hot", "3,000", "don't", "!", "a_b"]
SIGNS = [
    "°C",
    "don’t",
    "1990–1995",
    "“so”",
    "½",
    "m²",
    "\u200b",
    "☺️",
    "👍",
    "©",
    "…",
    "1️⃣",
    "é",
    "naïve.",
]


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [("unicode", ENGLISH + SIGNS[:-2]), ("rouge_score", ENGLISH + SIGNS)],
)
def test_rouge_l_of_english_is_that_of_rouge_score(tokenizer, words):
    reference = RougeScorer(["rougeL"], use_stemmer=False)
    rng = np.random.default_rng(0)
    for _ in range(300):
        answer, gold = (" ".join(rng.choice(words, rng.integers(0, 14))) for _ in range(2))
        gold = f"{gold} end"  # a gold answer of signs alone would have words by Unicode
        expected = reference.score(gold, answer)["rougeL"].fmeasure
        assert rouge_l(answer, gold, tokenizer) == approx(expected, abs=1e-12)


SCRIPTS = {
    "Latin": "Où êtes-vous né ?",
    "Cyrillic": "Привет, мой мир!",
    "Greek": "Ὁ Ὀδυσσεὺς εἶπεν·",
    "Arabic": "مرحبا، يا عَالَم؟",
    "Hebrew": "שָׁלוֹם לָעוֹלָם",
    "Devanagari": "नमस्ते दुनिया। शिंजो",
    "Korean": "안녕하세요, 넓은 세계",
    "Chinese": "今天天气很好。",
    "Japanese": "東京タワーはガラス、333mです。",
    "Thai": "สวัสดีครับ นี่คือน้ำ",
}
UNSPACED = ("Chinese", "Japanese", "Thai")


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_perfect_answers_are_perfect_in_every_script_and_form(script, form):
    text = SCRIPTS[script]
    answer = unicodedata.normalize(form, text)
    for name in OF_WORDS:
        assert SCORES[name](answer, text) == SCORES[name](text, answer) == 1, name


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_of_scripts_are_those_of_spaces_or_graphemes(script):
    """Against a plain reading: punctuation is no word, and a grapheme is one without spaces."""
    text = unicodedata.normalize("NFKC", SCRIPTS[script]).casefold()
    marked = regex.sub(r"[^\p{L}\p{M}\p{N}]+", " ", text).split()
    if script in UNSPACED:
        marked = [x for word in marked for x in regex.findall(r"[0-9a-z]+|\p{L}\p{M}*", word)]
    reference = RougeScorer(["rougeL"], tokenizer=types.SimpleNamespace(tokenize=str.split))
    rng = np.random.default_rng(0)
    for _ in range(40):
        words = list(rng.permutation(marked)[: rng.integers(1, len(marked))])
        joined = ("" if script in UNSPACED else " ").join(words)
        expected = reference.score(" ".join(marked), " ".join(words))["rougeL"].fmeasure
        assert rouge_l(joined, SCRIPTS[script]) == approx(expected, abs=1e-12)
        common = sum((Counter(words) & Counter(marked)).values())
        if script != "Latin":  # an apostrophe or a hyphen does not separate for SQuAD
            assert overlap_f1(joined, SCRIPTS[script]) == approx(
                2 * common / (len(words) + len(marked)), abs=1e-12
            )


@pytest.mark.parametrize(
    ("answer", "gold", "exact", "f1", "rouge"),
    [
        ("été", "t", 0, 0, 0),
        ("東京です", "東京", 0, 2 / 3, 2 / 3),
        ("大阪", "東京", 0, 0, 0),
        ("今 天", "今天。", 1, 1, 1),
        ("ＡＢＣ東京", "abc 東京", 1, 1, 1),
        ("ﾊﾟﾝ", "パン", 1, 1, 1),
        ("ΟΔΟΣ", "οδος", 1, 1, 1),
        ("ОН, ОНА", "«он» она", 1, 1, 1),
        ("می\u200cخواهم", "میخواهم", 1, 1, 1),
        ("١٢٣", "١٢٣", 1, 1, 1),
        ("क", "कि", 0, 0, 0),  # a vowel sign is a part of the letter
        ("👍", "👍", 1, 1, 1),
        ("👍", "😀", 0, 0, 0),
        ("❤", "❤\ufe0f नमस्ते", 0, 2 / 3, 2 / 3),
        ("nai\u0308ve", "naïve", 1, 1, 1),
        ("«oui»", "oui", 0, 0, 1),  # SQuAD's rules for the Latin script
    ],
)
def test_scores_of_other_scripts_by_hand(answer, gold, exact, f1, rouge):
    assert exact_match(answer, gold) == exact
    assert overlap_f1(answer, gold) == approx(f1)
    assert rouge_l(answer, gold) == approx(rouge)


def test_the_rule_for_gold_answers():
    assert rule_for(["a m² “so” 👍", "b"]) == "rouge_score"
    assert rule_for(["a", "café"]) == rule_for(["a", "👍"]) == "unicode"
    assert rule_for(["привет"], "rouge_score") == "rouge_score"
    assert rouge_l("привет", "привет", "rouge_score") == 0
    assert overlap_f1("東京です", "東京", "rouge_score") == 0
    assert [has_words(text) for text in ("a", "…", "", " -", "€", "東", "½")] == [
        *(True, False, False, False, True, True, True)
    ]


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
    with pytest.raises(fp.InputError, match="has no number"):
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
        with pytest.raises(fp.InputError):
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
