"""Centred clipping (Karimireddy et al. 2021).

    v = the result of the round before (0 at first)
    repeat L times:  v ← v + (1 / n) Σ (x_k - v) min(1, τ / ‖x_k - v‖)
    x = v                                                          (x_k: a client's change)

f of n hostile clients move v by at most ``τ f / n`` in a step. The paper's theorem is for less than
a tenth of the clients. In the paper clients send momentum, which changes slowly from round to
round. Here they send the change of their model, and the centre is all that is remembered.

v is a weighted sum of the last centre and of the changes, so the steps only need inner products.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.aggregators.ranking import middle
from fedjax_peft.aggregators.robust import (
    Changes,
    Combined,
    Space,
    distances_from,
    inner_products_around,
    robust,
    weighted_sum,
)
from fedjax_peft.contracts import Aggregator, Params, PyTree, RoundContext
from fedjax_peft.contracts.arguments import Count, Positive
from fedjax_peft.contracts.part import part


@part
def centred_clipping(
    radius: Positive | None = None, *, steps: Count = 1, space: Space = "factors"
) -> Aggregator:
    """Mean of changes that are clipped around the last round's result (Karimireddy et al. 2021).

    Clients count alike. The centre is the aggregator's state. The metric ``clipping_radius`` is τ.

    Args:
      radius: τ, the largest distance from the centre that counts in full; by default the median of
        the clients' distances from the last centre.
      steps: L, how often the centre moves in a round; the paper's choice is 1.
      space: whether distances are those of LoRA's ``factors`` or of their ``product``, which is
        then factored anew.

    Raises:
      InputError: on use, ``product`` with a model without LoRA pairs.
    """

    def rule(changes: Changes, context: RoundContext, state: Params) -> Combined:
        gram = inner_products_around(changes, state)  # the centre is the last row

        def distances(weights: Array) -> Array:
            return distances_from(gram, weights)[:-1]

        start = jnp.zeros(len(gram)).at[-1].set(1.0)
        reach = middle(distances(start), changes.here) if radius is None else radius
        bound = jnp.asarray(reach, jnp.float32)

        def step(_: int, weights: Array) -> Array:
            away = distances(weights)
            factor = jnp.where(away > bound, bound / jnp.where(away > 0, away, 1.0), 1.0)
            pulls = jnp.where(changes.here, factor, 0.0) / jnp.maximum(changes.number, 1)
            return weights * (1 - jnp.sum(pulls)) + jnp.append(pulls, 0.0)

        weights = jax.lax.fori_loop(0, steps, step, start)
        moved = weighted_sum(changes, weights[:-1])
        centre = {n: weights[-1] * x + moved[n] for n, x in state.items()}
        return Combined(centre, {"clipping_radius": bound}, centre)

    def init(start: Params) -> PyTree:
        return start

    return robust("centred_clipping", rule, space, init)
