"""The plans of a session: those of one seed have one shape, so that nothing compiles anew."""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np

from fedjax_peft.engine.devices.layout import Layout
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.schedule import Schedule


class Capacity(NamedTuple):
    """The common size of all plans of one seed."""

    rounds: int
    """The plans of rounds 1 to ``rounds`` fit."""
    schedule: Schedule
    time_steps: int


class Planner:
    """Makes the plans of rounds, and keeps the last two."""

    def __init__(
        self, schedule: Schedule, rounds: int, layout: Layout, lanes: Callable[[int], int]
    ):
        """Makes no plan yet.

        Args:
          layout: the devices, which share the clients of a round in equal parts.
          lanes: seed -> the number of lanes.
        """
        self._schedule, self._rounds, self._layout, self._lanes = schedule, rounds, layout, lanes
        self._capacities: dict[int, Capacity] = {}
        self._plans: dict[tuple, Plan] = {}

    def schedule(self, seed: int) -> Schedule:
        """Returns the schedule of the clients for a seed."""
        return self._schedule._replace(seed=int(seed))

    def plan(
        self,
        round_index: int,
        seed: int,
        without: Collection[int],
        limits: Mapping[int, int] | None,
        among: np.ndarray | None,
    ) -> Plan:
        """Returns the plan of a round; see :meth:`fedjax_peft.engine.session.Session.plan`."""
        capacity = self.capacity(seed, round_index)
        rest = (tuple(sorted((limits or {}).items())), None if among is None else among.tobytes())
        key = (round_index, seed, tuple(sorted(without)), *rest, capacity.rounds)
        if key not in self._plans:
            size = (self._lanes(seed), capacity.time_steps)
            schedule = capacity.schedule._replace(among=among)
            made = schedule.plan(round_index, *size, without, limits)
            last = list(self._plans.items())[-1:]
            self._plans = {**dict(last), key: made}
        return self._plans[key]

    def capacity(self, seed: int, round_index: int = 1) -> Capacity:
        """Returns the size of a seed's plans, large enough for the given round."""
        known = self._capacities.get(seed)
        if known is None or round_index > known.rounds:
            rounds = self._rounds if known is None else known.rounds
            while rounds < round_index:
                rounds *= 2
            lanes = self._lanes(seed)
            schedule = self.schedule(seed).for_rounds(rounds).for_lanes(lanes)
            schedule = schedule._replace(slots=self._layout.rows(schedule.capacity))
            known = Capacity(rounds, schedule, schedule.time_steps(rounds, lanes))
            self._capacities[seed] = known
        return known
