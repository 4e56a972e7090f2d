"""The schedule: each sampling method has its distribution and depends on the seed only."""

import itertools
from collections import Counter

import jax
import numpy as np
import pytest
from closeness import approx, roughly
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import Schedule, host_rng

from fedjax_peft.engine.plan import pack

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
        other = schedule(sampling, seed=1)
        assert rounds(one, 20) != rounds(other, 20)
        plans = [x.for_rounds(3).plan(3, 2, 40) for x in (one, again, other)]
        for a, b in zip(*plans[:2], strict=True):
            np.testing.assert_array_equal(a, b)
        assert plans[0].examples.tolist() != plans[2].examples.tolist()


def test_uniform_samples_equal_those_of_earlier_versions():
    expected = [
        sorted(host_rng(0, "cohort", number).choice(8, 3, replace=False).tolist())
        for number in range(1, 21)
    ]
    assert rounds(schedule(), 20) == expected
    assert expected[:3] == [[1, 4, 5], [1, 3, 5], [3, 4, 5]]
    assert shares(rounds(schedule())) == roughly([3 / 8] * 8, abs=0.08)


def test_by_size():
    drawn = rounds(schedule("size", 2), 2000)
    assert {len(members) for members in drawn} == {2}
    # The chance of a client in two successive draws without replacement.
    p = np.array(SIZES) / sum(SIZES)
    chance = [p[c] + sum(p[d] * p[c] / (1 - p[d]) for d in range(8) if d != c) for c in range(8)]
    assert shares(drawn) == roughly(chance, abs=0.04)
    assert shares(drawn)[2] == 0, "a client without examples"


def test_poisson():
    drawn = rounds(schedule("poisson"), 2000)
    assert shares(drawn) == roughly([3 / 8] * 8, abs=0.04)
    sizes = np.array([len(members) for members in drawn])
    assert sizes.min() == 0
    assert sizes.mean() == roughly(3, abs=0.1)
    # Clients are drawn independently of each other, so their number is binomial.
    assert sizes.var() == roughly(8 * 3 / 8 * 5 / 8, rel=0.1)


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
    assert count / (400 * 3 * 7 / 8) == roughly(0.3, abs=0.05)
    times = Counter(client for number in range(1, 401) for client in other.failed(number))
    assert all(times[c] / 400 == roughly(0.3, abs=0.1) for c, n in enumerate(SIZES) if n)
    assert schedule().failed(1) == []


def test_where_all_send_late_clients_are_members_without_work():
    """A given weight of 0 is one too: the client works, and its update does not count."""
    weights = np.array([2.0, 2, 2, 2, 2, 0, 2, 2])
    one = schedule("all", 8, all_send=True, given_weights=weights)
    cohort = one.cohort(1, without=[0], limits={4: 1})
    steps = [-(-n // 4) for n in SIZES]
    assert cohort.client == list(range(8))
    assert [len(rows) for rows in cohort.batches] == [0, *steps[1:4], 1, *steps[5:]]
    assert cohort.weight == [0, 2, 0, 2, 2, 0, 2, 2], "client 2 has no examples"


@pytest.mark.parametrize("options", [{"sampling": "poisson"}, {"failure_rate": 0.4}])
def test_room_is_for_the_largest_round(options):
    one = schedule(**options).for_rounds(30)
    present = [len(one.present(number)) for number in range(1, 31)]
    assert one.capacity == max(present) > min(present)
    time_steps = one.time_steps(30, 2)
    plans = [one.plan(number, 2, time_steps) for number in range(1, 31)]
    assert len({tuple((a.shape, a.dtype) for a in jax.tree.leaves(plan)) for plan in plans}) == 1
    assert max(int(p.steps) for p in plans) <= time_steps
    for number, plan in enumerate(plans, start=1):
        working = [c for c in one.present(number) if SIZES[c]]
        assert plan.client_steps == {c: -(-SIZES[c] // 4) for c in working}
    assert schedule().for_rounds(30).capacity == schedule().capacity == 3


@pytest.mark.parametrize("sampling", ["uniform", "size", "poisson", "round_robin", "all"])
def test_room_is_for_any_clients_that_may_be_available(sampling):
    """Who fails differs from client to client, so other cohorts may be larger."""
    one = schedule(sampling, failure_rate=0.6, intermittent=True).for_rounds(12)
    rng, time_steps = np.random.default_rng(0), one.time_steps(12, 2)
    for number in [*range(1, 13)] * 20:
        among = np.sort(rng.choice(8, rng.integers(0, 9), replace=False))
        plan = one._replace(among=among).plan(number, 2, time_steps)
        assert set(plan.client_steps) <= set(among.tolist())


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
def test_fewer_or_shorter_jobs_make_no_plan_longer(lengths, lanes, data):
    kept = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    shorter = [data.draw(st.integers(0, n)) for n in lengths]

    def longest(jobs):
        return max(sum(jobs[j] for j in queue) for queue in pack(jobs, lanes))

    assert longest([n for n, k in zip(lengths, kept, strict=True) if k]) <= longest(lengths)
    assert longest(shorter) <= longest(lengths)


# ------------------------------------------------------------------------------------ unequal work

RANGES = st.tuples(st.integers(1, 6), st.integers(0, 6)).map(lambda x: (x[0], x[0] + x[1]))


def unequal(seed=0, sampling="all", per_round=8, **options):
    """Returns a schedule whose clients draw their work."""
    work = {"epochs": 1, "local_steps": None} | options
    return schedule(sampling, per_round, seed=seed)._replace(**work)


@settings(deadline=None, max_examples=50)
@given(RANGES, st.booleans(), st.integers(0, 99), st.sampled_from([0.0, 0.5, 1.0]))
def test_work_is_within_its_range_and_fits_the_plan(work, by_epochs, seed, stragglers):
    key = "epochs" if by_epochs else "local_steps"
    one = unequal(seed, stragglers=stragglers, **{key: work})
    batches = [-(-n // 4) if by_epochs else int(n > 0) for n in SIZES]
    time_steps = {lanes: one.time_steps(3, lanes) for lanes in (1, 3)}
    for number in (1, 2, 3):
        plans = [one.plan(number, lanes, time_steps[lanes]) for lanes in (1, 3)]
        steps = plans[0].client_steps
        assert plans[1].client_steps == steps
        assert steps == {c: one.steps(c, number) for c in range(8) if SIZES[c]}
        for client, count in steps.items():
            assert count % batches[client] == 0
            drawn = count // batches[client]
            assert work[0] <= drawn <= work[1]
            assert stragglers or drawn == work[1]
            assert count <= one.most_steps(client)
        same = unequal(seed, "uniform", 3, stragglers=stragglers, **{key: work})
        drawn = {c: n for c in same.present(number) if (n := same.steps(c, number))}
        assert drawn.items() <= steps.items(), "whoever else is drawn"


def test_all_numbers_of_a_range_are_equally_likely():
    one = unequal(local_steps=(2, 5))
    drawn = [one.steps(c, number) for number in range(1, 401) for c in (0, 4, 7)]
    counts = Counter(drawn)
    assert [counts[n] / 1200 for n in (2, 3, 4, 5)] == roughly([1 / 4] * 4, abs=0.04)
    assert drawn[:6] == [
        int(host_rng(0, "work", number, c).integers(2, 6)) for number in (1, 2) for c in (0, 4, 7)
    ]
    assert drawn != [one._replace(seed=1).steps(c, n) for n in range(1, 401) for c in (0, 4, 7)]
    assert one.steps(2, 1) == 0, "a client without examples has no work"


def test_stragglers_are_a_share_of_the_clients_and_the_others_do_all():
    some, every = unequal(epochs=(1, 20), stragglers=0.5), unequal(epochs=(1, 20))
    pairs = [(some.steps(7, n), every.steps(7, n)) for n in range(1, 1001)]
    assert {a for a, b in pairs if a != b} == {20}, "a straggler's work is the same in both"
    # Half of the clients draw, and one draw in twenty is the whole work.
    assert np.mean([a < 20 for a, _ in pairs]) == approx(0.5 * 0.95, abs=0.04)


def test_a_number_is_a_range_of_itself():
    for key, number in (("epochs", 2), ("local_steps", 7)):
        one, same = (unequal(**{key: x}) for x in (number, (number, number)))
        assert (one.draws, same.draws) == (False, True)
        assert one.time_steps(5, 2) == same.time_steps(5, 2)
        plans = (x.plan(3, 2, 256) for x in (one, same))
        for a, b in zip(*plans, strict=True):
            np.testing.assert_array_equal(a, b)


def test_limited_work_is_the_first_part_of_the_whole():
    one = unequal(local_steps=(3, 6))
    whole, part = one.cohort(2), one.cohort(2, without=[0], limits={4: 2, 7: 99})
    assert part.client == whole.client[1:]
    assert part.weight == whole.weight[1:]
    for client, rows in zip(part.client, part.batches, strict=True):
        expected = whole.batches[client][: 2 if client == 4 else None]
        np.testing.assert_array_equal(rows, expected)
