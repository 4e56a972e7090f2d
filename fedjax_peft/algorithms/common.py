"""What algorithms share: the plain local objective, a step, head policy, the plain server."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_peft.typing import Batch, Key, Metrics, Params, Problem, PyTree, Roles, ServerUpdate

__all__ = ["HeadPolicy", "Weights", "descend", "objective", "replace", "roles"]

Weights = Literal["size", "uniform"]
"""Of clients in the aggregate: by their numbers of examples, or all the same."""

HeadPolicy = Literal["shared", "private", "frozen"]
"""``shared``: trained and averaged. ``private``: trained, never sent. ``frozen``: not trained."""


def objective(
    problem: Problem, params: Params, batch: Batch, key: Key
) -> tuple[jax.Array, Metrics]:
    """Returns the mean training loss of a batch and the task's metrics, for ``value_and_grad``."""
    outputs = problem.apply(params, batch, key, True)
    total, count = problem.task.loss(outputs, batch)
    metrics = jax.lax.stop_gradient(problem.task.metrics(outputs, batch))
    return total / jnp.maximum(count, 1.0), metrics


def descend(
    optimizer: optax.GradientTransformation,
    loss: Callable[[Params], tuple[jax.Array, Metrics]],
    params: Params,
    state: PyTree,
    correct: Callable[[Params], Params] = lambda gradient: gradient,
) -> tuple[Params, PyTree, Metrics]:
    """Returns (params, optimizer state, metrics) after one step of an optimizer.

    Args:
      optimizer: whose step.
      loss: params -> (loss, metrics).
      params: what is trained.
      state: the optimizer's.
      correct: gradient -> the gradient that the optimizer gets.
    """
    gradient, metrics = jax.grad(loss, has_aux=True)(params)
    updates, state = optimizer.update(correct(gradient), state, params)
    return optax.apply_updates(params, updates), state, metrics


def roles(head: HeadPolicy, *, adapters: Literal["shared", "private"] = "shared") -> Roles:
    """Returns roles for a head policy with all adapters shared, or all private."""
    if head == adapters:  # one rule: a model may train adapters only, or a head only
        return Roles(**{head: ("^(adapter|head):",)})
    return Roles(**{adapters: ("^adapter:",), "fixed" if head == "frozen" else head: ("^head:",)})


def replace() -> ServerUpdate:
    """Returns the server that takes the aggregate as its new state."""
    return ServerUpdate(
        init=lambda shared: shared,
        update=lambda state, new, tally: new,
        broadcast=lambda state: state,
    )
