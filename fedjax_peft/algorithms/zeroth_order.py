"""Zeroth-order steps: a client measures its loss at two points and goes along a random direction.

With a direction z, whose entries are standard normal, and a width ε, a local step is

    g  ←  (F(θ + εz) - F(θ - εz)) / 2ε                            two forward passes, no gradient
    θ  ←  θ + u z                      u: the optimizer's step for the slope g, -η g for SGD

(SPSA, Spall 1992; MeZO, Malladi et al. 2023). The lengths u and what z was drawn from say all that
a client has learned.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.numerics.random import stream


class Walk(NamedTuple):
    """A client during its local steps."""

    shared: c.Params
    private: c.Params
    optimizer: c.PyTree
    """The optimizer's state; its only parameter is the slope."""
    lengths: Array
    """float32 ``[n]``: how far the client went along each of n directions."""
    start: c.PyTree = ()
    """What the upload needs of the start of the round."""


def init_walk(
    optimizer: c.Optimizer, shared: c.Params, private: c.Params, n: int, start: c.PyTree = ()
) -> Walk:
    """Returns a client before its first step, which can go along n directions."""
    return Walk(shared, private, optimizer.init(_as_leaf(0.0)), jnp.zeros(n, jnp.float32), start)


def _as_leaf(slope: Array | float) -> c.Params:
    return {"slope": jnp.asarray(slope, jnp.float32)}


def direction(key: c.Key, leaves: c.Params) -> c.Params:
    """Returns a direction: standard normal numbers for each leaf, by its name."""
    return {name: jax.random.normal(stream(key, name), x.shape) for name, x in leaves.items()}


def along(leaves: c.Params, way: c.Params, length: Array | float) -> c.Params:
    """Returns leaves after a step along a direction, which may be of further leaves too."""
    return {name: x + length * way[name] for name, x in leaves.items()}


def step(
    optimizer: c.Optimizer,
    context: c.ClientContext,
    walk: Walk,
    index: Array,
    way_key: c.Key,
    epsilon: float,
    batch: c.Batch,
    key: c.Key,
) -> tuple[Walk, c.Metrics]:
    """Returns a client after a step along one direction, and the metrics at its first point.

    Both points have the same random numbers, such as dropout's. A step beyond the last direction
    does not move the client.

    Args:
      index: the number of the direction.
      way_key: what it is drawn from.
    """
    params = {**walk.shared, **walk.private}
    way = direction(way_key, params)
    ahead, metrics = context.objective(along(params, way, epsilon), batch, key)
    behind, _ = context.objective(along(params, way, -epsilon), batch, key)
    slope = _as_leaf((ahead - behind) / (2 * epsilon))
    moves, state = optimizer.update(slope, walk.optimizer, _as_leaf(0.0))
    length = jnp.where(index < len(walk.lengths), moves["slope"], 0.0)
    lengths = walk.lengths.at[index].add(length, mode="drop")
    shared, private = along(walk.shared, way, length), along(walk.private, way, length)
    return Walk(shared, private, state, lengths, walk.start), metrics


def rebuilt(
    leaves: c.Params, lengths: Array, key_of: Callable[[Array], c.Key], weight: Array | float = 1.0
) -> c.Params:
    """Returns leaves after steps along directions of given lengths, each times the weight.

    Directions of length 0 are not drawn.
    """

    def turn(i: Array, leaves: c.Params) -> c.Params:
        def go(leaves: c.Params) -> c.Params:
            return along(leaves, direction(key_of(i), leaves), weight * lengths[i])

        return jax.lax.cond(lengths[i] != 0, go, lambda leaves: leaves, leaves)

    found: c.Params = jax.lax.fori_loop(0, len(lengths), turn, leaves)
    return found


REFUSED = {
    c.Feature.EXAMPLE_PRIVACY: "Its clients take no gradients that could be clipped: their losses"
    " at two points depend on all examples. Use privacy of clients with 'fedkseed', or 'fedavg'.",
    c.Feature.KEPT_OPTIMIZER: "Its optimizer steps on slopes along random directions, of which"
    " those of earlier rounds say nothing. Leave `kept` out.",
    c.Feature.CLIENT_RANKS: "Its directions are of all entries of the leaves. Leave client_ranks"
    " out.",
    c.Feature.ASYNCHRONY: "Clients and server rebuild the model from what was learned from one"
    " version. Use 'fedavg'.",
    c.Feature.TRANSFORMS: "Its uploads are a few scalars, not the leaves that transforms and"
    " attacks change. Leave them out, or use 'fedavg'.",
}
"""What no zeroth-order algorithm can be combined with."""
