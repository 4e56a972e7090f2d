"""Unequal local work: drawn from a range, and the partial work of late clients."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import running
import toy
from closeness import approx
from compiled import compilations
from internals import Schedule
from internals import config as configs
from refusals import refused
from running import assert_same_models, model, rows
from small_config import small

import fedjax_peft as fp
from fedjax_peft import TimeModel

pytestmark = pytest.mark.slow

SIZES = (9, 4, 0, 1, 13, 5, 6, 2)
TRAIN = toy.clients(SIZES)
WORKING = [c for c in range(8) if SIZES[c]]
RANGE = (2, 7)
RATE, MU, EVERY = 0.3, 0.9, 4
SPREAD = TimeModel(1.0, 1e15, 1e15, 0.0, spread=1.0)
"""Clients of very different speeds, and transfers that take no time."""
SLOWNESS = SPREAD.slowness(8, 0)


@functools.cache
def algorithm():
    return fp.algorithms.fedprox(optax.sgd(RATE), mu=MU)


def run(*, rounds=EVERY, **options):
    common = {"lanes": 3, "local_steps": RANGE, "eval_every": EVERY, "algorithm": algorithm()}
    common["test"] = toy.dataset(20, seed=5)
    return running.run(**{**common, **options}, clients=TRAIN, rounds=rounds)


@functools.cache
def whole():
    return run()


@functools.cache
def late():
    return run(time_model=SPREAD, deadline=4.0, late="partial")


# ---------------------------------------------------------------------------- work from a range


def test_rounds_of_drawn_work_compile_once_and_are_recorded():
    before = []
    result = run(seed=3, rounds=8, on_round=lambda row: before.append(len(compilations)))
    assert before[-1] == before[1], "nothing compiles after the first round"
    schedule = Schedule(TRAIN.indices, 8, 4, 1, RANGE, 3, "all")
    drawn = set()
    for row in result.metrics[1:]:
        assert row["clients"] == WORKING
        assert row["client_steps"] == [schedule.steps(c, row["round"]) for c in WORKING]
        assert row["steps"] == sum(row["client_steps"])
        assert row["simulated_seconds"] == approx(
            0.5 * max(row["client_steps"]) + _transfer_seconds(row), rel=1e-6
        )
        drawn |= {*row["client_steps"]}
    assert drawn == {2, 3, 4, 5, 6, 7}


def _transfer_seconds(row):
    each = (row["bytes_up"] + row["bytes_down"]) / len(row["clients"])
    return 8 * each / 25e6 + 0.8


def test_a_number_equals_a_range_of_itself():
    one, same = (run(local_steps=x) for x in (5, (5, 5)))
    assert rows(one, "layers") == rows(same, "client_steps", "layers")
    assert_same_models(one, same, atol=0)
    assert "client_steps" not in one.metrics[1]


def test_epochs_from_a_range_and_stragglers():
    result = run(local_steps=None, epochs=[1, 3], stragglers=0.5, rounds=2)
    schedule = Schedule(TRAIN.indices, 8, 4, (1, 3), None, 0, "all", stragglers=0.5)
    for row in result.metrics[1:]:
        epochs = [n / -(-SIZES[c] // 4) for c, n in zip(WORKING, row["client_steps"], strict=True)]
        assert set(epochs) <= {1, 2, 3}
        assert row["client_steps"] == [schedule.steps(c, row["round"]) for c in WORKING]
    full = [schedule.steps(c, n) == schedule.most_steps(c) for n in range(200) for c in WORKING]
    assert np.mean(full) == approx(0.5 + 0.5 / 3, abs=0.05)


def counting():
    """Returns the algorithm with the number of local steps that a step sees as a metric."""

    def client(context):
        update = algorithm().client(context)

        def step(state, batch, key):
            state, metrics = update.step(state, batch, key)
            return state, {**metrics, "k": (batch["steps"].astype(jnp.float32), jnp.float32(1))}

        return update._replace(step=step)

    return algorithm()._replace(client=client)


def test_every_step_sees_the_number_of_steps_of_its_own_client():
    options = {"time_model": SPREAD, "diagnostics": ["clients"], "rounds": 2, "eval_every": 2}
    options |= {"deadline": 4.0, "late": "partial"}
    for row in run(algorithm=counting(), **options).metrics[1:]:
        assert row["per_client"]["k"] == row["client_steps"]


# ------------------------------------------------------------------- partial work of late clients


def expected_work(number, deadline):
    """Returns client -> steps that fit before the deadline, and its steps without a deadline."""
    schedule = Schedule(TRAIN.indices, 8, 4, 1, RANGE, 0, "all")
    steps = {c: schedule.steps(c, number) for c in WORKING}
    return {c: min(n, int(deadline / SLOWNESS[c])) for c, n in steps.items()}, steps


def test_late_clients_send_the_steps_that_fit_before_the_deadline():
    seen = set()
    for row in late().metrics[1:]:
        fitting, steps = expected_work(row["round"], 4.0)
        assert row["late"] == [c for c in WORKING if not fitting[c]]
        assert row["partial"] == [c for c in WORKING if 0 < fitting[c] < steps[c]]
        assert row["clients"] == [c for c in WORKING if fitting[c]]
        assert row["client_steps"] == [fitting[c] for c in row["clients"]]
        for client, count in zip(row["clients"], row["client_steps"], strict=True):
            assert count * SLOWNESS[client] <= 4.0
        assert row["simulated_seconds"] <= 4.0
        seen |= {("late", bool(row["late"])), ("partial", bool(row["partial"]))}
    assert ("partial", True) in seen
    dropped = run(rounds=1, time_model=SPREAD, deadline=4.0).metrics[1]
    first = late().metrics[1]
    assert dropped["late"] == sorted({*first["late"], *first["partial"]})
    assert "partial" not in dropped


def estimated(**options):
    """Returns the row of the first round, which the estimate of its costs agrees with."""
    seen = []
    row = run(rounds=1, test=None, on_phase=seen.append, **options).metrics[1]
    costs = seen[0].details["estimate"]
    assert (costs.clients, costs.steps) == (len(row["clients"]), row["steps"])
    assert (costs.bytes_up, costs.bytes_down) == (row["bytes_up"], row["bytes_down"])
    return row


@pytest.mark.parametrize("late", ["drop", "partial"])
def test_the_estimate_of_the_first_round_knows_drawn_steps_and_late_clients(late):
    row = estimated(time_model=SPREAD, deadline=4.0, late=late, failure_rate=0.2)
    assert row["late"]
    assert row["failed"]


def test_the_estimate_of_the_first_round_knows_who_is_available(tmp_path):
    """One of three clients leaves in the round."""
    leaves = max(WORKING, key=SLOWNESS.__getitem__)
    others = [client for client in WORKING if client != leaves][:2]
    ends = {leaves: 1.0, others[0]: 1e3, others[1]: 1e3}
    path = tmp_path / "trace.csv"
    path.write_text("client,start,end\n" + "".join(f"{c},0,{end}\n" for c, end in ends.items()))
    row = estimated(time_model=SPREAD, availability=fp.availability.trace(path))
    assert (row["clients"], row["failed"]) == (sorted(others), [leaves])


def test_the_estimate_of_the_first_aggregation_knows_who_has_started():
    buffer = fp.asynchronous.fedbuff(2, concurrency=4)
    row = estimated(time_model=SPREAD, asynchronous=buffer)
    assert len(row["clients"]) == 2
    assert row["bytes_down"] > row["bytes_up"]


def test_partial_work_compiles_nothing_more():
    whole()
    before = len(compilations)
    run(seed=1, time_model=SPREAD, deadline=4.0, late="partial")
    assert len(compilations) == before


def test_a_client_without_time_for_a_step_is_dropped():
    slowest = max(SLOWNESS[c] for c in WORKING)
    row = run(rounds=1, time_model=SPREAD, deadline=0.99 * slowest, late="partial").metrics[1]
    assert row["late"] == [c for c in WORKING if SLOWNESS[c] == slowest]
    assert min(row["client_steps"]) >= 1
    assert row["simulated_seconds"] == 0.99 * slowest, "the server waits for it"


def test_a_session_takes_limits_of_its_own():
    session = fp.session(
        model(),
        algorithm(),
        TRAIN,
        batch_size=4,
        local_steps=RANGE,
        placement=fp.Placement(lanes=3),
    )
    state = session.init(seed=0)
    plan = session.plan(1, 0, without=[0], limits={4: 1, 5: 2})
    state, info = session.step(state, plan)
    steps = info.plan.client_steps
    assert 0 not in steps
    assert (steps[4], steps[5]) == (1, 2)
    assert steps[6] >= 2


# ---------------------------------------------------------------------------- settings and configs


def test_a_config_has_the_same_keys():
    system = {"stragglers": 0.5, "deadline": 3.0, "late": "partial"}
    raw = small(local_steps=[2, 5], system=system, time={"spread": 1.0})
    config = configs.resolve(raw)
    assert (config["local_steps"], config["epochs"]) == ([2, 5], 1)
    assert config["system"].items() >= system.items()
    assert configs.resolve(configs.override(raw, "epochs=[1, 5]"))["epochs"] == [1, 5]
    refused(r"'local_steps' cannot be 'a'", configs.resolve, configs.override(raw, "local_steps=a"))
