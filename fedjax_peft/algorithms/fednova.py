"""FedNova (Wang et al. 2020): averages of normalised directions, for clients of unequal work.

FedAvg with clients that make unequal numbers of steps minimises another objective than it should:
who makes more steps counts for more. FedNova divides what a client has moved by the weight of its
gradients in it.

    server:  broadcast θ                                    the client's own leaves v stay with it
    client:  (θ_k, v_k) ← (θ, v_k);  τ_k local steps on F_k;   d_k ← (θ_k - θ) / ‖a_k‖₁
    server:  θ ← θ + τ_eff Σ p_k d_k,    τ_eff = Σ p_k ‖a_k‖₁,    p_k ∝ n_k over the cohort

θ_k - θ = -η Σ_i a_{k,i} g_{k,i} with the gradients g of the client's steps. For SGD all a are 1 and
``‖a_k‖₁ = τ_k``; with momentum ρ, whose buffer starts at 0 in every round, a gradient goes on
moving the client and (the paper's Section 4)

    ‖a_k‖₁ = (τ_k - ρ (1 - ρ^τ_k) / (1 - ρ)) / (1 - ρ)

The paper leaves τ_eff open; this choice, that of its authors' code, makes FedNova equal FedAvg
where all clients make the same number of steps. Other optimizers (Adam) have no such a; with
``momentum = 0`` the direction is the client's mean step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_peft.aggregators import mean
from fedjax_peft.aggregators.fields import by_field
from fedjax_peft.algorithms.checks import fraction
from fedjax_peft.algorithms.common import HeadPolicy, Local, Weights, begin, roles, train
from fedjax_peft.typing import (
    Algorithm,
    Batch,
    ClientUpdate,
    Key,
    Metrics,
    Params,
    Problem,
    PyTree,
    ServerUpdate,
    Tally,
)

__all__ = ["fednova"]


class State(NamedTuple):
    """A client during its local steps."""

    local: Local
    received: Params
    steps: jax.Array


def fednova(
    optimizer: optax.GradientTransformation,
    *,
    momentum: float = 0.0,
    head: HeadPolicy = "shared",
    weights: Weights = "size",
) -> Algorithm:
    """Normalised averaging: clients with more local steps do not count for more (FedNova).

    Args:
      optimizer: the clients' optimizer.
      momentum: the optimizer's own, if it is SGD with momentum (not Nesterov's).
      head: what becomes of the classification head.
      weights: p_k.

    Raises:
      InputError: a momentum that is not from 0 to below 1.
    """
    fraction(momentum=momentum)

    def client(problem: Problem) -> ClientUpdate:
        def init(broadcast: Params, private: Params, key: Key) -> State:
            del key
            local = begin(optimizer, broadcast, private)
            return State(local, broadcast, jnp.zeros((), jnp.int32))

        def step(state: State, batch: Batch, key: Key) -> tuple[State, Metrics]:
            local, metrics = train(optimizer, problem, state.local, batch, key)
            return state._replace(local=local, steps=state.steps + 1), metrics

        def final(state: State) -> tuple[PyTree, Params]:
            steps = jnp.maximum(state.steps, 1).astype(jnp.float32)
            length = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
            direction = jax.tree.map(
                lambda end, start: (end - start) / length, state.local.shared, state.received
            )
            return {"direction": direction, "work": {"length": length}}, state.local.private

        return ClientUpdate(init, step, final)

    def update(state: Params, new: PyTree, tally: Tally) -> Params:
        del tally
        effective = new["work"]["length"]
        return jax.tree.map(lambda x, d: x + effective * d, state, new["direction"])

    server = ServerUpdate(
        init=lambda shared: shared,
        update=update,
        broadcast=lambda state: state,
        like=lambda state: {
            "direction": jax.tree.map(jnp.zeros_like, state),
            "work": {"length": jnp.zeros(())},
        },
    )
    return Algorithm(
        "fednova",
        roles(head),
        client,
        by_field(direction=mean(error=False), work=mean(error=False)),
        server,
        weights=weights,
    )
