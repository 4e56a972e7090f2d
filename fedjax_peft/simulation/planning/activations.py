"""The arrays that a local step holds at once, from its jaxpr.

For a CPU they are those of the algorithm's own step over time
(:mod:`fedjax_peft.simulation.planning.liveness`). For accelerators they are those that one gradient
of the plain loss keeps, by rules that were compared with their compilers, and what the algorithm's
step needs more than this gradient over time.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from fedjax_peft.contracts import Algorithm, Params, Platform, Task
from fedjax_peft.models.base import Model
from fedjax_peft.numerics import tree
from fedjax_peft.simulation.planning.liveness import CALLS, FUSED, is_shared, needed_memory
from fedjax_peft.simulation.planning.local_step import local_step, traced_live
from fedjax_peft.simulation.planning.storage import Storage, plain_nbytes, storage_on


class Activations(NamedTuple):
    """Bytes of one lane's step that depend on its examples."""

    residuals: int
    """What the forward pass keeps for the backward pass; for a CPU, what the step holds at once."""
    recomputed: int
    """With ``remat``: what one block that is computed again keeps meanwhile."""
    working: int
    """Room for the layer at work: its largest array with this array's gradient. Without the array,
    if it is among the arrays of :attr:`recomputed` and the compiler shares it. For a CPU, one turn
    of the loop at work, such as a chunk of the loss, or what kernels outside of loops need."""
    largest: tuple[int, ...]
    """The shape of this array, such as ``[positions, vocabulary]`` for logits."""
    kernels: int = 0
    """Dequantised kernels that exist at once, those of all layers that read one array, such as
    query, key and value. All lanes share them, so :attr:`total` is without them."""
    moved: int = 0
    """Bytes of the arrays that are written once and read once at least, without padding."""
    of_algorithm: int = 0
    """What the algorithm's step holds beside the arrays of one gradient: other passes, gradients of
    single examples. Of a CPU's compiler :attr:`residuals` have it in them."""

    @property
    def total(self) -> int:
        """The bytes of one lane."""
        return self.residuals + self.recomputed + self.working + self.of_algorithm


def activations(
    model: Model,
    algorithm: Algorithm,
    task: Task,
    batch: Mapping[str, Any],
    *,
    platform: Platform = Platform(),
) -> Activations:
    """Returns the activations of one lane's step, from shapes alone.

    Args:
      model: arrays or shapes; its frozen leaves as a run holds them.
      algorithm: whose step is taken, with a mechanism of privacy in it if the run has one.
      platform: whose compiler stores the arrays.
    """
    own = local_step(model, algorithm, task, batch)
    count = len(model.frozen)
    needed = needed_memory(own.program, platform, lambda i: i >= count)
    if not storage_on(platform).fuses:
        kernels = 0  # without an array that lanes may share there are none, and nothing to trace
        if "custom_vmap_call" in _operations(own.program):
            kernels = one_gradient(model, task, batch, platform).kernels
        return Activations(
            residuals=max(needed.peak - needed.room - own.results, 0),
            recomputed=0,
            working=needed.room,
            largest=tuple(getattr(needed.largest, "shape", ())),
            kernels=kernels,
            moved=needed.written,
        )
    plain = one_gradient(model, task, batch, platform)
    alone = needed_memory(plain_gradient(model, task, batch), platform, lambda i: i >= count)
    more = max(needed.peak - own.results - alone.peak, 0)
    moved = plain.moved * needed.written // max(alone.written, 1)
    return plain._replace(of_algorithm=more, moved=moved)


def _operations(jaxpr: Any) -> set[str]:
    """Returns the names of a program's operations, also of those inside others."""
    found = {equation.primitive.name for equation in jaxpr.eqns}
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for part in value if isinstance(value, tuple) else (value,):
                inner = getattr(part, "jaxpr", part)
                found |= _operations(inner) if hasattr(inner, "eqns") else set()
    return found


def plain_gradient(model: Model, task: Task, batch: Mapping[str, Any]) -> Any:
    """Returns the program of the gradient of the plain loss."""

    def loss(frozen: Params, trainable: Params, batch: Any, key: Any) -> jax.Array:
        return task.loss(model.apply(frozen, trainable, batch, key, True), batch)[0]

    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = tree.shapes((model.frozen, model.trainable, dict(batch), key))
    return traced_live(jax.grad(loss, 1), *shapes)


def one_gradient(
    model: Model, task: Task, batch: Mapping[str, Any], platform: Platform
) -> Activations:
    """Returns the activations of one gradient of the plain loss, as an accelerator stores them."""
    storage = storage_on(platform)

    def loss(frozen: Params, trainable: Params, batch: Any, key: Any) -> jax.Array:
        return task.loss(model.apply(frozen, trainable, batch, key, True), batch)[0]

    def residuals(frozen: Params, trainable: Params, batch: Any, key: Any) -> Any:
        return jax.vjp(lambda trainable: loss(frozen, trainable, batch, key), trainable)

    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = tree.shapes((model.frozen, model.trainable, dict(batch), key))

    def run(function: Any) -> tuple[list[_Array], _Trace]:
        traced = jax.make_jaxpr(function)(*shapes).jaxpr
        inputs = [_Array(v.aval) for v in traced.invars]
        for x in inputs[len(model.frozen) :]:
            x.depends = True
        trace = _Trace(storage, [], [], {})
        return _run(traced, inputs, trace), trace

    _, forward = run(loss)  # rematerialised blocks are visible in the forward pass alone
    results, trace = run(residuals)
    made = _used(results, trace.made)
    kept = _residuals(results, made, storage)
    blocks = [_residuals_of_block(*block, storage) for block in forward.blocks]
    again = max((x for x, _ in blocks), key=lambda kept: _total(kept, storage), default=[])
    largest = _largest(made, storage)
    shared = any(_are_alike(largest, x) for x in again)
    kernels = [trace.kernels, forward.kernels, *(x.kernels for _, x in blocks)]
    return Activations(
        _total(kept, storage),
        _total(again, storage),
        (1 if shared else 2) * storage.nbytes(largest.aval),
        tuple(largest.aval.shape),
        max((sum(sizes) for waiting in kernels for sizes in waiting.values()), default=0),
        sum(plain_nbytes(x.aval) for x in [*kept, *again]),
    )


def _total(arrays: Sequence["_Array"], storage: Storage) -> int:
    """Returns the bytes of arrays together."""
    return sum(storage.nbytes(x.aval) for x in arrays)


def _largest(made: Sequence["_Array"], storage: Storage) -> "_Array":
    """Returns the largest array at work."""
    # What a loop makes is kept, and what one of its turns makes is at work.
    at_work = _without_widened([x for x in _with_loops(made) if not x.inside])
    nothing = _Array(jax.core.ShapedArray((), jnp.int8))
    return max(at_work, key=lambda x: storage.nbytes(x.aval), default=nothing)


def _without_widened(arrays: Sequence["_Array"]) -> list["_Array"]:
    """Returns the arrays without those that exist in registers only.

    They are made by widening an array, as a step between operations on the narrower type.
    """
    widened: set[int] = set()
    for x in arrays:
        sizes = [y.aval.dtype.itemsize for y in x.inputs]
        size = x.aval.dtype.itemsize
        wider = x.name == "convert_element_type" and size > min(sizes, default=size)
        stays = x.name in FUSED and sizes and size >= max(sizes)
        if wider or (stays and {id(y) for y in x.inputs} <= widened):
            widened.add(id(x))
    return [x for x in arrays if id(x) not in widened]


def _are_alike(x: "_Array", y: "_Array") -> bool:
    """Returns whether two arrays of different traces have one shape and one dtype."""
    return (x.aval.shape, x.aval.dtype) == (y.aval.shape, y.aval.dtype)


def _residuals_of_block(
    body: Any, depends: tuple[bool, ...], storage: Storage
) -> tuple[list["_Array"], "_Trace"]:
    """Returns the arrays that the backward pass of one rematerialised block keeps meanwhile."""
    inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.invars]
    moves = [
        i
        for i, (x, moved) in enumerate(zip(inputs, depends, strict=True))
        if moved and jnp.issubdtype(x.dtype, jnp.floating)
    ]

    def residuals(*values: jax.Array) -> Any:
        def run(*chosen: jax.Array) -> Any:
            given = list(values)
            for i, x in zip(moves, chosen, strict=True):
                given[i] = x
            return jax.core.eval_jaxpr(body, (), *given)

        return jax.vjp(run, *(values[i] for i in moves))

    traced = jax.make_jaxpr(residuals)(*inputs).jaxpr
    arrays = [_Array(v.aval) for v in traced.invars]
    for x, moved in zip(arrays, depends, strict=True):
        x.depends = moved
    trace = _Trace(storage, [], [], {})
    results = _run(traced, arrays, trace)
    return _residuals(results, trace.made, storage), trace


_VIEWS = frozenset(["convert_element_type", "copy", "reshape", "squeeze", "transpose"])

_REMAT = frozenset(["checkpoint", "remat", "remat2"])

_CALLS = CALLS - _REMAT
"""Operations that contain others."""

_LOOPS = {"scan": "jaxpr", "while": "body_jaxpr"}
"""Loops -> the parameter that holds their body. One turn's arrays exist at a time."""


class _Array:
    """An array of a traced program."""

    def __init__(self, aval: Any, name: str = "", inputs: Sequence["_Array"] = ()):
        self.aval, self.name = aval, name
        self.inputs: list[_Array] = [x for x in inputs if x.depends]
        self.depends: bool = bool(self.inputs)
        """Whether it depends on the examples or on trained leaves, so that every lane has one."""

        self.waits: _Array | None = next((x.waits for x in inputs if x.waits is not None), None)
        """The array of a lane that must be there before this one, which all lanes share."""

        self.stored = False
        """Whether an operation needs it in memory."""

        self.inside: list[_Array] = []
        """The arrays that exist during one turn of the loop that makes this array."""

    def store(self) -> None:
        """Notes that a matrix product needs this array, or the one that it is a view of."""
        self.stored = True
        if self.name in _VIEWS:
            for x in self.inputs:
                x.store()


class _Trace(NamedTuple):
    """What was found in a program."""

    storage: Storage
    """How its compiler stores arrays."""
    made: list[_Array]
    """The arrays that depend, in order."""
    blocks: list[tuple[Any, tuple[bool, ...]]]
    """Rematerialised functions, and which of their inputs depend."""
    kernels: dict[_Array, list[int]]
    """The array that kernels wait for -> their bytes."""


def _run(jaxpr: Any, inputs: Sequence[_Array], trace: _Trace) -> list[_Array]:
    """Returns the results of a traced program, and notes in ``trace`` what it makes.

    Inner functions count as if they were written out, and loops as their results.
    """
    known: dict[Any, _Array] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(v: Any) -> _Array:
        if isinstance(v, Literal) or v not in known:  # a constant
            return _Array(v.aval)
        return known[v]

    for equation in jaxpr.eqns:
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        given = [read(v) for v in equation.invars]
        if equation.primitive.name in _CALLS and inner is not None:
            outputs = _run(getattr(inner, "jaxpr", inner), given, trace)
        else:
            outputs = _apply(equation, inner, given, trace)
            trace.made.extend(x for x in outputs if x.depends)
        known |= dict(zip(equation.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _apply(equation: Any, inner: Any, given: Sequence[_Array], trace: _Trace) -> list[_Array]:
    """Returns the results of one operation."""
    name = equation.primitive.name
    outputs = [_Array(v.aval, name, given) for v in equation.outvars]
    if name in _LOOPS:
        _run_once(equation, given, outputs, trace)
    elif name in _REMAT:
        trace.blocks.append((inner, tuple(x.depends for x in given)))
    elif name == "custom_vmap_call" and is_shared(equation, [x.depends for x in given]):
        for x in outputs:
            x.waits, x.depends, x.inputs = next(y for y in given if y.depends), False, []
    elif name == "dot_general":
        for x in given:
            if trace.storage.product_inputs:
                x.store()
            if x.waits is not None and not x.depends:
                size = trace.storage.nbytes(x.aval)
                trace.kernels.setdefault(x.waits, []).append(size)
    return outputs


def _run_once(
    equation: Any, inputs: Sequence[_Array], outputs: Sequence[_Array], trace: _Trace
) -> None:
    """Adds the arrays of one turn of a loop to the loop's outputs."""
    body = equation.params[_LOOPS[equation.primitive.name]].jaxpr
    given = [_Array(v.aval) for v in body.invars]
    # The first inputs of a while loop belong to its condition; the body has the others.
    for x, outer in zip(given, inputs[len(inputs) - len(given) :], strict=True):
        x.depends = outer.depends
    turn = trace._replace(made=[])
    _run(body, given, turn)
    for x in outputs:
        x.inside = turn.made


def _with_loops(arrays: Sequence[_Array]) -> Iterator[_Array]:
    """Yields arrays, and those inside the loops that make them."""
    yield from arrays
    loops = {id(x.inside): x.inside for x in arrays}
    for inside in loops.values():
        yield from _with_loops(inside)


def _used(results: Sequence[_Array], made: Sequence[_Array]) -> list[_Array]:
    """Returns the arrays that the results need; a compiler drops the others."""
    found: set[int] = set()
    waiting = list(results)
    while waiting:
        x = waiting.pop()
        if id(x) not in found:
            found.add(id(x))
            waiting += x.inputs
    return [x for x in made if id(x) in found]


def _residuals(results: Sequence[_Array], made: Sequence[_Array], storage: Storage) -> list[_Array]:
    """Returns the stored arrays from which fused operations make the residuals.

    The residuals are decided one after the other. One is stored itself where it is smaller than
    what must be stored besides in order to make it again.
    """
    place = {id(x): i for i, x in enumerate(made)}
    asked, kept = set(map(id, results)), dict[int, _Array]()

    def is_repeated(x: _Array) -> bool:
        return bool(x.inputs) and not x.stored and x.name in FUSED

    def missing(result: _Array) -> dict[int, _Array]:
        """Returns the arrays to store besides those that are kept, so that there is a result."""
        waiting, found = [result], dict[int, _Array]()
        while waiting:
            x = waiting.pop()
            if id(x) not in found and id(x) not in kept:
                found[id(x)] = x
                waiting += x.inputs if is_repeated(x) else []
        least: dict[int, dict[int, _Array]] = {}
        # In the order of the program, so that the inputs are known; arguments come first.
        for x in sorted(found.values(), key=lambda x: place.get(id(x), -1)):
            least[id(x)] = {id(x): x}
            if is_repeated(x):
                parts = {k: y for z in x.inputs for k, y in least.get(id(z), {}).items()}
                if _total(list(parts.values()), storage) <= storage.nbytes(x.aval):
                    least[id(x)] = parts
        return least[id(result)] if id(result) in found else {}

    for x in made:
        if id(x) in asked:
            kept |= missing(x)
    return [x for k, x in kept.items() if k in place]
