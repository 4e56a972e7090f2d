"""The slow federation over LoRA's factors, and its comparison with the engine."""

import functools

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


class Slow(reference.Slow):
    """Plain averaging of all leaves."""

    model, federation, shared, local = toy.model(), FEDERATION, toy.SHARED, LOCAL
    optimizer = functools.partial(reference.Adam, RATE)  # which amplifies rounding errors

    def run(self, cohorts=None):
        """Returns the federation after all rounds."""
        return super().run(cohorts or COHORTS)


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
