"""The clients of each round and their batches: a pure function of the seed."""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import numpy as np

from fedjax_peft.engine.lengths import Lengths
from fedjax_peft.engine.plan import Cohort, Plan, batches, make_plan, pack, steps_of
from fedjax_peft.random import host_rng

__all__ = ["Sampling", "Schedule"]

Sampling = Literal["uniform", "size", "poisson", "round_robin", "all"]
"""How the clients of a round are drawn.

* ``uniform``: ``per_round`` clients, without replacement.
* ``size``: ``per_round`` clients, without replacement, one after the other with probabilities
  proportional to their numbers of examples. Clients without examples are never drawn. Use uniform
  aggregation weights with it; otherwise the number of examples counts twice.
* ``poisson``: each client independently, ``per_round`` on average; a round may be empty.
* ``round_robin``: the next ``per_round`` clients of a random order, which is repeated.
* ``all``: all clients.
"""


class Schedule(NamedTuple):
    """The sampling of clients and the order of their examples."""

    indices: Sequence[np.ndarray]
    """The examples of every client."""
    per_round: int
    """Number of clients per round; with Poisson sampling, the average number."""
    batch_size: int
    epochs: int
    local_steps: int | None
    seed: int
    sampling: Sampling = "uniform"
    failure_rate: float = 0.0
    """Probability that a sampled client drops out of the round."""
    slots: int | None = None
    """Number of clients that fit into a plan; by default ``per_round``. See :meth:`for_rounds`."""
    tokens: Lengths | None = None
    """The lengths of the examples, if they are texts."""

    @property
    def capacity(self) -> int:
        """The number of clients that fit into a plan."""
        return self.per_round if self.slots is None else self.slots

    def for_rounds(self, rounds: int) -> "Schedule":
        """Returns the schedule with exactly enough slots for the largest cohort of the rounds."""
        largest = max(len(self.present(round_index)) for round_index in range(1, rounds + 1))
        return self._replace(slots=max(largest, 1))

    def for_lanes(self, lanes: int) -> "Schedule":
        """Returns the schedule with padded lengths that suit ``lanes`` lanes."""
        if self.tokens is None:
            return self
        return self._replace(tokens=self.tokens.fitted(lanes * self.batch_size))

    @property
    def padded(self) -> tuple[int, ...]:
        """The padded lengths of a plan's steps; empty if the examples are not texts."""
        return () if self.tokens is None else self.tokens.padded

    def padding_share(self, plan: Plan) -> float | None:
        """Returns the share of padding in a plan's tokens; None if the examples are not texts.

        Idle lanes count as padding, because they compute too.
        """
        if self.tokens is None:
            return None
        used = int(plan.steps)
        return self.tokens.padding_share(plan.examples[:used], plan.bucket[:used])

    def members(self, round_index: int) -> list[int]:
        """Returns the ids of the clients that are drawn for a round, sorted."""
        clients = len(self.indices)
        rng = host_rng(self.seed, "cohort", round_index)
        match self.sampling:
            case "uniform":
                drawn = rng.choice(clients, self.per_round, replace=False)
            case "size":
                sizes = np.array([len(rows) for rows in self.indices])
                drawn = rng.choice(clients, self.per_round, replace=False, p=sizes / sizes.sum())
            case "poisson":
                drawn = np.flatnonzero(rng.random(clients) < self.per_round / clients)
            case "round_robin":
                # Shuffled: clients with neighbouring ids may have similar data, by the partition.
                order = host_rng(self.seed, "round robin").permutation(clients)
                first = (round_index - 1) * self.per_round
                drawn = order[np.arange(first, first + self.per_round) % clients]
            case "all":
                drawn = np.arange(clients)
        return sorted(drawn.tolist())

    def failed(self, round_index: int) -> list[int]:
        """Returns the members of a round that have examples and drop out of it."""
        if not self.failure_rate:
            return []
        return [
            c
            for c in self.members(round_index)
            if len(self.indices[c])
            and host_rng(self.seed, "failure", round_index, c).random() < self.failure_rate
        ]

    def present(self, round_index: int) -> list[int]:
        """Returns the members of a round that do not drop out."""
        failed = set(self.failed(round_index))
        return [c for c in self.members(round_index) if c not in failed]

    def steps(self, client: int) -> int:
        """Returns a client's local steps in a round."""
        return steps_of(len(self.indices[client]), self.batch_size, self.epochs, self.local_steps)

    def lengths(self, round_index: int) -> list[int]:
        """Returns the local steps of a round's present members."""
        return [self.steps(c) for c in self.present(round_index)]

    def cohort(self, round_index: int, without: Collection[int] = ()) -> Cohort:
        """Returns a round's present members, except ``without``, with their weights and batches.

        Weights are numbers of examples; the examples are shuffled.
        """
        members = [c for c in self.present(round_index) if c not in without]
        work = [
            batches(
                self.indices[c],
                self.batch_size,
                epochs=self.epochs,
                local_steps=self.local_steps,
                rng=host_rng(self.seed, "order", round_index, c),
            )
            for c in members
        ]
        return Cohort(members, [float(len(self.indices[c])) for c in members], work)

    def time_steps(self, rounds: int, lanes: int) -> int:
        """Returns the capacity of a plan for all rounds, so that nothing recompiles.

        The capacity is a power of two and fits the largest cohort that could be drawn. Therefore
        another seed, or more rounds, can use the same program. If that plan is larger than 4 MB,
        the capacity only fits the largest cohort of the given rounds.

        Leaving clients out never makes a plan longer: with fewer jobs,
        :func:`fedjax_peft.engine.plan.pack` gives no lane more work, if lanes are compared in the
        order of their load.
        """
        longest = 1
        for round_index in range(1, rounds + 1):
            lengths = self.lengths(round_index)
            loads = (sum(lengths[j] for j in queue) for queue in pack(lengths, lanes))
            longest = max(longest, *loads)
        most = sorted(map(self.steps, range(len(self.indices))))[-self.capacity :]
        # An upper bound for every lane, because every job goes to the lane with the least work.
        largest = sum(most) // lanes + most[-1]
        if largest * lanes * self.batch_size > 1 << 20:
            largest = longest
        return 1 << (largest - 1).bit_length()

    def plan(
        self, round_index: int, lanes: int, time_steps: int, without: Collection[int] = ()
    ) -> Plan:
        """Returns the plan of a round; the clients in ``without`` do not take part."""
        return make_plan(
            self.cohort(round_index, without),
            lanes,
            time_steps=time_steps,
            slots=self.capacity,
            batch_size=self.batch_size,
            tokens=self.tokens,
        )
