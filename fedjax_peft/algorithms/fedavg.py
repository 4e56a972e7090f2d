"""FedAvg (McMahan et al. 2017) over all trainable leaves: adapters, LoRA factors, a head.

    server:  broadcast θ                           the client's private leaves v stay on the client
    client:  (θ_k, v_k) ← (θ, v_k);  for each local step:  (θ_k, v_k) ← optimizer step on F_k
    server:  θ ← aggregate of θ_k over the cohort, weights w_k ∝ n_k

With LoRA and :func:`aggregators.mean` this is FedLR (FedIT); with ``lora(init="svd")`` FeDeRA; with
:func:`aggregators.fra` FRA-LoRA.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.common import (
    Local,
    freeze_where,
    init_local,
    loss_where,
    replace_server,
    send_shared,
    train,
)
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


def client(
    optimizer: c.Optimizer,
    context: c.ClientContext,
    moves: Callable[[str], Array | bool] | None = None,
) -> c.ClientUpdate:
    """Returns plain local training.

    Args:
      moves: leaf name -> whether it is trained; by default all are. See :func:`freeze_where`.
    """
    loss = None
    if moves is not None:
        optimizer, loss = freeze_where(optimizer, moves), loss_where(context, moves)

    def init(broadcast: c.Params, private: c.Params, key: c.Key) -> Local:
        return init_local(optimizer, broadcast, private)

    def step(local: Local, batch: c.Batch, key: c.Key) -> tuple[Local, c.Metrics]:
        return train(optimizer, context, local, batch, key, loss=loss)

    return c.ClientUpdate(init, step, send_shared)


@checked
def fedavg(
    optimizer: c.Optimizer,
    *,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
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
