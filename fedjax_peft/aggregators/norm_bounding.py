"""Norm bounding (Sun et al. 2019): shorten every upload to a norm, then take the mean.

    x = (1 / n) Σ x_k min(1, M / ‖x_k‖)            (x_k: a client's change)

f of n hostile clients move the result by at most ``2 f M / n``, whatever they send: their influence
is bounded, not removed. Where M is the median of the norms, hostile clients can raise it at will
once they are half of the clients.
"""

import jax.numpy as jnp

from fedjax_peft.aggregators.ranking import middle
from fedjax_peft.aggregators.robust import (
    Changes,
    Combined,
    Space,
    robust,
    squared_lengths,
    weighted_sum,
)
from fedjax_peft.contracts import Aggregator, PyTree, RoundContext
from fedjax_peft.contracts.arguments import Positive
from fedjax_peft.contracts.part import part


@part
def norm_bounding(norm: Positive | None = None, *, space: Space = "factors") -> Aggregator:
    """Mean of uploads whose change is shortened to a norm (Sun et al. 2019).

    Clients count alike. The metric ``norm_bound`` is M.

    Args:
      norm: M, the largest Euclidean norm of a change; by default the median of the norms of the
        round's changes.
      space: whether the norm is that of LoRA's ``factors`` or of their ``product`` with s, which is
        then factored anew.

    Raises:
      InputError: on use, ``product`` with a model without LoRA pairs.
    """

    def rule(changes: Changes, context: RoundContext, state: PyTree) -> Combined:
        lengths = jnp.sqrt(squared_lengths(changes))
        bound = jnp.asarray(middle(lengths, changes.here) if norm is None else norm, jnp.float32)
        factor = jnp.where(lengths > bound, bound / jnp.where(lengths > 0, lengths, 1.0), 1.0)
        weights = jnp.where(changes.here, factor, 0.0) / jnp.maximum(changes.number, 1)
        return Combined(weighted_sum(changes, weights), {"norm_bound": bound}, state)

    return robust("norm_bounding", rule, space)
