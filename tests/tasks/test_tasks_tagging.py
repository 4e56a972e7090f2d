"""Tagging: sums over labelled tokens, and entity scores equal to seqeval."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import approx, assert_close
from internals import IGNORE
from seqeval.metrics import f1_score, precision_score, recall_score

import fedjax_peft as fp
from fedjax_peft import tasks

NAMES = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


def outputs(logits):
    return fp.contracts.Outputs(logits, logits)


def dataset(sentences, kept=None):
    """Returns one token a word, after a first special one; ``kept`` words of each survive."""
    length = 2 + max(map(len, sentences))
    labels = np.full((len(sentences), length), IGNORE, np.int32)
    for row, tags in enumerate(sentences):
        some = tags[: kept and kept[row]]
        labels[row, 1 : 1 + len(some)] = [NAMES.index(tag) for tag in some]
    meta = {"unit": np.arange(len(sentences))}
    return fp.Dataset({"labels": labels}, NAMES, "x", "tagging", meta, sentences)


def score(gold, predicted, kept=None):
    predictions = np.zeros_like(dataset(gold).labels) + 4  # where there is no label, anything
    for row, tags in enumerate(predicted):
        predictions[row, 1 : 1 + len(tags)] = [NAMES.index(tag) for tag in tags]
    return tasks.tagging().score({}, {"tag": predictions}, dataset(gold, kept))


def test_loss_and_accuracy_are_of_labelled_tokens_of_real_rows():
    rng = np.random.default_rng(0)
    logits = jnp.array(rng.normal(size=(3, 4, 5)), jnp.float32)
    labels = jnp.array([[IGNORE, 3, 4, IGNORE], [IGNORE, 0, 0, 0], [2, IGNORE, 1, 0]])
    mask = jnp.array([True, False, True])
    counted = np.array([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]], bool)
    batch = {"labels": labels, "mask": mask}
    logs = np.asarray(jax.nn.log_softmax(logits))[counted]
    own = np.asarray(labels)[counted]
    hostile = logits.at[1].set(jnp.nan)
    total, count = tasks.tagging().loss(outputs(hostile), batch)
    assert_close(total, -logs[np.arange(5), own].sum(), rtol=1e-6)
    assert float(count) == 5
    right, tokens = tasks.tagging().metrics(outputs(hostile), batch)["accuracy"]
    assert (float(right), float(tokens)) == (np.sum(logs.argmax(1) == own), 5)
    gradient = jax.grad(lambda x: tasks.tagging().loss(outputs(x), batch)[0])(logits)
    assert np.array_equal(np.any(np.asarray(gradient) != 0, axis=-1), counted)


def test_no_labelled_tokens_have_zero_sums_and_the_largest_logit_is_predicted():
    batch = {"labels": jnp.full((2, 3), IGNORE)}
    total, count = tasks.tagging().loss(outputs(jnp.ones((2, 3, 5))), batch)
    assert (float(total), float(count)) == (0, 0)
    predictions = tasks.tagging().predict(outputs(jnp.eye(5)[None]), {})["tag"]
    assert predictions.tolist() == [[0, 1, 2, 3, 4]]
    assert predictions.dtype == jnp.int32


@pytest.mark.parametrize(
    ("gold", "predicted", "right", "found", "expected"),
    [
        ("B-PER I-PER O B-LOC", "B-PER I-PER O B-LOC", 2, 2, 2),
        ("B-PER I-PER O B-LOC", "B-PER O O B-LOC", 1, 2, 2),  # half an entity is none
        ("O I-PER O", "O B-PER O", 1, 1, 1),  # I- after O begins one
        ("B-PER I-LOC", "B-PER B-LOC", 2, 2, 2),  # so does I- of another type
        ("B-LOC B-LOC", "B-LOC I-LOC", 0, 1, 2),  # two that touch
        ("B-LOC I-LOC", "B-PER I-PER", 0, 1, 1),
        ("O O", "O B-LOC", 0, 1, 0),
        ("O B-LOC", "O O", 0, 0, 1),
        ("O O", "O O", 0, 0, 0),
    ],
)
def test_entities(gold, predicted, right, found, expected):
    scores = score([gold.split(), ["O"]], [predicted.split(), ["O"]])
    assert scores["precision"] == (right / found if found else 0)
    assert scores["recall"] == (right / expected if expected else 0)
    assert scores["f1"] == approx(2 * right / (found + expected) if found + expected else 0)
    assert scores["lost_entities"] == 0


def test_entities_do_not_reach_into_the_next_sentence():
    gold = [["B-LOC"], ["I-LOC", "O"]]
    assert score(gold, [["B-LOC"], ["O", "O"]])["recall"] == 0.5


def test_words_that_were_cut_off_are_not_compared_but_counted():
    gold = [["B-PER", "O", "B-LOC", "I-LOC"], ["O", "B-LOC", "O"]]
    predictions = [["B-PER", "O", "B-PER", "B-PER"], ["O", "B-LOC", "B-LOC"]]
    scores = score(gold, predictions, kept=[2, 2])
    assert (scores["f1"], scores["precision"], scores["recall"]) == (1, 1, 1)
    assert scores["lost_entities"] == approx(1 / 3)
    # Of an entity that is cut through, the rest is compared.
    assert score(gold, predictions, kept=[3, 3])["lost_entities"] == 0


@pytest.mark.parametrize("seed", range(5))
def test_scores_equal_seqeval(seed):
    rng = np.random.default_rng(seed)
    gold, predictions = (
        [[NAMES[i] for i in rng.integers(0, 5, n)] for n in range(1, 20)] for _ in range(2)
    )
    scores = score(gold, predictions)
    assert scores["f1"] == approx(f1_score(gold, predictions))
    assert scores["precision"] == approx(precision_score(gold, predictions))
    assert scores["recall"] == approx(recall_score(gold, predictions))
