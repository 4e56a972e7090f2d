"""Gaussian attack (Blanchard et al. 2017): hostile clients send random numbers.

    Δ  ~  N(0, σ²)

Δ is upload minus template. Its entries are independent, and new in every round for every client.
"""

import jax
from jax import Array

from fedjax_peft.attacks.common import make_attack, on_uploads
from fedjax_peft.contracts import Algorithm, Attack, Federation, Key, PyTree, Wrapped
from fedjax_peft.contracts.arguments import FromZero, NotNegative, Share
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.random import stream


@part
def gaussian(share: Share, std: NotNegative, *, seed: FromZero = 0) -> Attack:
    """Hostile clients send Gaussian noise instead of their change of the leaves.

    Args:
      share: the share of hostile clients, ``round(share * clients)`` of them.
      std: standard deviation of every entry.
      seed: chooses the hostile clients. The noise follows from the seed of the run.

    Raises:
      InputError: on use, an algorithm whose uploads are not leaves.
    """

    def change(learned: PyTree, key: Key) -> PyTree:
        leaves, structure = jax.tree.flatten(learned)
        key = stream(key, "gaussian")
        noise = [
            std * jax.random.normal(jax.random.fold_in(key, i), x.shape, x.dtype)
            for i, x in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, noise)

    def wrap(algorithm: Algorithm, federation: Federation, who: Array) -> Wrapped:
        return on_uploads("gaussian", algorithm, who, change)

    return make_attack("gaussian", share, seed, wrap)
