"""FedAvg (McMahan et al. 2017) over all trainable leaves: adapters, LoRA factors, a head.

    server:  broadcast θ                           the client's private leaves v stay on the client
    client:  (θ_k, v_k) ← (θ, v_k);  for each local step:  (θ_k, v_k) ← optimizer step on F_k
    server:  θ ← aggregate of θ_k over the cohort, weights w_k ∝ n_k

With LoRA and :func:`aggregators.mean` this is FedLR (FedIT); with ``lora(init="svd")`` FeDeRA; with
:func:`aggregators.fra` FRA-LoRA.
"""

from functools import partial
from typing import Any

from fedjax_peft import contracts as c
from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.common import Local, init_local, replace_server, send_shared, train
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


def client(optimizer: c.Optimizer, context: c.ClientContext) -> c.ClientUpdate:
    """Returns plain local training."""

    def init(broadcast: c.Params, private: c.Params, key: c.Key) -> Local:
        return init_local(optimizer, broadcast, private)

    def step(local: Local, batch: c.Batch, key: c.Key) -> tuple[Local, c.Metrics]:
        return train(optimizer, context, local, batch, key)

    return c.ClientUpdate(init, step, send_shared)


@checked
def fedavg(
    optimizer: c.Optimizer,
    *,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
    keep_optimizer: bool = False,
) -> c.Algorithm:
    """Federated averaging; over LoRA it is FedLR, FeDeRA or FRA-LoRA."""
    return averaging("fedavg", optimizer, head_roles(head), aggregator, weights=weights)


def averaging(
    name: str,
    optimizer: c.Optimizer,
    rules: c.Roles,
    aggregator: c.Aggregator | None = None,
    **others: Any,
) -> c.Algorithm:
    """Returns plain local training and aggregation of the leaves that the rules call shared.

    Args:
      aggregator: how uploads combine; by default their mean.
    """
    plain = partial(client, optimizer)
    return c.Algorithm(name, rules, plain, aggregator or mean(), replace_server(), **others)
