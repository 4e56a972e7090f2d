"""A server that aggregates at fixed times whatever has arrived."""

from typing import Literal

from fedjax_peft.asynchronous.staleness import Change, Staleness, StalenessWeight, server
from fedjax_peft.contracts import Asynchronous
from fedjax_peft.contracts.arguments import Count, FromZero, NotNegative, Positive
from fedjax_peft.contracts.part import part


@part
def semi_synchronous(
    period: Positive,
    concurrency: Count | None = None,
    staleness: Staleness = "polynomial",
    exponent: NotNegative = 0.5,
    slope: NotNegative = 10.0,
    grace: FromZero = 4,
    server_learning_rate: NotNegative = 1.0,
    weights: Literal["size", "uniform"] = "size",
    max_staleness: FromZero | None = None,
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
    """
    weight = StalenessWeight(staleness, exponent, slope, grace)
    return server(
        *("semi_synchronous", Change(weight, server_learning_rate), weights),
        period=float(period),
        concurrency=concurrency,
        max_staleness=max_staleness,
    )
