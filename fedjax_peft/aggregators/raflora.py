"""raFLoRA (Wu et al. 2026): each rank direction is averaged over the clients that have it.

    N_j = Σ_{k: r_k > j} w_k                            for the directions j = 0 … r - 1
    ΔW̄ = Σ_j Σ_{k: r_k > j} (w_k / N_j) s a_kj b_kj     a_kj: column j of A_k, b_kj: row j of B_k
    U Σ Vᵀ = svd(ΔW̄);   client i gets  A = U_{:r_i} √(Σ_{:r_i} / s),   B = √(Σ_{:r_i} / s) V_{:r_i}ᵀ

FlexLoRA weighs a client's whole product by w_k. Only clients of large rank have the last
directions, so in every round these shrink by the share N_j of the weights: the average collapses to
the smallest rank. Here the weights of a direction add up to 1. With equal ranks the two are equal.

The paper has partitions, from one client rank to the next, in place of single directions. All
directions of a partition have the same owners, so the sum is the same.

A direction belongs to a client unless its A and its B are both zero there: uploads hold zeros
beyond the client's rank (``client_ranks``) and where HetLoRA has pruned. A direction that no client
of the round has is not in the average, as in FlexLoRA. Weights are those of the algorithm, by
default the numbers of examples. The scale s is the same for all clients: α/r with the largest rank.
``split`` is an argument, as in :func:`fedjax_peft.aggregators.fra`.

Noise on the sum is refused: how much a direction of one client counts depends on who else has it.

The full text of the paper could not be read. This was written from its abstract and from a public
reimplementation of its Algorithm 1 and Eq 8, which splits Σ evenly, and was checked against a loop
over partitions in NumPy.
"""

from functools import partial
from typing import Literal

import jax.numpy as jnp
from jax import Array

from fedjax_peft.aggregators.fra import (
    Truncated,
    Truncation,
    truncated_average,
    truncated_products,
    truncating,
)
from fedjax_peft.contracts.aggregator import Aggregated, Aggregator, Stacked, Total
from fedjax_peft.contracts.part import part
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Params, PyTree


@part
def raflora(*, split: Literal["balanced", "B", "A"] = "balanced", error: bool = True) -> Aggregator:
    """raFLoRA: LoRA products of any ranks, each direction averaged over the clients that have it.

    Leaves outside of LoRA pairs (a head) are averaged. All uploads of a cohort are held in memory
    at once.

    Args:
      split: which factor gets the singular values, as in :func:`fedjax_peft.aggregators.fra`.
      error: measure what the cut to the adapters' rank loses of this average, and the share of the
        spectrum that is kept.

    Raises:
      InputError: on use, a model without LoRA pairs.
    """
    truncation = Truncation(
        partial(_by_direction, split=split, error=error), partial(truncated_products, split=split)
    )
    inner = truncating("raflora", truncation, error=error)

    def lift(upload: Params, template: Params, fixed: Params) -> PyTree:
        lifted = inner.lift(upload, template, fixed)
        return {**lifted, "products": Stacked(lifted["products"])}

    def finish(total: Total, template: Params, context: RoundContext, state: PyTree) -> Aggregated:
        value = {**total.value, "products": total.value["products"].value}
        return inner.finish(total._replace(value=value), template, context, state)

    return inner._replace(
        lift=lift, finish=finish, unmasked_policy="zero", needs_all_uploads=True, refactor=None
    )


def _by_direction(
    a: Array, b: Array, weights: Array, scales: Array, *, split: str, error: bool
) -> Truncated:
    """Returns the truncated average (``Truncation.factors``), with weights by direction."""
    has = jnp.any(a != 0, axis=2) | jnp.any(b != 0, axis=3)  # [matrices, clients, r]
    total = jnp.sum(weights[None, :, None] * has, axis=1, keepdims=True)
    root = jnp.where(total > 0, 1 / jnp.sqrt(jnp.where(total > 0, total, 1.0)), 0.0)
    a, b = a * root[:, :, None, :], b * root[:, :, :, None]
    return truncated_average(a, b, weights, scales, split=split, error=error)
