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
    with_client_state,
)
from fedjax_peft.roles import HeadPolicy, head_roles
from fedjax_peft.typing import (
    Aggregator,
    Algorithm,
    Batch,
    ClientContext,
    ClientUpdate,
    Key,
    Metrics,
    Params,
    PyTree,
    Roles,
)

__all__ = ["averaging", "client", "fedavg"]


def client(
    optimizer: optax.GradientTransformation, context: ClientContext, *, keep_optimizer: bool = False
) -> ClientUpdate:
    """Returns plain local training.

    Optimizer state starts afresh in every round. With ``keep_optimizer`` it is kept in the client's
    state, which is then ``{"model": private leaves, "optimizer": optimizer state}``.
    """

    def init(broadcast: Params, client_state: PyTree, key: Key) -> Local:
        del key
        if keep_optimizer:
            return Local(broadcast, client_state["model"], client_state["optimizer"])
        return init_local(optimizer, broadcast, client_state)

    def step(local: Local, batch: Batch, key: Key) -> tuple[Local, Metrics]:
        return train(optimizer, context, local, batch, key)

    def final(local: Local) -> tuple[Params, PyTree]:
        if keep_optimizer:
            return local.shared, {"model": local.private, "optimizer": local.optimizer}
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
      keep_optimizer: clients keep their optimizer's state from round to round. This suits a few
        clients that take part in every round. Aggregators that factor anew, such as ``fra``, are
        refused.
    """
    algorithm = averaging("fedavg", optimizer, head_roles(head), aggregator, keep_optimizer)
    return algorithm._replace(weights=weights)


def averaging(
    name: str,
    optimizer: optax.GradientTransformation,
    rules: Roles,
    aggregator: Aggregator | None = None,
    keep_optimizer: bool = False,
) -> Algorithm:
    """Returns plain local training and aggregation of the leaves that the rules call shared.

    Args:
      name: the algorithm's name.
      optimizer: the clients' optimizer.
      rules: which leaves are shared, private or fixed.
      keep_optimizer: see :func:`fedavg`.
    """

    def bound(context: ClientContext) -> ClientUpdate:
        return client(optimizer, context, keep_optimizer=keep_optimizer)

    def init_client_state(shared: Params, private: Params) -> PyTree:
        return {"model": private, "optimizer": optimizer.init({**shared, **private})}

    algorithm = Algorithm(name, rules, bound, aggregator or mean(), replace_server())
    if not keep_optimizer:
        return algorithm
    return algorithm._replace(
        init_client_state=init_client_state,
        model=with_client_state,
        needs_fixed_basis="With keep_optimizer = true, a client's optimizer remembers gradients of"
        " A and B of earlier rounds. Set keep_optimizer = false, or leave the aggregator out to"
        " average A and B.",
    )
