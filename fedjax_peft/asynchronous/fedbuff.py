"""FedBuff: the server averages a buffer of changes (Nguyen et al., AISTATS 2022, Algorithm 1)."""

from typing import Literal

from fedjax_peft.asynchronous.staleness import Change, Staleness, StalenessWeight, server
from fedjax_peft.contracts import Asynchronous
from fedjax_peft.contracts.arguments import Count, FromZero, NotNegative
from fedjax_peft.contracts.part import part


@part
def fedbuff(
    buffer_size: Count = 10,
    concurrency: Count | None = None,
    staleness: Staleness = "polynomial",
    exponent: NotNegative = 0.5,
    slope: NotNegative = 10.0,
    grace: FromZero = 4,
    server_learning_rate: NotNegative = 1.0,
    weights: Literal["size", "uniform"] = "uniform",
    max_staleness: FromZero | None = None,
) -> Asynchronous:
    """FedBuff: the server takes a step whenever a given number of uploads have arrived.

    Clients train all the time. Whenever ``buffer_size`` uploads have arrived, the server takes the
    mean of their changes, each multiplied by the weight of its staleness::

        x  <-  x + server_learning_rate * mean over the buffer of s(τ_k) (u_k - x_k)

    ``x_k`` is the version that client k fetched, ``u_k`` its upload, and τ_k the number of updates
    of the server in between. The mean is that of the algorithm's aggregator, and the step is that
    of the algorithm's server: with ``fedadam`` the server takes an Adam step.

    Args:
      buffer_size: K, the uploads of an aggregation.
      concurrency: M_c, the clients that train at the same time; None: ``clients_per_round``.
      staleness: the weight s of a stale change, see :data:`Staleness`.
      exponent: the exponent of the polynomial weight; the paper's is 0.5.
      slope: the slope of the hinge weight.
      grace: the staleness up to which the hinge weight is 1.
      server_learning_rate: η_g.
      weights: the weights of the mean: ``uniform``, 1 / K each, as in the paper; or ``size``, by
        the clients' numbers of examples, as in synchronous FedAvg.
      max_staleness: uploads with a larger staleness are discarded, and do not fill the buffer.
    """
    weight = StalenessWeight(staleness, exponent, slope, grace)
    return server(
        *("fedbuff", Change(weight, server_learning_rate), weights),
        buffer_size=buffer_size,
        concurrency=concurrency,
        max_staleness=max_staleness,
    )
