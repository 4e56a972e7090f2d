"""Sign flipping (Li et al. 2019, RSA): hostile clients send the opposite of what they learned.

    Δ  ←  -s · Δ

Δ is upload minus template, the upload of a client that learned nothing.
"""

import jax
from jax import Array

from fedjax_peft.attacks.common import make_attack, on_uploads
from fedjax_peft.contracts import Algorithm, Attack, Federation, Key, PyTree, Wrapped
from fedjax_peft.contracts.arguments import FromZero, NotNegative, Share
from fedjax_peft.contracts.part import part


@part
def sign_flip(share: Share, *, scale: NotNegative = 1.0, seed: FromZero = 0) -> Attack:
    """Hostile clients send their change of the leaves with the opposite sign, times ``scale``.

    Args:
      share: the share of hostile clients, ``round(share * clients)`` of them.
      scale: length of the sent change in lengths of the honest one.
      seed: chooses the hostile clients.

    Raises:
      InputError: on use, an algorithm whose uploads are not leaves.
    """

    def change(learned: PyTree, key: Key) -> PyTree:
        return jax.tree.map(lambda x: -scale * x, learned)

    def wrap(algorithm: Algorithm, federation: Federation, who: Array) -> Wrapped:
        return on_uploads("sign_flip", algorithm, who, change)

    return make_attack("sign_flip", share, seed, wrap)
