"""A million clients: planning and the ledger work on arrays, and draw for the cohort only."""

import pickle
import tracemalloc

import numpy as np
import optax
import pytest
import toy
from internals import Ledger, Ragged, Schedule, federation_of, random
from internals import schedule as schedules

import fedjax_peft as fp
from fedjax_peft.simulation import time_model
from fedjax_peft.simulation.description import describe
from fedjax_peft.simulation.time_model import Slowness

PRIVATE = fp.algorithms.fedavg(optax.sgd(0.1), head="private")
SIZES = np.random.default_rng(0).integers(0, 40, 300).tolist()


@pytest.mark.parametrize(
    "work", [{"local_steps": None}, {"local_steps": 3}, {"local_steps": (1, 5)}, {"epochs": (2, 4)}]
)
def test_the_steps_of_all_clients_are_those_of_each(work):
    indices = toy.clients(SIZES).indices
    work = {"epochs": 1, "local_steps": None, **work}
    one = Schedule(indices, 10, 4, seed=0, **work)
    assert one.sizes.tolist() == SIZES
    each = [one.most_steps(client) for client in range(len(SIZES))]
    assert one.all_most_steps.tolist() == each
    facts = federation_of(one, toy.clients(SIZES).data, PRIVATE)
    pairs = {(n, s) for n, s in zip(SIZES, each, strict=True) if n}
    assert facts.workloads == tuple(sorted(pairs))
    assert facts.most_steps == max(each)
    assert facts.most_passes == max(-(-s // -(-n // 4)) for n, s in pairs)
    assert facts.fewest_examples == min(n for n in SIZES if n)


def test_the_slowness_of_a_client_does_not_need_that_of_the_others():
    lazy = Slowness(0.7, 1_000_000, seed=3)
    drawn = random.host_rng(3, "slowness", 999_999).normal()
    assert lazy[999_999] == lazy[-1] == np.exp(0.7 * drawn)
    assert fp.TimeModel(spread=0.7).slowness(5, 3) == [lazy[i] for i in range(5)]
    with pytest.raises(IndexError):
        lazy[1_000_000]


@pytest.mark.parametrize("sampling", ["uniform", "size", "poisson", "round_robin"])
@pytest.mark.sample("size", "poisson")
def test_work_on_the_host_grows_with_the_cohort(sampling, monkeypatch):
    """Random streams are slow to make; a run makes them for the clients of its rounds only."""
    clients, streams = 20_000, []

    def counted(seed, name, *indices):
        streams.append(name)
        return random.host_rng(seed, name, *indices)

    for module in (schedules, time_model):
        monkeypatch.setattr(module, "host_rng", counted)
    schedules._shuffled.cache_clear()
    run = fp.simulate(
        *(toy.model(), PRIVATE, fp.partition.iid(toy.dataset(clients), clients)),
        rounds=3,
        clients_per_round=5,
        local_steps=1,
        sampling=sampling,
        system=fp.System(time=fp.TimeModel(spread=0.5)),
        placement=fp.Placement(client_state="host", lanes=1),
    )
    assert len(run.metrics) == 4
    assert len(streams) < 200
    assert run.client_state.store.slots <= 1 + 3 * 15


def test_a_client_takes_a_few_bytes_of_memory():
    """8 for the place of its rows, 4 in the ledger, and its examples, of 4 bytes each.

    A tuple of arrays would take 130 for each client more.
    """
    model = toy.model()
    server = PRIVATE.server.init(model.trainable)

    def prepared(clients):
        federation = fp.partition.zipf(np.zeros(clients, np.int32), clients)
        schedule = Schedule(federation.indices, 10, 4, 1, None, seed=0)
        ledger = Ledger(model, PRIVATE, server, clients)
        plan = schedule.plan(1, lanes=2, time_steps=64)
        ledger.record({"round": 1, "clients": plan.client})
        return federation, ledger, plan

    prepared(100)  # imports, and traces what the ledger counts
    tracemalloc.start()
    try:
        kept = prepared(100_000)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept[0]) == 100_000
    labels = 4 * 100_000
    assert held - labels < (4 + 8 + 4) * 100_000 + 100_000


LISTS = [np.arange(3), np.zeros(0, np.int64), np.array([5, 2, 5])]


def test_ragged_arrays_read_as_a_tuple_of_them():
    made = Ragged.of(LISTS)
    for found in (made, pickle.loads(pickle.dumps(made))):
        assert found == made
        assert [x.tolist() for x in found] == [[0, 1, 2], [], [5, 2, 5]]
    assert [made[i].tolist() for i in (0, 1, -1)] == [[0, 1, 2], [], [5, 2, 5]]
    assert made[:1] + tuple(LISTS[1:]) == made
    assert made[1:] == Ragged.of(LISTS[1:])
    assert made[::-1] == Ragged.of(LISTS[::-1])
    assert made != Ragged.of([np.arange(2), *LISTS[1:]])
    assert (len(made), made.sizes.tolist(), made.flat.dtype) == (3, [3, 0, 3], np.int64)
    assert Ragged.of([[], []]).flat.dtype == np.int32
    assert made.where(made.flat != 2) == Ragged.of([[0, 1], [], [5, 5]])
    assert describe(made) == describe(tuple(LISTS)), "runs of before go on"
    with pytest.raises(IndexError):
        made[3]


def test_many_arrays_are_described_together():
    rows = np.arange(20_000)
    one, other = (Ragged(x, np.ones(len(rows), int)) for x in (rows, rows[::-1]))
    assert describe(one) == describe(Ragged.of([*one]))
    assert describe(one) != describe(other)
    assert describe(one) != describe(Ragged(rows, np.array([*np.ones(19_998, int), 0, 2])))


def test_rows_of_clients_can_be_given_in_any_form():
    """And nothing depends on it: rows of several types, unsorted, repeated, or none at all."""
    data = toy.dataset(6)
    forms = [LISTS, tuple(LISTS), Ragged.of(LISTS), [[0, 1, 2], [], [5, 2, 5]]]
    made = [fp.Clients(data, form) for form in forms]
    held = [[part.indices for part in clients.holdout(0.5, seed=1)] for clients in made]
    for clients, parts in zip(made, held, strict=True):
        assert clients.indices == made[0].indices
        assert clients.rows.tolist() == [0, 1, 2, 5, 2, 5]
        assert clients.sizes.tolist() == [3, 0, 3]
        assert parts == held[0]
    assert [part.sizes.tolist() for part in held[0]] == [[1, 0, 1], [2, 0, 2]]
