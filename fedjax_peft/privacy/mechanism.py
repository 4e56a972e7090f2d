"""Noise on the sum of an aggregator: what the client-level mechanisms have in common.

A mechanism clips what a client sends, in the space in which the aggregator sums, and adds noise to
the dense sum of the clipped changes. The base aggregator then makes its update from the noisy sum
(:mod:`fedjax_peft.privacy.central` has the formulas).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts.aggregator import Aggregated, Aggregator, Stacked, Total
from fedjax_peft.contracts.algorithm import Algorithm
from fedjax_peft.contracts.compatibility import check_compatible
from fedjax_peft.contracts.feature import Feature
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Key, Params, PyTree
from fedjax_peft.numerics.linalg import qr, svd
from fedjax_peft.numerics.lowrank import matmul, one_by_one, pairs
from fedjax_peft.numerics.random import stream
from fedjax_peft.privacy import lifted as lifting
from fedjax_peft.transforms.clip import share_and_median


class Noise(NamedTuple):
    """Noise on the dense sum of a round."""

    std: Callable[[Array], Any]
    """round -> the standard deviation of the noise on an entry of the sum in this round."""
    add: Callable[[PyTree, Key, PyTree, Array], tuple[PyTree, PyTree]]
    """(dense sum, key, state, round) -> (noisy sum, next state)."""
    init: Callable[[Callable[[], PyTree]], PyTree] | None = None
    """function that returns a dense sum of zeros -> the state before the first round. None: the
    noise has no state."""


def gaussian(std: Any) -> Noise:
    """Returns independent Gaussian noise of the same standard deviation in every round."""
    return independent(lambda key, shape: std * jax.random.normal(key, shape), std)


def independent(draw: Callable[[Key, tuple[int, ...]], Array], std: Any) -> Noise:
    """Returns noise that is drawn anew in every round, entry by entry.

    Args:
      draw: (key, shape) -> noise.
    """

    def add(total: PyTree, key: Key, state: PyTree, round_index: Array) -> tuple:
        return lifting.with_noise(total, draw, key), state

    return Noise(lambda round_index: std, add)


def summing(algorithm: Algorithm) -> Aggregator:
    """Returns the algorithm's aggregator without measurements.

    Raises:
      InputError: noise on the sum would not hide what single clients send.
    """
    check_compatible(algorithm, {Feature.CLIENT_PRIVACY: "noise on the sum of the uploads"})
    aggregator = algorithm.aggregator
    return aggregator.unmeasured or aggregator


def protected(algorithm: Algorithm, aggregator: Aggregator) -> Algorithm:
    """Returns the algorithm with another aggregator, equal weights and a server that knows less."""
    server = algorithm.server

    def update(state: PyTree, new: PyTree, context: RoundContext) -> PyTree:
        return server.update(state, new, withheld(context))

    return algorithm._replace(
        aggregator=aggregator, server=server._replace(update=update), weights="uniform"
    )


def withheld(context: RoundContext) -> RoundContext:
    """Returns what a server may know about a round, whoever took part in it."""
    nobody = jnp.full_like(context.clients, jnp.iinfo(context.clients.dtype).max)
    return context._replace(metrics={}, clients=nobody)


def private(
    base: Aggregator,
    clip: Any,
    noise: Noise | None,
    shorten: Callable[[PyTree, Any], tuple[PyTree, Array]] | None = None,
) -> Aggregator:
    """Returns the aggregator of clipped changes with noise on their sum.

    Its state is the base's, or ``{"base": the base's, "noise": the noise's}`` if the noise has one.

    Args:
      noise: on the sum; None: none.
      shorten: (change, clip) -> (change of a norm of at most ``clip``, norm before); by default the
        Euclidean norm.
    """
    shorten = shorten or clipped_to

    def change(upload: PyTree, template: PyTree, fixed: Params) -> PyTree:
        start = base.lift(template, template, fixed)
        return lifting.difference(base.lift(upload, template, fixed), start, base.name)

    def lift(upload: PyTree, template: PyTree, fixed: Params) -> PyTree:
        clipped, length = shorten(change(upload, template, fixed), clip)
        return {"sum": clipped, "norm": Stacked(length)}

    def init(template: PyTree) -> PyTree:
        def zeros() -> PyTree:
            shapes = jax.eval_shape(lambda x: lifting.dense(change(x, x, {})), template)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)

        if noise is None or noise.init is None:
            return base.init(template)
        return {"base": base.init(template), "noise": noise.init(zeros)}

    def finish(total: Total, template: PyTree, context: RoundContext, state: PyTree) -> Aggregated:
        keeps = noise is not None and noise.init is not None
        inner, own = (state["base"], state["noise"]) if keeps else (state, ())
        noisy, std = total.value["sum"], None
        measured = clipping_metrics(total.value["norm"].value, total.weights, clip)
        if noise is not None:
            std = jnp.float32(noise.std(context.round_index)) / context.participants
            key = stream(context.key, "privacy")
            noisy, own = noise.add(noisy, key, own, context.round_index)
            measured["privacy_noise_std"] = std
        slots = len(total.weights)
        result = released(base, noisy, slots, template, context, inner)
        if std is not None:
            measured |= signal_to_noise(base, result.update, std)
        new = {"base": result.state, "noise": own} if keeps else result.state
        return Aggregated(result.update, result.metrics | measured, new)

    def carry(state: PyTree, start: PyTree) -> PyTree:
        if noise is None or noise.init is None:
            return base.carry(state, start)
        return {"base": base.carry(state["base"], start["base"]), "noise": start["noise"]}

    own = base._replace(lift=lift, finish=finish, init=init, carry=carry)
    return own._replace(refactor=None, every_round=True)


def clipped_to(change: PyTree, clip: Any) -> tuple[PyTree, Array]:
    """Returns a change of a norm of at most ``clip``, and its norm before.

    A change whose norm is not finite becomes 0.
    """
    length = lifting.norm(change)
    return lifting.scaled(change, *factor_to(clip, length)), length


def factor_to(clip: Any, length: Array) -> tuple[Array, Array]:
    """Returns the factor that shortens a norm to ``clip``, and whether the norm is finite."""
    usable = jnp.isfinite(length)
    factor = jnp.where(length > clip, clip / jnp.where(length > 0, length, 1.0), 1.0)
    return jnp.where(usable, factor, 0.0), usable


def released(
    base: Aggregator,
    noisy: PyTree,
    slots: int,
    template: PyTree,
    context: RoundContext,
    state: PyTree,
) -> Aggregated:
    """Returns what the base aggregator makes of a noisy sum of changes."""

    def lift(upload: PyTree) -> PyTree:
        return base.lift(upload, template, context.fixed)

    if context.sendable is not None:
        allowed = lifting.changeable(lift, template, context.sendable, base.name)
        noisy = jax.tree.map(lambda x, here: jnp.where(here, x, 0), noisy, allowed)
    count, context = context.participants, withheld(context)
    start = lifting.dense(lift(template))
    value = jax.tree.map(lambda x, change: count * x + change, start, noisy)
    # Who took part is not released: the weights have the right sum, in the first place.
    weights = jnp.zeros(slots).at[0].set(count)
    return base.finish(Total(value, count, weights), template, context, state)


def clipping_metrics(norms: Array, weights: Array, clip: Any) -> dict[str, Array]:
    """Returns the share of clients that were clipped and the median norm; NaN without clients.

    Args:
      norms: before clipping, ``[slots]``.
      weights: ``[slots]``; 0 for a slot without an upload.
    """
    share, middle = share_and_median(norms, weights > 0, clip)
    return {"privacy_clip_share": share, "privacy_median_norm": middle}


def signal_to_noise(base: Aggregator, update: PyTree, std: Array) -> dict[str, Array]:
    """Returns ``σ_r / (std (√in + √out))`` of the products that an aggregator truncates.

    σ_r is the smallest singular value that is kept, of A·B without LoRA's scale. A matrix of noise
    alone has a largest singular value of about ``std (√in + √out)``. So a value below 1 means that
    the smallest kept directions are noise. ``snr`` is the smallest value over all matrices.

    Args:
      base: gives nothing unless it ``truncates``.
    """
    found = pairs(update) if base.truncates and isinstance(update, dict) else {}
    if not found:
        return {}
    factors = {path: (update[a], update[b]) for path, (a, b) in found.items()}
    noise = {p: std * (math.sqrt(len(a)) + math.sqrt(b.shape[1])) for p, (a, b) in factors.items()}
    each = {p: x / noise[p] for p, x in one_by_one(_smallest_kept, factors).items()}
    return {"snr": jnp.min(jnp.stack([*each.values()])), **{f"snr/{p}": x for p, x in each.items()}}


def _smallest_kept(factors: tuple[Array, Array]) -> Array:
    """Returns the r-th singular value of ``a @ b``, from the r x r matrix ``R_a R_bᵀ``."""
    a, b = factors
    small = matmul(qr(a, mode="r"), qr(b.T, mode="r").T)
    return svd(small, compute_uv=False)[-1]
