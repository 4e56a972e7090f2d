"""The geometric median by smoothed Weiszfeld steps: RFA (Pillutla et al. 2022, Algorithm 2).

    x = argmin_z Σ ‖x_k - z‖                                              (x_k: a client's change)
    repeat:   β_k = 1 / max(ν, ‖x_k - z‖);   z ← Σ β_k x_k / Σ β_k

With a share ρ < 1/2 of hostile clients, z is at most ``(2 - 2 ρ) / (1 - 2 ρ)`` times the largest
distance of an honest x_k from any point away from that point: the breakdown point is 1/2.

The paper starts at the mean, from which an upload of length 1e6 needs many steps. Here the start is
one step from the upload with the smallest sum of distances, with ν the median of the distances from
it. So the first z is bounded already, and a few steps are enough. Each z is a weighted mean of
uploads, so the steps only need their inner products.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.aggregators.ranking import middle
from fedjax_peft.aggregators.robust import (
    Changes,
    Combined,
    Space,
    around_one,
    distances_from,
    inner_products,
    robust,
    weighted_sum,
)
from fedjax_peft.contracts import Aggregator, PyTree, RoundContext
from fedjax_peft.contracts.arguments import Count, Positive
from fedjax_peft.contracts.part import part


@part
def geometric_median(
    *, steps: Count = 8, smoothing: Positive = 1e-6, space: Space = "factors"
) -> Aggregator:
    """Geometric median (RFA); resists fewer than half of the clients (Pillutla et al. 2022).

    Clients count alike, unlike in the paper, where they count by their examples. All uploads of a
    round are held in memory at once.

    Args:
      steps: Weiszfeld steps.
      smoothing: ν, the smallest distance that is divided by, in the unit of a change.
      space: whether distances are those of LoRA's ``factors`` or of their ``product``, which is
        then factored anew.

    Raises:
      InputError: on use, ``product`` with a model without LoRA pairs.
    """

    def rule(changes: Changes, context: RoundContext, state: PyTree) -> Combined:
        here = changes.here
        differences, one = around_one(changes)
        gram = inner_products(differences)

        def moved(distances: Array, least: Array) -> Array:
            inverse = jnp.where(here, 1 / jnp.maximum(distances, least), 0.0)
            return inverse / jnp.maximum(jnp.sum(inverse), 1e-30)

        def step(_: int, weights: Array) -> Array:
            return moved(distances_from(gram, weights), jnp.asarray(smoothing))

        start = distances_from(gram, one)
        weights = moved(start, jnp.maximum(middle(start, here), smoothing))
        weights = jax.lax.fori_loop(0, steps, step, weights)
        return Combined(weighted_sum(changes, weights), {}, state)

    return robust("geometric_median", rule, space)
