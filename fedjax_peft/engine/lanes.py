"""How many clients to run side by side (``lanes="auto"``).

A throughput knob: results do not change but for float32 rounding.
"""

from collections.abc import Callable

__all__ = ["best_lanes", "cpu_lanes"]

SMALL_MODEL = 2_000_000
"""Backbone weights in matrix products below which a CPU gains from several lanes: dispatch, not
arithmetic, then limits it. Measured on 2 cores; see experiments/benchmarks/README.md."""


def cpu_lanes(weights: int, cohort: int) -> int:
    """Returns the lanes for a CPU, by rule, so that it is the same on every run.

    One client at a time keeps the caches warm; only tiny models are worth batching.
    """
    return min(4, cohort) if weights < SMALL_MODEL else 1


def best_lanes(
    measure: Callable[[int], tuple[float, int]], cohort: int, memory_limit: int, devices: int = 1
) -> int:
    """Returns the lanes with the best throughput, doubling while it pays.

    Args:
      measure: lanes -> (client steps a second, bytes that the compiled program needs).
      cohort: clients a round, the most lanes that can be of use.
      memory_limit: bytes of the device that may be used.
      devices: lanes are a multiple of it.
    """
    most = -(-cohort // devices) * devices
    best, best_speed = devices, 0.0
    lanes = devices
    while True:
        speed, needed = measure(lanes)
        if needed > memory_limit or speed < 1.05 * best_speed:
            return best
        best, best_speed = lanes, speed
        if lanes == most:
            return best
        lanes = min(2 * lanes, most)
