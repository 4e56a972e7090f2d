"""The choice of the number of clients that run side by side (``lanes="auto"``).

The number of lanes affects throughput; results change only by float32 rounding.
"""

import time
from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import numpy as np

from fedjax_peft.contracts import Params
from fedjax_peft.engine.devices.distributed import agree
from fedjax_peft.engine.devices.layout import Layout
from fedjax_peft.engine.program import Program
from fedjax_peft.engine.schedule import Schedule
from fedjax_peft.engine.state import State

Lanes: TypeAlias = int | Literal["auto"]

SMALL_MODEL = 2_000_000
"""A CPU gains from several lanes if the backbone has fewer weights in matrix products than this:
dispatch, not arithmetic, then limits its speed. Measured on 2 cores; see
experiments/benchmarks/README.md."""


def cpu_lanes(weights: int, cohort: int) -> int:
    """Returns the number of lanes for a CPU.

    It follows a fixed rule instead of a measurement, so it is the same in every run. One client at
    a time keeps the caches warm; several lanes are faster for tiny models only. At most four lanes
    are used, and no more than shorten the round: five clients take two turns with three lanes as
    they do with four, and idle lanes cost time.
    """
    if weights >= SMALL_MODEL:
        return 1
    turns = -(-cohort // 4)
    return -(-cohort // turns)


def best_lanes(
    measure: Callable[[int], tuple[float, int]], cohort: int, memory_limit: int, devices: int = 1
) -> int:
    """Returns the number of lanes with the best throughput.

    The number is doubled as long as throughput grows by at least 5 % and the memory suffices.

    Args:
      measure: lanes -> (client steps per second, bytes that the compiled program needs).
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


def choose_lanes(
    lanes: Lanes,
    schedule: Schedule,
    rounds: int,
    start: Callable[[], State],
    program: Callable[[Schedule], Program],
    layout: Layout,
    weights: Params,
) -> int:
    """Returns the number of lanes, a multiple of the number of lane devices.

    ``weights`` holds all weights of the model.
    """
    devices = layout.lane_devices
    most = layout.lanes(schedule.capacity)
    if lanes != "auto":
        layout.check_lanes(lanes)
        return min(lanes, most)
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        names = ("kernel", "kernel.codes")
        kernels = sum(x.size for name, x in weights.items() if name.endswith(names))
        return layout.lanes(cpu_lanes(kernels, schedule.capacity))
    # Sampling may leave the first rounds without work.
    trial = next((n for n in range(1, rounds + 1) if any(schedule.lengths(n))), 1)
    limit = int(0.9 * (device.memory_stats() or {}).get("bytes_limit", 16 << 30))

    def measure(lanes: int) -> tuple[float, int]:
        fitted = schedule.for_lanes(lanes)
        plan = fitted.plan(trial, lanes, fitted.time_steps(rounds, lanes))
        plan = plan._replace(steps=np.minimum(plan.steps, np.int32(4)))
        live = int((plan.slot[: int(plan.steps)] < schedule.capacity).sum())
        run = program(fitted)
        run.compile(start(), plan)
        if run.peak_bytes > limit:
            return 0.0, run.peak_bytes
        seconds = []
        for _ in range(3):
            state = jax.block_until_ready(start())
            began = time.perf_counter()
            jax.block_until_ready(run(state, plan, 1))
            seconds.append(time.perf_counter() - began)
        speed: float = agree(live / min(seconds))  # the first is a warm-up
        return speed, run.peak_bytes

    return best_lanes(measure, schedule.capacity, limit, devices)
