"""The automatic choice of the number of lanes."""

import pytest

from fedjax_peft.engine.lanes import SMALL_MODEL, best_lanes, cpu_lanes


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
