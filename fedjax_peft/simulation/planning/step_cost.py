"""The arithmetic and the memory traffic of a local step, from shapes alone.

The algorithm's own step is traced, and the operations of all matrix products and convolutions are
counted, those of blocks that are computed again included. The bytes are the least that a program of
these arrays moves::

    passes · frozen weights + lanes · (2 · activations + 2 · trained state)

A pass over a frozen weight is a forward pass, a backward pass, or the second forward pass of
``remat``. All lanes share a pass. An activation is written once and read once. Real programs move
several times as many bytes; :mod:`fedjax_peft.simulation.planning.compiled_step` counts theirs.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax.extend.core import jaxprs_in_params

from fedjax_peft.contracts import Algorithm, Task
from fedjax_peft.models.base import Model
from fedjax_peft.simulation.planning.activations import plain_gradient
from fedjax_peft.simulation.planning.local_step import local_step, traced_live
from fedjax_peft.simulation.planning.memory_plan import MemoryPlan

__all__ = ["StepCost", "count_flops", "step_cost", "step_flops", "traced_live"]


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


def step_cost(
    model: Model, algorithm: Algorithm, task: Task, batch: Mapping[str, Any], plan: MemoryPlan
) -> StepCost:
    """Returns the cost of a step of the algorithm.

    Args:
      model: arrays or shapes, with a PEFT method; its frozen leaves as a run holds them.
      algorithm: with a mechanism of privacy in it if the run has one.
      batch: columns of one client's batch, arrays or shapes.
      plan: the memory of the same model and batch.
    """
    traced = local_step(model, algorithm, task, batch).program
    weights = traced.invars[: len(model.frozen)]
    read = sum(v.aval.size * v.aval.dtype.itemsize * _passes(v, traced) for v in weights)
    return StepCost(count_flops(traced), read, 2 * (plan.activations.moved + plan.lane))


def step_flops(model: Model, task: Task, batch: Mapping[str, Any]) -> int:
    """Returns the operations of the products of one gradient of the plain loss."""
    return count_flops(plain_gradient(model, task, batch))


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


def _passes(variable: Any, jaxpr: Any) -> int:
    """Returns how often a program reads an array, where it does more than to look rows of it up."""
    total = 0
    for equation in jaxpr.eqns:
        places = [i for i, v in enumerate(equation.invars) if v is variable]
        if not places or equation.primitive.name == "gather":
            continue
        bodies = list(_inner(equation.params))
        if len(bodies) == 1 and len(bodies[0].invars) == len(equation.invars):
            total += sum(_passes(bodies[0].invars[i], bodies[0]) for i in places)
        else:
            total += 1
    return total
