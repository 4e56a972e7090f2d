"""Clients that keep their optimizer's state from round to round, for any algorithm.

An optimizer state starts afresh in every round by default. A client that keeps it goes on with its
moments and its counts of steps (so Adam's bias correction counts on). The state belongs to the
client: it is saved with the client's other state, and a client that is not in a round, or whose
upload is not finite, still has the state of its last round.

How it works: :func:`marked` makes an optimizer that marks its states, so that :func:`keeping` finds
them in a client's local state, whatever the algorithm. The client state of an algorithm becomes
``{"model": the client state, "optimizer": the optimizer state}``; with several optimizer states,
such as those of the two models of Ditto, ``optimizer`` is a tuple of them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_peft import contracts as c
from fedjax_peft.support.errors import InputError

_BASIS = (
    "A kept optimizer of a client remembers gradients of A and B of earlier rounds. Set keep ="
    " false of the optimizer, or average A and B: leave the aggregator out, and space at 'factors'."
)


class _Marked(NamedTuple):
    """An optimizer state in a client's local state."""

    state: c.PyTree


def marked(optimizer: c.Optimizer) -> c.Optimizer:
    """Returns the optimizer with states that :func:`keeping` finds."""

    def update(gradient: c.PyTree, state: c.PyTree, params: c.PyTree = None, **extra: Any) -> tuple:
        steps, new = optimizer.update(gradient, state.state, params, **extra)
        return steps, _Marked(new)

    return c.Optimizer(lambda params: _Marked(optimizer.init(params)), update)


def keeping(algorithm: c.Algorithm) -> c.Algorithm:
    """Returns the algorithm with clients that keep their optimizers' states.

    Args:
      algorithm: made with an optimizer from :func:`marked`.

    Raises:
      InputError: the algorithm says that its clients cannot keep them, or has no marked states.
    """
    kept = "clients that keep their optimizer's state (keep = true of the optimizer)"
    c.check_compatible(algorithm, {c.Feature.KEPT_OPTIMIZER: kept})

    def init_client_state(shared: c.Params, private: c.Params) -> c.PyTree:
        own = algorithm.init_client_state(shared, private)
        broadcast = algorithm.server.broadcast(algorithm.server.init(shared))
        # Only the optimizers' states are used, which do not depend on the context.
        context = c.ClientContext(_no_model, None, {}, jnp.int32(1))  # type: ignore[arg-type]
        local = algorithm.client(context).init(broadcast, own, jax.random.key(0))
        return {"model": own, "optimizer": _states(algorithm, local)}

    def client(context: c.ClientContext) -> c.ClientUpdate:
        inner = algorithm.client(context)

        def init(broadcast: c.PyTree, client_state: c.PyTree, key: c.Key) -> c.PyTree:
            local = inner.init(broadcast, client_state["model"], key)
            return _with_states(local, client_state["optimizer"])

        def final(local: c.PyTree) -> tuple[c.PyTree, c.PyTree]:
            upload, own = inner.final(local)
            return upload, {"model": own, "optimizer": _states(algorithm, local)}

        return c.ClientUpdate(init, inner.step, final)

    tuning, local_model = algorithm.tuning, algorithm.local_model
    return algorithm._replace(
        client=client,
        init_client_state=init_client_state,
        model=lambda broadcast, client_state: algorithm.model(broadcast, client_state["model"]),
        local_model=local_model and (lambda b, u, own: local_model(b, u, own["model"])),
        tuning=None if tuning is None else _passing(tuning),
        incompatible={c.Feature.NEW_FACTORS: _BASIS, **algorithm.incompatible},
    )


def _passing(tuning: c.Tuning) -> c.Tuning:
    """Returns the tuning, with a new optimizer; the kept state passes through."""

    def client(context: c.ClientContext) -> c.ClientUpdate:
        inner = tuning.client(context)

        def init(broadcast: c.PyTree, client_state: c.PyTree, key: c.Key) -> c.PyTree:
            return inner.init(broadcast, client_state["model"], key), client_state["optimizer"]

        def step(state: c.PyTree, batch: Any, key: c.Key) -> tuple[c.PyTree, Any]:
            local, metrics = inner.step(state[0], batch, key)
            return (local, state[1]), metrics

        def final(state: c.PyTree) -> tuple[c.PyTree, c.PyTree]:
            upload, own = inner.final(state[0])
            return upload, {"model": own, "optimizer": state[1]}

        return c.ClientUpdate(init, step, final)

    return tuning._replace(client=client)


def _no_model(*arguments: Any) -> Any:
    raise InputError(
        "The clients of this algorithm cannot keep their optimizer's state: they apply the model"
        " before their first step, and the states must be known before the first round."
    )


def _is_marked(x: Any) -> bool:
    return isinstance(x, _Marked)


def _states(algorithm: c.Algorithm, local: c.PyTree) -> c.PyTree:
    """Returns the optimizer state in a client's local state; a tuple if there are several."""
    found = [x.state for x in jax.tree.leaves(local, is_leaf=_is_marked) if _is_marked(x)]
    if not found:
        raise InputError(f"The clients of {algorithm.name!r} have no optimizer state to keep.")
    return found[0] if len(found) == 1 else tuple(found)


def _with_states(local: c.PyTree, kept: c.PyTree) -> c.PyTree:
    """Returns a client's local state with the given optimizer states."""
    leaves, structure = jax.tree.flatten(local, is_leaf=_is_marked)
    single = sum(map(_is_marked, leaves)) == 1
    states = iter([kept] if single else kept)
    new = [_Marked(next(states)) if _is_marked(x) else x for x in leaves]
    return jax.tree.unflatten(structure, new)
