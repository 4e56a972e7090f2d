"""FedDyn (Acar et al. 2021, Algorithm 1): clients whose optima agree with the server's.

Every client keeps g_k, an estimate of its own gradient, 0 at first. When no client moves any more,
the gradients of the clients' losses sum to zero: a stationary point of the common objective.

    server:  broadcast θ                           the client's private leaves v stay on the client
    client:  (θ_k, v_k) ← (θ, v_k);  for each local step an optimizer step on
             F_k(θ_k, v_k) - ⟨g_k, θ_k⟩ + α/2 ‖θ_k - θ‖²
             g_k ← g_k - α (θ_k - θ)
    server:  h ← h - α/N Σ_S (θ_k - θ);   θ ← (mean over S of θ_k) - h/α

S is the cohort of the round, N the number of clients that have examples (a client without any
never takes part). The paper minimises exactly; here clients make local steps.
The server keeps s = -h/α, the sum of all changes θ_k - θ so far, divided by N. It does not need h
itself, and α cancels. All clients have equal weights, because only then h is the mean of the g_k of
all N clients. So ``weights`` and ``aggregator`` are not options. The regulariser is on shared
leaves only.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_peft import contracts as c
from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.common import (
    Local,
    add_to_gradient,
    init_local,
    train,
    with_client_state,
)
from fedjax_peft.contracts.arguments import Positive
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


class Start(NamedTuple):
    """What a client had at the start of the round."""

    received: c.Params
    gradient: c.Params
    """g_k."""


class Server(NamedTuple):
    """The server."""

    model: c.Params
    moved: c.Params
    """s = -h/α."""


@checked
def feddyn(
    optimizer: c.Optimizer,
    *,
    alpha: Positive = 0.01,
    head: HeadPolicy = "shared",
) -> c.Algorithm:
    """Dynamic regularisation makes clients' optima agree with the common one (FedDyn).

    Args:
      alpha: weight of the regulariser. The paper tries 0.1, 0.01 and 0.001.
    """

    def client(context: c.ClientContext) -> c.ClientUpdate:
        def init(broadcast: c.Params, client_state: c.PyTree, key: c.Key) -> Local:
            start = Start(broadcast, client_state["gradient"])
            return init_local(optimizer, broadcast, client_state["model"], start)

        def away(local: Local) -> c.Params:
            return jax.tree.map(lambda x, y: alpha * (x - y), local.shared, local.start.received)

        def step(local: Local, batch: c.Batch, key: c.Key) -> tuple[Local, c.Metrics]:
            regular = jax.tree.map(jnp.subtract, away(local), local.start.gradient)
            return train(optimizer, context, local, batch, key, add_to_gradient(regular))

        def final(local: Local) -> tuple[c.Params, c.PyTree]:
            gradient = jax.tree.map(jnp.subtract, local.start.gradient, away(local))
            return local.shared, {"model": local.private, "gradient": gradient}

        return c.ClientUpdate(init, step, final)

    def update(state: Server, average: c.Params, context: c.RoundContext) -> Server:
        share = context.participants / context.total_clients
        moved = jax.tree.map(lambda s, x, y: s + share * (y - x), state.moved, state.model, average)
        new = Server(jax.tree.map(jnp.add, average, moved), moved)
        return tree.where(context.participants > 0, new, state)

    server = c.ServerUpdate(
        init=lambda shared: Server(shared, jax.tree.map(jnp.zeros_like, shared)),
        update=update,
        broadcast=lambda state: state.model,
    )
    return c.Algorithm(
        "feddyn",
        head_roles(head),
        client,
        mean(),
        server,
        init_client_state=lambda shared, private: {
            "model": private,
            "gradient": jax.tree.map(jnp.zeros_like, shared),
        },
        model=with_client_state,
        weights="uniform",
        incompatible={
            c.Feature.ASYNCHRONY: "FedDyn's server sums up the changes of the clients of every"
            " round, which must have started from the same leaves.",
            c.Feature.NEW_FACTORS: "FedDyn sums up the changes of A and B over rounds. Use 'fedavg'"
            " or 'fedprox'.",
        },
    )
