"""SCAFFOLD (Karimireddy et al. 2020, Algorithm 1, option II): control variates against drift.

The server has a control variate c, every client its own c_k; all are 0 at first. c estimates the
gradient of all clients, c_k that of client k. Their difference is the drift of local steps.

    server:  broadcast θ, c                        the client's private leaves v stay on the client
    client:  (θ_k, v_k) ← (θ, v_k);  K local steps  θ_k ← θ_k - η (∇F_k(θ_k) + c - c_k)
             c_k⁺ ← c_k - c + (θ - θ_k) / (K η);  upload θ_k and c_k⁺ - c_k;  c_k ← c_k⁺
    server:  θ ← θ + η_g (mean of θ_k - θ);   c ← c + |S|/N · mean of (c_k⁺ - c_k)

S is the cohort of the round, N the number of clients that have examples (a client without any
never takes part); K is each client's own number of steps. For SGD with step size η, c_k⁺ is the
mean of the gradients of the client's local steps. The theory covers this case. For
other optimizers (Adam, momentum, weight decay, a schedule) the correction is added to the gradient
that they get, and c_k⁺ is computed by the same formula, so it is a scaled estimate at best. Only
shared leaves have a control variate: private ones do not drift.

The paper weights clients equally. Both uploads are averaged with ``weights``. With weights by size,
c estimates the gradient of the size-weighted objective, provided that |S|/N is the cohort's share
of all examples.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.aggregators import mean
from fedjax_peft.aggregators.fields import by_field
from fedjax_peft.algorithms.checks import checked, with_factor
from fedjax_peft.algorithms.common import Local, add_to_gradient, init_local, train
from fedjax_peft.algorithms.probe import sgd_rate
from fedjax_peft.contracts.arguments import Positive
from fedjax_peft.numerics.roles import HeadPolicy, assign_roles, head_roles
from fedjax_peft.support.errors import InputError


class Start(NamedTuple):
    """What a client had at the start of the round."""

    received: c.Params
    everyone: c.Params
    """The server's control variate."""
    own: c.Params
    """The client's control variate."""


class State(NamedTuple):
    """A client during its local steps."""

    local: Local
    steps: Array


@checked
def scaffold(
    optimizer: c.Optimizer,
    *,
    learning_rate: Positive,
    server_learning_rate: Positive = 1.0,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "uniform",
    server_schedule: c.RateSchedule | None = None,
) -> c.Algorithm:
    """Control variates correct the drift of clients' local steps (SCAFFOLD).

    Before a run the optimizer is tried on a few gradients. SGD with another step size is refused.
    Any other optimizer (momentum, a schedule, clipping, weight decay, Adam) causes a warning.

    Args:
      optimizer: the clients' optimizer, ``sgd(learning_rate)``.
      learning_rate: the optimizer's learning rate, which cannot be read from an optax optimizer. It
        follows a schedule of the optimizer over rounds. In a config it is by default that of
        ``[optimizer]``, if this is plain SGD.
      server_learning_rate: η_g, the server's step towards the aggregate; 1 takes the aggregate.
      aggregator: how models combine; by default their mean. Control variates are averaged, but a
        robust aggregator combines them too.
      server_schedule: factor of η_g by round; by default 1 in every round.

    Raises:
      InputError: a kept optimizer; on use, a learning rate that is not the optimizer's.
    """
    rules = head_roles(head)

    def check(kinds: Mapping[str, str], clients: int) -> None:
        names = assign_roles(kinds, rules)
        _check_steps(optimizer, learning_rate, [*names["shared"], *names["private"]])

    control = aggregator if aggregator is not None and aggregator.robust else mean(error=False)
    algorithm = c.Algorithm(
        "scaffold",
        rules,
        lambda context: _client(optimizer, learning_rate, context),
        by_field(model=aggregator or mean(), control=control),
        _server(server_learning_rate, server_schedule),
        init_client_state=lambda shared, private: {"model": private, "control": _zeros(shared)},
        model=lambda broadcast, client_state: {**broadcast["model"], **client_state["model"]},
        weights=weights,
        check=check,
        traffic=c.Traffic(change_field="model"),
        incompatible={
            c.Feature.ASYNCHRONY: "SCAFFOLD's control variates of clients and server belong to one"
            " round.",
            c.Feature.NEW_FACTORS: "SCAFFOLD's control variates are gradients of A and B of earlier"
            " rounds, and its server goes part of the way between two pairs of factors. Leave the"
            " aggregator out to average A and B, or use 'fedavg' or 'fedprox'.",
            c.Feature.KEPT_OPTIMIZER: "SCAFFOLD's control variates are means of the gradients of"
            " one round. An optimizer that remembers earlier rounds would count their gradients"
            " twice. Use 'feddyn'.",
        },
    )
    return with_factor(algorithm, "server_learning_rate_factor", server_schedule)


def _client(
    optimizer: c.Optimizer, learning_rate: float, context: c.ClientContext
) -> c.ClientUpdate:
    def init(broadcast: c.PyTree, client_state: c.PyTree, key: c.Key) -> State:
        received, own = broadcast["model"], client_state["model"]
        start = Start(received, broadcast["control"], client_state["control"])
        local = init_local(optimizer, received, own, start)
        return State(local, jnp.zeros((), jnp.int32))

    def step(state: State, batch: c.Batch, key: c.Key) -> tuple[State, c.Metrics]:
        start = state.local.start
        drift = add_to_gradient(jax.tree.map(jnp.subtract, start.everyone, start.own))
        local, metrics = train(optimizer, context, state.local, batch, key, drift)
        return State(local, state.steps + 1), metrics

    def final(state: State) -> tuple[c.PyTree, c.PyTree]:
        way = jnp.float32(learning_rate) * jnp.maximum(state.steps, 1)

        def changed(start: Array, end: Array, everyone: Array) -> Array:
            # In a round with rate 0 (a schedule) nothing is learned about the gradient.
            return jnp.where(way > 0, (start - end) / jnp.where(way > 0, way, 1) - everyone, 0)

        local, start = state.local, state.local.start
        change = jax.tree.map(changed, start.received, local.shared, start.everyone)
        own = jax.tree.map(jnp.add, start.own, change)
        upload = {"model": local.shared, "control": change}
        return upload, {"model": local.private, "control": own}

    return c.ClientUpdate(init, step, final)


def _server(learning_rate: float, schedule: c.RateSchedule | None) -> c.ServerUpdate:
    def update(state: c.PyTree, new: c.PyTree, context: c.RoundContext) -> c.PyTree:
        share = context.participants / context.total_clients
        rate: Any = learning_rate
        if schedule is not None:
            rate = rate * schedule(context.round_index)
        return {
            "model": jax.tree.map(lambda x, y: x + rate * (y - x), state["model"], new["model"]),
            "control": jax.tree.map(lambda x, d: x + share * d, state["control"], new["control"]),
        }

    return c.ServerUpdate(
        init=lambda shared: {"model": shared, "control": _zeros(shared)},
        update=update,
        broadcast=lambda state: state,
        params=lambda state: state["model"],
        template=lambda state: {"model": state["model"], "control": _zeros(state["model"])},
    )


def _zeros(params: c.Params) -> c.Params:
    return jax.tree.map(jnp.zeros_like, params)


def _check_steps(optimizer: c.Optimizer, learning_rate: float, names: Sequence[str]) -> None:
    """Warns of an optimizer other than SGD; raises InputError for SGD with another step size."""
    rate = sgd_rate(optimizer, names)
    if rate is None:
        warnings.warn(
            f"SCAFFOLD's control variates are right for SGD with step size learning_rate ="
            f" {learning_rate}. This optimizer takes other steps, so they are estimates of"
            " another scale than the gradients that they are added to.",
            stacklevel=2,
        )
    elif rate and not math.isclose(rate, learning_rate, rel_tol=1e-3):
        raise InputError(
            f"The clients' optimizer is SGD with step size {rate:.6g}, but learning_rate ="
            f" {learning_rate!r} of scaffold: the control variates would be wrong by that factor."
            " Give both the same value."
        )
