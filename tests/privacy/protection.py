"""The facts of a run, uploads of LoRA and a head, and what an aggregator sums of them."""

import functools

import combining
import jax
import numpy as np
import optax
import toy
from combining import aggregate
from internals import summation

import fedjax_peft as fp
from fedjax_peft import aggregators, algorithms

CLIENTS, RANK, N_IN, N_OUT = 4, 3, 24, 20
QN = 5
"""The clients that a round expects; ``toy.context()`` says so."""
SHAPES = {"x.lora_a": (N_IN, RANK), "x.lora_b": (RANK, N_OUT), "head.kernel": (N_IN, 3)}
FIXED = {"x.lora_scale": np.full(RANK, 1.5, np.float32)}
BASES = {"mean": aggregators.mean, "fra": aggregators.fra}
draw = functools.partial(combining.draw, SHAPES, CLIENTS)
FEDAVG = algorithms.fedavg(optax.sgd(0.1))


def federation(sampling="poisson", clients=10, per_round=QN, **changes):
    """Returns the facts of a run."""
    work = {"batch_size": 4, "batch_sampling": "shuffled", "most_steps": 3, "most_passes": 1}
    return fp.contracts.Federation(
        clients, per_round, sampling, **work | {"fewest_examples": 2} | changes
    )


def private(privacy, base):
    """Returns the aggregator that a mechanism makes of another one."""
    return privacy.protect(FEDAVG._replace(aggregator=base), federation()).aggregator


def showing(base):
    """Returns an aggregator whose update is the average in its own space."""

    def finish(total, template, context, state):
        return fp.contracts.Aggregated(
            jax.tree.map(lambda x: x / total.weight, total.value), {}, state
        )

    return (base.unmeasured or base)._replace(finish=finish, unmeasured=None)


def run(aggregator, uploads, template, lanes=CLIENTS, state=None):
    """Returns the result of a round in which the clients of the uploads take part."""
    weights = np.ones(CLIENTS, np.float32)
    return aggregate(aggregator, uploads, weights, template, FIXED, chunk=lanes, state=state)


def in_space(name, leaves):
    """Returns what an aggregator sums of one client's leaves, with dense products, in float64."""
    leaves = {n: np.asarray(x, np.float64) for n, x in leaves.items()}
    if name == "mean":
        return leaves
    return {"head.kernel": leaves["head.kernel"], "x": leaves["x.lora_a"] @ leaves["x.lora_b"]}


def changes(name, uploads, template):
    """Returns each client's change in the aggregator's space, flat, ``[clients, entries]``."""
    start = in_space(name, template)
    each = [in_space(name, {n: x[k] for n, x in uploads.items()}) for k in range(CLIENTS)]
    return np.array(
        [np.concatenate([(one[n] - start[n]).ravel() for n in sorted(start)]) for one in each]
    )


def empty_rounds(aggregator, template, draws=1000, part=lambda done: (done.update, done.metrics)):
    """Returns a part of the results of rounds without an upload, which differ in their noise."""

    def one(key):
        context = toy.context()._replace(key=key, fixed=FIXED)
        nothing = summation.summed(summation.empty(aggregator, template, FIXED, CLIENTS))
        return part(aggregator.finish(nothing, template, context, aggregator.init(template)))

    keys = jax.random.split(jax.random.key(0), draws)
    return jax.device_get(jax.jit(jax.vmap(one))(keys))
