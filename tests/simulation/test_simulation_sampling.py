"""Sampled, failed and late clients: results are those of a run with the remaining clients only."""

import functools
import itertools

import numpy as np
import optax
import pytest
import toy
from closeness import approx, assert_close
from compiled import compilations
from options import run_options

from fedjax_peft.algorithms import fedavg
from fedjax_peft.contracts import Traffic
from fedjax_peft.data import Clients
from fedjax_peft.engine.schedule import Schedule
from fedjax_peft.simulation.simulate import simulate
from fedjax_peft.simulation.time_model import TimeModel
from fedjax_peft.support.errors import InputError

pytestmark = pytest.mark.slow

SIZES = (9, 4, 0, 1, 13, 5, 6, 2)
STEPS = [-(-n // 4) for n in SIZES]
TRAIN = toy.clients(SIZES)
EACH = 4 * (5 * 2 + 2 * 6)
"""Bytes of the toy's adapter."""


def run(clients=TRAIN, *, algorithm=None, rounds=8, **options):
    return simulate(
        toy.model(),
        algorithm or fedavg(optax.adam(0.02), head="private"),
        clients,
        test=toy.dataset(20, seed=5),
        rounds=rounds,
        batch_size=4,
        **run_options(lanes=2, **{"time_model": TimeModel(1.0, 1e12, 1e12, 0.0), **options}),
    )


def emptied(*which):
    """Returns the clients, some of them without examples."""
    nothing = np.array([], np.int32)
    rows = [nothing if c in which else x for c, x in enumerate(TRAIN.indices)]
    return Clients(TRAIN.data, tuple(rows))


def leaves(result):
    return {**result.params, **{f"private {n}": x for n, x in result.client_state.items()}}


def assert_same(one, other):
    for name, x in leaves(one).items():
        assert_close(x, leaves(other)[name], rtol=0, atol=1e-6, err_msg=name)


def rows(result):
    return [{k: v for k, v in row.items() if k != "time"} for row in result.metrics]


@pytest.mark.parametrize(
    ("sampling", "per_round"),
    [("uniform", 3), ("size", 3), ("poisson", 2), ("round_robin", 3), ("all", None)],
)
@pytest.mark.sample("size-3", "poisson-2", "round_robin-3")
def test_every_sampling_runs_in_one_program(sampling, per_round):
    counts = []
    result = run(
        clients_per_round=per_round,
        sampling=sampling,
        on_round=lambda row: counts.append(len(compilations)),
    )
    schedule = Schedule(TRAIN.indices, per_round or 8, 4, 1, None, 0, sampling)
    for row in result.metrics[1:]:
        assert row["clients"] == [c for c in schedule.members(row["round"]) if SIZES[c]]
        assert row["bytes_up"] == row["bytes_down"] == EACH * len(row["clients"])
    assert counts[-1] == counts[1], "nothing compiles after the first round"


def test_without_a_number_all_take_part():
    assert_same(run(rounds=2), run(rounds=2, sampling="all"))
    result = run(rounds=2)
    assert [row["clients"] for row in result.metrics[1:]] == [[0, 1, 3, 4, 5, 6, 7]] * 2


@functools.cache
def sparse(seed):
    return run(clients_per_round=1, sampling="poisson", seed=seed)


def test_a_round_without_clients_changes_no_state():
    schedule = Schedule(TRAIN.indices, 1, 4, 1, None, 0, "poisson")
    seed = next(s for s in range(99) if not schedule._replace(seed=s).members(1))
    before, *after = rows(sparse(seed))
    kinds = set()
    for row in after:
        kinds.add(bool(row["clients"]))
        if not row["clients"]:
            assert row["test_loss"] == before["test_loss"]
            assert (row["bytes_up"], row["bytes_down"], row["simulated_seconds"]) == (0, 0, 0)
            assert (row["steps"], row["dropped"]) == (0, [])
            assert not any(v is None for v in row.values()), "nothing looks like a failure"
        else:
            assert row["test_loss"] != before["test_loss"]
        before = row
    assert kinds == {True, False}
    assert "compile_s" not in sparse(seed).metrics[1]["time"], "it waits for somebody"


def test_a_client_that_fails_might_as_well_have_no_examples():
    schedule = Schedule(TRAIN.indices, 8, 4, 1, None, 0, "all", failure_rate=0.4)
    failed = schedule.failed(1)
    assert 0 < len(failed) < 7
    result = run(rounds=1, failure_rate=0.4)
    assert_same(result, run(emptied(*failed), rounds=1))
    row = result.metrics[1]
    assert row["failed"] == failed
    assert row["clients"] == [c for c in range(8) if SIZES[c] and c not in failed]
    assert row["bytes_up"] == EACH * (7 - len(failed))
    assert row["bytes_down"] == EACH * 7, "it had fetched the adapters"
    for name in toy.HEAD:  # what it keeps is what it had
        for client in failed:
            np.testing.assert_array_equal(result.client_state[name][client], result.params[name])


def test_a_round_in_which_all_clients_fail_is_a_round_without_clients():
    result = rows(run(clients_per_round=2, failure_rate=0.7))
    empty = [(before, row) for before, row in itertools.pairwise(result) if not row["clients"]]
    assert empty
    for before, row in empty:
        assert row["test_loss"] == before["test_loss"]
        assert row["failed"]
        assert row["bytes_up"] == 0


def test_who_is_late_might_as_well_have_no_examples():
    late = [c for c in range(8) if STEPS[c] > 2]
    assert late == [0, 4]
    result = run(rounds=3, deadline=2.5)
    assert_same(result, run(emptied(*late), rounds=3))
    for row in result.metrics[1:]:
        assert row["late"] == late
        assert not set(row["clients"]) & set(late)
        assert row["simulated_seconds"] == 2.5
        assert (row["bytes_up"], row["bytes_down"]) == (5 * EACH, 7 * EACH)
    in_time = run(rounds=1, deadline=1e3)
    assert_same(in_time, run(rounds=1))
    assert in_time.metrics[1]["late"] == []
    assert in_time.metrics[1]["simulated_seconds"] == approx(4)
    nobody = rows(run(rounds=2, deadline=0.5))
    assert [row["simulated_seconds"] for row in nobody] == [0, 0.5, 0.5]
    assert len({row["test_loss"] for row in nobody}) == 1


def test_lateness_depends_on_the_remaining_download():
    # The adapters take 2 seconds to fetch; who was there when nothing was taken has them.
    time = TimeModel(1.0, 1e12, EACH * 4, 0.0)
    result = run(rounds=3, time_model=time, deadline=2.5, sampling="all")
    late = [row["late"] for row in result.metrics[1:]]
    assert late[0] == [0, 1, 3, 4, 5, 6, 7]
    assert late[1] == [0, 4], "two steps are in time, but not with a transfer"
    assert late[2] == late[0]


OPTIONS = {
    "clients_per_round": 4,
    "sampling": "poisson",
    "failure_rate": 0.3,
    "deadline": 4.0,
    "time_model": TimeModel(1.0, EACH * 8, EACH * 8, 0.1, spread=0.7),
}


def test_equal_after_resume(tmp_path):
    def turns(broadcast, number):
        del broadcast
        return {"layer.lora_a": number % 2 == 1, "layer.lora_b": number % 2 == 0}

    algorithm = fedavg(optax.adam(0.02), head="private")._replace(traffic=Traffic(turns))
    whole = run(algorithm=algorithm, rounds=10, **OPTIONS)
    assert any(row["failed"] for row in whole.metrics[1:])
    assert any(row["late"] for row in whole.metrics[1:])
    for done in (1, 5):
        out = tmp_path / str(done)
        run(algorithm=algorithm, rounds=done, out=out, **OPTIONS)
        resumed = run(algorithm=algorithm, rounds=10, out=out, resume=True, **OPTIONS)
        for a, b in zip(rows(whole), rows(resumed), strict=True):
            assert a == {k: b[k] if not isinstance(v, float) else approx(b[k], abs=1e-6)
                         for k, v in a.items()}  # fmt: skip
        assert_same(whole, resumed)


def test_another_deadline_is_another_run(tmp_path):
    run(rounds=1, out=tmp_path / "run", deadline=3.0)
    with pytest.raises(InputError, match=r"deadline was 3\.0, is 4\.0"):
        run(rounds=2, out=tmp_path / "run", resume=True, deadline=4.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": "posson"}, r"no sampling 'posson'. Did you mean 'poisson'"),
        ({"sampling": "poisson"}, r"sampling = 'poisson' needs clients_per_round"),
        ({"sampling": "size"}, r"sampling = 'size' needs clients_per_round"),
        ({"sampling": "round_robin"}, r"sampling = 'round_robin' needs clients_per_round"),
        ({"sampling": "all", "clients_per_round": 3}, r"takes all 8 clients .* = 3: leave it out"),
        ({"sampling": "size", "clients_per_round": 8}, r"examples, which are 7: .* = 8 is more"),
        ({"clients_per_round": 9}, r"clients_per_round = 9 is more than the 8 clients"),
        ({"clients_per_round": 0}, r"clients_per_round = 0 must be"),
        ({"failure_rate": -0.1}, r"failure_rate = -0\.1 must be a number from 0 to below 1"),
        ({"failure_rate": 1}, r"failure_rate = 1 must be"),
        ({"failure_rate": True}, r"failure_rate = True must be"),
        ({"deadline": 0}, r"deadline = 0 must be a positive number of seconds"),
        ({"deadline": float("nan")}, r"deadline = nan must be"),
        ({"deadline": 3, "time_model": TimeModel("measured")}, r"a number, not 'measured'"),
    ],
)
def test_errors_of_settings_come_before_any_file_is_written(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        run(out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
