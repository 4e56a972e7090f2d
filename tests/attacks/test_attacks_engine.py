"""What the engine tells an attack: who a client is, and whose uploads a round aggregates."""

import jax
import jax.numpy as jnp
import linear
import numpy as np
import optax
import pytest
import toy
from closeness import assert_close, assert_trees_close

from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms import fedavg
from fedjax_peft.contracts import (
    Aggregated,
    Algorithm,
    ClientContext,
    ClientUpdate,
    Encoded,
    Stages,
    Transform,
    Tuning,
    Upload,
)
from fedjax_peft.engine.plan import Cohort
from fedjax_peft.engine.work import at_work
from fedjax_peft.numerics.random import attack_key

SIZES = (7, 4, 12, 1, 9)
FEDERATION = toy.clients(SIZES)


def spying() -> Algorithm:
    """Returns an algorithm without training whose uploads hold the client's number."""
    plain = fedavg(optax.sgd(0.1))

    def client(context: ClientContext) -> ClientUpdate:
        def step(state, batch, key):
            return state, {"client": (1.0 * context.client, jnp.ones(()))}

        def final(state):
            return jax.tree.map(lambda x: x * 0 + context.client, state), {}

        return ClientUpdate(lambda broadcast, own, key: broadcast, step, final)

    def finish(total, template, context, state):
        value = mean().finish(total, template, context, state).update
        clients = {f"slot_{i}": context.clients[i] for i in range(context.clients.shape[0])}
        return Aggregated(value, clients, state)

    return plain._replace(
        client=client, aggregator=mean()._replace(finish=finish), weights="uniform"
    )


def tamper(upload: Upload) -> Upload:
    """Adds ten times the client's number, and a random number of its own, to an upload."""
    client = upload.client
    key = attack_key(client.key, client.source.round_index, client.number)
    more = 10 * client.number + jax.random.uniform(key)
    return upload._replace(value=jax.tree.map(lambda x: x + more, upload.value))


TAMPERING = Stages(sent=(tamper,))


@pytest.mark.parametrize(("lanes", "engine"), [(1, "compiled"), (3, "compiled"), (1, "reference")])
def test_the_engine_names_the_clients(lanes, engine):
    options = {"per_round": 4, "bound": linear.model(), "stages": TAMPERING}
    rig = toy.Engine(spying(), FEDERATION, lanes=lanes, engine=engine, **options)
    cohort = rig.schedule.cohort(1)
    result = rig.run(cohort)
    members = [int(client) for client in rig.schedule.members(1)]
    slots = [int(result.aggregation[f"slot_{i}"]) for i in range(4)]
    assert sorted(slots[: len(members)]) == sorted(members)
    for client in members:
        total, count = (x[slots.index(client)] for x in result.sums["client"])
        assert total == client * count > 0 or client == 0
    sent = np.asarray(result.server["head.bias"])[0] - 11 * np.mean(members)
    assert 0 < sent < 1, "every client has its own key"
    if lanes > 1:
        alone = toy.Engine(spying(), FEDERATION, lanes=1, **options).run(cohort)
        assert_close(alone.server["head.bias"], result.server["head.bias"], atol=1e-5)


def test_a_slot_without_a_client_has_the_number_after_the_last():
    rig = toy.Engine(spying(), FEDERATION, per_round=4, lanes=2)
    members, weights, work = rig.schedule.cohort(1)
    result = rig.run(Cohort(members[:2], weights[:2], work[:2]))
    assert [int(result.aggregation[f"slot_{i}"]) for i in (2, 3)] == [len(SIZES)] * 2


@pytest.mark.parametrize("work", ["tuning", "uploads", "personal", "global", "local"])
def test_nobody_tampers_outside_of_training(work):
    setup = toy.Engine(spying(), FEDERATION, per_round=4, lanes=2, stages=TAMPERING).setup
    algorithm = spying()._replace(tuning=Tuning(spying().client, 1))
    setup = setup._replace(algorithm=algorithm)
    assert at_work(setup, "training").stages == TAMPERING
    assert at_work(setup, work).stages == Stages()


@pytest.mark.parametrize("engine", ["compiled", "reference"])
def test_stages_come_before_and_after_the_upload_transform(engine):
    """The transform removes what a client learned and what comes before it, not what follows."""

    def add(number):
        return lambda upload: upload._replace(
            value=jax.tree.map(lambda x: x + number, upload.value)
        )

    def nothing(update, memory, received, key):
        return Encoded(jax.tree.map(jnp.zeros_like, update))

    options = {"per_round": 4, "lanes": 2, "bound": linear.model(), "engine": engine}
    stages = Stages(sent=(add(1.0),), received=(add(2.0), add(3.0)))
    transform = Transform("nothing", nothing)
    algorithm = fedavg(optax.sgd(0.1))
    rig = toy.Engine(algorithm, FEDERATION, transform=transform, stages=stages, **options)
    server = rig.run(rig.schedule.cohort(1)).server
    assert_trees_close(server, {name: x + 5 for name, x in rig.shared.items()})


def test_tampering_with_nothing_changes_nothing():
    plain = fedavg(optax.sgd(0.1))
    stages = (Stages(), Stages(sent=(lambda upload: upload,), received=(lambda upload: upload,)))
    runs = [toy.Engine(plain, FEDERATION, per_round=4, lanes=2, stages=x) for x in stages]
    one, other = (rig.run(rig.schedule.cohort(1)).server for rig in runs)
    assert_trees_close(one, other)
