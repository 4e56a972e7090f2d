"""The arithmetic and the memory traffic of a local step, from shapes alone.

The loss of one lane's batch and its gradient are traced, and the operations of all matrix products
and convolutions are counted, those of blocks that are computed again included. The bytes are the
least that a program of these arrays moves::

    passes · frozen weights + lanes · (2 · (activations + a recomputed block's) + 2 · trained state)

A pass over the frozen weights is the forward pass, the backward pass, or the second forward pass of
``remat``. All lanes share a pass. An activation is written once and read once. Real programs move
several times as many bytes; :mod:`fedjax_peft.simulation.planning.compiled_step` counts theirs.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal, jaxprs_in_params
from jax.interpreters import partial_eval

from fedjax_peft.contracts import Params, Task
from fedjax_peft.models.base import Model
from fedjax_peft.numerics import tree
from fedjax_peft.simulation.planning.memory_plan import MemoryPlan


class StepCost(NamedTuple):
    """What a step computes and moves at least."""

    flops: int
    """Operations of one lane's products; a multiplication and an addition are two."""
    frozen: int
    """Bytes of the frozen weights, times the passes over them."""
    lane: int
    """Bytes that one lane moves besides."""

    def nbytes(self, lanes: int) -> int:
        """Returns the bytes that a step of this number of lanes moves at least."""
        return self.frozen + lanes * self.lane


def step_cost(model: Model, task: Task, batch: Mapping[str, Any], plan: MemoryPlan) -> StepCost:
    """Returns the cost of a step.

    Args:
      model: arrays or shapes, with a PEFT method; its frozen leaves as a run holds them.
      batch: columns of one client's batch, arrays or shapes.
      plan: the memory of the same model and batch.
    """
    traced = _traced_step(model, task, batch)
    start = len(model.trainable)
    weights = traced.invars[start : start + len(model.frozen)]
    looked_up = {v for v in weights if not _is_computed_with(v, traced)}
    a = plan.activations
    passes = 3 if a.recomputed else 2
    read = sum(v.aval.size * v.aval.dtype.itemsize for v in weights if v not in looked_up)
    return StepCost(count_flops(traced), passes * read, 2 * (a.moved + plan.lane))


def step_flops(model: Model, task: Task, batch: Mapping[str, Any]) -> int:
    """Returns the operations of the products of a step; the arguments are those above."""
    return count_flops(_traced_step(model, task, batch))


def _traced_step(model: Model, task: Task, batch: Mapping[str, Any]) -> Any:
    def loss(trainable: Params, frozen: Params, batch: Any, key: Any) -> jax.Array:
        return task.loss(model.apply(frozen, trainable, batch, key, True), batch)[0]

    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = tree.shapes((model.trainable, model.frozen, dict(batch), key))
    return traced_live(jax.grad(loss), *shapes)


def traced_live(function: Callable[..., Any], *shapes: Any) -> Any:
    """Returns the jaxpr of a function, without the operations that its results do not need."""
    traced = jax.make_jaxpr(function)(*shapes).jaxpr
    return partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars), instantiate=True)[0]


def count_flops(jaxpr: Any) -> int:
    """Returns the operations of a traced program's products; the body of a loop counts each turn.

    Of a loop without a known number of turns one is counted, of branches the dearest.
    """
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inner = [count_flops(x) for x in _inner(params)]
        if name == "cond":
            total += max(inner, default=0)
        else:
            total += params["length"] * sum(inner) if name == "scan" else sum(inner)
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            depth = math.prod(shape[i] for i in contracted)
            total += 2 * depth * equation.outvars[0].aval.size
        elif name == "conv_general_dilated":
            kernel, out = equation.invars[1].aval.shape, equation.outvars[0].aval
            features = kernel[params["dimension_numbers"].rhs_spec[0]]
            total += 2 * out.size * math.prod(kernel) // features
    return int(total)


def _inner(params: Mapping[str, Any]) -> Iterator[Any]:
    for inner in jaxprs_in_params(dict(params)):
        yield getattr(inner, "jaxpr", inner)


def _is_computed_with(variable: Any, jaxpr: Any) -> bool:
    """Returns whether a program does more with an array than to look rows of it up."""
    for equation in jaxpr.eqns:
        places = [i for i, v in enumerate(equation.invars) if v is variable]
        if not places or equation.primitive.name == "gather":
            continue
        bodies = list(_inner(equation.params))
        if len(bodies) != 1 or len(bodies[0].invars) != len(equation.invars):
            return True
        if any(_is_computed_with(bodies[0].invars[i], bodies[0]) for i in places):
            return True
    return any(v is variable for v in jaxpr.outvars if not isinstance(v, Literal))
