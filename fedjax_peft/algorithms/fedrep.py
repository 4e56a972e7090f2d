"""FedRep (Collins et al. 2021, Algorithm 1): train the client's head, then the common body.

    client:  head_k ← optimizer steps on F_k(body, ·)       the first E_h / (E_h + E_b) of its steps
             body_k ← optimizer steps on F_k(·, head_k)     the others
    server:  body ← Σ w_k body_k;  head_k never leaves the client
    at the end, with ``tune_epochs``:  head_k ← optimizer steps on F_k(body, ·), then evaluation

Run it with ``epochs = head_epochs + body_epochs``; then these are exactly the epochs of each part.
For other numbers of steps, the head's number of steps is rounded up, and each part gets at least
one step. A client with a single step in a round (``epochs = 1`` and one batch of examples) makes
one step for each part on this batch, the head first.

The default is E_h = E_b = 1, which costs least. According to its public forks, the authors' code
makes 10 epochs for the head and 1 for the body (``epochs = 11``, ``head_epochs = 10``), and trains
all clients' heads under the final body before the last evaluation, for 10 epochs
(``tune_epochs = 10``).

Each part has its own optimizer state, which does not change while the other part is trained. The
body is the adapters here. The paper's theory averages the bodies without weights, for clients of
equal size; ``weights`` offers both.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.common import loss_beside, optimizer_step, tuned_by
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.contracts.arguments import Count, FromZero
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.random import stream
from fedjax_peft.numerics.roles import head_roles


class State(NamedTuple):
    """A client during its local steps."""

    body: c.Params
    head: c.Params
    body_optimizer: c.PyTree
    head_optimizer: c.PyTree


@checked
def fedrep(
    optimizer: c.Optimizer,
    *,
    head_epochs: Count = 1,
    body_epochs: Count = 1,
    tune_epochs: FromZero = 0,
    aggregator: c.Aggregator | None = None,
    head: Literal["private"] = "private",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """FedRep: clients train first their own head, then the shared adapters.

    Args:
      optimizer: the clients' optimizer, for both parts.
      head_epochs: the head's part of a round's local steps, in proportion to ``body_epochs``.
      body_epochs: the adapters' part; run with ``epochs = head_epochs + body_epochs``.
      tune_epochs: before the last evaluation, every client trains its head for this number of
        epochs with the final adapters and a new optimizer. The scores are recorded as
        ``tuned_...``, in addition to those of the heads without tuning. Nothing else changes.
        0 means no tuning.
      aggregator: how adapters combine; by default their mean.
      head: only ``private``, which defines the algorithm.
    """

    def init(broadcast: c.Params, own: c.Params, key: c.Key) -> State:
        return State(broadcast, own, optimizer.init(broadcast), optimizer.init(own))

    def head_step(
        context: c.ClientContext, state: State, batch: c.Batch, key: c.Key
    ) -> tuple[State, c.Metrics]:
        loss = loss_beside(context, state.body)
        gradient, metrics = context.gradient(loss, state.head, batch, key)
        head, opt = optimizer_step(optimizer, gradient, state.head, state.head_optimizer)
        return state._replace(head=head, head_optimizer=opt), metrics

    def body_step(
        context: c.ClientContext, state: State, batch: c.Batch, key: c.Key
    ) -> tuple[State, c.Metrics]:
        loss = loss_beside(context, state.head)
        gradient, metrics = context.gradient(loss, state.body, batch, key)
        body, opt = optimizer_step(optimizer, gradient, state.body, state.body_optimizer)
        return state._replace(body=body, body_optimizer=opt), metrics

    def client(context: c.ClientContext) -> c.ClientUpdate:
        def step(state: State, batch: c.Batch, key: c.Key) -> tuple[State, c.Metrics]:
            here, steps = batch["step"], batch["steps"]
            # ⌈steps E_h / (E_h + E_b)⌉, but one step is left for the body if there are two or more.
            share = -(-steps * head_epochs // (head_epochs + body_epochs))
            on_head = here < jnp.clip(share, 1, jnp.maximum(steps - 1, 1))
            single = steps == 1
            # If both parts train in one step, their dropout masks are independent.
            for_body = jax.lax.select(single, stream(key, "body"), key)
            state, of_head = _if(on_head, partial(head_step, context), state, batch, key)
            state, of_body = _if(
                ~on_head | single, partial(body_step, context), state, batch, for_body
            )
            return state, tree.where(on_head, of_head, of_body)

        return c.ClientUpdate(init, step, lambda state: (state.body, state.head))

    def tuning(context: c.ClientContext) -> c.ClientUpdate:
        return c.ClientUpdate(init, partial(head_step, context), lambda state: ({}, state.head))

    algorithm = averaging("fedrep", optimizer, head_roles(head), aggregator)
    return algorithm._replace(
        client=client,
        weights=weights,
        gradients_per_step=2,  # of a client with a single step
        **tuned_by(tuning, tune_epochs, "the heads"),
    )


def _if(
    due: Array,
    step: Callable[[State, c.Batch, c.Key], tuple[State, c.Metrics]],
    state: State,
    batch: c.Batch,
    key: c.Key,
) -> tuple[State, c.Metrics]:
    """Returns a step's result if ``due``, else the unchanged state and metrics of 0."""

    def rest(state: State) -> tuple[State, c.Metrics]:
        shapes = jax.eval_shape(step, state, batch, key)[1]
        return state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return jax.lax.cond(due, lambda state: step(state, batch, key), rest, state)
