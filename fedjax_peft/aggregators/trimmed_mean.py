"""Coordinate-wise trimmed mean (Yin et al. 2018, Option II).

    m = ⌊β n⌋;   x = mean of x_1 … x_n without the m smallest and the m largest, entry by entry

(x_k: a client's change.) Every entry lies between those of honest clients while at most m of n
clients are hostile: the breakdown point is the share β < 1/2.
"""

from typing import Annotated

import jax.numpy as jnp
from annotated_types import Ge, Lt
from jax import Array

from fedjax_peft.aggregators.ranking import each_entry, ranked
from fedjax_peft.aggregators.robust import Changes, Combined, Space, robust
from fedjax_peft.contracts import Aggregator, PyTree, RoundContext
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics import tree


@part
def trimmed_mean(
    share: Annotated[float, Ge(0), Lt(0.5)], *, space: Space = "factors"
) -> Aggregator:
    """Coordinate-wise trimmed mean; resists a given share of the clients (Yin et al. 2018).

    Clients count alike. All uploads of a round are held in memory at once.

    Args:
      share: β, the share of the values that is cut off at each end. It should be at least the share
        of hostile clients.
      space: whether the entries are those of LoRA's ``factors`` or of their ``product``, which is
        then factored anew.

    Raises:
      InputError: on use, ``product`` with a model without LoRA pairs.
    """

    def rule(changes: Changes, context: RoundContext, state: PyTree) -> Combined:
        # The small number absorbs rounding: 0.35 * 20 may come out just below 7.
        cut = jnp.floor(share * changes.number + 1e-4).astype(jnp.int32)

        def trimmed(rows: Array) -> Array:
            return _trimmed(rows, changes.here, changes.number, cut)

        return Combined(each_entry(changes, trimmed), {}, state)

    return robust("trimmed_mean", rule, space)


def _trimmed(rows: Array, here: Array, count: Array, cut: Array) -> Array:
    """Returns the mean of the rows that are here, ``cut`` at each end left out in each entry."""
    rank = jnp.arange(len(rows))
    kept = (rank >= cut) & (rank < count - cut)
    kept = tree.where(kept, ranked(rows, here), jnp.zeros_like(rows))
    return jnp.sum(kept, axis=0) / jnp.maximum(count - 2 * cut, 1)
