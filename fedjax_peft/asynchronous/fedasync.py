"""FedAsync: the server mixes in every upload (Xie, Koyejo and Gupta 2019, Algorithm 1)."""

from fedjax_peft.asynchronous.staleness import Mixture, Staleness, StalenessWeight, server
from fedjax_peft.contracts import Asynchronous
from fedjax_peft.contracts.arguments import Count, FromZero, NotNegative, PositiveShare
from fedjax_peft.contracts.part import part


@part
def fedasync(
    alpha: PositiveShare = 0.6,
    concurrency: Count | None = None,
    staleness: Staleness = "polynomial",
    exponent: NotNegative = 0.5,
    slope: NotNegative = 10.0,
    grace: FromZero = 4,
    max_staleness: FromZero | None = None,
) -> Asynchronous:
    """FedAsync: the server mixes every upload into its model as soon as it arrives.

    Clients train all the time. The server takes every upload at once::

        x  <-  (1 - a) x + a u_k     with     a = alpha s(τ_k)

    ``u_k`` is the client's model, and τ_k the number of updates of the server since the client
    fetched. The paper's local work is that of FedProx: use ``fedprox`` as the algorithm for its
    proximal term.

    The other arguments are those of :func:`fedjax_peft.asynchronous.fedbuff`.

    Args:
      alpha: the weight of an upload that is not stale.
    """
    weight = StalenessWeight(staleness, exponent, slope, grace)
    return server(
        *("fedasync", Mixture(weight, alpha), "uniform"),
        buffer_size=1,
        concurrency=concurrency,
        max_staleness=max_staleness,
    )
