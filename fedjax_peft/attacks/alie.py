"""ALIE, "A Little Is Enough" (Baruch et al. 2019, Algorithm 3): a small step within the spread.

    n clients in the round, m of them hostile;  s = ⌊n/2 + 1⌋ - m  honest ones must be won over
    z   =  Φ⁻¹((n - m - s) / (n - m))
    Δ_j ←  μ_j - z · σ_j     mean and standard deviation of entry j over the honest changes

The sign that harms is not said in the paper (its Algorithm 3 adds); a change is a step downhill, so
this subtracts, like the authors' code. Their attackers estimate μ and σ from their own honest
uploads; these know those of all honest clients. With m > n/2 the s is 1.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.attacks.common import make_attack, moments, on_cohorts
from fedjax_peft.contracts import Algorithm, Attack, Federation, Wrapped
from fedjax_peft.contracts.arguments import FromZero, NotNegative, Share
from fedjax_peft.contracts.part import part


@part
def alie(share: Share, *, z: NotNegative | None = None, seed: FromZero = 0) -> Attack:
    """Hostile clients all send the mean of the honest changes minus ``z`` standard deviations.

    Args:
      share: the share of hostile clients, ``round(share * clients)`` of them.
      z: standard deviations; by default the paper's, from the numbers of clients in the round.
      seed: chooses the hostile clients.

    Raises:
      InputError: on use, an algorithm whose uploads are not leaves.
    """

    def craft(changes: Array, honest: Array, hostile: Array) -> Array:
        mean, std = moments(changes, honest)
        return mean - (_largest_z(honest, hostile) if z is None else z) * std

    def wrap(algorithm: Algorithm, federation: Federation, who: Array) -> Wrapped:
        return on_cohorts("alie", algorithm, who, craft)

    return make_attack("alie", share, seed, wrap)


def _largest_z(honest: Array, hostile: Array) -> Array:
    """Returns the paper's z for these clients, bool ``[slots]`` each; at least 0."""
    good, bad = (jnp.sum(x, dtype=jnp.float32) for x in (honest, hostile))
    supporters = jnp.maximum(jnp.floor((good + bad) / 2 + 1) - bad, 1.0)
    chance = (good - supporters) / jnp.maximum(good, 1.0)
    return jax.scipy.special.ndtri(jnp.maximum(chance, 0.5))
