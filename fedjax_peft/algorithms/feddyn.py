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
import optax

from fedjax_peft.aggregators import mean
from fedjax_peft.algorithms.checks import checked, positive
from fedjax_peft.algorithms.common import (
    Local,
    add_to_gradient,
    init_local,
    train,
    with_client_state,
)
from fedjax_peft.contracts import (
    Algorithm,
    Batch,
    ClientContext,
    ClientUpdate,
    Key,
    Metrics,
    Params,
    PyTree,
    RoundContext,
    ServerUpdate,
)
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.roles import HeadPolicy, head_roles

__all__ = ["feddyn"]


class State(NamedTuple):
    """A client during its local steps."""

    local: Local
    received: Params
    gradient: Params
    """g_k."""


class Server(NamedTuple):
    """The server."""

    model: Params
    moved: Params
    """s = -h/α."""


@checked
def feddyn(
    optimizer: optax.GradientTransformation,
    *,
    alpha: float = 0.01,
    head: HeadPolicy = "shared",
    keep_optimizer: bool = False,
) -> Algorithm:
    """Dynamic regularisation makes clients' optima agree with the common one (FedDyn).

    Args:
      optimizer: the clients' optimizer.
      alpha: weight of the regulariser. The paper tries 0.1, 0.01 and 0.001.

    Raises:
      InputError: ``alpha`` is not positive.
    """
    positive(alpha=alpha)

    def client(context: ClientContext) -> ClientUpdate:
        def init(broadcast: Params, client_state: PyTree, key: Key) -> State:
            del key
            return State(
                init_local(optimizer, broadcast, client_state["model"]),
                broadcast,
                client_state["gradient"],
            )

        def away(state: State) -> Params:
            return jax.tree.map(lambda x, y: alpha * (x - y), state.local.shared, state.received)

        def step(state: State, batch: Batch, key: Key) -> tuple[State, Metrics]:
            regular = add_to_gradient(jax.tree.map(jnp.subtract, away(state), state.gradient))
            local, metrics = train(optimizer, context, state.local, batch, key, regular)
            return state._replace(local=local), metrics

        def final(state: State) -> tuple[Params, PyTree]:
            gradient = jax.tree.map(jnp.subtract, state.gradient, away(state))
            return state.local.shared, {"model": state.local.private, "gradient": gradient}

        return ClientUpdate(init, step, final)

    def update(state: Server, average: Params, context: RoundContext) -> Server:
        share = context.participants / context.total_clients
        moved = jax.tree.map(lambda s, x, y: s + share * (y - x), state.moved, state.model, average)
        new = Server(jax.tree.map(jnp.add, average, moved), moved)
        return tree.where(context.participants > 0, new, state)

    server = ServerUpdate(
        init=lambda shared: Server(shared, jax.tree.map(jnp.zeros_like, shared)),
        update=update,
        broadcast=lambda state: state.model,
    )
    return Algorithm(
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
        synchronous_only="FedDyn's server sums up the changes of the clients of every round, which"
        " must have started from the same leaves.",
        needs_fixed_basis="FedDyn sums up the changes of A and B over rounds. Use 'fedavg' or"
        " 'fedprox'.",
    )
