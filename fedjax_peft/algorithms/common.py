"""Parts that algorithms share: the local objective, a local step, the plain server."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.numerics.lowrank import empty_products, matmul, pairs, scale
from fedjax_peft.numerics.measures.aggregation_error import error_metrics


def optimizer_step(
    optimizer: c.Optimizer, gradient: c.PyTree, params: c.PyTree, state: c.PyTree
) -> tuple[Any, c.PyTree]:
    """Returns (params, optimizer state) after one step of an optimizer.

    Args:
      gradient: from ``context.gradient``, with the terms that do not depend on examples.
    """
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


class Local(NamedTuple):
    """A client during its local steps."""

    shared: c.Params
    private: c.Params
    optimizer: c.PyTree
    start: c.PyTree = ()
    """What its steps or its upload need of the start of the round, such as the received leaves."""


def init_local(
    optimizer: c.Optimizer, shared: c.Params, private: c.Params, start: c.PyTree = ()
) -> Local:
    """Returns a client before its first step. Optimizer state starts afresh."""
    return Local(shared, private, optimizer.init({**shared, **private}), start)


def train(
    optimizer: c.Optimizer,
    context: c.ClientContext,
    local: Local,
    batch: c.Batch,
    key: c.Key,
    correct: Callable[[c.Params], c.Params] = lambda gradient: gradient,
    loss: c.LossFn | None = None,
) -> tuple[Local, c.Metrics]:
    """Returns a client after one step on its training loss, and the metrics of the step.

    Args:
      correct: gradient -> the gradient that the optimizer gets.
      loss: the loss of all leaves; by default ``context.objective``.
    """
    params = {**local.shared, **local.private}
    gradient, metrics = context.gradient(loss or context.objective, params, batch, key)
    params, state = optimizer_step(optimizer, correct(gradient), params, local.optimizer)
    shared = {name: params[name] for name in local.shared}
    private = {name: params[name] for name in local.private}
    return Local(shared, private, state, local.start), metrics


def send_shared(local: Local) -> tuple[c.Params, c.Params]:
    """Returns (upload, client state) of a client that sends its shared leaves: a ``final``."""
    return local.shared, local.private


def replace_server() -> c.ServerUpdate:
    """Returns the server that takes the aggregate as its new state."""
    return c.ServerUpdate(
        init=lambda shared: shared,
        update=lambda state, new, context: new,
        broadcast=lambda state: state,
    )


def add_to_gradient(extra: c.Params) -> Callable[[c.Params], c.Params]:
    """Returns a function of a gradient that adds ``extra`` to the leaves that ``extra`` names."""
    return lambda gradient: {n: g + extra[n] if n in extra else g for n, g in gradient.items()}


def proximal(
    strength: float | Array, params: c.Params, anchor: c.Params
) -> Callable[[c.Params], c.Params]:
    """Returns a function that adds the gradient of ``strength/2 ‖params - anchor‖²`` to a gradient.

    The gradients of leaves that ``anchor`` does not have stay the same.
    """

    def correct(gradient: c.Params) -> c.Params:
        pulls = {n: strength * (params[n] - anchor[n]) for n in gradient if n in anchor}
        return {n: g + pulls[n] if n in pulls else g for n, g in gradient.items()}

    return correct


def with_client_state(broadcast: c.Params, client_state: c.PyTree) -> c.Params:
    """Returns all leaves of a client that keeps its private leaves in the field ``model``."""
    return {**broadcast, **client_state["model"]}


def freeze_where(optimizer: c.Optimizer, moves: Callable[[str], Array | bool]) -> c.Optimizer:
    """Returns an optimizer for which some leaves, by name, have no gradient and no decay.

    These leaves stay bit-identical, whatever the optimizer does to a leaf without gradient. Neither
    they nor their gradients enter the optimizer's state.

    Args:
      moves: leaf name -> whether the optimizer moves it (a traced bool, so it may change).
    """

    def held(leaves: c.Params) -> c.Params:
        return {name: jnp.where(moves(name), x, 0) for name, x in leaves.items()}

    def update(gradient: c.Params, state: c.PyTree, params: c.Params | None = None) -> tuple:
        known = None if params is None else held(params)
        updates, state = optimizer.update(held(gradient), state, known)
        return held(updates), state

    return c.Optimizer(optimizer.init, update)


def loss_where(context: c.ClientContext, moves: Callable[[str], Array | bool]) -> c.LossFn:
    """Returns the training loss without gradient by the leaves that rest.

    Private training then clips the gradients of the others alone.

    Args:
      moves: leaf name -> whether it is trained, as for :func:`freeze_where`.
    """

    def loss(params: c.Params, batch: c.Batch, key: c.Key) -> tuple[Array, c.Metrics]:
        trained = {n: jnp.where(moves(n), x, jax.lax.stop_gradient(x)) for n, x in params.items()}
        return context.objective(trained, batch, key)

    return loss


def tuned_by(
    client: Callable[[c.ClientContext], c.ClientUpdate], epochs: int, what: str
) -> dict[str, Any]:
    """Returns the fields of an algorithm whose ``tune_epochs`` train ``what`` at the end."""
    if not epochs:
        return {}
    reason = (
        f"The option tune_epochs trains {what} after the last round, which the guarantee of the"
        " rounds does not count. Set tune_epochs = 0."
    )
    incompatible = {c.Feature.EXAMPLE_PRIVACY: reason}
    return {"tuning": c.Tuning(client, epochs), "incompatible": incompatible}


def loss_beside(context: c.ClientContext, resting: c.Params) -> c.LossFn:
    """Returns the training loss of some leaves beside others that rest."""

    def loss(params: c.Params, batch: c.Batch, key: c.Key) -> tuple[Array, c.Metrics]:
        return context.objective({**resting, **params}, batch, key)

    return loss


def merge_into_frozen() -> c.ServerUpdate:
    """Returns the server that adds a part of the aggregate to the frozen weights.

    The aggregate is ``{"model": shared leaves, "fold": module path -> [in, out]}``: W + s·AB is the
    exact average once ``fold`` is added to W. If an aggregator drops a part of the average, this
    part is in ``lost``, in the form of ``fold``. The sum of ``fold`` over all rounds is float32. It
    is added to the kernels of the modules that LoRA wraps. These modules use the float32 sum even
    if they compute in a narrower dtype (:mod:`fedjax_peft.numerics.precision`).

    The aggregation error is what is lost, and rounding: it is measured on the kernels that clients
    compute with.
    """

    def kernel(path: str) -> str:
        return f"{path}.base.kernel"

    def start(shared: c.Params) -> c.PyTree:
        return {"model": shared, "fold": empty_products(shared)}

    def update(state: c.PyTree, new: c.PyTree, context: c.RoundContext) -> c.PyTree:
        return {"model": new["model"], "fold": jax.tree.map(jnp.add, state["fold"], new["fold"])}

    def measure(
        new: c.PyTree, before: c.Params, after: c.Params, fixed: c.Params
    ) -> dict[str, Array]:
        model, errors, exact = new["model"], {}, {}
        for path, (a, b) in pairs(model).items():
            folded, name = new["fold"][path], kernel(path)
            exact[path] = folded + scale(fixed, path) * matmul(model[a], model[b])
            errors[path] = after[name] - before[name] - folded
            if "lost" in new:
                exact[path] += new["lost"][path]
                errors[path] -= new["lost"][path]
        return error_metrics(errors, exact)

    return c.ServerUpdate(
        init=start,
        update=update,
        broadcast=lambda state: state["model"],
        frozen_delta=lambda state: {kernel(path): x for path, x in state["fold"].items()},
        measure=measure,
    )
