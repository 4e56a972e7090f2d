"""Central privacy with a clip norm that follows a quantile of the norms (Andrew et al. 2021).

    client:  b_k = 1 if 0 < ‖D_k‖ ≤ C, 0 if ‖D_k‖ > C, and ½ if D_k = 0
    server:  b = (Σ (b_k - ½) + N(0, σ_b²)) / (q N) + ½              the share that was not clipped
             C ← C exp(-η (b - γ))

C is the clip norm of :mod:`fedjax_peft.privacy.central`, in the aggregator's space. It moves
towards the quantile γ of the norms: 0.5 is the median. The share is a part of what is released, so
a part of the noise is spent on it. A client that is missing, or sends zeros, adds nothing to the
sum of ``b_k - ½`` and nothing to the sum of the uploads. Any other client changes the first by ½,
and the second by at most C. Both together are as private as one sum with the noise multiplier z if
the noise on the uploads has the standard deviation z_Δ C with

    z_Δ = (z⁻² - (2 σ_b)⁻²)^(-½)

This is Algorithm 1 of the paper (arXiv 1905.03871), with a fixed denominator. The paper compares
federations with and without one client. Where one client sends zeros instead (zero-out), b_k = 1
for zeros would change the sum by 1 and need twice the noise, hence ½.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_peft.contracts.aggregator import Aggregated, Aggregator, Total
from fedjax_peft.contracts.algorithm import Algorithm
from fedjax_peft.contracts.arguments import NotNegative, Positive, Probability, Share
from fedjax_peft.contracts.part import part
from fedjax_peft.contracts.privacy import Federation, Guarantee, Privacy
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Params, PyTree
from fedjax_peft.numerics.hyperparameters import is_traced, maybe_nonzero
from fedjax_peft.numerics.random import stream
from fedjax_peft.privacy.accounting import Accountant, Neighbours
from fedjax_peft.privacy.central import TRUSTED
from fedjax_peft.privacy.guarantees import client_guarantee
from fedjax_peft.privacy.mechanism import gaussian, private, protected, summing
from fedjax_peft.privacy.statements import composition_in_words
from fedjax_peft.support.errors import InputError


@part
def adaptive(
    clip: Positive,
    noise_multiplier: NotNegative,
    *,
    quantile: Share = 0.5,
    clip_rate: Positive = 0.2,
    count_noise: Positive | None = None,
    delta: Probability = 1e-5,
    accountant: Accountant = "rdp",
    neighbours: Neighbours | None = None,
) -> Privacy:
    """Client-level central differential privacy with a clip norm that adapts to the clients.

    Rows gain ``privacy_clip``, the clip norm of the round, and ``privacy_unclipped``, the noisy
    share of clients that were not clipped. Both are private. The other fields are those of
    :func:`fedjax_peft.privacy.central`.

    Args:
      clip: the clip norm of the first round.
      noise_multiplier: z, of the uploads and of the share together; this is what is accounted.
      quantile: γ, the share of clients that should not be clipped.
      clip_rate: η; 0.2 changes the clip norm by at most about a fifth in a round.
      count_noise: σ_b, the standard deviation of the noise on the number of clients that were not
        clipped; by default a twentieth of the clients of a round, as in the paper, and at least z.
      delta: δ of the guarantee.
      accountant: as for :func:`fedjax_peft.privacy.central`.
      neighbours: likewise.

    Raises:
      InputError: a ``count_noise`` of at most z/2, with which the share alone would use up the
        whole guarantee; on use, as for ``central``.
    """
    if count_noise is not None:
        known = not (is_traced(count_noise) or is_traced(noise_multiplier))
        if known and 2 * count_noise <= noise_multiplier:
            raise InputError(
                f"count_noise = {count_noise!r} must be above half of noise_multiplier ="
                f" {noise_multiplier!r}: the share of clipped clients alone would otherwise use up"
                " the whole guarantee."
            )

    def protect(algorithm: Algorithm, federation: Federation) -> Algorithm:
        noise: Any = count_noise
        if noise is None:
            noise = jnp.maximum(federation.per_round / 20, noise_multiplier)
        base = summing(algorithm)
        return protected(
            algorithm, _adapting(base, clip, noise_multiplier, quantile, clip_rate, noise)
        )

    def guarantee(federation: Federation, rounds: int) -> Guarantee:
        numbers = (noise_multiplier, delta, federation, rounds)
        return client_guarantee(*numbers, accountant=accountant, neighbours=neighbours)

    def statement(federation: Federation) -> str:
        return (
            "Client-level differential privacy of everything that the server sends, of the final"
            " model and of the clip norms, which follow a noisy share of clipped clients."
            f" {composition_in_words(federation, neighbours)} {TRUSTED}"
        )

    return Privacy("adaptive", "client", protect, guarantee, statement)


def _adapting(
    base: Aggregator, start: Any, z: Any, quantile: Any, rate: Any, count_noise: Any
) -> Aggregator:
    """Returns the private aggregator whose clip norm is a part of its state."""
    share = jnp.float32(z) / (2 * jnp.float32(count_noise))
    for_uploads = jnp.float32(z) / jnp.sqrt(1 - share**2)

    def at(clip: Any) -> Aggregator:
        """Returns the aggregator of a round with this clip norm."""
        noise = gaussian(clip * for_uploads) if maybe_nonzero(z) else None
        inner = private(base, clip, noise)

        def lift(upload: PyTree, template: PyTree, fixed: Params) -> PyTree:
            lifted = inner.lift(upload, template, fixed)
            norm = lifted["norm"].value
            below = jnp.where(norm <= clip, 0.5, -0.5)
            # A client of zeros counts like a missing one, so that zero-out moves the sum by ½ too.
            return {"lifted": lifted, "below": jnp.where(norm == 0, 0.0, below)}

        def init(template: PyTree) -> PyTree:
            return {"inner": inner.init(template), "clip": jnp.float32(start)}

        def finish(
            total: Total, template: PyTree, context: RoundContext, state: PyTree
        ) -> Aggregated:
            sums = total._replace(value=total.value["lifted"])
            result = inner.finish(sums, template, context, state["inner"])
            below = total.value["below"]
            if maybe_nonzero(z):
                key = stream(context.key, "privacy", "share")
                below = below + count_noise * jax.random.normal(key)
            unclipped = below / context.participants + 0.5
            new = clip * jnp.exp(-rate * (unclipped - quantile))
            measured = {"privacy_clip": jnp.float32(clip), "privacy_unclipped": unclipped}
            return result._replace(
                metrics=result.metrics | measured,
                state={"inner": result.state, "clip": jnp.float32(new)},
            )

        return inner._replace(
            lift=lift, finish=finish, init=init, at_state=lambda state: at(state["clip"])
        )

    return at(start)
