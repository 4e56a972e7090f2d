"""Min-Max (Shejwalkar & Houmansadr 2021, Eq 8): as far as possible without standing out.

    Δ  ←  μ + γ p            μ: mean of the honest changes
    p  =  -μ/‖μ‖ (unit),  -σ (std)  or  -sign(μ) (sign)
    γ  =  largest with  max_i ‖Δ - Δ_i‖ ≤ max_{i,j} ‖Δ_i - Δ_j‖      i, j honest

The paper finds γ by a search that halves its step. Each distance is the root of a quadratic in γ,
so the largest γ is computed from their roots, without a search.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from fedjax_peft.attacks.common import make_attack, moments, on_cohorts
from fedjax_peft.contracts import Algorithm, Attack, Federation, Wrapped
from fedjax_peft.contracts.arguments import FromZero, Share
from fedjax_peft.contracts.part import part


@part
def min_max(
    share: Share, *, direction: Literal["unit", "std", "sign"] = "std", seed: FromZero = 0
) -> Attack:
    """Hostile clients all send the mean of the honest changes, moved far in a harmful direction.

    They stay as close to every honest change as the two honest ones that are farthest apart.

    Args:
      share: the share of hostile clients, ``round(share * clients)`` of them.
      direction: against the mean (``unit``), against the standard deviations (``std``), or against
        the signs of the mean (``sign``).
      seed: chooses the hostile clients.

    Raises:
      InputError: on use, an algorithm whose uploads are not leaves.
    """

    def craft(changes: Array, honest: Array, hostile: Array) -> Array:
        mean, std = moments(changes, honest)
        length = jnp.linalg.norm(mean)
        towards = {
            "unit": -mean / jnp.where(length > 0, length, 1.0),
            "std": -std,
            "sign": -jnp.sign(mean),
        }[direction]
        return mean + _largest_step(changes - mean[None], honest, towards) * towards

    def wrap(algorithm: Algorithm, federation: Federation, who: Array) -> Wrapped:
        return on_cohorts("min_max", algorithm, who, craft)

    return make_attack("min_max", share, seed, wrap)


def _largest_step(centred: Array, honest: Array, towards: Array) -> Array:
    """Returns the largest γ.

    Args:
      centred: honest changes minus their mean, ``[slots, entries]``.
      honest: bool ``[slots]``.
      towards: p, ``[entries]``.
    """
    x = jnp.where(honest[:, None], centred, 0.0)
    gram = jnp.matmul(x, x.T, precision="highest")
    squares = jnp.diagonal(gram)
    between = squares[:, None] + squares[None] - 2 * gram
    largest = jnp.max(jnp.where(honest[:, None] & honest[None], between, 0.0))
    # ‖γ p - x_i‖² = largest:  γ² ‖p‖² - 2 γ p·x_i + ‖x_i‖² - largest = 0
    a = jnp.sum(towards**2)
    b = jnp.matmul(x, towards, precision="highest")
    room = jnp.maximum(b**2 - a * (squares - largest), 0.0)
    steps = (b + jnp.sqrt(room)) / jnp.where(a > 0, a, 1.0)
    return jnp.where(a > 0, jnp.min(jnp.where(honest, steps, jnp.inf)), 0.0)
