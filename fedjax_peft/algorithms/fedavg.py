"""FedAvg (McMahan et al. 2017) over whatever is trainable: adapters, LoRA factors, a head.

    server:  broadcast θ                                    the client's own leaves v stay with it
    client:  (θ_k, v_k) ← (θ, v_k);  for each local step:  (θ_k, v_k) ← optimizer step on F_k
    server:  θ ← aggregate of θ_k over the cohort, weights w_k ∝ n_k

With LoRA and :func:`aggregators.mean` this is FedLR (FedIT); with ``lora(init="svd")`` FeDeRA; with
:func:`aggregators.fra` FRA-LoRA.
"""

from typing import NamedTuple

import jax
import optax

from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms.common import HeadPolicy, descend, objective, replace, roles
from fedjax_peft.typing import (
    Aggregator,
    Algorithm,
    Batch,
    ClientUpdate,
    Key,
    Metrics,
    Params,
    Problem,
    PyTree,
    Roles,
)

__all__ = ["fedavg", "local"]


class State(NamedTuple):
    """A client during its local steps."""

    shared: Params
    private: Params
    optimizer: PyTree


def client(optimizer: optax.GradientTransformation, problem: Problem) -> ClientUpdate:
    """Returns plain local training. Optimizer state starts afresh in every round."""

    def init(broadcast: Params, private: Params, key: Key) -> State:
        del key
        return State(broadcast, private, optimizer.init({**broadcast, **private}))

    def step(state: State, batch: Batch, key: Key) -> tuple[State, Metrics]:
        params = {**state.shared, **state.private}

        def loss(params: Params) -> tuple[jax.Array, Metrics]:
            return objective(problem, params, batch, key)

        params, opt, metrics = descend(optimizer, loss, params, state.optimizer)
        shared = {name: params[name] for name in state.shared}
        private = {name: params[name] for name in state.private}
        return State(shared, private, opt), metrics

    def final(state: State) -> tuple[Params, Params]:
        return state.shared, state.private

    return ClientUpdate(init, step, final)


def fedavg(
    optimizer: optax.GradientTransformation,
    *,
    aggregator: Aggregator | None = None,
    head: HeadPolicy = "shared",
) -> Algorithm:
    """Federated averaging; over LoRA it is FedLR, FeDeRA or FRA-LoRA.

    Args:
      optimizer: the clients' optimizer.
      aggregator: how uploads combine; by default their mean, weighted by example counts.
      head: what becomes of the classification head.
    """
    return _algorithm("fedavg", optimizer, roles(head), aggregator or mean())


def local(optimizer: optax.GradientTransformation) -> Algorithm:
    """Baseline without federation: every client trains alone, nothing is sent.

    Args:
      optimizer: the clients' optimizer.
    """
    return _algorithm("local", optimizer, roles("private", adapters="private"), mean(error=False))


def _algorithm(
    name: str, optimizer: optax.GradientTransformation, rules: Roles, aggregator: Aggregator
) -> Algorithm:
    return Algorithm(name, rules, lambda problem: client(optimizer, problem), aggregator, replace())
