"""FedNova (Wang et al. 2020): averages of normalised directions, for clients of unequal work.

If clients make unequal numbers of steps, FedAvg minimises a wrong objective: a client with more
steps counts for more. FedNova divides the change of a client by the total weight of the gradients
in this change.

    server:  broadcast θ                           the client's private leaves v stay on the client
    client:  (θ_k, v_k) ← (θ, v_k);  τ_k local steps on F_k;   d_k ← (θ_k - θ) / ‖a_k‖₁
    server:  θ ← θ + τ_eff Σ p_k d_k,    τ_eff = Σ p_k ‖a_k‖₁,    p_k ∝ n_k over the cohort

θ_k - θ = -η Σ_i a_{k,i} g_{k,i} with the gradients g of the client's steps. For SGD all a are 1 and
``‖a_k‖₁ = τ_k``. With momentum ρ, whose buffer starts at 0 in every round, a gradient moves the
client in later steps too, and (the paper's Section 4)

    ‖a_k‖₁ = (τ_k - ρ (1 - ρ^τ_k) / (1 - ρ)) / (1 - ρ)

``‖a_k‖₁`` is measured, not computed from options. For each leaf of the client, the same optimizer
also moves a number whose gradient is always 1. The distance that this number has moved, in units of
its first step, is the sum of a. This holds for momentum, Nesterov's momentum and schedules.
Optimizers that are not linear in the gradient have no a; the measure is then the distance that a
constant gradient moves the client. For Adam that is the number of its steps.

The paper does not fix τ_eff. This choice is that of the authors' code; with it FedNova equals
FedAvg if all clients make the same number of steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.aggregators import mean
from fedjax_peft.aggregators.fields import by_field
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.common import Local, init_local, replace_server, train
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


class Gauge(NamedTuple):
    """Numbers that measure the weight of a client's gradients."""

    numbers: c.Params
    """One for each leaf; their gradient is 1."""
    optimizer: c.PyTree
    first: Array
    """The first steps of the shared leaves' numbers, ``[leaves]``."""
    length: Array
    """``‖a_k‖₁`` so far, in units of ``first``, ``[leaves]``."""


class State(NamedTuple):
    """A client during its local steps."""

    local: Local
    received: c.Params
    gauge: Gauge


@checked
def fednova(
    optimizer: c.Optimizer,
    *,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """Normalised averaging: clients with more local steps do not count for more (FedNova).

    Args:
      optimizer: the clients' optimizer: SGD, with or without momentum or a schedule. Others work
        too, but are not in the paper.
      weights: p_k, the weights of clients: by ``size`` or all the same (``uniform``).

    Raises:
      InputError: a kept optimizer.
    """

    def client(context: c.ClientContext) -> c.ClientUpdate:
        def init(broadcast: c.Params, private: c.Params, key: c.Key) -> State:
            local = init_local(optimizer, broadcast, private)
            return State(local, broadcast, _start(optimizer, broadcast, private))

        def step(state: State, batch: c.Batch, key: c.Key) -> tuple[State, c.Metrics]:
            local, metrics = train(optimizer, context, state.local, batch, key)
            gauge = _measure(optimizer, state.gauge, state.received, batch["step"] == 0)
            return State(local, state.received, gauge), metrics

        def final(state: State) -> tuple[c.PyTree, c.Params]:
            length = state.gauge.length
            # A leaf that the optimizer does not move has direction 0.
            by = jnp.where(length == 0, 1.0, length)
            direction = {
                n: (state.local.shared[n] - start) / by[i]
                for i, (n, start) in enumerate(sorted(state.received.items()))
            }
            return {"direction": direction, "work": {"length": length}}, state.local.private

        return c.ClientUpdate(init, step, final)

    def update_norm(upload: c.PyTree, template: c.PyTree, fixed: c.Params) -> Array:
        # A direction is the change per step: multiplied by the client's ‖a_k‖₁ it is θ_k - θ.
        lengths, direction = upload["work"]["length"], upload["direction"]
        moved = {n: lengths[i] * x for i, (n, x) in enumerate(sorted(direction.items()))}
        return tree.distance(moved, template["direction"])

    server = replace_server()._replace(
        update=lambda state, new, context: _moved(state, new),
        template=lambda state: {
            "direction": jax.tree.map(jnp.zeros_like, state),
            "work": {"length": jnp.zeros(len(state))},
        },
        update_norm=update_norm,
    )
    return c.Algorithm(
        "fednova",
        head_roles(head),
        client,
        by_field(direction=mean(error=False), work=mean(error=False)),
        server,
        weights=weights,
        traffic=c.Traffic(change_field="direction"),
        incompatible={
            c.Feature.ASYNCHRONY: "FedNova's uploads are directions and numbers of steps, which the"
            " server combines over one round.",
            c.Feature.KEPT_OPTIMIZER: "FedNova divides a client's change by the weight of the"
            " gradients of this round. With momentum of earlier rounds, the change also contains"
            " their gradients. Use 'fedavg'.",
        },
        local_model=lambda broadcast, upload, private: {**_moved(broadcast, upload), **private},
    )


def _moved(shared: c.Params, upload: c.PyTree) -> c.Params:
    """Returns the leaves at the end of a direction: ``θ + ‖a‖₁ d``."""
    length, direction = upload["work"]["length"], upload["direction"]
    return {n: x + length[i] * direction[n] for i, (n, x) in enumerate(sorted(shared.items()))}


def _start(optimizer: c.Optimizer, shared: c.Params, private: c.Params) -> Gauge:
    # As many axes as its leaf has: an optimizer may treat vectors and matrices differently.
    numbers = {n: jnp.zeros((1,) * x.ndim) for n, x in {**shared, **private}.items()}
    nothing = jnp.zeros(len(shared))
    return Gauge(numbers, optimizer.init(numbers), nothing, nothing)


def _measure(optimizer: c.Optimizer, gauge: Gauge, shared: c.Params, begins: Array) -> Gauge:
    """Returns the gauge after a step."""
    ones = jax.tree.map(jnp.ones_like, gauge.numbers)
    steps, state = optimizer.update(ones, gauge.optimizer, gauge.numbers)
    made = jnp.stack([jnp.reshape(steps[n], ()) for n in sorted(shared)])
    first = jnp.where(begins, made, gauge.first)
    # A schedule may begin with 0, for all clients: any unit other than 0 is right.
    length = gauge.length + made / jnp.where(first == 0, 1.0, first)
    return Gauge(optax.apply_updates(gauge.numbers, steps), state, first, length)
