"""Pieces that algorithms share: the plain local objective, head policy, the plain server."""

from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_peft.typing import Batch, Key, Metrics, Params, Problem, Roles, ServerUpdate

__all__ = ["HeadPolicy", "objective", "replace", "roles"]

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


def roles(head: HeadPolicy, *, adapters: Literal["shared", "private"] = "shared") -> Roles:
    """Returns roles for a head policy with all adapters shared, or all private."""
    if head == adapters:  # one rule: a model may train adapters only, or a head only
        return Roles(**{head: ("^(adapter|head):",)})
    return Roles(**{adapters: ("^adapter:",), "fixed" if head == "frozen" else head: ("^head:",)})


def replace() -> ServerUpdate:
    """Returns the server that takes the aggregate as its new state."""
    return ServerUpdate(
        init=lambda shared: shared, update=lambda _, new: new, broadcast=lambda state: state
    )
