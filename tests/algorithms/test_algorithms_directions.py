"""FSLoRA and Fed-PLoRA equal loops over clients in NumPy float64, written from their formulas."""

import functools

import jax
import numpy as np
import optax
import pytest
import reference
import slow_lora
import toy
from closeness import assert_close, roughly
from internals import client_key, stream
from options import run_options
from slow_lora import MODEL, SCALE, A, B, S, Slow

import fedjax_peft as fp
from fedjax_peft.algorithms.directions import drawn, own_rank

pytestmark = pytest.mark.slow

RATE, RANKS = 0.1, (1, 2)
SGD = optax.sgd(RATE)
DECAY = optax.adamw(RATE, weight_decay=0.3)
FSLORA, FEDPLORA = fp.algorithms.fslora, fp.algorithms.fedplora


def mask(client, number):
    """Returns the directions that a client draws in a round, bool ``[RANK]``."""
    key = jax.random.fold_in(client_key(stream(0, "clients"), number, client), 0)
    order = np.asarray(jax.random.permutation(stream(key, "layer"), toy.RANK))
    return order < RANKS[client % len(RANKS)]


class SlowFSLoRA(Slow):
    """The sketch is a dense matrix, between B and A of a weight ``W + s A S B``."""

    optimizer, size_weights = functools.partial(reference.Sgd, RATE), False

    def gradient(self, leaves, batch, client, number):
        own = mask(client, number)
        sketch = toy.RANK / own.sum() * np.diag(own.astype(float))
        unit = {**leaves, SCALE: np.ones(toy.RANK), B: S * sketch @ leaves[B]}
        by_a = super().gradient(unit, batch, client, number)[A]
        unit = {**leaves, SCALE: np.ones(toy.RANK), A: S * leaves[A] @ sketch}
        by = super().gradient(unit, batch, client, number)
        return by | {A: by_a}


class SlowFedPLoRA(Slow):
    """Each direction is a LoRA of its own, whose mean is over the clients that drew it."""

    optimizer, size_weights = functools.partial(reference.Sgd, RATE), False

    def gradient(self, leaves, batch, client, number):
        by, own = super().gradient(leaves, batch, client, number), mask(client, number)
        return by | {A: by[A] * own[None], B: by[B] * own[:, None]}

    def aggregate(self, uploads, weights, number):
        received = {n: self.leaves[n] for n in (A, B)}
        super().aggregate(uploads, weights, number)
        a, b = (x.copy() for x in received.values())
        for j in range(toy.RANK):
            trained = [u for c, u in zip(self.members, uploads, strict=True) if mask(c, number)[j]]
            if trained:
                a[:, j] = np.mean([u[A][:, j] for u in trained], axis=0)
                b[j] = np.mean([u[B][j] for u in trained], axis=0)
        self.leaves |= {A: a, B: b}


@pytest.mark.parametrize(
    ("make", "slow"), [(FSLORA, SlowFSLoRA), (FEDPLORA, SlowFedPLoRA)], ids=["fslora", "fedplora"]
)
def test_rounds_equal_the_slow_reference(make, slow):
    rig = slow_lora.engine(make(SGD, ranks=RANKS))
    results = slow_lora.check(rig, slow().run())
    before = MODEL.trainable
    for (number, members), result in zip(slow_lora.COHORTS.items(), results, strict=True):
        untouched = ~np.any([mask(c, number) for c in members], axis=0)
        model = rig.algorithm.server.model(result.server)
        np.testing.assert_array_equal(model[B][untouched], before[B][untouched])
        before = model


def test_every_subset_is_drawn_as_often():
    leaves = {"x.lora_a": np.zeros((3, 4)), "x.lora_b": np.zeros((4, 2))}
    keys = jax.random.split(jax.random.key(0), 600)
    found = np.asarray(jax.vmap(lambda key: drawn(leaves, own_rank([2, 3], 2), key)["x"])(keys))
    assert (found.sum(axis=1) == 2).all()
    _, counts = np.unique(found, axis=0, return_counts=True)
    # Six subsets: the standard deviation of each share of 1/6 is .0152.
    assert counts / 600 == roughly(np.full(6, 1 / 6), abs=0.05)
    for more in (9, [2**31, 2**70]):
        assert drawn(leaves, own_rank(more, 1), keys[0])["x"].all()


@pytest.mark.parametrize("make", [FSLORA, FEDPLORA], ids=["fslora", "fedplora"])
def test_directions_that_rest_do_not_move_and_do_not_count(make):
    """Whatever the optimizer does to leaves without gradient, such as weight decay."""
    federation = toy.clients([4, 3, 5])
    options = {"rounds": 1, "batch_size": 4, "lanes": 1}
    run = fp.simulate(MODEL, make(DECAY, ranks=1), federation, **run_options(**options))
    head = sum(MODEL.trainable[n].nbytes for n in toy.HEAD)
    assert run.metrics[1]["bytes_up"] == 3 * (head + 4 * (toy.FEATURES + toy.WIDTH))
    rng = [jax.random.fold_in(client_key(stream(0, "clients"), 1, c), 0) for c in range(3)]
    drew = [np.asarray(jax.random.permutation(stream(k, "layer"), toy.RANK)) < 1 for k in rng]
    for name, axis in ((A, 0), (B, 1)):
        moved = np.any(run.params[name] != MODEL.trainable[name], axis=axis)
        np.testing.assert_array_equal(moved, np.any(drew, axis=0))


@pytest.mark.exhaustive
def test_with_all_directions_both_are_fedavg():
    plain = slow_lora.rounds(slow_lora.engine(fp.algorithms.fedavg(SGD, weights="uniform")))
    for make in (FSLORA, FEDPLORA):
        rig = slow_lora.engine(make(SGD, ranks=toy.RANK))
        for result, expected in zip(slow_lora.rounds(rig), plain, strict=True):
            for name, x in rig.algorithm.server.model(result.server).items():
                # Two programs in float32; values below 2.
                assert_close(x, expected.server[name], rtol=0, atol=2e-6)
