"""A forward pass that puts its split weights together one at a time, just before their use."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import Array
from jax.extend.core import Literal


def gather_at_use(
    function: Callable[..., Any],
    weights: Mapping[str, Array],
    arguments: tuple,
    gather: Callable[[Array], Array],
    split: Callable[[str], bool],
) -> Any:
    """Returns ``function(weights, *arguments)``; each split weight is gathered where it is used.

    The equations of the function are evaluated one by one. An equation that joins a split weight
    with other arrays gets the gathered weight. Two things keep all weights from being gathered
    at the same time:

    * The gathering waits for the other arrays of its equation (an optimization barrier).
    * The equation is rematerialised: the gradient gathers the weight again, when the gradient of
      the equation's result is there.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(weights, *arguments)
    values: dict[Any, Any] = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    leaves = jax.tree.leaves((weights, *arguments))
    values |= dict(zip(traced.jaxpr.invars, leaves, strict=True))
    # Leaves of a dict come in the order of its sorted keys.
    waiting = {v for v, n in zip(traced.jaxpr.invars, sorted(weights), strict=False) if split(n)}

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in traced.jaxpr.eqns:
        inputs = [read(v) for v in equation.invars]
        given = [v for v in equation.invars if not isinstance(v, Literal)]
        late = [not isinstance(v, Literal) and v in waiting for v in equation.invars]
        if any(late) and not all(v in waiting for v in given):
            outputs = _with_gathered(equation, inputs, late, gather)
        else:
            outputs = _evaluated(equation, inputs)
            if any(late):  # made of split weights alone, such as a cast: it is still split
                waiting |= set(equation.outvars)
        values |= dict(zip(equation.outvars, outputs, strict=True))
    results = [
        gather(read(v)) if not isinstance(v, Literal) and v in waiting else read(v)
        for v in traced.jaxpr.outvars
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _with_gathered(
    equation: Any, inputs: Sequence[Any], late: Sequence[bool], gather: Callable[[Array], Array]
) -> list[Any]:
    """Returns the outputs of an equation; its inputs that are ``late`` are gathered first."""

    @jax.checkpoint
    def run(*inputs: Any) -> list[Any]:
        # Only the weights are taken from the barrier. Its results all count as differentiated, and
        # constants of a function with its own derivative must not.
        ready = jax.lax.optimization_barrier(inputs)
        chosen = zip(inputs, ready, late, strict=True)
        return _evaluated(equation, [gather(r) if is_late else x for x, r, is_late in chosen])

    return run(*inputs)


def _evaluated(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    primitive = equation.primitive
    outputs = primitive.bind(*inputs, **primitive.get_bind_params(equation.params))
    return outputs if primitive.multiple_results else [outputs]
