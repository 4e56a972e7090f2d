"""An aggregator on random or given uploads, without a round: the sum, some lanes at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import toy
from internals import summation


def draw(shapes, clients, seed, spread=1.0):
    """Returns random (uploads ``[clients, ...]``, template) with leaves of these shapes."""
    rng = np.random.default_rng(seed)
    template = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    uploads = {
        n: (x + spread * rng.normal(size=(clients, *x.shape))).astype(np.float32)
        for n, x in template.items()
    }
    return uploads, template


def combine(aggregator, uploads, weights, slots, ids, template, fixed, state, parts, spare=0):
    """Returns what an aggregator makes of stacked uploads; to be jitted.

    Args:
      aggregator: to use.
      uploads: stacked ``[clients, ...]``.
      weights: ``[clients]``.
      slots: ``[clients]``, the place of each in the cohort.
      ids: ``[clients]``, the id of each.
      template: one upload.
      fixed: the leaves that never change.
      state: the aggregator's.
      parts: how many uploads are added at a time, in order.
      spare: slots that nobody has, as in rounds with fewer clients than the largest one.
    """
    total = summation.empty(aggregator, template, fixed, len(weights) + spare)
    start = 0
    for lanes in parts:
        part = slice(start, start + lanes)
        some = jax.tree.map(lambda x, part=part: x[part], uploads)
        own = (weights[part], slots[part])
        total = summation.add(aggregator, total, some, *own, template, fixed)
        start += lanes
    places = jnp.full(len(weights) + spare, len(weights), jnp.int32).at[slots].set(ids)
    context = toy.context()._replace(fixed=fixed, clients=places)
    return aggregator.finish(summation.summed(total), template, context, state)


@functools.cache
def program(aggregator, parts, spare=0):
    """Returns :func:`combine` for an aggregator and a split into lanes, jitted."""
    return jax.jit(functools.partial(combine, aggregator, parts=parts, spare=spare))


def aggregate(
    aggregator, uploads, weights, template, fixed, slots=None, chunk=None, state=None, ids=None
):
    """Returns the :class:`Aggregated` of stacked uploads, by a jitted program that is kept."""
    clients = len(weights)
    everyone = np.arange(clients, dtype=np.int32)
    slots, ids = (everyone if x is None else x for x in (slots, ids))
    chunk = chunk or clients
    parts = tuple(min(chunk, clients - i) for i in range(0, clients, chunk))
    state = jax.device_get(aggregator.init(template)) if state is None else state
    made = program(aggregator, parts)(uploads, weights, slots, ids, template, fixed, state)
    return jax.device_get(made)
