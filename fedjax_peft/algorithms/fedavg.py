"""FedAvg (McMahan et al. 2017) over all trainable leaves: adapters, LoRA factors, a head.

    server:  broadcast θ                           the client's private leaves v stay on the client
    client:  (θ_k, v_k) ← (θ, v_k);  for each local step:  (θ_k, v_k) ← optimizer step on F_k
    server:  θ ← aggregate of θ_k over the cohort, weights w_k ∝ n_k

With LoRA and :func:`aggregators.mean` this is FedLR (FedIT); with ``lora(init="svd")`` FeDeRA; with
:func:`aggregators.fra` FRA-LoRA.
"""

import optax

from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.common import (
    Local,
    Weights,
    init_local,
    replace_server,
    train,
)
from fedjax_peft.contracts import (
    Aggregator,
    Algorithm,
    Batch,
    ClientContext,
    ClientUpdate,
    Key,
    Metrics,
    Params,
    Roles,
)
from fedjax_peft.numerics.roles import HeadPolicy, head_roles

__all__ = ["averaging", "client", "fedavg"]


def client(optimizer: optax.GradientTransformation, context: ClientContext) -> ClientUpdate:
    """Returns plain local training."""

    def init(broadcast: Params, private: Params, key: Key) -> Local:
        del key
        return init_local(optimizer, broadcast, private)

    def step(local: Local, batch: Batch, key: Key) -> tuple[Local, Metrics]:
        return train(optimizer, context, local, batch, key)

    def final(local: Local) -> tuple[Params, Params]:
        return local.shared, local.private

    return ClientUpdate(init, step, final)


@checked
def fedavg(
    optimizer: optax.GradientTransformation,
    *,
    aggregator: Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: Weights = "size",
    keep_optimizer: bool = False,
) -> Algorithm:
    """Federated averaging; over LoRA it is FedLR, FeDeRA or FRA-LoRA.

    Args:
      optimizer: the clients' optimizer.
      aggregator: how uploads combine; by default their mean, weighted by example counts.
    """
    algorithm = averaging("fedavg", optimizer, head_roles(head), aggregator)
    return algorithm._replace(weights=weights)


def averaging(
    name: str,
    optimizer: optax.GradientTransformation,
    rules: Roles,
    aggregator: Aggregator | None = None,
) -> Algorithm:
    """Returns plain local training and aggregation of the leaves that the rules call shared.

    Args:
      name: the algorithm's name.
      optimizer: the clients' optimizer.
      rules: which leaves are shared, private or fixed.
    """
    return Algorithm(
        name,
        rules,
        lambda context: client(optimizer, context),
        aggregator or mean(),
        replace_server(),
    )
