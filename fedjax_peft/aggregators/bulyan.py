"""Bulyan (El Mhamdi et al. 2018), over Krum.

    S = {}
    repeat θ = n - 2 f times:  move the x_i of the smallest Krum score, among the rest, to S
    x = mean of the β = θ - 2 f values of S closest to the median of S, entry by entry

(x_i: a client's change.) Of n clients f are hostile, and n ≥ 4 f + 3: less than a quarter of the
clients. Krum alone lets a hostile upload differ much in one entry, since it compares distances
only; here every entry lies among those of honest clients. Krum's scores are those among the rest,
and its n is their number. Of values at equal distances from the median the smaller one counts
first.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.aggregators.krum import ranks
from fedjax_peft.aggregators.ranking import each_entry, middle_of_ranked, ranked
from fedjax_peft.aggregators.robust import (
    Changes,
    Combined,
    Space,
    enough_clients,
    robust,
    squared_distances,
    too_few,
)
from fedjax_peft.contracts import Aggregator, PyTree, RoundContext
from fedjax_peft.contracts.arguments import FromZero
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics import tree


@part
def bulyan(hostile: FromZero | Array, *, space: Space = "factors") -> Aggregator:
    """Bulyan: repeated Krum, then a trimmed mean around the median (El Mhamdi et al. 2018).

    A round has at least ``4 * hostile + 3`` clients. In a round with fewer uploads the metric
    ``too_few_clients`` is 1, and at least one upload and one value of each entry are kept.

    Args:
      hostile: f, the number of hostile clients in a round that it resists.
      space: whether distances and entries are those of LoRA's ``factors`` or of their ``product``.

    Raises:
      InputError: on use, a round has too few clients, or ``product`` with a model without LoRA
        pairs.
    """

    def rule(changes: Changes, context: RoundContext, state: PyTree) -> Combined:
        here, number = changes.here, changes.number
        enough_clients("bulyan", len(here), hostile, per=4)
        distances = squared_distances(changes)
        theta = jnp.maximum(number - 2 * hostile, 1)

        def choose(i: int, rest: Array) -> Array:
            best = rest & (ranks(distances, rest, hostile) == 0)
            return jnp.where(i < theta, rest & ~best, rest)

        rest = jax.lax.fori_loop(0, len(here), choose, here)
        chosen = here & ~rest
        kept = jnp.asarray(jnp.maximum(theta - 2 * hostile, 1), jnp.int32)
        change = each_entry(changes, lambda rows: _around_median(rows, chosen, kept))
        return Combined(change, too_few(number, hostile, per=4), state)

    return robust("bulyan", rule, space)


def _around_median(rows: Array, here: Array, kept: Array) -> Array:
    """Returns the mean of the ``kept`` values closest to the median, in each entry.

    In the sorted values they stand side by side: in the window whose ends are closest.
    """
    values, slots, number = ranked(rows, here), len(rows), jnp.sum(here, dtype=jnp.int32)
    away = jnp.abs(values - middle_of_ranked(values, number)[None])
    places = jnp.arange(slots)
    ends = jnp.take(away, jnp.minimum(places + kept - 1, slots - 1), axis=0)
    ends = tree.where(places + kept <= slots, ends, jnp.full_like(ends, jnp.inf))
    start = jnp.argmin(jnp.maximum(away, ends), axis=0)
    place = places.reshape(slots, *(1,) * start.ndim)
    window = (place >= start[None]) & (place < start[None] + kept) & (place < number)
    return jnp.sum(jnp.where(window, values, 0.0), axis=0) / kept
