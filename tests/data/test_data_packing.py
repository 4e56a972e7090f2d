"""Packed rows: the same examples, losses, gradients and rounds as without packing."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closeness import assert_close
from internals import Schedule
from options import run_options
from refusals import refusals

import fedjax_peft as fp
from fedjax_peft import tasks
from fedjax_peft.data.packing import bins

pytestmark = pytest.mark.slow

LENGTHS = [3, 9, 4, 12, 2, 5, 7, 3, 11, 6]
OWNED = ([0, 1, 2, 3, 4, 5], [6, 7], [8, 9])
CONFIG = {
    "model_type": "gpt2",
    **{"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
TASK = tasks.instruction_tuning()


def data(**more):
    rng = np.random.default_rng(0)
    mask = np.arange(12) < np.array(LENGTHS)[:, None]
    columns = {
        "input_ids": np.where(mask, rng.integers(1, 40, mask.shape), 0).astype(np.int32),
        "attention_mask": mask,
        "loss_mask": mask & (rng.random(mask.shape) < 0.6),
        "prompt_ids": np.ones((10, 3), np.int32),
    }
    columns["loss_mask"][:, 0] = False
    meta = {"unit": np.arange(10, dtype=np.int32)}
    return fp.Dataset(columns | more, name="short", task=TASK, meta=meta)


def clients():
    return fp.Clients(data(), tuple(np.array(own, np.int32) for own in OWNED), ("a", "b", "c"))


@functools.cache
def model():
    """Returns GPT-2 with LoRA factors that are not zero, so that all of them have gradients."""
    model = fp.attach(
        fp.random_model(CONFIG, head=fp.heads.causal_lm()), fp.lora(rank=2, init="gaussian")
    )
    rng = np.random.default_rng(1)
    noisy = {n: x + rng.normal(0, 0.1, x.shape).astype("f4") for n, x in model.trainable.items()}
    return dataclasses.replace(model, trainable=noisy)


@pytest.mark.parametrize("capacity", [12, 13, 30])
def test_bins_hold_every_item_once(capacity):
    sizes = np.random.default_rng(capacity).integers(0, 13, 200)
    groups = bins(sizes, capacity)
    assert sorted(i for group in groups for i in group) == list(range(200))
    totals = [sizes[group].sum() for group in groups]
    assert max(totals) <= capacity
    # No two groups fit into one, for otherwise the smaller one would not have been begun.
    assert sum(sorted(totals)[:2]) > capacity
    assert groups == bins(sizes, capacity)


def test_bins_of_nothing():
    assert bins(np.zeros(0, int), 5) == []


def test_rows_hold_the_examples_of_one_client():
    before, after = clients(), clients().pack(16)
    columns = after.data.columns
    for own, rows in zip(before.indices, after.indices, strict=True):
        found = []
        for row in rows:
            segments = columns["segment_ids"][row]
            assert np.array_equal(segments > 0, columns["attention_mask"][row])
            for segment in range(1, segments.max() + 1):
                place = segments == segment
                assert columns["position_ids"][row][place].tolist() == list(range(place.sum()))
                ids, loss = (columns[n][row][place].tolist() for n in ("input_ids", "loss_mask"))
                found.append((ids, loss))
        expected = []
        for example in own:
            size = LENGTHS[example]
            ids, loss = (before.data.columns[n][example] for n in ("input_ids", "loss_mask"))
            expected.append((ids[:size].tolist(), loss[:size].tolist()))
        assert sorted(found) == sorted(expected)
    assert after.names == before.names
    assert after.weights.tolist() == [6, 2, 2]
    assert after.sizes.sum() < 10
    assert columns.keys() == {
        *("input_ids", "attention_mask", "loss_mask", "segment_ids", "position_ids")
    }


def total(params, batch):
    outputs = model().apply(model().frozen, params, batch, None, False)
    return TASK.loss(outputs, batch)


@functools.cache
def slopes():
    """Returns the function of losses and gradients, which two tests call with the same shapes."""
    return jax.jit(jax.value_and_grad(total, has_aux=True))


def unpacked():
    return {n: jnp.asarray(x) for n, x in data().columns.items() if n != "prompt_ids"}


def test_losses_and_gradients_equal_those_of_unpacked_examples():
    packed = {n: jnp.asarray(x) for n, x in clients().pack(16).data.columns.items()}
    assert len(packed["input_ids"]) < 10
    results = [slopes()(model().trainable, batch) for batch in (unpacked(), packed)]
    ((loss, count), gradient), ((packed_loss, packed_count), packed_gradient) = results
    assert count == packed_count == data().columns["loss_mask"].sum()
    assert_close(packed_loss, loss, rtol=1e-6)
    for name, x in gradient.items():
        assert np.abs(x).max() > 1e-3, name
        assert_close(packed_gradient[name], x, atol=1e-5, err_msg=name)


def test_an_example_of_a_row_does_not_see_the_others():
    packed = dict(clients().pack(16).data.columns)
    row = int(np.argmax(packed["segment_ids"].max(axis=1)))
    other = packed["input_ids"].copy()
    first = packed["segment_ids"][row] == 1
    other[row, first] = (other[row, first] % 39) + 1
    apply = jax.jit(model().apply, static_argnums=(3, 4))
    logits = [
        apply(model().frozen, model().trainable, packed | {"input_ids": x}, None, False)
        for x in (packed["input_ids"], other)
    ]
    later = packed["segment_ids"][row] > 1
    np.testing.assert_array_equal(logits[0].logits[row, later], logits[1].logits[row, later])
    assert np.abs(logits[0].logits[row, first] - logits[1].logits[row, first]).max() > 1e-3


def test_a_round_of_packed_clients_equals_one_without_packing():
    """One step of each client over all of its examples; the weights are 6, 2 and 2."""
    method = fp.algorithms.fedavg(optax.sgd(0.1))
    how = run_options(rounds=1, batch_size=6, seed=3, progress=False)
    run = fp.simulate(model(), method, clients().pack(16), **how)
    before, columns = model().trainable, unpacked()
    expected = dict(before)
    for own, weight in zip(OWNED, (6, 2, 2), strict=True):
        mask = columns["loss_mask"] & np.isin(np.arange(10), own)[:, None]
        (_, count), slope = slopes()(before, columns | {"loss_mask": mask})
        expected = {n: x - 0.1 * weight / 10 * slope[n] / count for n, x in expected.items()}
    for name, kind in model().kinds.items():
        if kind != "fixed":
            assert_close(run.params[name], expected[name], atol=1e-6, err_msg=name)
            assert np.abs(run.params[name] - before[name]).max() > 1e-4, name


def test_weights_decide_about_sampling_by_size():
    weights = np.array([1.0, 0.0, 5.0])
    indices = [np.arange(3), np.arange(3), np.arange(3)]
    schedule = Schedule(indices, 1, 2, 1, None, 0, "size", given_weights=weights)
    drawn = [schedule.members(round_index)[0] for round_index in range(1, 200)]
    assert 1 not in drawn
    assert 20 < drawn.count(0) < 50
    assert schedule.cohort(1, members=[0, 2]).weight == [1, 5]
    assert schedule._replace(indices=[[], [], np.arange(2)]).weights.tolist() == [0, 0, 5]


test_packing_is_refused_where_it_does_not_fit = refusals(
    operator.call,
    (lambda: clients().pack(10), "has 12 tokens, which do not fit into rows of 10"),
    (lambda: clients().pack(16).pack(16), "packed already"),
    (
        lambda: fp.Clients(fp.Dataset({"x": np.ones(2)}), (np.arange(2),)).pack(16),
        "has no 'loss_mask'",
    ),
    (lambda: fp.Clients(np.zeros(3, int), (np.arange(3),)).pack(16), "not labels alone"),
    (lambda: clients().pack(1), "length = 1 must be"),
    (lambda: clients().pack(16).holdout(0.5), "Hold out examples before"),
)


def test_packed_rows_need_a_model_that_keeps_their_examples_apart():
    lstm = {"model_type": "lstm", "vocab_size": 40, "embedding_size": 4, "hidden_size": 4}
    run = functools.partial(fp.simulate, rounds=1, records=fp.Records(progress=False))
    with pytest.raises(fp.InputError, match="does not read the column 'position_ids'"):
        run(
            fp.random_model(lstm, head=fp.heads.causal_lm()),
            fp.algorithms.fedavg(optax.sgd(0.1)),
            clients().pack(16),
        )
    private = fp.privacy.example(clip=1.0, noise_multiplier=1.0)
    with pytest.raises(fp.InputError, match="rows are packed"):
        run(
            model(),
            fp.algorithms.fedavg(optax.sgd(0.1)),
            clients().pack(16),
            privacy=private,
            batch_sampling="poisson",
        )
