"""Question answering: start and end, the best span over all windows, exact match and F1."""

import re
import string
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import approx, assert_close
from hypothesis import given
from hypothesis import strategies as st
from internals import Question, exact_match
from refusals import refused

import fedjax_peft as fp
from fedjax_peft import tasks
from fedjax_peft.tasks.text_scores import overlap_f1
from fedjax_peft.tasks.words import squad_words

LENGTH = 12
CONTEXT = ["On", "Monday", "the", "red", "boat", "left", "Marenholm", "for", "the", "far", "north"]


def windows(*firsts, unit=0, golds=("the red boat",)):
    """Returns windows of 8 words of the context, from the given words on, after 2 other tokens."""
    n = len(firsts)
    context = np.zeros((n, LENGTH), bool)
    offsets = np.zeros((n, LENGTH, 2), np.uint16)
    ends = np.cumsum([len(word) + 1 for word in CONTEXT]) - 1
    starts = ends - [len(word) for word in CONTEXT]
    for row, first in enumerate(firsts):
        words = range(first, min(first + 8, len(CONTEXT)))
        context[row, 2 : 2 + len(words)] = True
        offsets[row, 2 : 2 + len(words)] = np.stack([starts, ends], axis=1)[words]
    columns = {"context_mask": context, "attention_mask": context | (np.arange(LENGTH) < 2)}
    meta = {"unit": np.full(n, unit), "offsets": offsets}
    questions = (Question("q", " ".join(CONTEXT), tuple(golds)),) * (unit + 1)
    return fp.Dataset(columns, (), "x", "question_answering", meta, questions)


def logits(data, *spans):
    """Returns logits that favour, for each window, (first token, last token, how much)."""
    x = np.zeros((len(data), LENGTH, 2), np.float32)
    for row, (start, end, much) in enumerate(spans):
        x[row, start, 0] += much
        x[row, end, 1] += much
    return x


def scored(data, x, **options):
    task = tasks.question_answering(**options)
    batch = {name: jnp.array(column) for name, column in data.columns.items()}
    predictions = jax.jit(task.predict)(fp.contracts.Outputs(jnp.array(x), None), batch)
    return task.score({}, {name: np.asarray(column) for name, column in predictions.items()}, data)


def test_loss_is_the_mean_of_both_ends_over_real_tokens():
    rng = np.random.default_rng(0)
    data = windows(0, 5)
    x = jnp.array(rng.normal(size=(2, LENGTH, 2)), jnp.float32)
    start, end = jnp.array([4, 0]), jnp.array([6, 0])
    real = data.columns["attention_mask"]
    batch = labelled(data, start, end)
    expected = 0.0
    for row in range(2):
        for which, label in enumerate((start[row], end[row])):
            own = np.asarray(x)[row, real[row], which]
            expected += (np.log(np.exp(own).sum()) - own[label]) / 2
    task = tasks.question_answering()
    total, count = task.loss(fp.contracts.Outputs(x, None), batch)
    assert_close(total, expected, rtol=1e-6)
    assert float(count) == 2
    # Padding may hold anything.
    wild = jnp.where(real[..., None], x, jnp.nan)
    assert_close(task.loss(fp.contracts.Outputs(wild, None), batch)[0], total, rtol=1e-6)


def labelled(data, start, end, **more):
    real = jnp.array(data.columns["attention_mask"])
    positions = {"start_positions": jnp.array(start), "end_positions": jnp.array(end)}
    return {"attention_mask": real, **positions, **more}


def test_accuracy_wants_both_ends():
    data = windows(0, 0, 0)
    x = logits(data, (4, 6, 9), (4, 7, 9), (3, 6, 9))
    batch = labelled(data, [4, 4, 4], [6, 6, 6])
    accuracy = tasks.question_answering().metrics(fp.contracts.Outputs(jnp.array(x), None), batch)[
        "accuracy"
    ]
    assert [float(value) for value in accuracy] == [1, 3]


def test_masked_rows_have_no_effect_even_with_nan():
    data = windows(0, 0)
    x = jnp.array(logits(data, (4, 6, 2), (4, 6, 2)))
    batch = labelled(data, [4, 99], [6, 99], mask=jnp.array([True, False]))
    batch["attention_mask"] = batch["attention_mask"].at[1].set(False)
    one = {name: column[:1] for name, column in batch.items()}
    task = tasks.question_answering()
    metrics = task.metrics(fp.contracts.Outputs(x.at[1].set(jnp.nan), None), batch)
    for name, (total, count) in task.metrics(fp.contracts.Outputs(x[:1], None), one).items():
        assert_close(metrics[name], (total, count), rtol=1e-6)
    gradient = jax.grad(lambda x: task.loss(fp.contracts.Outputs(x, None), batch)[0])(x)
    assert np.isfinite(gradient).all()
    assert not np.any(gradient[1])


def test_the_best_window_answers():
    data = windows(0, 3)
    x = logits(data, (4, 6, 3.0), (6, 6, 5.0))  # "the red boat", "Marenholm"
    assert scored(data, x)["exact_match"] == 0
    x = logits(data, (4, 6, 5.0), (6, 6, 3.0))
    assert scored(data, x) == {"exact_match": 1.0, "f1": 1.0, "raw_exact_match": 1.0, "raw_f1": 1.0}


def test_an_answer_cut_by_the_stride_is_scored_on_the_rest():
    data = windows(5, golds=("the red boat left Marenholm",))
    scores = scored(data, logits(data, (2, 3, 5.0)))  # "left Marenholm"
    assert (scores["exact_match"], scores["f1"]) == (0, approx(2 * 2 / (2 + 4)))


@pytest.mark.parametrize("n_best", [1, 3, 20])
def test_spans_are_ordered_short_and_in_the_context(n_best):
    rng = np.random.default_rng(n_best)
    data = windows(0, 2, 6)
    x = rng.normal(size=(3, LENGTH, 2)).astype(np.float32)
    x[:, :2] += 50  # the question
    best, answer = -np.inf, ""
    for row in range(3):
        places = np.flatnonzero(data.columns["context_mask"][row])
        top = [sorted(places, key=lambda i, w=which: -x[row, i, w])[:n_best] for which in (0, 1)]
        for start in top[0]:
            for end in top[1]:
                value = x[row, start, 0] + x[row, end, 1]
                if start <= end < start + 3 and value > best:
                    first, last = data.meta["offsets"][row, [start, end], [0, 1]]
                    best, answer = value, " ".join(CONTEXT)[first:last]
    gold = replace(data, references=(Question("q", " ".join(CONTEXT), (answer or "?",)),))
    scores = scored(gold, x, n_best=n_best, max_answer_length=3)
    assert scores["exact_match"] == float(bool(answer))


def test_an_answer_has_at_most_so_many_tokens_or_is_empty():
    data = windows(0, golds=("red boat left",))
    x = logits(data, (5, 7, 9.0))
    assert scored(data, x, max_answer_length=3)["exact_match"] == 1
    assert scored(data, x, max_answer_length=2)["exact_match"] == 0
    assert scored(data, logits(data, (6, 4, 9.0)), n_best=1)["f1"] == 0  # the end comes first
    wild = np.full_like(x, np.nan)
    assert scored(data, wild)["f1"] == 0
    assert scored(windows(0, golds=("The",)), wild)["exact_match"] == 1


def test_several_golds_several_questions():
    first = windows(0, golds=("boat", "the red boat", "a red boat!"))
    second = windows(0, unit=1, golds=("Monday",))
    columns, meta = (
        {name: np.concatenate([x, b[name]]) for name, x in a.items()}
        for a, b in ((first.columns, second.columns), (first.meta, second.meta))
    )
    golds = (first.references[0], second.references[1])
    data = replace(first, columns=columns, meta=meta, references=golds)
    scores = scored(data, logits(data, (4, 6, 5.0), (5, 6, 5.0)))  # "the red boat", "red boat"
    assert scores["exact_match"] == 1 / 2
    assert scores["f1"] == 1 / 2
    assert scores["raw_exact_match"] == approx(2 / 4)
    assert scores["raw_f1"] == approx((2 / 3 + 1 + 1 + 0) / 4)
    # A part of the data has the questions of its windows only.
    part = data.take(np.array([1]))
    assert scored(part, logits(part, (3, 3, 5.0)))["exact_match"] == 1


@pytest.mark.parametrize(
    ("none", "golds", "right"),
    [
        # The logits of no answer in both windows; the best span has 5 + 5.
        ((9.0, 9.0), ("the red boat",), 1),
        ((11.0, 9.0), ("the red boat",), 1),  # one window decides
        ((11.0, 12.0), ("the red boat",), 0),
        ((11.0, 12.0), ("",), 1),
        ((9.0, 12.0), ("",), 0),
        ((10.0, 12.0), ("the red boat",), 1),  # equal
    ],
)
def test_no_answer_needs_a_higher_score_in_every_window(none, golds, right):
    """SQuAD 2's rule, as transformers' run_qa has it: the least of the windows' scores of [CLS]."""
    data = windows(0, 3, golds=golds)
    x = logits(data, (4, 6, 5.0), (6, 6, 1.0))
    x[:, 0] = np.array(none, np.float32)[:, None] / 2
    scores = scored(data, x, unanswerable=True)
    assert scores["exact_match"] == scores["f1"] == right
    # Without the option, [CLS] is no answer.
    assert scored(data, x)["exact_match"] == float(golds != ("",))


def test_fewer_tokens_than_n_best():
    data = windows(8)
    assert data.columns["context_mask"].sum() == 3
    predictions = tasks.question_answering().predict(
        fp.contracts.Outputs(jnp.array(logits(data, (3, 3, 1.0))), None),
        {"context_mask": jnp.array(data.columns["context_mask"])},
    )
    assert {column.shape for column in predictions.values()} == {(1, 20)}
    assert np.isfinite(predictions["start_logit"]).sum() == 3


def official(answer, gold):
    """The published evaluation of SQuAD, as its description reads, step by step."""

    def tokens(text):
        text = "".join(c for c in text.lower() if c not in set(string.punctuation))
        return re.sub(r"\b(a|an|the)\b", " ", text, flags=re.UNICODE).split()

    ours, theirs = tokens(answer), tokens(gold)
    if not ours or not theirs:
        return ours == theirs, float(ours == theirs)
    same, rest = 0, list(theirs)
    for word in ours:
        if word in rest:
            rest.remove(word)
            same += 1
    if not same:
        return ours == theirs, 0.0
    precision, recall = same / len(ours), same / len(theirs)
    return ours == theirs, 2 * precision * recall / (precision + recall)


WORDS = ["The", "an", "theme", "Boat", "boat", "1,000", "U.S.", "–", "«ja»", "İ", "naïve", "-", ""]


@given(*[st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)] * 2)
def test_comparisons_equal_a_plain_reading_of_the_official_ones(answer, gold):
    exact, f1 = official(answer, gold)
    assert exact_match(answer, gold) == float(exact)
    assert overlap_f1(answer, gold) == approx(f1, abs=1e-12)


@pytest.mark.parametrize(
    ("answer", "gold", "exact", "f1"),
    [
        ("The Eiffel tower!", "eiffel Tower", 1, 1),
        ("theatre", "the atre", 0, 0),  # articles are whole words
        ("an-other", "another", 1, 1),  # punctuation goes first
        ("1,000 km", "1000 km", 1, 1),
        ("«red»", "red", 0, 0),  # only ASCII punctuation goes
        ("rouge – vert", "rouge vert", 0, 0.8),
        ("ÉCOLE", "école", 1, 1),
        ("red red boat", "red boat boat", 0, 2 / 3),  # a multiset
        ("", "boat", 0, 0),
        ("the", "", 1, 1),
        ("...", "the", 1, 1),
    ],
)
def test_comparisons(answer, gold, exact, f1):
    assert exact_match(answer, gold) == exact
    assert overlap_f1(answer, gold) == approx(f1)
    assert squad_words("  The  U.S. of\tA., an\u00a0isle ") == ["us", "of", "isle"]


def test_rows_name_the_rule_for_other_scripts_and_gold_answers_need_a_word():
    task = tasks.question_answering()
    assert task.words(windows(0, golds=("the red boat", "Köln"))) is None
    assert task.words(windows(0, golds=("the red boat", "東京"))) == "unicode"
    task.check(windows(0, golds=("...",)), "training")
    task.check(windows(0, golds=("...", "boat")), "test")
    with pytest.raises(fp.InputError, match=r"test data .* gold answer '\.\.\.' has no word.*'q'"):
        task.check(windows(0, golds=("...",)), "test")


def test_settings():
    assert tasks.question_answering().headline == "f1"
    assert tasks.question_answering(metric="fednlp_raw").headline == "raw_f1"
    refused("Did you mean 'squad'", tasks.question_answering, metric="squat")
    refused("n_best = 0", tasks.question_answering, n_best=0)
    data = windows(0)
    plain = fp.Dataset(data.columns, (), "x", "question_answering")
    refused(r"data set 'x' .* 'offsets'", scored, plain, logits(data, (4, 6, 1.0)))
