"""Inner product manipulation, IPM (Xie et al. 2020, "Fall of Empires", section 4).

    Δ  ←  -ε · (mean of the honest changes)

The inner product of the aggregate and the true mean becomes small or negative. A small ε keeps the
hostile uploads close to the others.
"""

from jax import Array

from fedjax_peft.attacks.common import make_attack, moments, on_cohorts
from fedjax_peft.contracts import Algorithm, Attack, Federation, Wrapped
from fedjax_peft.contracts.arguments import FromZero, NotNegative, Share
from fedjax_peft.contracts.part import part


@part
def ipm(share: Share, *, epsilon: NotNegative = 0.5, seed: FromZero = 0) -> Attack:
    """Hostile clients all send ``-epsilon`` times the mean of the honest changes.

    Args:
      share: the share of hostile clients, ``round(share * clients)`` of them.
      epsilon: the paper tries 0.1 to 100.
      seed: chooses the hostile clients.

    Raises:
      InputError: on use, an algorithm whose uploads are not leaves.
    """

    def craft(changes: Array, honest: Array, hostile: Array) -> Array:
        return -epsilon * moments(changes, honest)[0]

    def wrap(algorithm: Algorithm, federation: Federation, who: Array) -> Wrapped:
        return on_cohorts("ipm", algorithm, who, craft)

    return make_attack("ipm", share, seed, wrap)
