"""The round plan: it has every example of every client once per epoch, and few idle slots."""

from collections import Counter

import jax
import numpy as np
import pytest
from closeness import approx
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import Cohort, Schedule, batches, make_plan

import fedjax_peft as fp
from fedjax_peft.engine.lanes import SMALL_MODEL, best_lanes, cpu_lanes
from fedjax_peft.engine.plan import most_slots, pack, steps_of, window

SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=9)


def owners(sizes):
    """Returns disjoint example lists in a random order."""
    order = np.random.default_rng(0).permutation(sum(sizes)).astype(np.int32)
    return np.split(order, np.cumsum(sizes)[:-1])


def walk(plan):
    """Yields (slot, lane, time, local step, real examples, padding) of every busy lane-step."""
    for t in range(len(plan.slot)):
        for lane in range(plan.lanes):
            rows = plan.examples[t, lane]
            if plan.slot[t, lane] < len(plan.client):
                yield plan.slot[t, lane], lane, t, plan.local[t, lane], rows[rows >= 0], rows < 0
            else:
                assert (rows == -1).all()


@settings(deadline=None, max_examples=60)
@given(SIZES, st.integers(1, 7), st.integers(1, 3), st.integers(1, 6), st.integers(0, 3))
def test_every_example_runs_once_an_epoch(sizes, batch_size, epochs, lanes, spare):
    schedule = Schedule(owners(sizes), len(sizes), batch_size, epochs, None, seed=1)
    time_steps = schedule.time_steps(1, lanes) + spare
    plan = schedule.plan(1, lanes, time_steps)
    assert plan.slot.shape == plan.local.shape == (time_steps, lanes)
    assert plan.examples.shape == (time_steps, lanes, batch_size)

    seen = {slot: [] for slot in range(len(sizes))}
    places = {slot: [] for slot in range(len(sizes))}
    for slot, lane, t, local, real, padding in walk(plan):
        assert t < plan.steps
        assert len(real)
        assert not np.any(np.diff(padding.astype(int)) < 0), "padding comes last"
        seen[slot] += real.tolist()
        places[slot].append((lane, t, local))
    for slot, indices in enumerate(schedule.indices):
        assert Counter(seen[slot]) == Counter(indices.tolist() * epochs)
        length = epochs * -(-len(indices) // batch_size)
        assert plan.length[slot] == length == len(places[slot])
        if length:
            # One lane, one step after the other, from the first to the last: nothing in between.
            lane, begins, _ = places[slot][0]
            assert places[slot] == [(lane, begins + i, i) for i in range(length)]
            assert (plan.client[slot], plan.weight[slot]) == (slot, len(indices))
        else:
            assert (plan.client[slot], plan.weight[slot]) == (-1, 0)
    assert plan.useful == sum(plan.length) <= int(plan.steps) * lanes


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 12))
def test_local_steps_cycle_through_epochs(size, batch_size, steps):
    indices = np.arange(100, 100 + size)
    rng = np.random.default_rng(0)
    result = batches(indices, batch_size, local_steps=steps, rng=rng)
    assert result.shape == (steps, batch_size)
    per_epoch = -(-size // batch_size)
    for start in range(0, steps, per_epoch):
        rows = result[start : start + per_epoch].ravel()
        rows = rows[rows >= 0]
        assert len(set(rows.tolist())) == len(rows)
        if start + per_epoch <= steps:
            assert sorted(rows) == indices.tolist()


def test_each_epoch_is_shuffled_unless_no_rng_is_given():
    indices = np.arange(32)
    first, second = batches(indices, 32, epochs=2, rng=np.random.default_rng(0))
    assert first.tolist() != second.tolist()
    kept = batches(np.array([5, 3, 4]), 2, epochs=2)
    assert kept.tolist() == [[5, 3], [4, -1], [5, 3], [4, -1]]


def test_a_client_without_examples_takes_no_steps():
    assert steps_of(0, 4, 3, None) == steps_of(0, 4, 1, 7) == 0
    assert batches(np.array([], np.int32), 4, local_steps=7).shape == (0, 4)
    nobody = make_plan(
        Cohort([3], [0.0], [np.zeros((0, 4), np.int32)]), 2, time_steps=5, slots=1, batch_size=4
    )
    assert (int(nobody.steps), nobody.client.tolist(), nobody.slot_utilisation) == (0, [-1], 0)


def test_plans_keep_their_shape_from_round_to_round():
    schedule = Schedule(owners([40, 1, 0, 17, 3, 25, 8]), 4, 4, 2, None, 0)
    capacity = schedule.time_steps(20, 3)
    plans = [schedule.plan(number, 3, capacity) for number in range(1, 21)]
    forms = {tuple((a.shape, a.dtype) for a in jax.tree.leaves(plan)) for plan in plans}
    assert len(forms) == 1
    assert len({int(p.steps) for p in plans}) > 1
    assert max(int(p.steps) for p in plans) <= capacity


def test_the_capacity_of_a_plan_is_that_of_other_seeds_and_more_rounds():
    indices = owners([40, 1, 0, 17, 3, 25, 8])
    schedules = [Schedule(indices, 3, 4, 2, None, seed) for seed in range(20)]
    assert {s.time_steps(rounds, 2) for s in schedules for rounds in (1, 20)} == {64}
    # A huge client that is not drawn costs nothing.
    rare = Schedule(owners([1 << 20, *[4] * 50]), 2, 4, 1, None, 0)
    assert rare.time_steps(1, 1) == 2


@pytest.mark.parametrize(("lanes", "steps"), [(1, 1), (1, 4), (3, 2), (3, 50)])
def test_windows_are_the_plan_in_parts(lanes, steps):
    """Every part has the same examples of the same clients, and starts each client once."""
    work = [batches(rows, 4) for rows in owners([9, 30, 1, 17, 4])]
    whole = make_plan(
        Cohort([7, 3, 9, 1, 0], [1.0] * 5, work), lanes, time_steps=40, slots=5, batch_size=4
    )
    slots = most_slots(whole, steps)
    seen = []
    for start in range(0, int(whole.steps), steps):
        part = window(whole, start, steps, time_steps=steps, slots=slots)
        assert (part.slot.shape, part.client.shape) == ((steps, lanes), (slots,))
        for t in range(int(part.steps)):
            for lane in range(lanes):
                slot, before = part.slot[t, lane], whole.slot[start + t, lane]
                assert (slot < slots) == (before < 5)
                if slot < slots:
                    assert part.client[slot] == whole.client[before]
                    earlier = part.slot[:t, lane] == slot
                    assert part.local[t, lane] == earlier.sum()
                np.testing.assert_array_equal(
                    part.examples[t, lane], whole.examples[start + t, lane]
                )
        seen += part.examples[part.examples >= 0].tolist()
    assert sorted(seen) == sorted(np.concatenate([w[w >= 0] for w in work]).tolist())


def test_the_plan_reports_its_utilisation():
    work = [np.zeros((n, 2), np.int32) for n in (5, 3, 2, 0)]
    plan = make_plan(Cohort(range(4), [1] * 4, work), 2, time_steps=9, slots=4, batch_size=2)
    assert (plan.useful, int(plan.steps)) == (10, 5)
    assert plan.slot_utilisation == 1.0
    assert plan.padded_utilisation == approx(10 / 15)
    one = Cohort([0], [1.0], [np.zeros((1, 2), np.int32)])  # a single step, so nothing is idle
    one = make_plan(one, 1, time_steps=1, slots=1, batch_size=2)
    assert one.slot_utilisation == one.padded_utilisation == 1.0


def test_too_small_a_capacity_is_an_error():
    work = [np.zeros((4, 2), np.int32)]
    for capacity in ({"time_steps": 3, "slots": 1}, {"time_steps": 4, "slots": 0}):
        with pytest.raises(ValueError, match="plan of 4 steps, 1 clients"):
            make_plan(Cohort([0], [1.0], work), 1, batch_size=2, **capacity)


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 6))
def test_packing_places_every_job_once(lengths, lanes):
    queues = pack(lengths, lanes)
    assert len(queues) == lanes
    assert sorted(j for q in queues for j in q) == [j for j, n in enumerate(lengths) if n]
    # Graham 1966: no queue is longer than the mean by more than (lanes - 1) / lanes of one job.
    longest = max(sum(lengths[j] for j in q) for q in queues)
    assert lanes * longest <= sum(lengths) + (lanes - 1) * max(lengths, default=0)


def test_packing_is_within_five_percent_for_a_skewed_federation():
    labels = np.random.default_rng(0).integers(0, 20, 11_293)
    clients = fp.partition.dirichlet(labels, 100, 0.1, mode="class_wise", seed=0)
    schedule = Schedule(clients.indices, 20, 16, 1, None, seed=0)
    rounds = [schedule.lengths(number) for number in range(1, 41)]
    assert max(map(max, rounds)) > 5 * min(map(min, rounds)), "the sizes are unequal"
    for lanes in range(2, 17):
        ratios = []
        for lengths in rounds:
            longest = max(sum(lengths[j] for j in queue) for queue in pack(lengths, lanes))
            ratios.append(longest / max(max(lengths), -(-sum(lengths) // lanes)))
        assert np.mean(ratios) <= 1.05, f"{lanes} lanes"


# -------------------------------------------------------------------- the automatic number of lanes


def test_a_cpu_runs_one_lane_but_for_tiny_models():
    assert cpu_lanes(SMALL_MODEL, 10) == 1
    assert cpu_lanes(SMALL_MODEL - 1, 10) == 4
    assert cpu_lanes(1000, 2) == 2


def test_a_cpu_has_no_more_lanes_than_shorten_a_round():
    assert [cpu_lanes(1000, n) for n in range(1, 11)] == [1, 2, 3, 4, 3, 3, 4, 4, 3, 4]


@pytest.mark.parametrize(
    ("speeds", "needed", "devices", "chosen", "measured"),
    [
        # Doubling pays up to 8, and 10 clients cannot fill more than 10 lanes.
        ({1: 10, 2: 19, 4: 35, 8: 60, 10: 90}, 0, 1, 10, [1, 2, 4, 8, 10]),
        ({1: 10, 2: 19, 4: 35, 8: 36}, 0, 1, 4, [1, 2, 4, 8]),
        ({1: 10, 2: 10.4}, 0, 1, 1, [1, 2]),
        # Out of memory, as the compiler sees it.
        ({1: 10, 2: 20, 4: 40, 8: 80}, 30, 1, 2, [1, 2, 4]),
        # Lanes are a multiple of the devices, even beyond the cohort.
        ({4: 10, 8: 20, 12: 30}, 0, 4, 12, [4, 8, 12]),
        ({16: 10}, 0, 16, 16, [16]),
    ],
)
def test_doubling_stops_where_it_no_longer_pays(speeds, needed, devices, chosen, measured):
    asked = []

    def measure(lanes):
        asked.append(lanes)
        return speeds[lanes], needed * lanes

    assert best_lanes(measure, 10, memory_limit=100, devices=devices) == chosen
    assert asked == measured
