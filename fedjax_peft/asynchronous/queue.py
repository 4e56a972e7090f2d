"""The event queue of an asynchronous server, in simulated time, on the host.

The queue does not depend on the training: it is a pure function of the seed and its settings. So
it says beforehand which jobs each aggregation takes. The rules, where papers leave them open:

* A free place among the ``concurrency`` clients is taken at once, by a client that is drawn
  uniformly from those that are idle and available.
* A client whose upload waits for its aggregation is not idle. So no client is in an aggregation
  twice, and a client and the number of the next aggregation identify a job.
* Uploads that arrive at the same time are taken before any client starts.
* A client that leaves before it has finished loses its work, at the time at which it leaves.
* A client that fails has worked for the whole time of its job, but the upload never arrives.
* An aggregation takes no simulated time.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from fedjax_peft.contracts import Aggregation, Availability, Job
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.errors import InputError

_TRIES = 32
"""How often a client is drawn from all idle ones before the available ones are listed."""
_MOST_LOST = 10_000
"""Jobs without an upload, one after the other, after which a run is given up."""


class Settings(NamedTuple):
    """What the events of an asynchronous run depend on."""

    seed: int
    clients: np.ndarray
    """int ``[n]``: the clients that have examples."""
    concurrency: int
    buffer_size: int | None
    """The server aggregates at this number of uploads; None: at multiples of ``period``."""
    period: float | None
    max_staleness: int | None
    steps: Callable[[int, int], int]
    """(client, round) -> local steps."""
    seconds: Callable[..., float]
    """(client, local steps, ``first``: whether it is the client's first job, ``version``: the
    server's) -> seconds from the beginning of the download to the end of the upload."""
    failure: Callable[[int], float]
    """client -> the probability that a job of it fails."""
    availability: Availability | None = None


class Queue:
    """The aggregations of a run; a :class:`fedjax_peft.contracts.Timeline`.

    Aggregations are made when they are asked for, and kept.
    """

    def __init__(self, settings: Settings):
        """Begins at the simulated time 0."""
        self._made: list[Aggregation] = []
        self._more = _aggregations(settings)

    def __call__(self, round_index: int) -> Aggregation:
        """Returns an aggregation by its number, from 1.

        Raises:
          InputError: no upload ever arrives.
        """
        while len(self._made) < round_index:
            self._made.append(next(self._more))
        return self._made[round_index - 1]


class _Idle:
    """The idle clients: uniform draws, removal and return in constant time."""

    def __init__(self, clients: np.ndarray):
        self._order = np.array(clients)
        self._at = np.zeros(clients.max(initial=-1) + 1, np.int64)  # client -> place in the order
        self._at[clients] = np.arange(len(clients))
        self._idle = len(clients)

    def __len__(self) -> int:
        return self._idle

    def all(self) -> np.ndarray:
        """Returns the idle clients."""
        return self._order[: self._idle]

    def draw(self, rng: np.random.Generator) -> int:
        """Returns an idle client, all with the same probability."""
        return int(self._order[rng.integers(self._idle)])

    def remove(self, client: int) -> None:
        """Removes an idle client."""
        self._idle -= 1
        self._swap(client, self._idle)

    def add(self, client: int) -> None:
        """Returns a client to the idle ones."""
        self._swap(client, self._idle)
        self._idle += 1

    def _swap(self, client: int, to: int) -> None:
        at, other = self._at[client], int(self._order[to])
        self._order[at], self._order[to] = other, client
        self._at[client], self._at[other] = to, at


class _Running(NamedTuple):
    """A job at work; the heap is ordered by the first two fields."""

    finish: float
    number: int
    job: Job
    lost: bool


class _State:
    """The clients and the server at one moment of simulated time."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.idle = _Idle(settings.clients)
        self.running: list[_Running] = []
        self.buffer: list[Job] = []
        self.started: list[Job] = []
        self.lost: list[Job] = []
        self.discarded: list[Job] = []
        self.met: set[int] = set()
        self.jobs, self.rounds, self.version = 0, 0, 0
        self.places = {0: 0}  # version -> place
        self.wake = math.inf
        """When a client may become available for a free place; inf while all places are taken."""
        self.in_vain = 0

    def refill(self, now: float) -> None:
        """Starts a job for every free place, as long as there are idle, available clients."""
        self.wake = math.inf
        while len(self.running) < self.settings.concurrency and len(self.idle):
            found = self._draw(now)
            if found is None:
                return
            self._start(*found, now)

    def _draw(self, now: float) -> tuple[int, float] | None:
        """Returns (client, when it leaves), None if no idle client is available."""
        availability, seed = self.settings.availability, self.settings.seed
        rng = host_rng(seed, "start", self.jobs)
        if availability is None:
            return self.idle.draw(rng), math.inf
        for _ in range(_TRIES):
            client = self.idle.draw(rng)
            there, until = availability.at(seed, np.array([client]), now)
            if there[0]:
                return client, float(until[0])
        clients = np.sort(self.idle.all())
        there, until = availability.at(seed, clients, now)
        if not there.any():
            self.wake = float(until.min())
            return None
        chosen = rng.choice(np.flatnonzero(there))
        return int(clients[chosen]), float(until[chosen])

    def _start(self, client: int, leaves: float, now: float) -> None:
        settings, round_index = self.settings, self.rounds + 1
        steps, first = settings.steps(client, round_index), client not in self.met
        finish = now + settings.seconds(client, steps, first=first, version=self.version)
        drawn = host_rng(settings.seed, "job failure", self.jobs).random()
        lost = leaves < finish or drawn < settings.failure(client)
        job = Job(
            client=client,
            number=self.jobs,
            round_index=round_index,
            version=self.version,
            place=self.places[self.version],
            steps=steps,
            first=first,
            start=now,
            finish=min(finish, leaves),
        )
        self.idle.remove(client)
        self.met.add(client)
        self.jobs += 1
        self.started.append(job)
        heapq.heappush(self.running, _Running(job.finish, job.number, job, lost))

    def end(self) -> None:
        """Ends the job that finishes first."""
        _, _, job, lost = heapq.heappop(self.running)
        stale = self._too_stale(job)
        if not lost and not stale:
            self.buffer.append(job)
            self.in_vain = 0
            return
        (self.lost if lost else self.discarded).append(job)
        self.idle.add(job.client)
        self.in_vain += 1
        if self.in_vain > _MOST_LOST:
            raise InputError(
                f"The last {_MOST_LOST} jobs of the asynchronous run, until {job.finish:.0f}"
                " simulated seconds, were all lost or too stale, so no aggregation comes. Clients"
                " fail, leave before they have finished, or are slower than max_staleness allows:"
                " give them less work, or change the availability, failure_rate or max_staleness."
            )

    def _too_stale(self, job: Job) -> bool:
        most = self.settings.max_staleness
        return most is not None and self.version - job.version > most

    def aggregate(self, now: float) -> Aggregation:
        """Takes the buffer; returns the aggregation."""
        made = Aggregation(
            time=now,
            version=self.version,
            place=self.places[self.version],
            jobs=tuple(sorted(self.buffer, key=lambda job: job.client)),
            started=tuple(self.started),
            lost=tuple(self.lost),
            discarded=tuple(self.discarded),
            in_flight=len(self.running),
            versions=len(self.places),
        )
        for job in made.jobs:
            self.idle.add(job.client)
        self.version += bool(made.jobs)
        self.rounds += 1
        self.buffer, self.started, self.lost, self.discarded = [], [], [], []
        self._keep_needed_versions()
        return made

    def _keep_needed_versions(self) -> None:
        """Gives the present version the first place that no client at work needs."""
        needed = {one.job.version for one in self.running if not self._too_stale(one.job)}
        needed.add(self.version)
        self.places = {v: place for v, place in self.places.items() if v in needed}
        if self.version not in self.places:
            taken = set(self.places.values())
            self.places[self.version] = next(p for p in range(len(taken) + 1) if p not in taken)


def _aggregations(settings: Settings) -> Iterator[Aggregation]:
    """Yields the aggregations in order of time."""
    state = _State(settings)
    state.refill(0.0)
    while True:
        finish = state.running[0].finish if state.running else math.inf
        tick = math.inf if settings.period is None else (state.rounds + 1) * settings.period
        now = min(finish, tick, state.wake)
        if math.isinf(now):
            raise InputError(
                "The asynchronous run comes to an end after"
                f" {state.rounds} aggregations: no client is at work, and none is ever available"
                " again. Ask for fewer rounds, or use an availability that goes on, such as a"
                " trace with a period."
            )
        # Everything that happens at this time, before any client starts.
        while state.running and state.running[0].finish == now:
            state.end()
            if len(state.buffer) == settings.buffer_size:
                yield state.aggregate(now)
        if now == tick:
            yield state.aggregate(now)
        state.refill(now)
