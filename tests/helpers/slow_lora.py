"""A slow federation over LoRA's factors: loops over rounds and clients in NumPy float64.

A method is a subclass that overrides the steps in which it differs from plain averaging. Beside
the names of random streams it shares no code with the library.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reference
import toy
from closeness import assert_close
from internals import Cohort

SIZES = (7, 4, 12, 1, 9)
FEDERATION = toy.clients(SIZES)
RATE, BATCH, EPOCHS = 0.02, 4, 2
LOCAL = {"batch_size": BATCH, "epochs": EPOCHS, "dropout": False}
ADAM = optax.adam(RATE)
COHORTS = {1: (0, 2, 3), 2: (0, 1, 2, 3, 4), 3: (1, 2, 4)}
"""Round -> its members: partial, full, partial."""
A, B, SCALE, KERNEL = "layer.lora_a", "layer.lora_b", "layer.lora_scale", "layer.base.kernel"
S = 1.5
MODEL = toy.lora_model(dropout=0)


def mean(uploads, weights, name):
    """Returns the weighted mean of a leaf."""
    return np.average([u[name] for u in uploads], axis=0, weights=weights)


def product(leaves):
    """Returns the dense product of the factors."""
    return S * leaves[A] @ leaves[B]


def average(uploads, weights):
    """Returns the exact average of the products."""
    return np.average([product(u) for u in uploads], axis=0, weights=weights)


def batches(client, number):
    """Returns (x, labels, 0.8) of every local step of a client in a round."""
    return reference.local_batches(FEDERATION, client, number, **LOCAL)


class Slow:
    """Plain averaging of all leaves."""

    shared, private, size_weights = toy.SHARED, (), True
    rate = None
    """The learning rate of plain SGD; None: Adam of ``RATE``, which amplifies rounding errors."""

    def __init__(self):
        self.kernel = reference.leaves64(toy.model().frozen)["layer.kernel"]
        self.leaves = reference.leaves64(toy.model().trainable)
        self.own = [{n: self.leaves[n] for n in self.private} for _ in SIZES]

    def names(self, number):
        """Returns the leaves that are trained in a round."""
        return [*self.shared, *self.private]

    def start(self, client, number):
        """Returns the leaves with which a client begins a round."""
        return {**self.leaves, **self.own[client]}

    def train(self, client, number):
        """Returns all leaves of a client after its local steps."""
        model = toy.model().replace(frozen={"layer.kernel": self.kernel})
        start, names = self.start(client, number), self.names(number)
        if self.rate is None:
            inputs = (model, start, names, FEDERATION, client, number)
            return reference.train_client(*inputs, rate=RATE, **LOCAL)[0]
        for x, labels, kept in batches(client, number):
            by = reference.gradients(model.frozen, start, x, labels, kept)
            start = {**start, **{n: start[n] - self.rate * by[n] for n in names}}
        return start

    def upload(self, leaves, number):
        """Returns what a client with these leaves sends."""
        return leaves

    def aggregate(self, uploads, weights, number):
        """Changes the server's leaves."""
        self.leaves |= {n: mean(uploads, weights, n) for n in self.shared}

    def run(self, cohorts=None):
        """Returns the federation after all rounds."""
        for number, members in (cohorts or COHORTS).items():
            uploads = []
            for c in members:
                leaves = self.train(c, number)
                self.own[c] = {n: leaves[n] for n in self.private}
                uploads.append(self.upload(leaves, number))
            weights = np.array([SIZES[c] if self.size_weights else 1 for c in members], float)
            self.aggregate(uploads, weights / weights.sum(), number)
        return self


def engine(algorithm, lanes=3, bound=None, **options):
    """Returns the engine of the federation."""
    options = {"per_round": len(SIZES), "epochs": EPOCHS, **options}
    return toy.Engine(algorithm, FEDERATION, lanes=lanes, bound=bound or MODEL, **options)


def cohort(rig, number, members=None):
    """Returns the cohort of a round: of all clients, the given ones."""
    clients, weights, work = rig.schedule.cohort(number)
    rows = [i for i, c in enumerate(clients) if members is None or c in members]
    return Cohort(*([part[i] for i in rows] for part in (clients, weights, work)))


def rounds(rig, cohorts=None):
    """Returns the results of the rounds, one after the other."""
    results, state = [], rig.start()
    for number, members in (cohorts or COHORTS).items():
        state = jax.tree.map(jnp.array, state)  # what is given is donated
        results.append(rig.run(cohort(rig, number, members), number, state))
        state = (results[-1].server, results[-1].client_state)
    return results


def compare(rig, result, slow, *, atol=3e-5):
    """Asserts that a round ends as that of the slow federation.

    Adam amplifies the rounding of small gradients: a step of .02 that is off by 1e-4 adds 2e-6.
    """
    model, own = rig.algorithm.server.model(result.server), result.client_state
    assert set(model) == set(slow.shared)
    for name, x in model.items():
        assert_close(x, slow.leaves[name], rtol=0, atol=atol)
    for name in slow.private:
        kept = [leaves[name] for leaves in slow.own]
        assert_close(own[name], kept, rtol=0, atol=atol)


def check(rig, slow, *, atol=1e-5):
    """Asserts that the rounds end as those of the slow federation; returns them."""
    results = rounds(rig)
    compare(rig, results[-1], slow, atol=atol)
    return results
