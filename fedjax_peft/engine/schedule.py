"""The clients of each round and their batches: a pure function of the seed."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from fedjax_peft.contracts import Aggregation, Job, Timeline
from fedjax_peft.engine.lengths import Lengths
from fedjax_peft.engine.plan import (
    Cohort,
    Fetched,
    Plan,
    batches,
    make_plan,
    pack,
    poisson_batches,
    steps_of,
)
from fedjax_peft.numerics.ragged import Ragged
from fedjax_peft.numerics.random import host_rng

Sampling = Literal["uniform", "size", "poisson", "round_robin", "all"]
"""How the clients of a round are drawn.

* ``uniform``: ``per_round`` clients, without replacement.
* ``size``: ``per_round`` clients, without replacement, one after the other with probabilities
  proportional to their weights: ``Clients.weights``, by default the numbers of examples. Clients
  without examples or with the weight 0 are never drawn. Use uniform aggregation weights with it;
  otherwise the weights count twice.
* ``poisson``: each client independently, ``per_round`` on average; a round may be empty.
* ``round_robin``: the next ``per_round`` clients of a random order, which is repeated.
* ``all``: all clients.
"""
BatchSampling = Literal["shuffled", "poisson"]
"""How a client draws the examples of a local step.

* ``shuffled``: passes over its examples in a random order, ``batch_size`` at a time.
* ``poisson``: each example independently, ``batch_size`` on average.
"""
Range: TypeAlias = int | Sequence[int]
"""A number, or a pair ``(least, most)`` from which each client draws its number in each round. All
numbers from ``least`` to ``most``, both included, have the same probability."""


class Schedule(NamedTuple):
    """The sampling of clients and the order of their examples."""

    indices: Sequence[np.ndarray]
    """The examples of every client."""
    per_round: int
    """Number of clients per round; with Poisson sampling, the average number."""
    batch_size: int
    """Examples in a local step; with Poisson sampling, on average."""
    epochs: Range
    local_steps: Range | None
    seed: int
    sampling: Sampling = "uniform"
    failure_rate: float = 0.0
    """Probability that a sampled client drops out of the round."""
    slots: int | None = None
    """Number of clients that fit into a plan; by default ``per_round``. See :meth:`for_rounds`."""
    tokens: Lengths | None = None
    """The lengths of the examples, if they are texts."""
    stragglers: float = 1.0
    """Probability that a client draws its work from a range; otherwise it does the most."""
    batch_sampling: BatchSampling = "shuffled"
    width: int | None = None
    """The examples that a local step has room for; by default ``batch_size``. It is less where no
    client can fill a batch, and more where Poisson sampling can draw more."""
    timelines: Callable[[int], Timeline] | None = None
    """seed -> the jobs of every aggregation of an asynchronous run, which then replace the drawn
    cohorts; None: the run is synchronous."""
    failure: Callable[[int, int], float] | None = None
    """(seed, client) -> the probability that the client drops out; None: ``failure_rate``."""
    intermittent: bool = False
    """Whether cohorts are drawn from the clients that are available (``among``). They are then not
    known before the rounds."""
    among: np.ndarray | None = None
    """int ``[n]``: the clients that are available in the round that is planned; None: all."""
    given_weights: np.ndarray | None = None
    """The weights of all clients, float ``[clients]``, if they are not the numbers of examples."""
    all_send: bool = False
    """Whether members without work, because they have no examples or are late, take part without it
    (``Plan.silent``): their noise is then in the sum, and their absence tells nobody why."""

    @property
    def room(self) -> int:
        """The examples that a local step has room for."""
        return self.batch_size if self.width is None else self.width

    @property
    def draws(self) -> bool:
        """Whether clients draw their work from a range."""
        return not isinstance(self._work, int)

    @property
    def _work(self) -> Range:
        return self.epochs if self.local_steps is None else self.local_steps

    @property
    def capacity(self) -> int:
        """The number of clients that fit into a plan."""
        return self.per_round if self.slots is None else self.slots

    def for_rounds(self, rounds: int) -> "Schedule":
        """Returns the schedule with exactly enough slots for the largest cohort of the rounds.

        Where ``uniform`` and ``size`` draw from the clients that are available, it may be any of
        them, and none may fail, so there are slots for ``per_round``. An asynchronous run's
        timeline knows who is available, and more than ``per_round`` may arrive in a period.
        """
        unknown = self.intermittent and self.timelines is None
        if unknown and self.sampling in ("uniform", "size"):
            return self._replace(slots=self.per_round)
        largest = max(len(self.present(round_index)) for round_index in range(1, rounds + 1))
        return self._replace(slots=max(largest, 1))

    def for_lanes(self, lanes: int) -> "Schedule":
        """Returns the schedule with padded lengths that suit ``lanes`` lanes."""
        if self.tokens is None:
            return self
        return self._replace(tokens=self.tokens.fitted(lanes * self.room))

    def of_everyone(self, epochs: int, slots: int) -> "Schedule":
        """Returns the schedule in which all clients train, ``slots`` of them in each plan."""
        return self._replace(
            per_round=len(self.indices),
            slots=slots,
            epochs=epochs,
            local_steps=None,
            sampling="all",
            failure_rate=0.0,
            timelines=None,
            all_send=False,
        )

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
        """Returns the ids of the clients that are drawn for a round, sorted.

        Of those available, ``uniform`` and ``size`` draw ``per_round``, all if there are fewer. The
        other samplings draw as ever, and leave out the clients that are not available.
        """
        if self.timelines is not None:
            return [job.client for job in self.aggregation(round_index).jobs]
        clients = len(self.indices)
        rng = host_rng(self.seed, "cohort", round_index)
        there = np.arange(clients) if self.among is None else self.among
        match self.sampling:
            case "uniform":
                drawn = rng.choice(there, min(self.per_round, len(there)), replace=False)
            case "size":
                weights = self.weights[there]
                number = min(self.per_round, int(np.count_nonzero(weights)))
                p = weights / weights.sum() if number else None
                drawn = rng.choice(there, number, replace=False, p=p)
            case "poisson":
                drawn = np.flatnonzero(rng.random(clients) < self.per_round / clients)
            case "round_robin":
                # Shuffled: clients with neighbouring ids may have similar data, by the partition.
                order = _shuffled(clients, self.seed)
                first = (round_index - 1) * self.per_round
                drawn = order[np.arange(first, first + self.per_round) % clients]
            case "all":
                drawn = np.arange(clients)
        if self.among is not None:
            drawn = np.intersect1d(drawn, self.among)
        return sorted(drawn.tolist())

    def failed(self, round_index: int) -> list[int]:
        """Returns the members of a round that have examples and drop out of it."""
        if self.timelines is not None:
            return sorted({job.client for job in self.aggregation(round_index).lost})
        if not self.failure_rate:
            return []
        return [
            c
            for c in self.members(round_index)
            if len(self.indices[c])
            and host_rng(self.seed, "failure", round_index, c).random() < self._failure(c)
        ]

    def _failure(self, client: int) -> float:
        return self.failure_rate if self.failure is None else self.failure(self.seed, client)

    def present(self, round_index: int) -> list[int]:
        """Returns the members of a round that do not drop out."""
        if self.timelines is not None:
            return self.members(round_index)
        failed = set(self.failed(round_index))
        return [c for c in self.members(round_index) if c not in failed]

    def aggregation(self, round_index: int) -> Aggregation:
        """Returns an aggregation of an asynchronous run."""
        assert self.timelines is not None
        return self.timelines(self.seed)(round_index)

    def origins(self, round_index: int) -> dict[int, int]:
        """Returns a round's present members -> the round that gives their random numbers.

        In an asynchronous run this is an earlier round for a client that fetched earlier.
        """
        if self.timelines is None:
            return dict.fromkeys(self.present(round_index), round_index)
        return {job.client: job.round_index for job in self.aggregation(round_index).jobs}

    def places(self, rounds: int) -> int:
        """Returns the places that a history of versions needs for all rounds; 0: none is needed.

        It is a power of two, so that other seeds can use the same program.
        """
        if self.timelines is None:
            return 0
        made = [self.aggregation(number) for number in range(1, rounds + 1)]
        last = max(place for one in made for place in (one.place, *(j.place for j in one.jobs)))
        return 1 << last.bit_length()

    def steps(self, client: int, round_index: int) -> int:
        """Returns a client's local steps in a round.

        Work that is drawn depends on the seed, the round and the client only.
        """
        work = self._work
        if isinstance(work, int):
            return self._steps(client, work)
        least, most = work
        rng = host_rng(self.seed, "work", round_index, client)
        # Drawn before the decision: a straggler's work is then the same for all shares of them.
        drawn = int(rng.integers(least, most, endpoint=True))
        return self._steps(client, drawn if rng.random() < self.stragglers else most)

    def most_steps(self, client: int) -> int:
        """Returns the largest number of local steps that a client can draw in a round."""
        return self._steps(client, self._most_work)

    @property
    def all_most_steps(self) -> np.ndarray:
        """:meth:`most_steps` of all clients, int64 ``[clients]``."""
        if self.local_steps is not None:
            return np.where(self.sizes > 0, self._most_work, 0)
        return self._most_work * -(-self.sizes // self.batch_size)

    @property
    def sizes(self) -> np.ndarray:
        """The number of examples of every client, int64 ``[clients]``."""
        return Ragged.of(self.indices).sizes

    @property
    def weights(self) -> np.ndarray:
        """:meth:`weight` of all clients, ``[clients]``."""
        if self.given_weights is None:
            return self.sizes
        return np.where(self.sizes > 0, self.given_weights, 0.0)

    def weight(self, client: int) -> float:
        """Returns a client's weight: by default its number of examples; 0 without examples."""
        examples = len(self.indices[client])
        if self.given_weights is None or not examples:
            return float(examples)
        return float(self.given_weights[client])

    @property
    def _most_work(self) -> int:
        work = self._work
        return work if isinstance(work, int) else work[1]

    def _steps(self, client: int, work: int) -> int:
        """Returns a client's local steps for a number of epochs, or of steps."""
        epochs, local_steps = (work, None) if self.local_steps is None else (1, work)
        return steps_of(len(self.indices[client]), self.batch_size, epochs, local_steps)

    def client_steps(self, round_index: int) -> dict[int, int]:
        """Returns client -> local steps, for a round's present members that have examples."""
        origins = self.origins(round_index)
        return {c: n for c, origin in origins.items() if (n := self.steps(c, origin))}

    def lengths(self, round_index: int) -> list[int]:
        """Returns the local steps of a round's present members."""
        least = int(self.all_send)
        return [max(self.steps(c, n), least) for c, n in self.origins(round_index).items()]

    def cohort(
        self,
        round_index: int,
        without: Collection[int] = (),
        limits: Mapping[int, int] | None = None,
        members: Sequence[int] | None = None,
    ) -> Cohort:
        """Returns a round's present members, except ``without``, with their weights and batches.

        Weights are those of :meth:`weight`; the examples are shuffled. With ``all_send``, clients
        in ``without`` are members without work. A client in ``limits`` makes
        at most this number of steps, which are the first ones of its work. With ``members``, these
        clients are the cohort instead.
        """
        if members is None:
            origins = self.origins(round_index)
        else:
            origins = dict.fromkeys(members, round_index)
        limits = limits or {}
        if self.all_send:
            limits = {**limits, **dict.fromkeys(without, 0)}
        members = [c for c in origins if self.all_send or c not in without]
        work = [self._batches(c, origins[c])[: limits.get(c)] for c in members]
        weights = [self.weight(c) if len(b) else 0.0 for c, b in zip(members, work, strict=True)]
        return Cohort(members, weights, work)

    def _batches(self, client: int, round_index: int) -> np.ndarray:
        """Returns a client's batches in a round, int32 ``[steps, room]``; -1 pads."""
        rows, steps = self.indices[client], self.steps(client, round_index)
        rng = host_rng(self.seed, "order", round_index, client)
        if self.batch_sampling == "poisson":
            return poisson_batches(rows, self.batch_size, self.room, steps=steps, rng=rng)
        return batches(rows, self.room, local_steps=steps, rng=rng)

    def time_steps(self, rounds: int, lanes: int) -> int:
        """Returns the capacity of a plan for all rounds, so that nothing recompiles.

        The capacity is a power of two and fits the largest cohort and the most work that could be
        drawn. Therefore another seed, or more rounds, can use the same program. If that plan is
        larger than 4 MB, and the cohorts are known, the capacity only fits the largest cohort of
        the given rounds.

        Leaving clients out, or shortening their work, never makes a plan longer: with fewer or
        shorter jobs, :func:`fedjax_peft.engine.plan.pack` gives no lane more work, if lanes are
        compared in the order of their load.
        """
        largest = self._bound(lanes)
        if largest * lanes * self.room > 1 << 20 and not self.intermittent:
            largest = max(self._longest(number, lanes) for number in range(1, rounds + 1))
        return 1 << (max(largest, 1) - 1).bit_length()

    def time_steps_of_part(self, lanes: int) -> int:
        """Returns the capacity of a plan for any clients that fit into it."""
        if self.capacity >= len(self.indices):
            return self.time_steps(1, lanes)
        return 1 << (max(self._bound(lanes), 1) - 1).bit_length()

    def _bound(self, lanes: int) -> int:
        """Returns an upper bound of the time steps of a plan.

        Every job goes to the lane with the least work, so a lane is over the average by one job.
        """
        most = np.sort(np.maximum(self.all_most_steps, int(self.all_send)))[-self.capacity :]
        return int(most.sum()) // lanes + int(most[-1])

    def _longest(self, round_index: int, lanes: int) -> int:
        """Returns the time steps of a round's plan."""
        lengths = self.lengths(round_index)
        return max(sum(lengths[j] for j in queue) for queue in pack(lengths, lanes))

    def plan(
        self,
        round_index: int,
        lanes: int,
        time_steps: int,
        without: Collection[int] = (),
        limits: Mapping[int, int] | None = None,
        members: Sequence[int] | None = None,
    ) -> Plan:
        """Returns the plan of a round; for the last arguments see :meth:`cohort`."""
        plan = make_plan(
            self.cohort(round_index, without, limits, members),
            lanes,
            time_steps=time_steps,
            slots=self.capacity,
            batch_size=self.room,
            tokens=self.tokens,
            all_send=self.all_send,
        )
        if self.timelines is None:
            return plan
        aggregation = self.aggregation(round_index)
        jobs = [job for job in aggregation.jobs if self.all_send or job.client not in without]
        return plan._replace(fetched=self._fetched(aggregation, jobs))

    def _fetched(self, aggregation: Aggregation, jobs: Sequence[Job]) -> Fetched:
        """Returns the versions from which the clients of a cohort start, by slot."""
        place, origin, staleness = np.zeros((3, self.capacity), np.int32)
        for slot, job in enumerate(jobs):
            place[slot], origin[slot] = job.place, job.round_index
            staleness[slot] = aggregation.version - job.version
        return Fetched(np.array(aggregation.place, np.int32), place, origin, staleness)


@lru_cache(maxsize=2)
def _shuffled(clients: int, seed: int) -> np.ndarray:
    """Returns the random order in which clients take turns."""
    return host_rng(seed, "round robin").permutation(clients)
