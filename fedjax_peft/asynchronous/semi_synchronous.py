"""A server that aggregates at fixed times whatever has arrived."""

from typing import Literal

from fedjax_peft.asynchronous.staleness import Change, Staleness, StalenessWeight, server
from fedjax_peft.contracts import Asynchronous
from fedjax_peft.contracts.part import part
from fedjax_peft.support.checks import check_number


@part
def semi_synchronous(
    period: float,
    concurrency: int | None = None,
    staleness: Staleness = "polynomial",
    exponent: float = 0.5,
    slope: float = 10.0,
    grace: int = 4,
    server_learning_rate: float = 1.0,
    weights: Literal["size", "uniform"] = "size",
    max_staleness: int | None = None,
) -> Asynchronous:
    """Semi-synchronous: the server takes a step every ``period`` simulated seconds.

    It takes the uploads that have arrived by then. Late clients go on, and their changes count in
    the aggregation after they arrive, with the weight of their staleness::

        x  <-  x + server_learning_rate * mean over the arrivals of s(τ_k) (u_k - x_k)

    Nothing changes at the end of a period without uploads. (The synchronous server with
    ``deadline`` and ``late="partial"`` instead ends the work of late clients.)

    The other arguments are those of :func:`fedjax_peft.asynchronous.fedbuff`.

    Args:
      period: simulated seconds between aggregations.

    Raises:
      InputError: a number is out of range.
    """
    weight = StalenessWeight(staleness, exponent, slope, grace)
    check_number("semi_synchronous", "period", period, positive=True)
    check_number("semi_synchronous", "server_learning_rate", server_learning_rate)
    return server(
        *("semi_synchronous", Change(weight, server_learning_rate), weights),
        period=float(period),
        concurrency=concurrency,
        max_staleness=max_staleness,
    )
