"""FedRep (Collins et al. 2021, Algorithm 1): first the client's head, then the common body.

    client:  head_k ← optimizer steps on F_k(body, ·)       the first E_h / (E_h + E_b) of its steps
             body_k ← optimizer steps on F_k(·, head_k)     the others
    server:  body ← Σ w_k body_k;  head_k never leaves the client

Run it with ``epochs = head_epochs + body_epochs``; then these are exactly the epochs of each part.
For other numbers of steps the head gets the next whole number of them.

Both parts have an optimizer state of their own, which rests, moments and all, while the other part
is trained. The body is the adapters here. The paper averages the bodies without weights in its
theory, where clients are equally large; ``weights`` has both.
"""

from typing import NamedTuple

import jax
import optax

from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms.checks import only_head
from fedjax_peft.algorithms.common import HeadPolicy, Weights, descend, objective, replace, roles
from fedjax_peft.errors import InputError
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
)

__all__ = ["fedrep"]


class State(NamedTuple):
    """A client during its local steps."""

    body: Params
    head: Params
    body_optimizer: PyTree
    head_optimizer: PyTree


def fedrep(
    optimizer: optax.GradientTransformation,
    *,
    head_epochs: int = 1,
    body_epochs: int = 1,
    aggregator: Aggregator | None = None,
    head: HeadPolicy = "private",
    weights: Weights = "size",
) -> Algorithm:
    """FedRep: clients train first their own head, then the shared adapters.

    Args:
      optimizer: the clients' optimizer, for both parts.
      head_epochs: the head's part of a round's local steps, in proportion to ``body_epochs``.
      body_epochs: the adapters' part; run with ``epochs = head_epochs + body_epochs``.
      aggregator: how adapters combine; by default their mean.
      head: only ``private``, which is what the algorithm is.
      weights: of clients in the aggregate.

    Raises:
      InputError: another head policy, or a part without epochs.
    """
    only_head("fedrep", head, "private")
    for name, epochs in (("head_epochs", head_epochs), ("body_epochs", body_epochs)):
        if epochs < 1:
            raise InputError(f"{name} = {epochs} of fedrep must be a positive whole number.")

    def client(problem: Problem) -> ClientUpdate:
        def init(broadcast: Params, own: Params, key: Key) -> State:
            del key
            return State(broadcast, own, optimizer.init(broadcast), optimizer.init(own))

        def step(state: State, batch: Batch, key: Key) -> tuple[State, Metrics]:
            def head_step(state: State) -> tuple[State, Metrics]:
                def loss(head: Params) -> tuple[jax.Array, Metrics]:
                    return objective(problem, {**state.body, **head}, batch, key)

                head, opt, metrics = descend(optimizer, loss, state.head, state.head_optimizer)
                return state._replace(head=head, head_optimizer=opt), metrics

            def body_step(state: State) -> tuple[State, Metrics]:
                def loss(body: Params) -> tuple[jax.Array, Metrics]:
                    return objective(problem, {**body, **state.head}, batch, key)

                body, opt, metrics = descend(optimizer, loss, state.body, state.body_optimizer)
                return state._replace(body=body, body_optimizer=opt), metrics

            parts = head_epochs + body_epochs
            on_head = batch["step"] * parts < batch["steps"] * head_epochs
            return jax.lax.cond(on_head, head_step, body_step, state)

        return ClientUpdate(init, step, lambda state: (state.body, state.head))

    algorithm = Algorithm("fedrep", roles(head), client, aggregator or mean(), replace())
    return algorithm._replace(weights=weights)
