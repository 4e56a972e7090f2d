"""Client-level central differential privacy: clip what a client sends, add noise to the sum.

    client:  D_k = lift(upload_k) - lift(what it would send had it learned nothing)
             D_k ← D_k · min(1, C / ‖D_k‖)              ‖·‖ over everything that is summed, together
    server:  S = Σ D_k + N(0, (z C)²)                       on every entry of the sum, once a round
             update = finish(lift(nothing learned) + S / (q N))

This is DP-FedAvg (McMahan et al. 2018) in the space in which an aggregator sums: leaves for the
mean, dense products for FRA-LoRA and FlexLoRA, products for server optimizers on products. So noise
enters linearly. What follows (the truncation of FRA, a server optimizer) is post-processing.

All clients have the weight 1, and the denominator q N (the sampling probability times the number of
clients that have examples) does not depend on who took part. One client then moves the sum by at
most C. A client that drops out, or whose upload is not finite, contributes 0. A round without
clients releases noise like any other. The server knows nothing about the clients of a round but the
sum: training metrics, numbers of participants and measurements of the aggregation are withheld.

Not noised, and not changed, are entries that no client can send in a round: factors that rest
(RoLoRA), directions that no client owns (``client_ranks``).

The noise is float32 and from a seeded generator. That is right for a simulation. A deployment needs
a secret seed and noise that is safe against attacks on floating-point numbers.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_peft.algorithms.checks import at_least, positive
from fedjax_peft.errors import InputError
from fedjax_peft.hyperparameters import maybe_nonzero
from fedjax_peft.linalg import qr, svd
from fedjax_peft.lowrank import matmul, pairs
from fedjax_peft.privacy import lifted as lifting
from fedjax_peft.privacy.accounting import (
    Accountant,
    Neighbours,
    client_guarantee,
    composition_in_words,
)
from fedjax_peft.random import stream
from fedjax_peft.typing import (
    Aggregated,
    Aggregator,
    Algorithm,
    Federation,
    Guarantee,
    Params,
    Privacy,
    PyTree,
    RoundContext,
    Stacked,
    Total,
)

__all__ = ["central", "protected"]


def central(
    clip: float,
    noise_multiplier: float,
    *,
    delta: float = 1e-5,
    accountant: Accountant = "rdp",
    neighbours: Neighbours | None = None,
) -> Privacy:
    """Client-level central differential privacy, for every aggregator that sums.

    The uploads of all clients have the same weight, whatever the algorithm's ``weights``. Rows gain
    ``privacy_noise_std``, the standard deviation of the noise on the mean, and two diagnostics of
    the simulation that a real server would not see: ``privacy_median_norm``, the median norm of
    what clients send before clipping, and ``privacy_clip_share``, the share of clients that were
    clipped. An aggregator that truncates products adds ``snr``, see :func:`signal_to_noise`.

    With ``sampling="poisson"`` the guarantee uses the amplification by sampling; with any other
    sampling see :func:`fedjax_peft.privacy.accounting.client_event`.

    Args:
      clip: C, the largest norm of what a client sends, in the aggregator's space.
      noise_multiplier: z; the noise on the sum has the standard deviation z C. 0 only clips.
      delta: δ of the guarantee.
      accountant: ``rdp``, or ``pld``, which is slower and nearly exact.
      neighbours: the federations that the guarantee compares; by default those that suit the
        sampling (:func:`fedjax_peft.privacy.accounting.client_neighbours`).

    Raises:
      InputError: an option out of its range; on use, an algorithm whose server passes uploads on,
        needs the clients' training metrics, or does not sum uploads.
    """
    positive(clip=clip)
    at_least(0, noise_multiplier=noise_multiplier)
    check_delta(delta)

    def protect(algorithm: Algorithm, federation: Federation) -> Algorithm:
        del federation
        return protected(algorithm, private(summing(algorithm), clip, noise_multiplier))

    def guarantee(federation: Federation, rounds: int) -> Guarantee:
        numbers = (noise_multiplier, delta, federation, rounds)
        return client_guarantee(*numbers, accountant=accountant, neighbours=neighbours)

    def statement(federation: Federation) -> str:
        return (
            "Client-level differential privacy of everything that the server sends and of the"
            f" final model. {composition_in_words(federation, neighbours)} The server is trusted:"
            " it sees the uploads before the noise."
        )

    return Privacy("central", "client", protect, guarantee, statement)


def check_delta(delta: Any) -> None:
    """Raises InputError for a δ that is not between 0 and 1."""
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 < delta < 1:
        raise InputError(f"delta = {delta!r} must be a number between 0 and 1, such as 1e-5.")


def summing(algorithm: Algorithm) -> Aggregator:
    """Returns the algorithm's aggregator without measurements.

    Raises:
      InputError: noise on the sum would not hide what single clients send.
    """
    name, aggregator = algorithm.name, algorithm.aggregator
    if algorithm.relayed_leaves is not None:
        raise InputError(
            f"The server of {name!r} passes the factors of every client on to all clients, where"
            " they are seen without noise: noise on a sum protects nobody. Use 'fedavg' with the"
            " aggregator 'fra', which averages the same products and sends factors of their sum."
        )
    if algorithm.needs_metrics is not None:
        raise InputError(
            f"Noise on the sum of the uploads does not hide the training metrics. "
            f"{algorithm.needs_metrics}"
        )
    if aggregator.needs_all_uploads:
        raise InputError(
            f"The aggregator {aggregator.name!r} looks at the uploads one by one, and noise is"
            " added to a sum. Use an aggregator that sums: 'mean', 'fra' or 'flexlora'."
        )
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


def private(base: Aggregator, clip: Any, noise_multiplier: Any) -> Aggregator:
    """Returns the aggregator of clipped changes with Gaussian noise on their sum.

    Args:
      base: an aggregator without measurements.
      clip: C.
      noise_multiplier: z.
    """
    noise_std = clip * noise_multiplier

    def lift(upload: PyTree, template: PyTree, fixed: Params) -> PyTree:
        change = lifting.difference(
            base.lift(upload, template, fixed), base.lift(template, template, fixed), base.name
        )
        clipped, length = clipped_to(change, clip)
        return {"sum": clipped, "norm": Stacked(length)}

    def finish(total: Total, template: PyTree, context: RoundContext, state: PyTree) -> Aggregated:
        noisy = total.value["sum"]
        if maybe_nonzero(noise_multiplier):
            key = stream(context.key, "privacy")
            noisy = lifting.with_noise(noisy, _gaussian(noise_std), key)
        result = released(base, noisy, len(total.weights), template, context, state)
        measured = clipping_metrics(total.value["norm"].value, total.weights, clip)
        measured["privacy_noise_std"] = jnp.float32(noise_std) / context.participants
        if maybe_nonzero(noise_multiplier):
            measured |= signal_to_noise(base, result.update, measured["privacy_noise_std"])
        return result._replace(metrics=result.metrics | measured)

    return base._replace(lift=lift, finish=finish, refactor=None, every_round=True)


def clipped_to(change: PyTree, clip: Any) -> tuple[PyTree, jax.Array]:
    """Returns a change of a norm of at most ``clip``, and its norm before.

    A change whose norm is not finite becomes 0.
    """
    length = lifting.norm(change)
    usable = jnp.isfinite(length)
    factor = jnp.where(length > clip, clip / jnp.where(length > 0, length, 1.0), 1.0)
    return lifting.scaled(change, jnp.where(usable, factor, 0.0), usable), length


def _gaussian(std: Any) -> Any:
    return lambda key, shape: std * jax.random.normal(key, shape)


def released(
    base: Aggregator,
    noisy: PyTree,
    slots: int,
    template: PyTree,
    context: RoundContext,
    state: PyTree,
) -> Aggregated:
    """Returns what the base aggregator makes of a noisy sum of changes.

    Args:
      base: an aggregator without measurements.
      noisy: a dense sum of changes, with noise on every entry.
      slots: the number of clients that fit into a round.
      template: the upload of a client that learned nothing.
      context: of the round.
      state: of the base aggregator.
    """

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


def clipping_metrics(norms: jax.Array, weights: jax.Array, clip: Any) -> dict[str, jax.Array]:
    """Returns the share of clients that were clipped and the median norm; NaN without clients.

    Args:
      norms: before clipping, ``[slots]``.
      weights: ``[slots]``; 0 for a slot without an upload.
      clip: the largest norm.
    """
    there = weights > 0
    count = jnp.sum(there)
    share = jnp.sum(there & (norms > clip)) / jnp.maximum(count, 1)
    ordered = jnp.sort(jnp.where(there, norms, jnp.inf))
    middle = ordered[(count - 1) // 2] / 2 + ordered[count // 2] / 2
    measured = {"privacy_clip_share": share, "privacy_median_norm": middle}
    return {n: jnp.where(count > 0, x, jnp.nan) for n, x in measured.items()}


def signal_to_noise(base: Aggregator, update: PyTree, std: jax.Array) -> dict[str, jax.Array]:
    """Returns ``σ_r / (std (√in + √out))`` of the products that an aggregator truncates.

    σ_r is the smallest singular value that is kept, of A·B without LoRA's scale. A matrix of noise
    alone has a largest singular value of about ``std (√in + √out)``. So a value below 1 means that
    the smallest kept directions are noise. ``snr`` is the smallest value over all matrices.

    Args:
      base: gives nothing unless it ``truncates``.
      update: its update.
      std: the standard deviation of the noise on the average product.
    """
    found = pairs(update) if base.truncates and isinstance(update, dict) else {}
    shapes: dict[tuple, list[str]] = {}
    for path, (a, b) in found.items():
        shapes.setdefault((update[a].shape, update[b].shape), []).append(path)
    each: dict[str, jax.Array] = {}
    for (left, right), paths in sorted(shapes.items()):
        factors = [jnp.stack([update[found[p][i]] for p in paths]) for i in range(2)]
        # One matrix at a time: concurrent LAPACK calls deadlock XLA's small CPU thread pools.
        smallest = jax.lax.map(_smallest_kept, tuple(factors))
        noise = std * (math.sqrt(left[0]) + math.sqrt(right[1]))
        each |= {path: smallest[i] / noise for i, path in enumerate(paths)}
    if not each:
        return {}
    return {"snr": jnp.min(jnp.stack([*each.values()])), **{f"snr/{p}": x for p, x in each.items()}}


def _smallest_kept(factors: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns the r-th singular value of ``a @ b``, from the r x r matrix ``R_a R_bᵀ``."""
    a, b = factors
    small = matmul(qr(a, mode="r"), qr(b.T, mode="r").T)
    return svd(small, compute_uv=False)[-1]
