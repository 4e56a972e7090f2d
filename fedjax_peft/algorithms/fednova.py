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

``‖a_k‖₁`` is measured, not computed from options: beside the client's leaves the same optimizer
moves numbers whose gradient is always 1. How far such a number has come, in units of its first
step, is the sum of a, for momentum, Nesterov's momentum and schedules alike, each leaf by itself.
For optimizers that are not linear in the gradient there is no such a; the measure then says how far
a constant gradient moves the client. For Adam that is the number of its steps.

The paper leaves τ_eff open; this choice, that of its authors' code, makes FedNova equal FedAvg
where all clients make the same number of steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_peft import tree
from fedjax_peft.aggregators import mean
from fedjax_peft.aggregators.fields import by_field
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.common import Local, Weights, init_local, train
from fedjax_peft.roles import HeadPolicy, head_roles
from fedjax_peft.typing import (
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

__all__ = ["fednova"]


class Gauge(NamedTuple):
    """What measures the weight of a client's gradients."""

    numbers: Params
    """One for each leaf; their gradient is 1."""
    optimizer: PyTree
    first: jax.Array
    """The first steps of the shared leaves' numbers, ``[leaves]``."""
    length: jax.Array
    """``‖a_k‖₁`` so far, in units of ``first``, ``[leaves]``."""


class State(NamedTuple):
    """A client during its local steps."""

    local: Local
    received: Params
    gauge: Gauge


@checked
def fednova(
    optimizer: optax.GradientTransformation,
    *,
    head: HeadPolicy = "shared",
    weights: Weights = "size",
) -> Algorithm:
    """Normalised averaging: clients with more local steps do not count for more (FedNova).

    Args:
      optimizer: the clients' optimizer: SGD, with or without momentum or a schedule. Others work
        too, but are not in the paper.
      weights: p_k.
    """

    def client(context: ClientContext) -> ClientUpdate:
        def init(broadcast: Params, private: Params, key: Key) -> State:
            del key
            local = init_local(optimizer, broadcast, private)
            return State(local, broadcast, _start(optimizer, broadcast, private))

        def step(state: State, batch: Batch, key: Key) -> tuple[State, Metrics]:
            local, metrics = train(optimizer, context, state.local, batch, key)
            gauge = _measure(optimizer, state.gauge, state.received, batch["step"] == 0)
            return State(local, state.received, gauge), metrics

        def final(state: State) -> tuple[PyTree, Params]:
            length = state.gauge.length
            # Of a leaf that the optimizer does not move, the direction is 0.
            by = jnp.where(length == 0, 1.0, length)
            direction = {
                n: (state.local.shared[n] - start) / by[i]
                for i, (n, start) in enumerate(sorted(state.received.items()))
            }
            return {"direction": direction, "work": {"length": length}}, state.local.private

        return ClientUpdate(init, step, final)

    def update(state: Params, new: PyTree, context: RoundContext) -> Params:
        del context
        effective = new["work"]["length"]
        return {
            n: x + effective[i] * new["direction"][n]
            for i, (n, x) in enumerate(sorted(state.items()))
        }

    def update_norm(upload: PyTree, template: PyTree, fixed: Params) -> jax.Array:
        # A direction is per step: times the client's own work it is θ_k - θ.
        del fixed
        lengths, direction = upload["work"]["length"], upload["direction"]
        moved = {n: lengths[i] * x for i, (n, x) in enumerate(sorted(direction.items()))}
        return tree.distance(moved, template["direction"])

    server = ServerUpdate(
        init=lambda shared: shared,
        update=update,
        broadcast=lambda state: state,
        template=lambda state: {
            "direction": jax.tree.map(jnp.zeros_like, state),
            "work": {"length": jnp.zeros(len(state))},
        },
        update_norm=update_norm,
    )
    return Algorithm(
        "fednova",
        head_roles(head),
        client,
        by_field(direction=mean(error=False), work=mean(error=False)),
        server,
        weights=weights,
        change_field="direction",
    )


def _start(optimizer: optax.GradientTransformation, shared: Params, private: Params) -> Gauge:
    # With as many axes as the leaves: an optimizer may treat vectors and matrices differently.
    numbers = {n: jnp.zeros((1,) * x.ndim) for n, x in {**shared, **private}.items()}
    nothing = jnp.zeros(len(shared))
    return Gauge(numbers, optimizer.init(numbers), nothing, nothing)


def _measure(
    optimizer: optax.GradientTransformation, gauge: Gauge, shared: Params, begins: jax.Array
) -> Gauge:
    """Returns the gauge after a step."""
    ones = jax.tree.map(jnp.ones_like, gauge.numbers)
    steps, state = optimizer.update(ones, gauge.optimizer, gauge.numbers)
    made = jnp.stack([jnp.reshape(steps[n], ()) for n in sorted(shared)])
    first = jnp.where(begins, made, gauge.first)
    # A schedule may begin with 0, for all clients: any other unit does.
    length = gauge.length + made / jnp.where(first == 0, 1.0, first)
    return Gauge(optax.apply_updates(gauge.numbers, steps), state, first, length)
