"""The memory of a traced program while it runs: which arrays are stored, in which order, how long.

XLA joins operations to kernels. Only what a kernel writes is an array in memory, from the kernel
that writes it to the last one that reads it. The rules for what is written are short:

* Equal operations are computed once, and what no result needs is left out.
* An elementwise operation whose result one kernel reads is a part of that kernel. If several read
  it, it is written; an accelerator makes it again where its inputs take no more memory.
* Products, reductions, lookups and loops are kernels. A loop has the arrays of one turn, and
  nothing besides. Outside of it, a CPU needs room for two of the largest arrays that wait for the
  backward pass, because kernels read constants in their shape.

The compiler for CPUs orders kernels breadth first: each one runs as soon as its inputs are there,
so that two gradients of one step, or the passes of a contrastive loss, are in memory at once. Those
for accelerators are taken to keep the order of the program.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
from jax.interpreters import partial_eval

from fedjax_peft.contracts import Platform
from fedjax_peft.simulation.planning.storage import Storage, plain_nbytes, storage_on

# fmt: off
FUSED = frozenset(
    [
        "abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "concatenate",
        "convert_element_type", "copy", "div", "dynamic_slice", "eq", "erf", "erf_inv", "exp",
        "exp2", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic",
        "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pad", "pow", "rem", "reshape", "rev",
        "rsqrt", "select_n", "shift_left", "shift_right_logical", "sign", "slice", "sqrt", "square",
        "squeeze", "stop_gradient", "sub", "tanh", "transpose", "xor",
    ]
)
# fmt: on
"""Operations that become a part of the kernel that reads their result."""

CALLS = frozenset(
    [
        *("checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
        *("jit", "pjit", "remat", "remat2"),
    ]
)
"""Operations that stand for the program inside."""

BODIES = {"scan": ("jaxpr",), "while": ("body_jaxpr",), "cond": ("branches",)}
"""Loops and branches -> the parameters that hold their programs."""

_VIEWS = frozenset(["copy", "optimization_barrier", "reshape", "squeeze", "stop_gradient"])
_PRODUCTS = frozenset(["conv_general_dilated", "dot_general"])
_REDUCTIONS = frozenset(f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum"))


class Needed(NamedTuple):
    """The memory of a program, beside its arguments."""

    peak: int
    """The most bytes at once."""
    room: int
    """Of the peak, the bytes of the layer at work: one turn of a loop, or the inputs of kernels
    that the CPU's compiler writes besides."""
    largest: Any
    """The shape and dtype of the largest array at work. None: there are no arrays."""
    written: int
    """Bytes that its kernels write."""


class _Array:
    """An array of a program."""

    def __init__(self, aval: Any, maker: "_Operation | None" = None):
        self.aval, self.maker = aval, maker
        self.users: list[_Operation] = []
        self.depends: bool = maker is not None and any(x.depends for x in maker.inputs)
        """Whether each lane has its own."""


class _Operation:
    """An operation with its inputs and results."""

    def __init__(self, equation: Any, given: Sequence[_Array | None]):
        self.name, self.given = equation.primitive.name, given
        self.inputs = [x for x in given if x is not None]
        self.results = [_Array(v.aval, self) for v in equation.outvars]
        self.equation = equation
        self.is_view = self.name in _VIEWS
        self.joined = False
        """Whether it is a part of the kernels that read its result."""

        depends = [x is not None and x.depends for x in given]
        if self.name == "custom_vmap_call" and is_shared(equation, depends):
            for x in self.results:
                x.depends = False


def live(jaxpr: Any) -> Any:
    """Returns a program without the operations that its results do not need."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def needed_memory(
    jaxpr: Any, platform: Platform, depends: Callable[[int], bool] = lambda index: True
) -> Needed:
    """Returns the memory of a program on a platform; its arguments are not counted.

    Args:
      depends: the index of an argument -> whether each lane has its own. What does not depend on
        such arguments is the same in all lanes, and not counted.
    """
    graph = _Graph(platform)
    inputs = [_Array(v.aval) for v in jaxpr.invars]
    for i, x in enumerate(inputs):
        x.depends = depends(i)
    results = [x for x in graph.read(live(jaxpr), inputs) if x is not None]
    return graph.memory(results)


class _Graph:
    """The operations of a program, written out, each once."""

    def __init__(self, platform: Platform):
        self.platform, self.storage = platform, storage_on(platform)
        self.operations: list[_Operation] = []
        self._known: dict[Any, list[_Array]] = {}
        self._indices: dict[_Array, int] = {}

    def read(self, jaxpr: Any, inputs: Sequence[_Array | None]) -> list[_Array | None]:
        """Adds a program's operations; returns its results, None for constants."""
        known: dict[Any, _Array | None] = dict(zip(jaxpr.invars, inputs, strict=True))
        for equation in jaxpr.eqns:
            given = [None if isinstance(v, Literal) else known.get(v) for v in equation.invars]
            known |= dict(zip(equation.outvars, self._results(equation, given), strict=True))
        return [None if isinstance(v, Literal) else known.get(v) for v in jaxpr.outvars]

    def _results(self, equation: Any, given: list[_Array | None]) -> Sequence[_Array | None]:
        name, parameters = equation.primitive.name, equation.params
        if name == "platform_index":
            return [self._index(equation)]
        first = None if not given else given[0] if name != "clamp" else given[1]
        if first in self._indices and name in ("clamp", "convert_element_type"):
            return [first]
        if first in self._indices and name == "cond":
            branch = parameters["branches"][self._indices[first]]
            return self.read(branch.jaxpr, given[1:])
        inner = parameters.get("jaxpr", parameters.get("call_jaxpr"))
        if name in CALLS and inner is not None:
            return self.read(getattr(inner, "jaxpr", inner), given)
        return self._operation(equation, given)

    def _index(self, equation: Any) -> _Array:
        """Returns the number of the branch for the platform, which is known before the program."""
        names = ("cuda", "rocm") if self.platform.name == "gpu" else (self.platform.name,)
        branches = equation.params["platforms"]
        which = (i for i, x in enumerate(branches) if x is None or set(x) & set(names))
        index = _Array(equation.outvars[0].aval)
        self._indices[index] = next(which, 0)
        return index

    def _operation(self, equation: Any, given: list[_Array | None]) -> list[_Array]:
        key: Any = object()
        if equation.primitive.name not in BODIES:
            literals = [str(v.val) for v in equation.invars if isinstance(v, Literal)]
            shapes = tuple(str(v.aval) for v in equation.outvars)
            key = (equation.primitive.name, *map(id, given), *literals, shapes)
            key += (str(equation.params),)
        if key not in self._known:
            made = _Operation(equation, given)
            self.operations.append(made)
            self._known[key] = made.results
        return self._known[key]

    def memory(self, results: Sequence[_Array]) -> Needed:
        """Returns the memory of the program with these results."""
        operations = _asked(results, self.operations)
        for operation in operations:
            for x in operation.inputs:
                x.users.append(operation)
        _join(operations, set(results), self.storage)
        kernels = [x for x in operations if not (x.joined or x.is_view)]
        read = _Readings(kernels, results)
        order = kernels if self.storage.fuses else _breadth_first(kernels, read)
        return self._over_time(order, read)

    def _over_time(self, order: Sequence[_Operation], read: "_Readings") -> Needed:
        last = {x: i for i, kernel in enumerate(order) for x in read.by[kernel]}
        last |= dict.fromkeys(read.results, len(order))
        held = [x for kernel in order for x in kernel.results if x.depends]
        room = 0 if self.storage.fuses else 2 * self._waiting(held, order, read, last)
        at_work = max((x.aval for x in held), key=self.storage.nbytes, default=None)
        ending: dict[int, list[_Array]] = {}
        now, found, written = 0, Needed(0, 0, None, 0), 0
        for i, kernel in enumerate(order):
            inner = self._turn(kernel)
            for x in (x for x in kernel.results if x.depends):
                now, written = now + self.storage.nbytes(x.aval), written + plain_nbytes(x.aval)
                ending.setdefault(last.get(x, i), []).append(x)
            written += inner.written
            is_loop = kernel.name in BODIES
            most, largest = (inner.peak, inner.largest) if is_loop else (room, at_work)
            most = max(most, self._start(kernel))
            found = max(found, Needed(now + most, most, largest, 0), key=lambda x: x.peak)
            now -= sum(self.storage.nbytes(x.aval) for x in ending.pop(i, ()))
        return found._replace(written=written)

    def _start(self, kernel: _Operation) -> int:
        """Returns the bytes of the constant, such as zeros, that rows are added to.

        The compiler for CPUs makes it once, outside of the loop over steps, and copies it.
        """
        adds = kernel.name.startswith("scatter") and not self.storage.fuses
        if not adds or kernel.given[0] is None or kernel.given[0].depends:
            return 0
        return self.storage.nbytes(kernel.results[0].aval)

    def _waiting(
        self,
        held: Sequence[_Array],
        order: Sequence[_Operation],
        read: "_Readings",
        last: Mapping[_Array, int],
    ) -> int:
        """Returns the bytes of the largest array that is in memory while a product runs without it.

        The compiler joins a product with the elementwise operations after it. Constants and masks
        that they read are then arrays of their own, as large as what waits for the backward pass.
        """
        place = {kernel: i for i, kernel in enumerate(order)}
        products = [i for i, kernel in enumerate(order) if kernel.name in _PRODUCTS]

        def waits(x: _Array) -> bool:
            times = products[bisect_right(products, place[x.maker]) :]  # type: ignore[index]
            return any(i < last.get(x, 0) and x not in read.by[order[i]] for i in times)

        largest = sorted(held, key=lambda x: -self.storage.nbytes(x.aval))
        return next((self.storage.nbytes(x.aval) for x in largest if waits(x)), 0)

    def _turn(self, kernel: _Operation) -> Needed:
        """Returns the memory of one turn of a loop, with the bytes that all turns write."""
        parameters = kernel.equation.params
        bodies: list[Any] = []
        for name in BODIES.get(kernel.name, ()):
            body = parameters[name]
            bodies += body if isinstance(body, tuple) else [body]
        own = [x is not None and x.depends for x in kernel.given]
        found = []
        for body in bodies:  # the last inputs are those of the body
            first = len(own) - len(body.jaxpr.invars)
            found.append(needed_memory(body.jaxpr, self.platform, lambda i, n=first: own[n + i]))  # type: ignore[misc]
        turns = parameters["length"] if kernel.name == "scan" else 1
        most = max(found, key=lambda x: x.peak, default=Needed(0, 0, None, 0))
        return most._replace(written=turns * most.written)


def _asked(results: Sequence[_Array], operations: Sequence[_Operation]) -> list[_Operation]:
    """Returns the operations that the results need, in their order."""
    wanted, kept = set(results), list[_Operation]()
    for operation in reversed(operations):
        if wanted & set(operation.results):
            kept.append(operation)
            wanted.update(operation.inputs)
    return kept[::-1]


def _join(operations: Sequence[_Operation], results: set[_Array], storage: Storage) -> None:
    """Decides which operations are parts of the kernels that read their results."""
    constant: set[_Array] = set()
    sources: dict[_Array, set[_Array]] = {}
    for operation in operations:
        if all(x in constant for x in operation.inputs):
            constant.update(operation.results)

    def of(x: _Array) -> set[_Array]:
        return set() if x.maker is None else sources[x]

    for operation in operations if storage.fuses else ():
        for x in operation.results:
            sources[x] = {x}
        (x, *_), starts = operation.results, set[_Array]().union(*map(of, operation.inputs))
        size = sum(storage.nbytes(y.aval) for y in starts)
        if operation.is_view:
            sources[x] = starts
            continue
        small = operation.name in FUSED and size <= storage.nbytes(x.aval)
        if small and not _is_read_whole(x, results, storage):
            sources[x], operation.joined = starts, True
    readers: dict[_Operation, set[_Operation]] = {}
    for operation in reversed(operations):
        x = operation.results[0]
        found = {y for user in x.users for y in readers.get(user, {user})}
        if operation.is_view or operation.joined:
            readers[operation] = found
        elif operation.name in FUSED and x not in results:
            whole = _is_read_whole(x, results, storage)
            if x in constant or (not whole and len(found) <= 1):
                operation.joined, readers[operation] = True, found


def is_shared(equation: Any, depends: Sequence[bool]) -> bool:
    """Returns whether results have no axis of lanes, although an argument has one.

    Args:
      depends: which arguments have one.
    """
    if not any(depends):
        return False

    def call(*values: jax.Array) -> Any:
        return equation.primitive.bind(*values, **equation.params)

    axes = tuple(0 if x else None for x in depends)
    shapes = [v.aval for v in equation.invars]
    values = [
        jax.ShapeDtypeStruct((2, *x.shape) if moved else x.shape, x.dtype)
        for x, moved in zip(shapes, depends, strict=True)
    ]
    try:
        jax.eval_shape(jax.vmap(call, axes, None), *values)
    except ValueError:  # `out_axes` None is refused for results with the axis
        return False
    return True


def _is_read_whole(x: _Array, results: set[_Array], storage: Storage) -> bool:
    """Returns whether a kernel needs an array in memory, and cannot make it by itself."""

    def needs(user: _Operation) -> bool:
        if user.is_view:
            return _is_read_whole(user.results[0], results, storage)
        if user.name == "dot_general":
            return storage.product_inputs
        return user.name not in FUSED and user.name not in _REDUCTIONS

    return x in results or any(map(needs, x.users))


class _Readings:
    """The stored arrays that kernels read, through the operations that are parts of them."""

    def __init__(self, kernels: Iterable[_Operation], results: Iterable[_Array]):
        self._found: dict[_Array, frozenset[_Array]] = {}
        self.by = {kernel: self._of(kernel.inputs) for kernel in kernels}
        self.results = self._of(results)

    def _of(self, arrays: Iterable[_Array]) -> frozenset[_Array]:
        return frozenset().union(*map(self._stored, arrays))

    def _stored(self, x: _Array) -> frozenset[_Array]:
        if x not in self._found:
            maker = x.maker
            if maker is None:  # an argument
                self._found[x] = frozenset()
            elif maker.joined or maker.is_view:
                self._found[x] = self._of(maker.inputs)
            else:
                self._found[x] = frozenset([x])
        return self._found[x]


def _breadth_first(kernels: Sequence[_Operation], read: _Readings) -> list[_Operation]:
    """Returns the kernels in the order in which their inputs are there."""
    waits = {kernel: {x.maker for x in read.by[kernel]} for kernel in kernels}
    followers: dict[_Operation | None, list[_Operation]] = {}
    for kernel in kernels:
        for maker in waits[kernel]:
            followers.setdefault(maker, []).append(kernel)
    ready = deque(kernel for kernel in kernels if not waits[kernel])
    order = []
    while ready:
        kernel = ready.popleft()
        order.append(kernel)
        for follower in followers.get(kernel, ()):
            waits[follower].remove(kernel)
            if not waits[follower]:
                ready.append(follower)
    return order
