"""Who takes part in which round, with which batches: a pure function of the seed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_peft.engine.plan import Cohort, Plan, batches, make_plan, pack, steps_of
from fedjax_peft.random import host_rng

__all__ = ["Schedule"]


class Schedule(NamedTuple):
    """The sampling of clients and the order of their examples."""

    indices: Sequence[np.ndarray]
    """Every client's examples."""
    per_round: int
    batch_size: int
    epochs: int
    local_steps: int | None
    seed: int

    def members(self, number: int) -> list[int]:
        """Returns the client ids of a round: uniform without replacement, sorted."""
        rng = host_rng(self.seed, "cohort", number)
        return sorted(rng.choice(len(self.indices), self.per_round, replace=False).tolist())

    def lengths(self, number: int) -> list[int]:
        """Returns the local steps of a round's members."""
        return [
            steps_of(len(self.indices[c]), self.batch_size, self.epochs, self.local_steps)
            for c in self.members(number)
        ]

    def cohort(self, number: int) -> Cohort:
        """Returns a round's members with their weights (example counts) and shuffled batches."""
        members = self.members(number)
        work = [
            batches(
                self.indices[c],
                self.batch_size,
                epochs=self.epochs,
                local_steps=self.local_steps,
                rng=host_rng(self.seed, "order", number, c),
            )
            for c in members
        ]
        return Cohort(members, [float(len(self.indices[c])) for c in members], work)

    def time_steps(self, rounds: int, lanes: int) -> int:
        """Returns the longest plan of all rounds: the capacity with which nothing recompiles."""
        longest = 1
        for number in range(1, rounds + 1):
            lengths = self.lengths(number)
            loads = (sum(lengths[j] for j in queue) for queue in pack(lengths, lanes))
            longest = max(longest, *loads)
        return longest

    def plan(self, number: int, lanes: int, time_steps: int) -> Plan:
        """Returns the plan of a round."""
        return make_plan(
            self.cohort(number),
            lanes,
            time_steps=time_steps,
            slots=self.per_round,
            batch_size=self.batch_size,
        )
