"""Padded lengths: their choice, and the independence of results from them."""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest
import running
import toy
from closeness import approx, assert_close
from hypothesis import given
from hypothesis import strategies as st
from internals import Task

import fedjax_peft as fp
from fedjax_peft import Clients, Dataset
from fedjax_peft.engine.lengths import Lengths, token_columns

pytestmark = [pytest.mark.slow, pytest.mark.lengths]

FULL = 64


def columns(lengths, full=FULL):
    mask = np.arange(full)[None] < np.asarray(lengths)[:, None]
    ids = np.random.default_rng(0).integers(5, 60, mask.shape)
    return {"input_ids": np.where(mask, ids, 0).astype(np.int32), "attention_mask": mask}


def fitted(lengths, group=1, most=4, full=FULL):
    return Lengths.of(columns(lengths, full), most).fitted(group)


def test_columns_with_an_axis_of_tokens():
    data = {**columns([3, 4]), "labels": np.zeros(2), "pixel_values": np.zeros((2, 3, 8, 8))}
    assert token_columns(data) == {"input_ids", "attention_mask"}
    assert token_columns({"x": np.zeros((2, FULL))}) == frozenset()
    assert Lengths.of({"x": np.zeros((2, FULL))}, 4) is None


def test_lengths_count_up_to_the_last_real_token():
    mask = np.array([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]], bool)
    assert Lengths.of({"attention_mask": mask}, 4).examples.tolist() == [2, 4, 3, 4]


@pytest.mark.parametrize(
    ("lengths", "padded"),
    [
        ([5] * 10, (8,)),
        ([64] * 10, (64,)),
        ([5] * 50 + [60] * 50, (8, 64)),
        ([61] * 99 + [5], (64,)),  # a length for one text in a hundred does not pay
        ([5] * 90 + [20] * 90 + [60] * 90, (8, 24, 64)),
    ],
)
def test_the_lengths_that_pay(lengths, padded):
    assert fitted(lengths).padded == padded


def test_larger_groups_are_longer_so_that_short_lengths_do_not_pay():
    lengths = [5] * 90 + [60] * 10
    assert fitted(lengths, group=1).padded == (8, 64)
    assert fitted(lengths, group=100).padded == (64,)


@pytest.mark.parametrize(("most", "padded"), [(0, (FULL,)), (1, (32,)), (2, (8, 32))])
def test_the_number_of_padded_lengths(most, padded):
    assert fitted([5] * 50 + [30] * 50, most=most).padded == padded


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    group=st.integers(1, 5),
    most=st.integers(1, 3),
)
def test_the_chosen_lengths_are_the_best(lengths, group, most):
    """No other choice of the same number of multiples of 8 has a smaller expected length."""
    chosen = fitted(lengths, group, most, full=40).padded
    lengths = [n or 40 for n in lengths]  # of a text without tokens nothing can be left out
    share = [np.mean(np.array(lengths) <= edge) ** group for edge in range(0, 48, 8)]

    def cost(padded):
        reached = [0.0] + [share[edge // 8] for edge in padded]
        return sum(e * (b - a) for e, a, b in zip(padded, reached, reached[1:], strict=False))

    top = max(8, -(-max(lengths) // 8) * 8)
    choices = itertools.combinations(range(8, top, 8), len(chosen) - 1)
    assert chosen[-1] == top
    assert cost(chosen) == approx(min(cost((*c, top)) for c in choices))


@given(lengths=st.lists(st.integers(0, 64), min_size=1, max_size=40), data=st.data())
def test_a_step_is_as_long_as_its_longest_example_needs(lengths, data):
    tokens = fitted(lengths)
    lengths = [n or FULL for n in lengths]
    rows = np.array(data.draw(st.lists(st.integers(-1, len(lengths) - 1), min_size=6, max_size=6)))
    rows = rows.reshape(1, 3, 2)  # one step of three lanes
    (bucket,) = tokens.bucket(rows)
    longest = max(0 if i < 0 else lengths[i] for i in rows.ravel())
    assert tokens.padded[bucket] >= longest
    assert bucket == 0 or tokens.padded[bucket - 1] < longest
    real = sum(0 if i < 0 else lengths[i] for i in rows.ravel())
    share = tokens.padding_share(rows, np.array([bucket]))
    assert share == approx(1 - real / (6 * tokens.padded[bucket]))


SIZES = (7, 3, 12, 1, 9)


def federation():
    rng = np.random.default_rng(1)
    n = sum(SIZES)
    lengths = np.where(rng.random(n) < 0.75, rng.integers(1, 8, n), rng.integers(8, 32, n))
    lengths[5] = 0  # a text without tokens, as GPT-2's tokenizer makes of an empty one
    labels = (np.arange(n) % 3).astype(np.int32)
    data = Dataset({**columns(lengths, 32), "labels": labels}, ("class 0", "class 1", "class 2"))
    rows = np.split(rng.permutation(n).astype(np.int32), np.cumsum(SIZES)[:-1])
    return Clients(data, tuple(rows))


ALGORITHM = fp.algorithms.fedavg(optax.sgd(0.1))
text_model = functools.cache(toy.text_model)
"""With dropout, but not of single tokens; for that see ``test_models_padding.py``."""


@functools.cache
def run(length_buckets, *, lanes=1, task=None, **options):
    clients = federation()
    options |= {"clients": clients, "test": clients.data, "client_test": clients, "batch_size": 2}
    options |= {"model": text_model(), "eval_batch_size": 4, "length_buckets": length_buckets}
    return running.run(ALGORITHM, lanes=lanes, task=task, **options)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.sample("3")
def test_results_are_those_of_full_padding_dropout_included(lanes):
    full, short = run(0), run(2, lanes=lanes)
    for name, value in full.params.items():
        assert_close(short.params[name], value, atol=1e-5)
    for a, b in zip(full.metrics, short.metrics, strict=True):
        for key in ("train_loss", "test_loss", "test_accuracy", "client_loss_std"):
            if key in a:
                assert b[key] == approx(a[key], abs=1e-5)
    shares = [(a["padding_share"], b["padding_share"])
              for a, b in zip(full.metrics[1:], short.metrics[1:], strict=True)]  # fmt: skip
    assert all(b < a - 0.02 for a, b in shares), shares


def test_predictions_are_scored_in_the_order_of_the_data():
    """The score gets every example once, with the token axis padded with zeros."""
    seen = []

    def score(means, predictions, data):
        seen.append((predictions, data))
        assert set(means) == {"loss"}
        return {"tokens": float(data.columns["attention_mask"].sum())}

    def count(outputs, batch):
        del outputs
        return jax.numpy.sum(batch["mask"]) * 1.0, jax.numpy.sum(batch["mask"]) * 1.0

    task = Task(
        loss=lambda outputs, batch: (jax.numpy.sum(outputs.logits**2), count(outputs, batch)[1]),
        metrics=lambda outputs, batch: {"loss": count(outputs, batch)},
        predict=lambda outputs, batch: {"ids": batch["input_ids"], "label": batch["labels"]},
        score=score,
    )
    clients = federation()
    result = run(2, task=task, eval_every=2)
    assert len(seen) == 2 * (1 + len(SIZES))
    for predictions, data in seen:
        np.testing.assert_array_equal(predictions["label"], data.columns["labels"])
        np.testing.assert_array_equal(predictions["ids"], data.columns["input_ids"])
    own = [clients.data.take(rows).columns["attention_mask"].sum() for rows in clients.indices]
    last = result.metrics[-1]
    assert last["test_tokens"] == sum(own)
    assert last["client_tokens_mean"] == approx(np.mean(own))
    assert last["client_tokens_worst"] == min(own)
