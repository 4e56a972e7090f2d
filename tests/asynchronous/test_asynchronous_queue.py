"""The event queue: by hand, and its properties."""

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.asynchronous import queue as events
from fedjax_peft.asynchronous.queue import Queue, Settings


def queue(seconds, *, failure=0.0, **changes):
    """Returns a queue of clients whose jobs take these seconds."""
    given = Settings(
        seed=0,
        clients=np.arange(len(seconds)),
        concurrency=len(seconds),
        buffer_size=1,
        period=None,
        max_staleness=None,
        steps=lambda client, round_index: 1,
        seconds=lambda client, steps, first, version: seconds[client],
        failure=lambda client: failure,
    )
    return Queue(given._replace(**changes))


def told(aggregation):
    """Returns the time of an aggregation, and the client, the version and the start of each job."""
    return aggregation.time, [(job.client, job.version, job.start) for job in aggregation.jobs]


def test_three_clients_by_hand():
    """Client 0 takes 2 s, client 1 takes 3 s and client 2 takes 7 s; K = 2.

    Arrivals: 0 at 2, 1 at 3 (first aggregation); both start again from version 1: 0 at 5, 1 at 6
    (second); from version 2: client 2 arrives at 7 with version 0, client 0 at 8 (third).
    """
    made = queue([2.0, 3.0, 7.0], buffer_size=2)
    assert told(made(1)) == (3.0, [(0, 0, 0.0), (1, 0, 0.0)])
    assert told(made(2)) == (6.0, [(0, 1, 3.0), (1, 1, 3.0)])
    assert told(made(3)) == (8.0, [(0, 2, 6.0), (2, 0, 0.0)])
    assert [made(3).version - job.version for job in made(3).jobs] == [0, 2]
    assert [job.round_index for job in made(3).jobs] == [3, 1]
    # Versions that the server holds: 0 (client 2) and the present one.
    assert [made(i).versions for i in (1, 2, 3)] == [1, 2, 2]
    assert [made(i).place for i in (1, 2, 3)] == [0, 1, 1]
    assert [made(i).in_flight for i in (1, 2, 3)] == [1, 1, 1]
    assert [job.first for job in made(2).started] == [False, False]


def test_semi_synchronous_periods_by_hand():
    made = queue([2.0, 3.0, 7.0], buffer_size=None, period=4.0)
    assert told(made(1)) == (4.0, [(0, 0, 0.0), (1, 0, 0.0)])
    assert told(made(2)) == (8.0, [(0, 1, 4.0), (1, 1, 4.0), (2, 0, 0.0)])
    nobody = queue([7.0], buffer_size=None, period=3.0)
    assert [len(nobody(i).jobs) for i in (1, 2, 3, 4)] == [0, 0, 1, 0]
    assert [nobody(i).version for i in (1, 2, 3, 4)] == [0, 0, 0, 1], "empty periods update nothing"


def test_too_stale_uploads_are_discarded_and_do_not_fill_the_buffer():
    made = queue([2.0, 3.0, 7.0], buffer_size=2, max_staleness=1)
    assert told(made(3)) == (9.0, [(0, 2, 6.0), (1, 2, 6.0)])
    assert [job.client for job in made(3).discarded] == [2]
    assert made(3).versions == 1, "nobody needs the version that is too old"


def test_a_client_that_leaves_loses_its_job_at_that_time():
    def at(seed, clients, time):
        # Client 1 is there from 0 to 1 and from 5 on; the others are always there.
        there = (clients != 1) | (time < 1) | (time >= 5)
        next_change = 1.0 if time < 1 else 5.0 if time < 5 else math.inf
        return there, np.where(clients == 1, next_change, math.inf)

    made = queue([2.0, 3.0], buffer_size=2, availability=fp.contracts.Availability("test", at))
    assert told(made(1)) == (8.0, [(0, 0, 0.0), (1, 0, 5.0)])
    assert [(job.client, job.finish) for job in made(1).lost] == [(1, 1.0)]


@settings(max_examples=30, deadline=None)
@given(
    seconds=st.lists(st.floats(0.1, 30.0), min_size=3, max_size=9),
    buffer_size=st.integers(1, 3),
    concurrency=st.integers(1, 9),
    period=st.none() | st.floats(0.5, 20.0),
    failure=st.sampled_from([0.0, 0.3]),
    most=st.none() | st.integers(0, 3),
)
def test_properties(seconds, buffer_size, concurrency, period, failure, most):
    options = {
        "concurrency": min(concurrency, len(seconds)),
        "buffer_size": None if period else buffer_size,
        "period": period,
        "max_staleness": most,
        "failure": failure,
    }
    made = [queue(seconds, **options)(i) for i in range(1, 25)]
    once = queue(seconds, **options)
    assert made == [once(i) for i in range(1, 25)], "the same whatever was asked before"

    times = [one.time for one in made]
    assert times == sorted(times), "the clock does not go back"
    jobs = [job for one in made for job in one.started]
    assert [job.number for job in jobs] == list(range(len(jobs)))
    for client in range(len(seconds)):
        own = [job for job in jobs if job.client == client]
        for job, later in itertools.pairwise(own):
            assert later.start >= job.finish, "one job of a client at a time"
    for moment in {job.start for job in jobs}:
        assert sum(job.start <= moment < job.finish for job in jobs) <= options["concurrency"]
    held = {}
    for one in made:
        clients = [job.client for job in one.jobs]
        assert clients == sorted(set(clients)), "a client is in an aggregation once"
        if not period:
            assert len(clients) == buffer_size
        held[one.place] = one.version
        for job in one.jobs:
            assert held[job.place] == job.version, "the history still holds what a client fetched"
            assert 0 <= one.version - job.version <= (math.inf if most is None else most)
            assert job.finish <= one.time
    keys = [(job.round_index, job.client) for one in made for job in one.jobs]
    assert len(keys) == len(set(keys)), "random numbers are never used twice"


def test_clients_are_drawn_uniformly():
    made = queue([1.0] * 5, concurrency=2)
    counts = np.bincount([job.client for i in range(1, 2001) for job in made(i).jobs])
    assert np.all(np.abs(counts - 400) < 80)


def test_an_arrival_ends_a_row_of_lost_jobs(monkeypatch):
    monkeypatch.setattr(events, "_MOST_LOST", 20)
    made = queue([1.0, 1.0], failure=0.3)
    assert sum(len(made(number).lost) for number in range(1, 201)) > 20


def test_a_run_that_cannot_go_on_says_so():
    def never(seed, clients, time):
        return np.full(len(clients), time < 5), np.full(len(clients), 5.0 if time < 5 else math.inf)

    gone = queue([2.0, 2.0], buffer_size=2, availability=fp.contracts.Availability("gone", never))
    assert told(gone(2))[0] == 4.0
    refused(r"comes to an end after 2 aggregations", gone, 3)

    def flickers(seed, clients, time):
        return np.ones(len(clients), bool), np.full(len(clients), time + 1.0)

    lost = queue([2.0], availability=fp.contracts.Availability("flickers", flickers))
    refused("were all lost or too stale", lost, 1)
