"""Client-level central privacy with Laplace noise: pure ε, and poor for models of many parameters.

    client:  D_k ← D_k · min(1, C / ‖D_k‖₁)                  ‖·‖₁ over everything that is summed
    server:  S = Σ D_k + Laplace(b) on every entry,   b = z C

A round is (1/z, 0)-private. Rounds are composed by adding their ε. Everything else is as in
:mod:`fedjax_peft.privacy.central`.

The L1 norm of a vector of d entries is up to √d times its Euclidean norm, so a change is scaled
down by about that factor, while the noise on every entry stays. For d = 10⁶ the Gaussian mechanism
is better by orders of magnitude. The mechanism is offered for comparison.

The L1 norm of a product A·B needs the dense matrix, of every client that runs at the same time.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Algorithm, Federation, Guarantee, Privacy, PyTree
from fedjax_peft.contracts.arguments import NotNegative, Positive
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.hyperparameters import maybe_nonzero
from fedjax_peft.privacy import lifted as lifting
from fedjax_peft.privacy.accounting import client_neighbours
from fedjax_peft.privacy.central import TRUSTED
from fedjax_peft.privacy.guarantees import participations
from fedjax_peft.privacy.mechanism import Noise, factor_to, independent, private, protected, summing
from fedjax_peft.privacy.statements import composition_in_words


@part
def laplace(clip: Positive, noise_multiplier: NotNegative) -> Privacy:
    """Client-level central privacy with Laplace noise; poor for many parameters.

    Rows gain the fields of :func:`fedjax_peft.privacy.central`, with L1 norms. δ is 0.

    Args:
      clip: C, the largest L1 norm of what a client sends, in the aggregator's space.
      noise_multiplier: z; the noise on the sum has the scale b = z C, and a round has ε = 1/z.

    Raises:
      InputError: as :func:`fedjax_peft.privacy.central`.
    """

    def protect(algorithm: Algorithm, federation: Federation) -> Algorithm:
        noise = laplace_noise(clip * noise_multiplier) if maybe_nonzero(noise_multiplier) else None
        return protected(algorithm, private(summing(algorithm), clip, noise, clipped_l1))

    def guarantee(federation: Federation, rounds: int) -> Guarantee:
        if not rounds:
            return Guarantee(0.0, 0.0)
        if not noise_multiplier:
            return Guarantee(math.inf, 0.0)
        each = 1 / noise_multiplier
        if federation.sampling == "poisson" and each < 700:  # beyond that, e^ε overflows
            each = math.log1p(federation.sampling_probability * math.expm1(each))
        return Guarantee(participations(federation, rounds) * each, 0.0)

    def statement(federation: Federation) -> str:
        return (
            "Pure client-level differential privacy (δ = 0) of everything that the server sends and"
            " of the final model; the ε of rounds are added up."
            f" {composition_in_words(federation, client_neighbours(federation))} {TRUSTED}"
        )

    return Privacy("laplace", "client", protect, guarantee, statement)


def laplace_noise(scale: Any) -> Noise:
    """Returns independent Laplace noise of the same scale in every round."""
    return independent(
        lambda key, shape: scale * jax.random.laplace(key, shape), scale * math.sqrt(2)
    )


def clipped_l1(change: PyTree, clip: Any) -> tuple[PyTree, Array]:
    """Returns a change of an L1 norm of at most ``clip``, dense, and its L1 norm before."""
    whole = lifting.dense(change)
    length = sum((jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(whole)), jnp.zeros(()))
    return lifting.scaled(whole, *factor_to(clip, length)), length
