"""Clip the norm of every client's change (the first half of DP-FedAvg, McMahan et al. 2018).

    client:  Δ_k ← Δ_k · min(1, C / ‖Δ_k‖)

‖·‖ is the Euclidean norm over all leaves together, and C the largest norm. Each upload then moves
the mean by at most its weight times C, whatever its data.
"""

import math
from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Gt, Le
from jax import Array

from fedjax_peft.contracts.part import part
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.transform import Decoded, Encoded, Measurements, Transform
from fedjax_peft.contracts.types import Key, PyTree
from fedjax_peft.numerics import tree


@part
def clip_norm(max_norm: Annotated[float, Gt(0), Le(math.inf)]) -> Transform:
    """Scales every client's change down to a Euclidean norm of at most ``max_norm``.

    The row of a round gains ``clip_share``, the share of the aggregated clients whose change was
    longer than that, and ``clip_median_norm``, the median of their norms before clipping: a usual
    choice of ``max_norm``.

    Args:
      max_norm: the largest norm over all leaves that are sent; ``inf`` only measures.
    """

    def client(update: PyTree, memory: PyTree, received: PyTree, key: Key) -> Encoded:
        norm = tree.norm(update)
        return Encoded(clipped(update, norm, max_norm), memory, norm)

    def server(
        aggregate: PyTree, state: PyTree, measured: Measurements, context: RoundContext
    ) -> Decoded:
        share, middle = share_and_median(measured.values, measured.accepted, max_norm)
        return Decoded(aggregate, state, {"clip_share": share, "clip_median_norm": middle})

    return Transform("clip_norm", client, server=server)


def share_and_median(norms: Array, accepted: Array, max_norm: float | Array) -> tuple[Array, Array]:
    """Returns the share of clients that were clipped and the median norm; NaN without clients.

    Args:
      norms: before clipping, ``[slots]``.
      accepted: bool ``[slots]``: which entries count.
    """
    count = jnp.sum(accepted)
    share = jnp.sum(accepted & (norms > max_norm)) / jnp.maximum(count, 1)
    ordered = jnp.sort(jnp.where(accepted, norms, jnp.inf))
    middle = ordered[(count - 1) // 2] / 2 + ordered[count // 2] / 2
    # Nobody has no share and no median.
    return jnp.where(count > 0, share, jnp.nan), jnp.where(count > 0, middle, jnp.nan)


def clipped(update: PyTree, norm: Array, max_norm: float | Array) -> PyTree:
    """Returns a change of this norm scaled down to ``max_norm``, bit-equal where it is not longer.

    Args:
      norm: its Euclidean norm, a float32 scalar.
    """
    scale = jnp.where(norm > max_norm, max_norm / jnp.where(norm > 0, norm, 1.0), 1.0)
    return jax.tree.map(lambda x: (x * scale).astype(x.dtype), update)
