"""An algorithm's own local step as a traced program, from shapes alone."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_peft.contracts import Algorithm, ClientContext, Params, Task
from fedjax_peft.models.base import Model
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.roles import assign_roles
from fedjax_peft.simulation.planning.liveness import live


class LocalStep(NamedTuple):
    """The step of one client, as the engine maps it over lanes."""

    program: Any
    """The jaxpr; its first arguments are the frozen leaves."""
    results: int
    """Bytes of the gradient and the new values, which :attr:`MemoryPlan.lane` counts."""


def traced_live(function: Callable[..., Any], *shapes: Any) -> Any:
    """Returns the jaxpr of a function, without the operations that its results do not need."""
    return live(jax.make_jaxpr(function)(*shapes).jaxpr)


def local_step(
    model: Model, algorithm: Algorithm, task: Task, batch: Mapping[str, Any]
) -> LocalStep:
    """Returns the step that ``algorithm`` takes on a batch, a mechanism of privacy included.

    Args:
      model: arrays or shapes, with a PEFT method.
      batch: columns of one client's batch, arrays or shapes.
    """
    names = assign_roles(model.kinds, algorithm.roles)
    shared, private, fixed = (
        tree.select(model.trainable, names[role]) for role in ("shared", "private", "fixed")
    )

    def client(frozen: Params, fixed: Params) -> Any:
        def apply(params: Params, batch: Any, key: Any, train: bool) -> Any:
            return model.apply(frozen, {**fixed, **params}, batch, key, train)

        salt = jnp.zeros(2, jnp.uint32)
        context = ClientContext(apply, task, fixed, jnp.int32(1), jnp.int32(0), salt=salt)
        return algorithm.client(context)

    def begin(frozen: Params, fixed: Params, shared: Params, private: Params, key: Any) -> Any:
        server, own = algorithm.server.init(shared), algorithm.init_client_state(shared, private)
        return client(frozen, fixed).init(algorithm.server.broadcast(server), own, key)

    def step(frozen: Params, fixed: Params, state: Any, batch: Any, key: Any) -> Any:
        return client(frozen, fixed).step(state, batch, key)

    key = jax.eval_shape(lambda: jax.random.key(0))
    frozen, fixed, shared, private = tree.shapes((model.frozen, fixed, shared, private))
    state = jax.eval_shape(begin, frozen, fixed, shared, private, key)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    rows = {**tree.shapes(dict(batch)), "step": number, "steps": number}
    program = traced_live(step, frozen, fixed, state, rows, key)
    return LocalStep(program, 2 * tree.nbytes((shared, private)))
