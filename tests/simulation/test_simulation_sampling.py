"""Sampled, failed and late clients: results are those of a run with the remaining clients only."""

import functools
import itertools
from dataclasses import replace

import linear
import numpy as np
import optax
import pytest
import running
import toy
from closeness import approx, assert_close, roughly
from compiled import compilations
from internals import Schedule, poisson_batches
from running import assert_same_models, rows
from scipy.stats import binom

import fedjax_peft as fp
from fedjax_peft import Clients, TimeModel
from fedjax_peft.simulation.session import poisson_width

pytestmark = pytest.mark.slow

SIZES = (9, 4, 0, 1, 13, 5, 6, 2)
STEPS = [-(-n // 4) for n in SIZES]
TRAIN, TEST = toy.clients(SIZES), toy.dataset(20, seed=5)
ALGORITHM = fp.algorithms.fedavg(optax.adam(0.02), head="private")
EACH = 4 * (5 * 2 + 2 * 6)
"""Bytes of the toy's adapter."""


def run(clients=TRAIN, *, rounds=8, **options):
    options = {"time_model": TimeModel(1.0, 1e12, 1e12, 0.0), "lanes": 2, "test": TEST, **options}
    return running.run(ALGORITHM, clients=clients, rounds=rounds, **options)


def emptied(*which):
    """Returns the clients, some of them without examples."""
    nothing = np.array([], np.int32)
    rows = [nothing if c in which else x for c, x in enumerate(TRAIN.indices)]
    return Clients(TRAIN.data, tuple(rows))


@pytest.mark.parametrize(
    ("sampling", "per_round"),
    [("uniform", 3), ("size", 3), ("poisson", 2), ("round_robin", 3), ("all", None)],
)
@pytest.mark.sample("poisson-2", "round_robin-3")
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


def test_a_client_of_weight_0_counts_as_one_without_examples():
    """FedDyn's server divides by the number of clients that can change it."""
    algorithm, model = fp.algorithms.feddyn(optax.sgd(0.1)), linear.model()
    weights = np.array([2.0, 1, 1, 1, 0, 1, 1, 1])
    one, other = (
        running.run(algorithm, clients=replace(clients, weights=weights), model=model).params
        for clients in (TRAIN, emptied(4))
    )
    for name, x in one.items():
        assert_close(x, other[name], atol=1e-6)
        assert np.abs(x - model.trainable[name]).max() > 1e-2


def test_without_a_number_all_take_part():
    assert_same_models(run(rounds=2), run(rounds=2, sampling="all"))
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
    assert_same_models(result, run(emptied(*failed), rounds=1))
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
    assert_same_models(result, run(emptied(*late), rounds=3))
    for row in result.metrics[1:]:
        assert row["late"] == late
        assert not set(row["clients"]) & set(late)
        assert row["simulated_seconds"] == 2.5
        assert (row["bytes_up"], row["bytes_down"]) == (5 * EACH, 7 * EACH)
    in_time = run(rounds=1, deadline=1e3)
    assert_same_models(in_time, run(rounds=1))
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


# ------------------------------ batches of examples that are drawn independently (Poisson sampling)


COUNTING = fp.algorithms.fedavg(fp.optimizers.adam(0.02, keep=True))


def drawn(indices, batch_size, *, width=20, steps=2000):
    return poisson_batches(
        np.array(indices, np.int32), batch_size, width, steps=steps, rng=np.random.default_rng(0)
    )


def test_examples_are_drawn_independently_with_the_same_probability():
    rows = drawn(range(10, 20), 4)
    member = np.array([[n in row for n in range(10, 20)] for row in rows])
    assert member.mean(axis=0) == roughly(0.4, abs=4 * np.sqrt(0.24 / 2000))
    sizes = member.sum(axis=1)
    assert (np.sort(rows, axis=1)[:, -4:] < 20).all()
    np.testing.assert_array_equal((rows >= 0).sum(axis=1), sizes)  # nobody twice
    # Independent draws: the variance of the size is n p (1 - p), and not 0.
    assert_close(sizes.var(), 2.4, rtol=0.15)


def test_a_client_with_few_examples_uses_them_all():
    np.testing.assert_array_equal(drawn([3, 5], 4, width=3, steps=2), [[3, 5, -1]] * 2)


def test_batches_have_room_for_all_draws_but_one_in_a_trillion():
    for n, batch_size in ((1000, 16), (5, 2), (100, 100)):
        width = poisson_width([n, 0], batch_size)
        assert binom.sf(width, n, batch_size / n) <= 1e-12
        assert width == n or binom.sf(width - 1, n, batch_size / n) > 1e-12
    assert poisson_width([1000], 16) < 64


def test_a_draw_that_does_not_fit_is_cut_at_random():
    rows = drawn(range(10), 9, width=2, steps=4000)
    share = (rows[..., None] == np.arange(10)).any(axis=1).mean(axis=0)
    assert share == roughly(0.2, abs=0.03)


def drawing(**options):
    options |= {"rounds": 3, "local_steps": 4, "batch_sampling": "poisson", "batch_size": 1}
    return running.run(COUNTING, lanes=3, **options)


def test_the_draws_depend_on_the_seed_and_empty_batches_are_steps_too():
    one, other = drawing(), drawing(seed=1)
    assert one.metrics[-1]["train_loss"] != other.metrics[-1]["train_loss"]
    counts = np.asarray(one.client_state["optimizer"][0].count)
    assert set(counts.tolist()) == {12}, "Adam counts all"
