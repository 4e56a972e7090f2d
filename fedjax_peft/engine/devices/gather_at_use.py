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

    Of stacked weights (``scan_layers``), each turn of the scan gathers its own rows.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(weights, *arguments)
    leaves = jax.tree.leaves((weights, *arguments))
    # Leaves of a dict come in the order of its sorted keys.
    late = [split(name) for name in sorted(weights)]
    late += [False] * (len(leaves) - len(late))
    results = _run(traced, leaves, late, gather)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _run(
    closed: Any, inputs: Sequence[Any], late: Sequence[bool], gather: Callable[[Array], Array]
) -> list[Any]:
    """Returns the outputs of a jaxpr, gathered; its inputs that are ``late`` are split weights."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(jaxpr.invars, inputs, strict=True))
    waiting = {v for v, is_late in zip(jaxpr.invars, late, strict=True) if is_late}

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    def waits(variable: Any) -> bool:
        return not isinstance(variable, Literal) and variable in waiting

    for equation in jaxpr.eqns:
        inputs = [read(v) for v in equation.invars]
        late = [waits(v) for v in equation.invars]
        given = [v for v in equation.invars if not isinstance(v, Literal)]
        if equation.primitive is jax.lax.scan_p and any(late):
            outputs = _scanned(equation, inputs, late, gather)
        elif any(late) and not all(map(waits, given)):
            outputs = _with_gathered(equation, inputs, late, gather)
        else:
            outputs = _evaluated(equation, inputs)
            if any(late):  # made of split weights alone, such as a cast: it is still split
                waiting |= set(equation.outvars)
        values |= dict(zip(equation.outvars, outputs, strict=True))
    return [gather(read(v)) if waits(v) else read(v) for v in jaxpr.outvars]


def _scanned(
    equation: Any, inputs: Sequence[Any], late: Sequence[bool], gather: Callable[[Array], Array]
) -> list[Any]:
    """Returns the outputs of a scan, each turn of which gathers its rows of stacked weights."""
    params, body = equation.params, equation.params["jaxpr"]
    # JAX's names for these numbers changed in 0.11. Rows have one axis more outside of the body.
    first = _same_axes(equation.invars, body.in_avals)
    carried = _same_axes(equation.outvars, body.out_avals)
    consts = first - carried

    def turn(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = _run(body, [*inputs[:consts], *carry, *rows], late, gather)
        return outputs[:carried], outputs[carried:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, rows = jax.lax.scan(turn, list(inputs[consts:first]), list(inputs[first:]), **options)
    return [*carry, *rows]


def _same_axes(variables: Sequence[Any], inner: Sequence[Any]) -> int:
    """Returns how many variables of a scan have as many axes as inside of its body."""
    return sum(v.aval.ndim == x.ndim for v, x in zip(variables, inner, strict=True))


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
