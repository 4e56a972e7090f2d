"""FedOpt (Reddi et al. 2021, Algorithms 1 and 2): an optimizer at the server.

    server:  broadcast θ                           the client's private leaves v stay on the client
    client:  (θ_k, v_k) ← (θ, v_k);  for each local step an optimizer step on F_k
    server:  Δ ← (aggregate of θ_k over the cohort) - θ;   θ ← server optimizer's step on -Δ

The server optimizers, with learning rate η; m and v are kept from round to round:

    FedAvgM     m ← β m + Δ                                                 θ ← θ + η m
    FedAdagrad  m ← β₁ m + (1 - β₁) Δ,  v ← v + Δ²                          θ ← θ + η m / (√v + τ)
    FedAdam     m as above,             v ← β₂ v + (1 - β₂) Δ²              θ as above
    FedYogi     m as above,             v ← v - (1 - β₂) Δ² sign(v - Δ²)    θ as above

FedAvgM is from Hsu et al. 2019, where η = 1; it is optax's sgd. The other three have no bias
correction, and τ is outside of the root. They are implemented here because optax's adam and yogi
correct the bias, and its adagrad has τ inside. β₁ = 0.9 (0 for Adagrad), β₂ = 0.99 and τ = 0.001
are the settings usually quoted from the paper. The paper's algorithm box requires a first v of at
least τ². The authors' experiments start with 0, and this is the default of ``start`` too; m starts
with 0 in both.

These steps are for leaves whose entries mean the same in every round. An aggregator that factors
LoRA's products anew (FRA, FlexLoRA) gives A and B another basis in every round, in which the
old m and v are meaningless, so it is refused. With ``space="product"`` the server optimizes the
products instead; other leaves (a head) are optimized as before:

    server:  P ← A B;   Δ ← Σ w_k A_k B_k - P;   P ← server optimizer's step on -Δ
             (A, B) ← rank-r factors of P, by the aggregator's SVD (FRA's by default)

With ``optax.sgd(1.0)`` this is FRA-LoRA. It is not in a paper: the FRA-LoRA paper only names server
optimizers as an outlook. P is without LoRA's scale s = α/r, so the step size and τ are in units of
A B. The server starts each step from the model that clients received: the truncated remainder is
not carried over. The step may raise the rank, so the SVD is dense. Optimizer states are dense too:
for 24 matrices of 768 x 768, FedAvgM keeps 57 MB and FedAdam 113 MB.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.aggregators import fra
from fedjax_peft.aggregators.products import PRODUCT, product_changes, with_products
from fedjax_peft.algorithms.checks import checked, with_factor
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.contracts.arguments import Fraction, NotNegative, Positive
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.lowrank import pairs, required_pairs
from fedjax_peft.numerics.roles import HeadPolicy, head_roles
from fedjax_peft.numerics.schedules import Scheduled, at_round, scheduled
from fedjax_peft.support.errors import InputError

Space = Literal["factors", "product"]
"""The server optimizer steps on LoRA's ``factors`` A and B, leaf by leaf, or on their ``product``
A·B, which is then factored anew."""


_BASIS = (
    "A server optimizer that steps on A and B one by one would mix these bases: their product would"
    " move even where no client has learned anything. Set space = 'product': the optimizer then"
    " steps on the product A·B, which this aggregator factors anew. Or leave the aggregator out to"
    " average A and B."
)


class State(NamedTuple):
    """The server."""

    model: c.Params
    optimizer: c.PyTree


class ProductState(NamedTuple):
    """The server that optimizes products."""

    model: c.Params
    """The factors and the other leaves."""
    optimizer: c.PyTree
    """The optimizer state of the products and the other leaves."""
    metrics: dict[str, Array]
    """Metrics of the last factorisation."""


@checked
def fedopt(
    optimizer: c.Optimizer,
    *,
    server: c.Optimizer,
    aggregator: c.Aggregator | None = None,
    space: Space = "factors",
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
    server_schedule: c.RateSchedule | None = None,
) -> c.Algorithm:
    """FedAvg with any optax optimizer at the server (FedOpt).

    Args:
      server: the server optimizer, such as ``optax.sgd(1.0)`` (FedAvg) or ``optax.adam(1e-2)``.
        Its gradient is the received model minus the aggregate. Its state is kept over rounds, so a
        schedule of optax counts rounds too.

    Raises:
      InputError: ``product`` with an aggregator that cannot factor; on use, ``product`` with a
        model without LoRA pairs, or ``factors`` with an aggregator that factors anew.
    """
    return _fedopt("fedopt", optimizer, server, aggregator, space, head, weights, server_schedule)


def _fedopt(
    name: str,
    optimizer: c.Optimizer,
    server: c.Optimizer,
    aggregator: c.Aggregator | None,
    space: Space,
    head: HeadPolicy,
    weights: c.Weights,
    server_schedule: c.RateSchedule | None,
) -> c.Algorithm:
    """Returns :func:`fedopt` under a name; the other arguments are its."""
    if server_schedule is not None:
        server = scheduled(server, server_schedule)
    combine, moves, incompatible = aggregator, _on_leaves(server), {c.Feature.NEW_FACTORS: _BASIS}
    if space == "product":
        base = aggregator or fra()
        if base.refactor is None:
            advice = (
                "Give the aggregator space = 'product' too."
                if base.robust
                else "Leave the aggregator out to use 'fra'."
            )
            raise InputError(
                f"space = 'product' needs an aggregator that can factor a product anew, such as"
                f" 'fra' or 'flexlora', not {base.name!r}. {advice}"
            )
        combine, moves, incompatible = product_changes(base), _on_products(server, base), {}
    algorithm = averaging(name, optimizer, head_roles(head), combine)
    algorithm = algorithm._replace(server=moves, weights=weights, incompatible=incompatible)
    factor = server.schedule if isinstance(server, Scheduled) else None
    return with_factor(algorithm, "server_learning_rate_factor", factor)


def _on_leaves(optimizer: c.Optimizer) -> c.ServerUpdate:
    """Returns the server that optimizes the shared leaves as they are."""

    def update(state: State, aggregate: c.Params, context: c.RoundContext) -> State:
        gradient = jax.tree.map(jnp.subtract, state.model, aggregate)
        now = at_round(optimizer, context.round_index)
        steps, memory = now.update(gradient, state.optimizer, state.model)
        new = State(optax.apply_updates(state.model, steps), memory)
        # Skip the server step when no upload was aggregated: momentum would move the model.
        return tree.where(context.participants > 0, new, state)

    return c.ServerUpdate(
        init=lambda shared: State(shared, optimizer.init(shared)),
        update=update,
        broadcast=lambda state: state.model,
    )


def _on_products(optimizer: c.Optimizer, aggregator: c.Aggregator) -> c.ServerUpdate:
    """Returns the server that optimizes LoRA's products, and the other leaves as they are."""

    def factored(point: c.Params, model: c.Params, scales: c.Params) -> c.Aggregated:
        assert aggregator.refactor is not None
        products = {path: point[path + PRODUCT] for path in pairs(model)}
        made = aggregator.refactor(products, model, scales)
        rest = {n: x for n, x in point.items() if n in model}
        return c.Aggregated({**rest, **made.update}, made.metrics)

    def init(shared: c.Params) -> ProductState:
        found = required_pairs(shared, aggregator.name)
        point = with_products(shared)
        ones = dict.fromkeys(found, jnp.ones(()))
        metrics = jax.eval_shape(factored, point, shared, ones).metrics
        nothing = {name: jnp.zeros(x.shape, x.dtype) for name, x in metrics.items()}
        return ProductState(shared, optimizer.init(point), nothing)

    def update(state: ProductState, new: c.PyTree, context: c.RoundContext) -> ProductState:
        point = with_products(state.model)
        gradient = jax.tree.map(jnp.negative, new["change"])
        now = at_round(optimizer, context.round_index)
        steps, memory = now.update(gradient, state.optimizer, point)
        made = factored(optax.apply_updates(point, steps), state.model, new["scale"])
        moved = ProductState(made.update, memory, made.metrics)
        return tree.where(context.participants > 0, moved, state)

    return c.ServerUpdate(
        init=init,
        update=update,
        broadcast=lambda state: state.model,
        metrics=lambda state: state.metrics,
    )


@checked
def fedavgm(
    optimizer: c.Optimizer,
    *,
    server_learning_rate: Positive = 1.0,
    momentum: Fraction = 0.9,
    nesterov: bool = False,
    aggregator: c.Aggregator | None = None,
    space: Space = "factors",
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
    server_schedule: c.RateSchedule | None = None,
) -> c.Algorithm:
    """FedAvg with momentum at the server (FedAvgM).

    Args:
      server_learning_rate: η. In the long run the server moves η / (1 - β) times FedAvg's distance.
      momentum: β; 0 with η = 1 is FedAvg.
      nesterov: Nesterov's momentum: the step is η (β m + Δ).
    """
    server = optax.sgd(server_learning_rate, momentum=momentum, nesterov=nesterov)
    return _fedopt("fedavgm", optimizer, server, aggregator, space, head, weights, server_schedule)


@checked
def fedadam(
    optimizer: c.Optimizer,
    *,
    server_learning_rate: Positive = 0.01,
    b1: Fraction = 0.9,
    b2: Fraction = 0.99,
    tau: Positive = 1e-3,
    start: NotNegative = 0.0,
    aggregator: c.Aggregator | None = None,
    space: Space = "factors",
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
    server_schedule: c.RateSchedule | None = None,
) -> c.Algorithm:
    """FedAvg with Adam at the server (FedAdam).

    Args:
      server_learning_rate: η, to be tuned together with the clients'.
      b1: β₁, the decay of the mean change.
      b2: β₂, the decay of the mean squared change.
      tau: τ; the smaller, the more adaptive.
      start: the first v.
    """

    def second(v: Array, square: Array) -> Array:
        return b2 * v + (1 - b2) * square

    server = _adaptive(second, server_learning_rate, b1, tau, start)
    return _fedopt("fedadam", optimizer, server, aggregator, space, head, weights, server_schedule)


@checked
def fedyogi(
    optimizer: c.Optimizer,
    *,
    server_learning_rate: Positive = 0.01,
    b1: Fraction = 0.9,
    b2: Fraction = 0.99,
    tau: Positive = 1e-3,
    start: NotNegative = 0.0,
    aggregator: c.Aggregator | None = None,
    space: Space = "factors",
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
    server_schedule: c.RateSchedule | None = None,
) -> c.Algorithm:
    """FedAvg with Yogi at the server, Adam with a slower v (FedYogi).

    Args:
      server_learning_rate: η, to be tuned together with the clients'.
      b1: β₁, the decay of the mean change.
      b2: β₂; v moves by at most (1 - β₂) Δ² in a round.
      tau: τ; the smaller, the more adaptive.
      start: the first v.
    """

    def second(v: Array, square: Array) -> Array:
        return v - (1 - b2) * square * jnp.sign(v - square)

    server = _adaptive(second, server_learning_rate, b1, tau, start)
    return _fedopt("fedyogi", optimizer, server, aggregator, space, head, weights, server_schedule)


@checked
def fedadagrad(
    optimizer: c.Optimizer,
    *,
    server_learning_rate: Positive = 0.01,
    b1: Fraction = 0.0,
    tau: Positive = 1e-3,
    start: NotNegative = 0.0,
    aggregator: c.Aggregator | None = None,
    space: Space = "factors",
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
    server_schedule: c.RateSchedule | None = None,
) -> c.Algorithm:
    """FedAvg with Adagrad at the server (FedAdagrad).

    Args:
      server_learning_rate: η, to be tuned together with the clients'.
      b1: β₁, the decay of the mean change.
      tau: τ; the smaller, the more adaptive.
      start: the first v.
    """
    server = _adaptive(jnp.add, server_learning_rate, b1, tau, start)
    return _fedopt(
        "fedadagrad", optimizer, server, aggregator, space, head, weights, server_schedule
    )


class Moments(NamedTuple):
    """m and v of the adaptive optimizers."""

    first: c.Params
    second: c.Params


def _adaptive(
    second: Callable[[Array, Array], Array],
    learning_rate: float,
    b1: float,
    tau: float,
    start: float,
) -> c.Optimizer:
    """Returns the optimizer of Algorithm 2 whose v becomes ``second(v, Δ²)``."""

    def init(params: c.Params) -> Moments:
        v = jax.tree.map(lambda x: jnp.full_like(x, start), params)
        return Moments(jax.tree.map(jnp.zeros_like, params), v)

    def update(gradient: c.Params, state: Moments, params: c.Params | None = None) -> tuple:
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.first, gradient)
        v = jax.tree.map(lambda v, g: second(v, g**2), state.second, gradient)
        steps = jax.tree.map(lambda m, v: -learning_rate * m / (jnp.sqrt(v) + tau), m, v)
        return steps, Moments(m, v)

    return c.Optimizer(init, update)
