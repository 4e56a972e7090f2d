"""FedKSeed and FedMeZO against a loop in float64, what travels, and that there is no gradient."""

import functools

import jax
import numpy as np
import optax
import pytest
import reference
import slow_lora
import toy
from closeness import assert_close
from internals import Ledger, client_key, stream

import fedjax_peft as fp

RATE, EPSILON, SEEDS = 0.05, 0.1, 7
"""ε is wide: the loss is rounded to 6e-8, and a slope is a difference of two losses over 2ε."""
COHORTS = {1: (0, 2, 3), 2: (0, 1, 2, 3, 4)}
MAKE = {
    "fedkseed": functools.partial(fp.algorithms.fedkseed, seeds=SEEDS, epsilon=EPSILON, seed=3),
    "fedmezo": functools.partial(fp.algorithms.fedmezo, steps=6, epsilon=EPSILON),
}


class Slow(slow_lora.Slow):
    """FedAvg over clients that walk along random directions."""

    def way_key(self, key, step):
        raise NotImplementedError

    def train(self, client, number):
        frozen = {"layer.kernel": self.kernel}
        leaves, key = self.start(client, number), client_key(stream(0, "clients"), number, client)
        for t, (x, labels, _) in enumerate(self.batches(client, number)):
            way_key = self.way_key(key, t)
            way = {
                n: np.asarray(jax.random.normal(stream(way_key, n), leaves[n].shape), np.float64)
                for n in self.shared
            }
            ahead, behind = (
                reference.loss(frozen, leaves | {n: leaves[n] + s * way[n] for n in way}, x, labels)
                for s in (EPSILON, -EPSILON)
            )
            slope = (ahead - behind) / (2 * EPSILON)
            leaves = {**leaves, **{n: leaves[n] - RATE * slope * way[n] for n in way}}
        self.steps[client] = 1
        return leaves


class SlowSeeds(Slow):
    def way_key(self, key, step):
        own = stream(jax.random.fold_in(key, step + 1), "direction")
        index = jax.random.randint(own, (), 0, SEEDS)
        return jax.random.fold_in(stream(3, "fedkseed"), index)


class SlowMeZO(Slow):
    def way_key(self, key, step):
        return jax.random.fold_in(jax.random.fold_in(key, 0), step)


SLOW = {"fedkseed": SlowSeeds, "fedmezo": SlowMeZO}


@functools.cache
def played(name):
    rig = slow_lora.engine(MAKE[name](optax.sgd(RATE)), 3)
    return rig, slow_lora.rounds(rig, COHORTS)


@pytest.mark.parametrize("name", MAKE)
def test_rounds_equal_the_slow_reference(name):
    rig, results = played(name)
    expected = SLOW[name]().run(COHORTS)
    model = rig.algorithm.server.model(results[-1].server)
    for leaf in expected.shared:
        # Slopes are exact to 6e-8 / 2ε = 3e-7, times rates and directions of order .1 and 1.
        assert_close(model[leaf], expected.leaves[leaf], rtol=0, atol=1e-6)


def test_the_model_of_fedkseed_follows_from_the_lengths_of_all_rounds():
    rig, results = played("fedkseed")
    server = results[-1].server
    model = {n: np.asarray(x, np.float64) for n, x in rig.model_at_start().items()}
    for index, length in enumerate(np.asarray(server["lengths"], np.float64)):
        key = jax.random.fold_in(stream(3, "fedkseed"), index)
        for n in toy.SHARED:
            way = np.asarray(jax.random.normal(stream(key, n), model[n].shape), np.float64)
            model[n] = model[n] + length * way
    for n in toy.SHARED:
        assert_close(server["model"][n], model[n], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MAKE)
def test_local_models_are_those_of_the_clients_before_the_aggregation(name):
    rig, _ = played(name)
    algorithm, slow = rig.algorithm, SLOW[name]()
    broadcast = algorithm.server.broadcast(rig.start()[0])
    alone = slow_lora.rounds(rig, {1: (2,)})[0]
    expected = slow.train(2, 1)
    model = algorithm.server.model(alone.server)
    for n in toy.SHARED:
        assert_close(model[n], expected[n], rtol=0, atol=1e-6)
    nothing = algorithm.server.unchanged(rig.start()[0])
    still = algorithm.local_model(broadcast, nothing, {})
    for n in toy.SHARED:
        np.testing.assert_array_equal(still[n], rig.model_at_start()[n])


def test_bytes_are_those_of_seeds_and_scalars():
    model = toy.lora_model()
    start = {n: model.trainable[n] for n in toy.SHARED}
    seeds = fp.algorithms.fedkseed(optax.sgd(RATE))
    ledger = Ledger(model, seeds, seeds.server.init(start), 4)
    taken = {"lengths": np.zeros(4096, np.float32)}
    taken["lengths"][:200] = 1
    shares = {n: float(x) for n, x in seeds.traffic.sent_shares(taken, None).items()}
    # 200 steps, as in the paper: together less than 18 kB.
    assert (ledger.up(0, shares=shares), ledger.down(0)) == (8 * 200, 4 * 4096)
    taken["lengths"][:] = 1
    full = {n: float(x) for n, x in seeds.traffic.sent_shares(taken, None).items()}
    assert ledger.up(0, shares=full) == 4 * 4096
    walks = fp.algorithms.fedmezo(optax.sgd(RATE), steps=512)
    ledger = Ledger(model, walks, walks.server.init(start), 4)
    upload = {"lengths": {"lengths": taken["lengths"][:512] * (np.arange(512) < 200)}}
    shares = {n: float(x) for n, x in walks.traffic.sent_shares(upload, None).items()}
    assert ledger.up(0, shares=shares) == 8 + 4 * 200


@pytest.mark.parametrize("name", MAKE)
def test_no_step_takes_a_gradient(name, monkeypatch):
    def forbidden(*given, **options):
        raise AssertionError("a gradient")

    for function in ("grad", "value_and_grad", "vjp", "linearize"):
        monkeypatch.setattr(jax, function, forbidden)
    slow_lora.engine(MAKE[name](optax.sgd(RATE)), 1).traced()


def test_steps_beyond_the_room_of_an_upload_move_nobody():
    results = [
        slow_lora.rounds(
            slow_lora.engine(fp.algorithms.fedmezo(optax.sgd(RATE), steps=1), 1, epochs=epochs),
            {1: (1,)},
        )[0].server
        for epochs in (1, 2)
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)
