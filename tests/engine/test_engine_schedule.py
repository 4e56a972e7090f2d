"""The schedule: each sampling method has its distribution and depends on the seed only."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_peft.engine.plan import pack
from fedjax_peft.engine.schedule import Schedule
from fedjax_peft.random import host_rng

SIZES = (5, 9, 0, 7, 40, 6, 3, 1)


def schedule(sampling="uniform", per_round=3, *, sizes=SIZES, seed=0, **options):
    ends = np.cumsum((0, *sizes))
    rows = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
    return Schedule(rows, per_round, 4, 1, None, seed, sampling, **options)


def rounds(one, n=400):
    return [one.members(number) for number in range(1, n + 1)]


def shares(drawn):
    counts = Counter(c for members in drawn for c in members)
    return [counts[c] / len(drawn) for c in range(len(SIZES))]


@pytest.mark.parametrize("sampling", ["uniform", "size", "poisson", "round_robin", "all"])
def test_a_round_depends_on_seed_and_number_only(sampling):
    one, again = schedule(sampling), schedule(sampling)
    backwards = [again.members(number) for number in range(20, 0, -1)]
    assert rounds(one, 20) == backwards[::-1]
    for members in rounds(one, 20):
        assert members == sorted(set(members))
        assert set(members) <= set(range(8))
    if sampling != "all":
        assert rounds(one, 20) != rounds(schedule(sampling, seed=1), 20)


def test_uniform_samples_equal_those_of_earlier_versions():
    expected = [
        sorted(host_rng(0, "cohort", number).choice(8, 3, replace=False).tolist())
        for number in range(1, 21)
    ]
    assert rounds(schedule(), 20) == expected
    assert expected[:3] == [[1, 4, 5], [1, 3, 5], [3, 4, 5]]
    np.testing.assert_allclose(shares(rounds(schedule())), 3 / 8, atol=0.08)


def test_by_size():
    drawn = rounds(schedule("size", 2), 2000)
    assert {len(members) for members in drawn} == {2}
    # The chance of a client in two successive draws without replacement.
    p = np.array(SIZES) / sum(SIZES)
    chance = [p[c] + sum(p[d] * p[c] / (1 - p[d]) for d in range(8) if d != c) for c in range(8)]
    np.testing.assert_allclose(shares(drawn), chance, atol=0.04)
    assert shares(drawn)[2] == 0, "a client without examples"


def test_poisson():
    drawn = rounds(schedule("poisson"), 2000)
    np.testing.assert_allclose(shares(drawn), 3 / 8, atol=0.04)
    sizes = np.array([len(members) for members in drawn])
    assert sizes.min() == 0
    assert sizes.mean() == pytest.approx(3, abs=0.1)
    # Clients are drawn independently of each other, so their number is binomial.
    assert sizes.var() == pytest.approx(8 * 3 / 8 * 5 / 8, rel=0.1)


@pytest.mark.parametrize("per_round", [2, 3, 8])
def test_round_robin(per_round):
    drawn = rounds(schedule("round_robin", per_round), 8)
    assert {len(members) for members in drawn} == {per_round}
    assert set(shares(drawn)) == {per_round / 8}, "over 8 rounds everybody equally often"
    order = host_rng(0, "round robin").permutation(8)
    if per_round == 3:  # the order goes on where the last round stopped
        assert drawn[2] == sorted([*order[6:].tolist(), int(order[0])])


def test_all():
    assert rounds(schedule("all", 8), 3) == [list(range(8))] * 3


def test_failures_are_independent_of_who_else_is_drawn():
    one, other = schedule(failure_rate=0.3), schedule("all", 8, failure_rate=0.3)
    count = 0
    for number in range(1, 401):
        failed = one.failed(number)
        count += len(failed)
        assert failed == [c for c in other.failed(number) if c in one.members(number)]
        assert one.present(number) == [c for c in one.members(number) if c not in failed]
        assert one.cohort(number).client == one.present(number)
        assert len(one.lengths(number)) == len(one.present(number))
        assert 2 not in failed, "it has no examples, so it has nothing to drop out of"
    assert count / (400 * 3 * 7 / 8) == pytest.approx(0.3, abs=0.05)
    assert schedule().failed(1) == []


@pytest.mark.parametrize("options", [{"sampling": "poisson"}, {"failure_rate": 0.4}])
def test_room_is_for_the_largest_round(options):
    one = schedule(**options).for_rounds(30)
    present = [len(one.present(number)) for number in range(1, 31)]
    assert one.capacity == max(present) > min(present)
    time_steps = one.time_steps(30, 2)
    plans = [one.plan(number, 2, time_steps) for number in range(1, 31)]
    assert len({tuple((a.shape, a.dtype) for a in plan) for plan in plans}) == 1
    assert max(int(p.steps) for p in plans) <= time_steps
    for number, plan in enumerate(plans, start=1):
        working = [c for c in one.present(number) if SIZES[c]]
        assert plan.client_steps == {c: -(-SIZES[c] // 4) for c in working}
    assert schedule().for_rounds(30).capacity == schedule().capacity == 3


def test_a_round_without_clients_has_an_empty_plan():
    one = schedule("poisson", 1)
    number = next(n for n in range(1, 100) if not one.members(n))
    plan = one.plan(number, 2, one.time_steps(100, 2))
    assert (plan.useful, int(plan.steps), plan.client.tolist()) == (0, 0, [-1])
    empty = next(s for s in range(100) if not schedule("poisson", 1, seed=s).members(1))
    alone = schedule("poisson", 1, seed=empty).for_rounds(1)
    assert alone.capacity == 1, "shapes need some room"
    assert alone.time_steps(1, 2) >= 1


def test_a_plan_without_some():
    one = schedule("all", 8)
    plan = one.plan(1, 2, one.time_steps(1, 2), without=[4, 0])
    assert sorted(plan.client_steps) == [1, 3, 5, 6, 7]
    whole = one.plan(1, 2, one.time_steps(1, 2))
    rows = {tuple(r) for r in plan.examples.reshape(-1, 4).tolist()}
    assert rows <= {tuple(r) for r in whole.examples.reshape(-1, 4).tolist()}


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(1, 5), st.data())
def test_fewer_jobs_make_no_plan_longer(lengths, lanes, data):
    kept = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))

    def longest(jobs):
        return max(sum(jobs[j] for j in queue) for queue in pack(jobs, lanes))

    assert longest([n for n, k in zip(lengths, kept, strict=True) if k]) <= longest(lengths)
