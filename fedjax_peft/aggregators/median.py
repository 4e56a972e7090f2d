"""Coordinate-wise median (Yin et al. 2018, Option I).

    x = median of x_1 … x_n, entry by entry                             (x_k: a client's change)

Every entry lies between those of honest clients while fewer than n / 2 clients are hostile: the
breakdown point is 1/2. Of an even number of values the median is the mean of the two in the middle.
"""

from fedjax_peft.aggregators.ranking import each_entry, middle
from fedjax_peft.aggregators.robust import Changes, Combined, Space, robust
from fedjax_peft.contracts import Aggregator, PyTree, RoundContext
from fedjax_peft.contracts.part import part


@part
def median(*, space: Space = "factors") -> Aggregator:
    """Coordinate-wise median; resists fewer than half of the clients (Yin et al. 2018).

    Clients count alike. All uploads of a round are held in memory at once.

    Args:
      space: whether the entries are those of LoRA's ``factors`` or of their ``product``, which is
        then factored anew.

    Raises:
      InputError: on use, ``product`` with a model without LoRA pairs.
    """

    def rule(changes: Changes, context: RoundContext, state: PyTree) -> Combined:
        return Combined(each_entry(changes, lambda rows: middle(rows, changes.here)), {}, state)

    return robust("median", rule, space)
