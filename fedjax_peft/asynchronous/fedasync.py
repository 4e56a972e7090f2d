"""FedAsync: the server mixes in every upload (Xie, Koyejo and Gupta 2019, Algorithm 1)."""

from fedjax_peft.asynchronous.staleness import Mixture, Staleness, StalenessWeight, server
from fedjax_peft.contracts import Asynchronous
from fedjax_peft.contracts.part import part
from fedjax_peft.support.checks import check_number


@part
def fedasync(
    alpha: float = 0.6,
    concurrency: int | None = None,
    staleness: Staleness = "polynomial",
    exponent: float = 0.5,
    slope: float = 10.0,
    grace: int = 4,
    max_staleness: int | None = None,
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

    Raises:
      InputError: a number is out of range.
    """
    weight = StalenessWeight(staleness, exponent, slope, grace)
    check_number("fedasync", "alpha", alpha, most=1.0, positive=True)
    return server(
        *("fedasync", Mixture(weight, alpha), "uniform"),
        buffer_size=1,
        concurrency=concurrency,
        max_staleness=max_staleness,
    )
