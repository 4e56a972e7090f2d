"""FedProx (Li et al. 2020): FedAvg with clients that stay near the model that they received.

    server:  broadcast θ                           the client's private leaves v stay on the client
    client:  (θ_k, v_k) ← (θ, v_k);  for each local step an optimizer step on
             F_k(θ_k, v_k) + μ/2 ‖θ_k - θ‖²
    server:  θ ← aggregate of θ_k over the cohort, weights w_k ∝ n_k

The penalty (the paper's Eq 2) is the squared norm over the shared leaves. Its gradient μ (θ_k - θ)
is added to the gradient of the loss, so the training loss in the metrics is F_k alone. The local
steps of a client take the place of the paper's γ-inexact solver. For its partial work, give
``simulate`` a range of ``epochs`` or ``local_steps`` and a share of ``stragglers``. With LoRA the
penalty is on the factors A and B, not on their product.

The paper samples clients in proportion to their size and averages them without weights. Here
clients are sampled uniformly and weighted by size. This is the paper's other scheme, with the same
expectation (``weights="uniform"`` averages without weights).
"""

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.common import Local, init_local, proximal, send_shared, train
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.contracts.arguments import NotNegative
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def fedprox(
    optimizer: c.Optimizer,
    *,
    mu: NotNegative = 0.01,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """FedAvg with a penalty on the distance from the received model (FedProx).

    Args:
      mu: weight of the penalty; 0 is FedAvg.
      head: policy of the head: ``shared``, ``private`` or ``frozen``. The penalty is on shared
        leaves only.
    """

    def client(context: c.ClientContext) -> c.ClientUpdate:
        def init(broadcast: c.Params, private: c.Params, key: c.Key) -> Local:
            return init_local(optimizer, broadcast, private, start=broadcast)

        def step(local: Local, batch: c.Batch, key: c.Key) -> tuple[Local, c.Metrics]:
            near = proximal(mu, local.shared, local.start)
            return train(optimizer, context, local, batch, key, near)

        return c.ClientUpdate(init, step, send_shared)

    algorithm = averaging("fedprox", optimizer, head_roles(head), aggregator)
    return algorithm._replace(client=client, weights=weights)
