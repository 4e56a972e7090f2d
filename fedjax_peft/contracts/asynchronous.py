"""Servers that do not wait, and clients that are not always there."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from fedjax_peft.contracts.algorithm import Algorithm
from fedjax_peft.contracts.privacy import Federation, Wrapped


class Job(NamedTuple):
    """The work of one client of an asynchronous server, from its download to its upload."""

    client: int
    """The client's number in the federation."""
    number: int
    """The job's number, from 0, in the order in which jobs start."""
    round_index: int
    """The aggregation that came next when the client fetched, from 1. Together with the client, it
    determines the random numbers of the job, its examples and its number of steps."""
    version: int
    """The server's version that the client fetched: how often the server had been updated."""
    place: int
    """Where the history of broadcasts holds this version."""
    steps: int
    """Local steps."""
    first: bool
    """Whether it is the client's first job."""
    start: float
    """Simulated seconds at which the client begins to fetch."""
    finish: float
    """Simulated seconds at which the server has the upload; for a lost job, at which it ends."""


class Aggregation(NamedTuple):
    """One aggregation of an asynchronous server, and the time since the one before it."""

    time: float
    """Simulated seconds since the start of the run."""
    version: int
    """The server's version before the aggregation."""
    place: int
    """Where the history of broadcasts holds this version."""
    jobs: tuple[Job, ...]
    """The jobs whose uploads are aggregated, by client; no client twice."""
    started: tuple[Job, ...] = ()
    """The jobs that started since the aggregation before."""
    lost: tuple[Job, ...] = ()
    """The jobs that ended without an upload since then: their clients failed or left."""
    discarded: tuple[Job, ...] = ()
    """The jobs whose uploads came since then and were too stale."""
    in_flight: int = 0
    """The number of clients that are still at work."""
    versions: int = 1
    """The number of versions that the server holds: the present one and those still needed."""


class Timeline(Protocol):
    """The events of an asynchronous run in simulated time: a pure function of its settings."""

    def __call__(self, round_index: int) -> Aggregation:
        """Returns an aggregation by its number, from 1."""


class Asynchronous(NamedTuple):
    """An asynchronous server: when it aggregates, and what it does with stale uploads."""

    name: str
    apply: Callable[[Algorithm, Federation], Wrapped]
    """Returns the algorithm for a server that takes stale uploads, and what it makes of them
    (``Stages.received``). Raises InputError with the reason if the algorithm does not fit."""
    buffer_size: int | None = None
    """The server aggregates whenever this number of uploads has arrived; None: see ``period``."""
    period: float | None = None
    """The server aggregates every ``period`` simulated seconds; None: see ``buffer_size``."""
    concurrency: int | None = None
    """The number of clients that work at the same time; None: ``clients_per_round``."""
    max_staleness: int | None = None
    """Uploads with a larger staleness are discarded; None: none are."""


class Availability(NamedTuple):
    """When clients can take part: a pure function of the seed, the client and the time."""

    name: str
    at: Callable[[int, Any, float], tuple[Any, Any]]
    """(seed, client numbers, int ``[n]``, simulated seconds) -> (bool ``[n]``: whether each client
    is available, float64 ``[n]``: the time at which that changes next; ``inf``: never)."""
