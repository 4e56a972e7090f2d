"""Runs that combine many features equal the slow reference engine, and resume to the same bits."""

import functools
import json

import jax
import linear
import numpy as np
import optax
import pytest
import running
import toy
from closeness import approx, assert_close
from running import rows

import fedjax_peft as fp

pytestmark = pytest.mark.slow

SGD, ADAM = optax.sgd(0.1), optax.adam(0.02)
SIZES = (5, 9, 12, 7, 20, 3)
TRAIN, HELD_OUT = toy.clients(SIZES).holdout(0.4)
CLIENTS, TEST = toy.clients(SIZES), toy.dataset(20, seed=5)
ADAPTER = 4 * (5 * 2 + 2 * 6)
UNEQUAL = fp.TimeModel(1.0, ADAPTER * 8, ADAPTER * 8, 0.1, spread=0.7)
"""Clients of different speeds, which send the toy's adapter in a second."""
small, large = functools.cache(linear.model), functools.cache(toy.lora_model)
SVD = fp.peft.base.Method("lora", {}, lambda *_: None, start_shapes_frozen=True)
started = functools.cache(functools.partial(toy.lora_model, method=SVD))
FEEDBACK = fp.transforms.top_k(0.3, error_feedback=True)
DEFAULTS = {"model": small, "clients": CLIENTS, "test": TEST, "rounds": 3, "lanes": 3, "seed": 1}


def turns(broadcast, number):
    """A in odd rounds, B in even ones."""
    return {"layer.lora_a": number % 2 == 1, "layer.lora_b": number % 2 == 0}


def private(mechanism, **options):
    return {"privacy": mechanism, "clients_per_round": 3, **options}


def late(**options):
    return {"failure_rate": 0.3, "time_model": UNEQUAL, "deadline": 5.0, **options}


ALTERNATING = fp.algorithms.fedavg(ADAM, head="private")._replace(
    traffic=fp.contracts.Traffic(turns)
)
FRA = fp.algorithms.fedavg(SGD, aggregator=fp.aggregators.fra())
STALE = fp.asynchronous.fedbuff(2, concurrency=4)
SPREAD = {"time_model": fp.TimeModel(spread=1.0), "rounds": 4}
RANKS = {"model": large, "client_ranks": [1, 2], "local_steps": (1, 4), "stragglers": 0.5}
CASES = {
    "work": late(
        **{**RANKS, "algorithm": fp.algorithms.fedbabu(SGD), "late": "partial"},
        **{"attack": fp.attacks.sign_flip(0.4), "transforms": FEEDBACK, "client_test": HELD_OUT},
        **{"clients": TRAIN, "validation": TEST, "client_validation": HELD_OUT},
    ),
    "traffic": late(
        **{"model": started, "time_model": UNEQUAL._replace(preload=True)},
        **{"algorithm": ALTERNATING, "sampling": "poisson"},
        **{"clients_per_round": 4, "diagnostics": ["clients", "local"], "test_clients": 2},
        **{"attack": fp.attacks.gaussian(0.4, 0.1)},
    ),
    "batches": {
        **{"algorithm": fp.algorithms.fedavg(ADAM, keep_optimizer=True), "batch_size": 1},
        **{"batch_sampling": "poisson", "local_steps": 4, "attack": fp.attacks.alie(0.4)},
        **{"availability": fp.availability.markov(20.0, 10.0), "clients_per_round": 4},
    },
    **{
        name: {"model": large, "algorithm": algorithm, "rounds": 2, "diagnostics": ["local"]}
        for name, algorithm in {
            "flora": fp.algorithms.flora(SGD, head="private"),
            "fedrep": fp.algorithms.fedrep(SGD),
            "fra_ffa": fp.algorithms.fra_ffa(SGD, at=1),
        }.items()
    },
    "adaptive": private(
        fp.privacy.adaptive(0.01, 0.5, clip_rate=0.5), sampling="poisson", validation=TEST
    ),
    "correlated": private(fp.privacy.correlated(1.0, 1.0, rounds=3), sampling="round_robin"),
    "distributed": private(fp.privacy.distributed(0.5, 1.0), attack=fp.attacks.gaussian(0.4, 0.1)),
    "central": private(
        fp.privacy.central(0.2, 0.5), model=large, algorithm=FRA, sampling="poisson"
    ),
    "local": private(fp.privacy.local(0.5, 1.0)),
    "example": private(fp.privacy.example(0.5, 1.0), algorithm=fp.algorithms.ditto(SGD)),
    "fedbuff": {
        **{"asynchronous": STALE, "algorithm": fp.algorithms.ditto(SGD), **SPREAD, "rounds": 6},
        **{"attack": fp.attacks.sign_flip(0.3), "failure_rate": 0.3, "failure_exponent": 1.0},
    },
    "periods": {
        **{"asynchronous": fp.asynchronous.semi_synchronous(3.0), "transforms": FEEDBACK},
        **{"algorithm": fp.algorithms.fedadam(SGD, server_learning_rate=0.05), **SPREAD},
        **{"availability": fp.availability.markov(20.0, 10.0)},
    },
    "stale ranks": {
        **{**RANKS, **SPREAD, "asynchronous": STALE},
        **{"algorithm": fp.algorithms.fedprox(SGD, mu=0.1)},
    },
}
SEEN = {
    "work": ("failed", "partial"),
    "traffic": ("failed", "late", "skipped_leaves"),
    "batches": ("available", "hostile"),
    "fedbuff": ("failed", "staleness_max", "hostile"),
}
"""Fields that some row must have, neither 0 nor empty."""


def run(name, **options):
    options = {**DEFAULTS, **CASES[name], **options}
    return running.run(**{**options, "model": options["model"]()})


@functools.cache
def whole(name):
    """Returns the run without interruption, which has what it is about."""
    result = run(name)
    for field in SEEN.get(name, ()):
        assert any(row.get(field) for row in result.metrics), field
    if name == "adaptive":
        assert len({row["privacy_clip"] for row in result.metrics[1:]}) == 3
    start = result.model.trainable
    assert max(np.abs(x - start[n]).max() for n, x in result.params.items()) > 1e-3
    return result


def states(result):
    return jax.tree.leaves((result.server, [result.client_params(c) for c in range(len(SIZES))]))


def assert_same(one, other, *but):
    """Asserts equality up to float32 rounding, of rows, models and what clients keep."""
    for a, b in zip(rows(one), rows(other), strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - set(but):
            (xs, form), (ys, same) = jax.tree.flatten(a[name]), jax.tree.flatten(b[name])
            assert form == same, name
            for x, y in zip(xs, ys, strict=True):
                assert x == (approx(y, rel=1e-4, abs=1e-5) if isinstance(y, float) else y), name
    for x, y in zip(states(one), states(other), strict=True):
        assert_close(x, y, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample("work")
def test_the_reference_engine_gives_the_same_run(name):
    """Also if it has its examples in host memory, and the clients' states on disk."""
    other = run(name, engine="reference", client_state="disk", examples="host")
    assert_same(whole(name), other)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample("traffic")
def test_lanes_and_the_places_of_clients_and_examples_do_not_change_a_run(name):
    packing = ("lanes", "slot_utilisation", "padded_utilisation", "layers")
    other = run(name, lanes=1, client_state="host", examples="host")
    assert_same(whole(name), other, *packing)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample("work", "traffic", "batches", "correlated", "fedbuff")
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(name, tmp_path):
    rounds = whole(name).metrics[-1]["round"]
    stop = running.interrupt(rounds // 2 + 1)
    with pytest.raises(KeyboardInterrupt):
        run(name, out=tmp_path, checkpoint_every=1, on_round=stop)
    again = run(name, out=tmp_path, checkpoint_every=1, resume=True)
    for row, other in zip(rows(again), json.loads(json.dumps(rows(whole(name)))), strict=True):
        assert row.keys() == other.keys()
        for field in row:
            assert json.loads(json.dumps(row[field])) == other[field], field
    for x, y in zip(states(again), states(whole(name)), strict=True):
        np.testing.assert_array_equal(x, y)
    again, other = (jax.tree.leaves(made.client_state) for made in (again, whole(name)))
    assert all(np.array_equal(x, y) for x, y in zip(again, other, strict=True))
