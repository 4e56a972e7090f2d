"""Asynchronous runs: rows, resume, combinations, and what is refused."""

import functools
import json

import jax
import linear
import numpy as np
import optax
import pytest
import toy
from closeness import approx, assert_close
from options import run_options

import fedjax_peft as fp

pytestmark = pytest.mark.slow

SIZES = [5, 9, 12, 7, 20, 3]
TIME = fp.TimeModel(seconds_per_step=1.0, spread=1.0)
FEDBUFF = fp.asynchronous.fedbuff(2, concurrency=4)
SGD = optax.sgd(0.2)
FEDAVG = fp.algorithms.fedavg(SGD)
small = functools.cache(linear.model)
STATEFUL = fp.transforms.clip_norm(1.0)._replace(init=lambda template: np.zeros(()))


def simulated(algorithm=FEDAVG, asynchronous=FEDBUFF, rounds=5, model=None, **options):
    given = {"time_model": TIME, "batch_size": 4, "progress": False, "eval_every": 100, "seed": 1}
    return fp.simulate(
        model or small(),
        algorithm,
        toy.clients(SIZES),
        rounds=rounds,
        asynchronous=asynchronous,
        **run_options(**given | options),
    )


def same(one, other, **tolerance):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert_close(a, b, **tolerance)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    options = {"algorithm": fp.algorithms.ditto(SGD), "checkpoint_every": 1}
    whole = simulated(rounds=9, **options)
    simulated(rounds=4, out=tmp_path / "run", **options)
    simulated(rounds=9, out=tmp_path / "run", resume=True, **options)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    parts = [json.loads(line) for line in lines]
    for one, other in zip(parts, whole.metrics, strict=True):
        assert {
            k: v for k, v in one.items() if k not in ("time", "test_accuracy", "test_loss")
        } == {k: v for k, v in other.items() if k not in ("time", "test_accuracy", "test_loss")}
    assert max(row.get("versions", 0) for row in parts) > 2


def test_a_session_grows_its_history_beyond_the_foreseen_rounds():
    made = [
        fp.session(
            small(),
            FEDAVG,
            toy.clients(SIZES),
            batch_size=4,
            asynchronous=FEDBUFF,
            system=fp.System(time=TIME),
            rounds=rounds,
        )
        for rounds in (1, 12)
    ]
    ends = []
    for session in made:
        state = session.init(1)
        places = len(jax.tree.leaves(state.history)[0])
        for _ in range(12):
            state, _ = session.step(state)
        ends.append((places, state.server))
    assert ends[0][0] < ends[1][0]
    same(ends[0][1], ends[1][1], atol=1e-6)


def alone(**options):
    return pytest.param(options, marks=pytest.mark.exhaustive)


TOP_K, SIGN_FLIP = fp.transforms.top_k(0.3), fp.attacks.sign_flip(0.3)
PERIODS = fp.asynchronous.semi_synchronous(3.0)
FEDADAM = fp.algorithms.fedadam(SGD, server_learning_rate=0.05)
FEDPROX = fp.algorithms.fedprox(SGD, mu=0.1)
MARKOV = fp.availability.markov(20.0, 10.0)


@pytest.mark.parametrize(
    "options",
    [
        {"transforms": TOP_K, "asynchronous": PERIODS},
        {"attack": SIGN_FLIP, "failure_rate": 0.3, "failure_exponent": 1.0},
        {"algorithm": FEDADAM, "availability": MARKOV},
        {"algorithm": FEDPROX, "client_ranks": [1, 2], "local_steps": (1, 4), "stragglers": 0.5},
        alone(transforms=TOP_K),
        alone(attack=SIGN_FLIP),
        alone(algorithm=FEDADAM),
        alone(algorithm=FEDPROX, client_ranks=[1, 2]),
        alone(asynchronous=PERIODS),
        alone(failure_rate=0.3, failure_exponent=1.0),
        alone(availability=MARKOV),
        alone(local_steps=(1, 4), stragglers=0.5),
    ],
    ids="-".join,
)
@pytest.mark.sample("transforms*", "attack*", "*stragglers")
def test_combinations_equal_the_reference_engine(options):
    model = toy.model(dropout=0.2) if "client_ranks" in options else small()
    compiled = simulated(model=model, lanes=2, **options)
    plain = simulated(model=model, engine="reference", **options)
    same(compiled.params, plain.params, atol=1e-5)
    moved = [np.abs(compiled.params[n] - model.trainable[n]).max() for n in compiled.params]
    assert max(moved) > 1e-3


def test_rows_tell_costs_and_staleness():
    rows = simulated(rounds=6, failure_rate=0.4).metrics[1:]
    size = 4 * sum(x.size for x in small().trainable.values())
    assert all(row["bytes_up"] == 2 * size for row in rows)
    assert any(row["failed"] for row in rows)
    assert all(row["staleness_max"] >= row["staleness_mean"] for row in rows)
    assert all(row["in_flight"] <= 4 and row["versions"] >= 1 for row in rows)


def test_slow_clients_fail_more_often():
    from fedjax_peft.simulation.asynchrony import failure_probability

    assert failure_probability(0.2, 1.0, 1.0) == approx(0.2)
    assert failure_probability(0.2, 1.0, 4.0) == approx(0.5)  # odds 1/4 -> 1
    assert failure_probability(0.2, 0.0, 4.0) == approx(0.2)
    assert failure_probability(0.0, 2.0, 9.0) == 0.0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"algorithm": fp.algorithms.scaffold(SGD, learning_rate=0.2)}, "control variates"),
        ({"algorithm": fp.algorithms.feddyn(SGD, alpha=0.1)}, "FedDyn"),
        ({"algorithm": fp.algorithms.flora(SGD)}, "flora"),
        ({"algorithm": fp.algorithms.fedavg(SGD, aggregator=fp.aggregators.fra())}, "anew"),
        ({"deadline": 5.0}, "deadline does not fit"),
        ({"sampling": "round_robin", "clients_per_round": 4}, "sampling does not fit"),
        ({"time_model": fp.TimeModel("measured")}, "not 'measured'"),
        ({"time_model": TIME._replace(topology="serial")}, "parallel"),
        ({"asynchronous": fp.asynchronous.fedbuff(7)}, "more than the 6 clients"),
        ({"clients_per_round": 3}, "two numbers for the same thing"),
        ({"asynchronous": "fedbuff"}, "is not an fp.contracts.Asynchronous"),
        ({"failure_exponent": -1.0}, "failure_exponent"),
        ({"transforms": STATEFUL}, "state on the server"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_does_not_fit_is_refused(options, match):
    with pytest.raises(fp.InputError, match=match):
        simulated(model=toy.lora_model(), **options)


def test_privacy_is_refused():
    privacy = fp.privacy.central(clip=1.0, noise_multiplier=1.0)
    with pytest.raises(fp.InputError, match="privacy does not fit"):
        simulated(privacy=privacy)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: fp.asynchronous.fedbuff(0), "buffer_size"),
        (lambda: fp.asynchronous.fedbuff(staleness="linear"), "no staleness weight"),
        (lambda: fp.asynchronous.fedasync(alpha=1.5), "alpha"),
        (lambda: fp.asynchronous.semi_synchronous(0), "period"),
        (lambda: fp.asynchronous.fedbuff(max_staleness=-1), "max_staleness"),
    ],
)
def test_wrong_numbers_are_refused(make, match):
    with pytest.raises(fp.InputError, match=match):
        make()
