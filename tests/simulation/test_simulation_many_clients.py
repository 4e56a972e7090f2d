"""A million clients: planning and the ledger work on arrays, and draw for the cohort only."""

import numpy as np
import optax
import pytest
import toy
from internals import Schedule, federation_of, random
from internals import schedule as schedules

import fedjax_peft as fp
from fedjax_peft.simulation import time_model
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
