"""Parts that algorithms share: the local objective, a local step, the plain server."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_peft.contracts import (
    Batch,
    ClientContext,
    Key,
    LossFn,
    Metrics,
    Outputs,
    Params,
    PyTree,
    RoundContext,
    ServerUpdate,
    Task,
)
from fedjax_peft.measures.aggregation_error import error_metrics
from fedjax_peft.numerics.lowrank import empty_products, matmul, pairs, scale

__all__ = [
    "Local",
    "Weights",
    "add_to_gradient",
    "freeze_where",
    "init_local",
    "loss_and_metrics",
    "merge_into_frozen",
    "objective",
    "optimizer_step",
    "proximal",
    "replace_server",
    "train",
    "with_client_state",
]

Weights = Literal["size", "uniform"]
"""The weights of clients in the aggregate: by their numbers of examples, or all the same."""


def objective(
    context: ClientContext, params: Params, batch: Batch, key: Key
) -> tuple[jax.Array, Metrics]:
    """Returns the mean training loss of a batch and the task's metrics.

    ``functools.partial(objective, context)`` is a loss for ``context.gradient``.
    """
    outputs = context.apply(params, batch, key, True)
    (total, count), metrics = loss_and_metrics(context.task, outputs, batch)
    return total / jnp.maximum(count, 1.0), jax.lax.stop_gradient(metrics)


def loss_and_metrics(
    task: Task, outputs: Outputs, batch: Batch
) -> tuple[tuple[jax.Array, jax.Array], Metrics]:
    """Returns ((sum of losses, count), metrics) of a task, by one computation if it has one."""
    together = getattr(task, "loss_and_metrics", None)
    if together is None:
        return task.loss(outputs, batch), task.metrics(outputs, batch)
    found: tuple[tuple[jax.Array, jax.Array], Metrics] = together(outputs, batch)
    return found


def optimizer_step(
    optimizer: optax.GradientTransformation, gradient: PyTree, params: PyTree, state: PyTree
) -> tuple[Any, PyTree]:
    """Returns (params, optimizer state) after one step of an optimizer.

    Args:
      optimizer: makes the step.
      gradient: from ``context.gradient``, with the terms that do not depend on examples.
      params: the trained leaves.
      state: the optimizer's state.
    """
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


class Local(NamedTuple):
    """A client during plain local training."""

    shared: Params
    private: Params
    optimizer: PyTree


def init_local(optimizer: optax.GradientTransformation, shared: Params, private: Params) -> Local:
    """Returns a client before its first step. Optimizer state starts afresh."""
    return Local(shared, private, optimizer.init({**shared, **private}))


def train(
    optimizer: optax.GradientTransformation,
    context: ClientContext,
    local: Local,
    batch: Batch,
    key: Key,
    correct: Callable[[Params], Params] = lambda gradient: gradient,
    loss: LossFn | None = None,
) -> tuple[Local, Metrics]:
    """Returns a client after one step on its training loss, and the metrics of the step.

    Args:
      optimizer: makes the step.
      context: the model and the task.
      local: the client.
      batch: the examples.
      key: the step's key.
      correct: gradient -> the gradient that the optimizer gets.
      loss: the loss of all leaves; by default :func:`objective`.
    """
    params = {**local.shared, **local.private}
    gradient, metrics = context.gradient(loss or partial(objective, context), params, batch, key)
    params, state = optimizer_step(optimizer, correct(gradient), params, local.optimizer)
    shared = {name: params[name] for name in local.shared}
    private = {name: params[name] for name in local.private}
    return Local(shared, private, state), metrics


def replace_server() -> ServerUpdate:
    """Returns the server that takes the aggregate as its new state."""
    return ServerUpdate(
        init=lambda shared: shared,
        update=lambda state, new, context: new,
        broadcast=lambda state: state,
    )


def add_to_gradient(extra: Params) -> Callable[[Params], Params]:
    """Returns a function of a gradient that adds ``extra`` to the leaves that ``extra`` names."""
    return lambda gradient: {n: g + extra[n] if n in extra else g for n, g in gradient.items()}


def proximal(
    strength: float | jax.Array, params: Params, anchor: Params
) -> Callable[[Params], Params]:
    """Returns a function that adds the gradient of ``strength/2 ‖params - anchor‖²`` to a gradient.

    The gradients of leaves that ``anchor`` does not have stay the same.
    """

    def correct(gradient: Params) -> Params:
        pulls = {n: strength * (params[n] - anchor[n]) for n in gradient if n in anchor}
        return {n: g + pulls[n] if n in pulls else g for n, g in gradient.items()}

    return correct


def with_client_state(broadcast: Params, client_state: PyTree) -> Params:
    """Returns all leaves of a client that keeps its private leaves in the field ``model``."""
    return {**broadcast, **client_state["model"]}


def freeze_where(
    optimizer: optax.GradientTransformation, moves: Callable[[str], jax.Array | bool]
) -> optax.GradientTransformation:
    """Returns an optimizer for which some leaves, by name, have no gradient and no decay.

    These leaves stay bit-identical, whatever the optimizer does to a leaf without gradient. Neither
    they nor their gradients enter the optimizer's state.

    Args:
      optimizer: an optimizer for a dict of leaves.
      moves: leaf name -> whether the optimizer moves it (a traced bool, so it may change).
    """

    def held(leaves: Params) -> Params:
        return {name: jnp.where(moves(name), x, 0) for name, x in leaves.items()}

    def update(gradient: Params, state: PyTree, params: Params | None = None) -> tuple:
        known = None if params is None else held(params)
        updates, state = optimizer.update(held(gradient), state, known)
        return held(updates), state

    return optax.GradientTransformation(optimizer.init, update)


def merge_into_frozen() -> ServerUpdate:
    """Returns the server that adds a part of the aggregate to the frozen weights.

    The aggregate is ``{"model": shared leaves, "fold": module path -> [in, out]}``: W + s·AB is the
    exact average once ``fold`` is added to W. The sum of ``fold`` over all rounds is float32. It
    is added to the kernels of the modules that LoRA wraps. These modules use the float32 sum even
    if they compute in a narrower dtype (:mod:`fedjax_peft.numerics.precision`).

    The algebra is exact, so the aggregation error is only rounding. It is measured on the kernels
    that clients compute with.
    """

    def kernel(path: str) -> str:
        return f"{path}.base.kernel"

    def start(shared: Params) -> PyTree:
        return {"model": shared, "fold": empty_products(shared)}

    def update(state: PyTree, new: PyTree, context: RoundContext) -> PyTree:
        del context
        return {"model": new["model"], "fold": jax.tree.map(jnp.add, state["fold"], new["fold"])}

    def measure(new: PyTree, before: Params, after: Params, fixed: Params) -> dict[str, jax.Array]:
        model, errors, exact = new["model"], {}, {}
        for path, (a, b) in pairs(model).items():
            folded, name = new["fold"][path], kernel(path)
            exact[path] = folded + scale(fixed, path) * matmul(model[a], model[b])
            errors[path] = after[name] - before[name] - folded
        return error_metrics(errors, exact)

    return ServerUpdate(
        init=start,
        update=update,
        broadcast=lambda state: state["model"],
        frozen_delta=lambda state: {kernel(path): x for path, x in state["fold"].items()},
        measure=measure,
    )
