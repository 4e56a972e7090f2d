"""FedOpt (Reddi et al. 2021, Algorithms 1 and 2): an optimizer at the server.

    server:  broadcast θ                                    the client's own leaves v stay with it
    client:  (θ_k, v_k) ← (θ, v_k);  for each local step an optimizer step on F_k
    server:  Δ ← (aggregate of θ_k over the cohort) - θ;   θ ← server optimizer's step on -Δ

The server optimizers, with its learning rate η and m, v that stay from round to round:

    FedAvgM     m ← β m + Δ                                                 θ ← θ + η m
    FedAdagrad  m ← β₁ m + (1 - β₁) Δ,  v ← v + Δ²                          θ ← θ + η m / (√v + τ)
    FedAdam     m as above,             v ← β₂ v + (1 - β₂) Δ²              θ as above
    FedYogi     m as above,             v ← v - (1 - β₂) Δ² sign(v - Δ²)    θ as above

FedAvgM is from Hsu et al. 2019, where η = 1; it is optax's sgd. The other three have no bias
correction, and τ is outside of the root; optax's adam and yogi correct the bias, and its adagrad
has τ inside, so that these are written out here. β₁ = 0.9 (0 for Adagrad), β₂ = 0.99 and τ = 0.001
are the settings that the paper is quoted with. Its box asks for a first v of at least τ², its
authors' experiments begin with 0, and so does ``start``; m begins with 0 in both.

Adaptive steps are for leaves that stay what they are from round to round. An aggregator that
factorises LoRA's products anew (FRA, FlexLoRA) gives the factors another basis in every round, for
which m and v mean nothing: average the factors here.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_peft import tree
from fedjax_peft.algorithms.checks import at_least, fraction, positive
from fedjax_peft.algorithms.common import HeadPolicy, Weights, roles
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.typing import Aggregator, Algorithm, Params, PyTree, ServerUpdate, Tally

__all__ = ["fedadagrad", "fedadam", "fedavgm", "fedopt", "fedyogi"]


class State(NamedTuple):
    """The server."""

    model: Params
    optimizer: PyTree


def fedopt(
    optimizer: optax.GradientTransformation,
    *,
    server: optax.GradientTransformation,
    aggregator: Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: Weights = "size",
) -> Algorithm:
    """FedAvg with any optax optimizer at the server (FedOpt).

    Args:
      optimizer: the clients' optimizer.
      server: the server's, such as ``optax.sgd(1.0)`` (FedAvg) or ``optax.adam(1e-2)``. Its
        gradient is the received model minus the aggregate.
      aggregator: how uploads combine; by default their mean.
      head: what becomes of the classification head.
      weights: of clients in the aggregate.
    """

    def update(state: State, aggregate: Params, tally: Tally) -> State:
        gradient = jax.tree.map(jnp.subtract, state.model, aggregate)
        steps, memory = server.update(gradient, state.optimizer, state.model)
        new = State(optax.apply_updates(state.model, steps), memory)
        # Momentum would carry on where nobody was heard.
        return tree.where(tally.taken > 0, new, state)

    return averaging("fedopt", optimizer, roles(head), aggregator)._replace(
        server=ServerUpdate(
            init=lambda shared: State(shared, server.init(shared)),
            update=update,
            broadcast=lambda state: state.model,
        ),
        weights=weights,
    )


def fedavgm(
    optimizer: optax.GradientTransformation,
    *,
    server_learning_rate: float = 1.0,
    momentum: float = 0.9,
    nesterov: bool = False,
    aggregator: Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: Weights = "size",
) -> Algorithm:
    """FedAvg with momentum at the server (FedAvgM).

    Args:
      optimizer: the clients' optimizer.
      server_learning_rate: η. In the long run the server goes η / (1 - β) times FedAvg's way.
      momentum: β; 0 with η = 1 is FedAvg.
      nesterov: Nesterov's momentum: the step is η (β m + Δ).
      aggregator: how uploads combine; by default their mean.
      head: what becomes of the classification head.
      weights: of clients in the aggregate.

    Raises:
      InputError: an option out of its range.
    """
    positive(server_learning_rate=server_learning_rate)
    fraction(momentum=momentum)
    server = optax.sgd(server_learning_rate, momentum=momentum, nesterov=nesterov)
    algorithm = fedopt(optimizer, server=server, aggregator=aggregator, head=head, weights=weights)
    return algorithm._replace(name="fedavgm")


def fedadam(
    optimizer: optax.GradientTransformation,
    *,
    server_learning_rate: float = 0.01,
    b1: float = 0.9,
    b2: float = 0.99,
    tau: float = 1e-3,
    start: float = 0.0,
    aggregator: Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: Weights = "size",
) -> Algorithm:
    """FedAvg with Adam at the server (FedAdam).

    Args:
      optimizer: the clients' optimizer.
      server_learning_rate: η, to be tuned together with the clients'.
      b1: β₁, of the mean change.
      b2: β₂, of the mean squared change.
      tau: τ; the smaller, the more adaptive.
      start: the first v.
      aggregator: how uploads combine; by default their mean.
      head: what becomes of the classification head.
      weights: of clients in the aggregate.

    Raises:
      InputError: an option out of its range.
    """
    fraction(b2=b2)

    def second(v: jax.Array, square: jax.Array) -> jax.Array:
        return b2 * v + (1 - b2) * square

    server = _adaptive(second, server_learning_rate, b1, tau, start)
    algorithm = fedopt(optimizer, server=server, aggregator=aggregator, head=head, weights=weights)
    return algorithm._replace(name="fedadam")


def fedyogi(
    optimizer: optax.GradientTransformation,
    *,
    server_learning_rate: float = 0.01,
    b1: float = 0.9,
    b2: float = 0.99,
    tau: float = 1e-3,
    start: float = 0.0,
    aggregator: Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: Weights = "size",
) -> Algorithm:
    """FedAvg with Yogi at the server, Adam with a slower v (FedYogi).

    Args:
      optimizer: the clients' optimizer.
      server_learning_rate: η, to be tuned together with the clients'.
      b1: β₁, of the mean change.
      b2: β₂; v moves by at most (1 - β₂) Δ² in a round.
      tau: τ; the smaller, the more adaptive.
      start: the first v.
      aggregator: how uploads combine; by default their mean.
      head: what becomes of the classification head.
      weights: of clients in the aggregate.

    Raises:
      InputError: an option out of its range.
    """
    fraction(b2=b2)

    def second(v: jax.Array, square: jax.Array) -> jax.Array:
        return v - (1 - b2) * square * jnp.sign(v - square)

    server = _adaptive(second, server_learning_rate, b1, tau, start)
    algorithm = fedopt(optimizer, server=server, aggregator=aggregator, head=head, weights=weights)
    return algorithm._replace(name="fedyogi")


def fedadagrad(
    optimizer: optax.GradientTransformation,
    *,
    server_learning_rate: float = 0.01,
    b1: float = 0.0,
    tau: float = 1e-3,
    start: float = 0.0,
    aggregator: Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: Weights = "size",
) -> Algorithm:
    """FedAvg with Adagrad at the server (FedAdagrad).

    Args:
      optimizer: the clients' optimizer.
      server_learning_rate: η, to be tuned together with the clients'.
      b1: β₁, of the mean change.
      tau: τ; the smaller, the more adaptive.
      start: the first v.
      aggregator: how uploads combine; by default their mean.
      head: what becomes of the classification head.
      weights: of clients in the aggregate.

    Raises:
      InputError: an option out of its range.
    """
    server = _adaptive(jnp.add, server_learning_rate, b1, tau, start)
    algorithm = fedopt(optimizer, server=server, aggregator=aggregator, head=head, weights=weights)
    return algorithm._replace(name="fedadagrad")


class Moments(NamedTuple):
    """m and v of the adaptive optimizers."""

    first: Params
    second: Params


def _adaptive(
    second: Callable[[jax.Array, jax.Array], jax.Array],
    learning_rate: float,
    b1: float,
    tau: float,
    start: float,
) -> optax.GradientTransformation:
    """Returns the optimizer of Algorithm 2 whose v becomes ``second(v, Δ²)``."""
    positive(server_learning_rate=learning_rate, tau=tau)
    at_least(0, start=start)
    fraction(b1=b1)

    def init(params: Params) -> Moments:
        v = jax.tree.map(lambda x: jnp.full_like(x, start), params)
        return Moments(jax.tree.map(jnp.zeros_like, params), v)

    def update(gradient: Params, state: Moments, params: Params | None = None) -> tuple:
        del params
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.first, gradient)
        v = jax.tree.map(lambda v, g: second(v, g**2), state.second, gradient)
        steps = jax.tree.map(lambda m, v: -learning_rate * m / (jnp.sqrt(v) + tau), m, v)
        return steps, Moments(m, v)

    return optax.GradientTransformation(init, update)
