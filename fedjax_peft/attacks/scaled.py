"""Scaled uploads: model replacement (Bagdasaryan et al. 2020, Eq 3; Bhagoji et al. 2019).

    Δ  ←  γ · Δ

Δ is upload minus template. With γ = (clients of the round) / (hostile ones), the mean becomes about
what the hostile clients learned.
"""

import jax
from jax import Array

from fedjax_peft.attacks.common import make_attack, on_uploads
from fedjax_peft.contracts import Algorithm, Attack, Federation, Key, PyTree, Wrapped
from fedjax_peft.contracts.arguments import FromZero, NotNegative, Share
from fedjax_peft.contracts.part import part


@part
def scaled(share: Share, factor: NotNegative, *, seed: FromZero = 0) -> Attack:
    """Hostile clients send their change of the leaves times ``factor``, to outweigh the others.

    Args:
      share: the share of hostile clients, ``round(share * clients)`` of them.
      factor: the length of the sent change in lengths of the honest one.
      seed: chooses the hostile clients.

    Raises:
      InputError: on use, an algorithm whose uploads are not leaves.
    """

    def change(learned: PyTree, key: Key) -> PyTree:
        return jax.tree.map(lambda x: factor * x, learned)

    def wrap(algorithm: Algorithm, federation: Federation, who: Array) -> Wrapped:
        return on_uploads("scaled", algorithm, who, change)

    return make_attack("scaled", share, seed, wrap)
