"""Rank directions of LoRA: how many a client has, and those that it draws for a round."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.numerics.lowrank import pairs
from fedjax_peft.numerics.random import stream

Directions = dict[str, Array]
"""Module path -> the directions that a client trains in a round, bool ``[r]``."""


def own_rank(ranks: int | Sequence[int], client: Array | int) -> Array:
    """Returns a client's rank, int32; a list with fewer entries than clients is repeated.

    Ranks above the largest int32 become that number, which no adapter has.
    """
    listed = np.minimum(np.atleast_1d(ranks), 2**31 - 1).tolist()
    return jnp.asarray(listed, jnp.int32)[client % len(listed)]


def drawn(leaves: c.Params, rank: Array, key: c.Key) -> Directions:
    """Returns ``rank`` directions of each matrix, all subsets with the same chance.

    Args:
      leaves: with LoRA's factors.
      key: of the client in the round; each matrix has a stream of its own.
    """
    sizes = {path: leaves[a].shape[1] for path, (a, _) in pairs(leaves).items()}
    return {p: jax.random.permutation(stream(key, p), r) < rank for p, r in sizes.items()}


def only(own: Directions, leaves: c.Params, others: c.Params) -> c.Params:
    """Returns ``leaves`` with the values of ``others`` in the directions that are not drawn."""
    new = dict(leaves)
    for path, (a, b) in pairs(leaves).items():
        new[a] = jnp.where(own[path][None], leaves[a], others[a])
        new[b] = jnp.where(own[path][:, None], leaves[b], others[b])
    return new


def moved_shares(upload: c.Params, template: c.Params) -> dict[str, Array]:
    """Returns the shares of the factors that changed (``Traffic.sent_shares``)."""
    shares = {}
    for a, b in pairs(template).values():
        changed = jnp.any(upload[a] != template[a], axis=0) | jnp.any(
            upload[b] != template[b], axis=1
        )
        shares[a] = shares[b] = jnp.mean(changed, dtype=jnp.float32)
    return shares
