"""Kernels and bytes of a compiled program, from XLA's text of it.

An instruction of the optimised program that computes something is a kernel. It reads its operands
and writes its result, all of them in the device's main memory; arrays in a TPU's scratch memory
(``S(1)``) are not counted. Of what a fusion reads by slices, or updates in place, the slices count.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple


class Traffic(NamedTuple):
    """What a part of a program does."""

    kernels: int = 0
    read: int = 0
    written: int = 0
    calls: Mapping[str, int] = MappingProxyType({})
    """Library kernels (``custom-call``) and collectives: name -> how many."""
    exchanged: Mapping[str, int] = MappingProxyType({})
    """Collectives: name -> bytes of their results."""

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def plus(self, other: "Traffic", times: int = 1) -> "Traffic":
        """Returns the sum of this and ``times`` another part."""
        calls, exchanged = Counter(self.calls), Counter(self.exchanged)
        for name in other.calls:
            calls[name] += times * other.calls[name]
        for name in other.exchanged:
            exchanged[name] += times * other.exchanged[name]
        return Traffic(
            self.kernels + times * other.kernels,
            self.read + times * other.read,
            self.written + times * other.written,
            dict(calls),
            dict(exchanged),
        )


class _Instruction(NamedTuple):
    name: str
    shape: str
    kind: str
    operands: list[str]
    rest: str


_Computation = dict[str, _Instruction]
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\(([^)]*)\)(.*)")
_ARRAY = re.compile(r"\b(?:pred|(?:f|bf|s|u|c)(\d+)\w*)\[([\d,]*)\](\{[^}]*\})?")
# fmt: off
_FREE = frozenset(
    [
        "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "iota",
        "partition-id", "replica-id", "opt-barrier", "add-dependency",
    ]
)
# fmt: on
_SLICES = ("dynamic-slice", "slice", "gather")
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")


def step_traffic(text: str) -> Traffic:
    """Returns what one turn of the loop over time steps does.

    That is the loop without a known number of turns, whose number a round gets at run time. The
    part that begins or ends a client's work is not in every turn and is not counted.
    """
    computations, entry = _read(text)
    steps = [
        _traffic(_called(x, "body"), computations, unknown=0)
        for computation in computations.values()
        for x in computation.values()
        if x.kind == "while" and _turns(x, computations) is None
    ]
    return max(steps, key=lambda x: x.kernels, default=_traffic(entry, computations))


def _read(text: str) -> tuple[dict[str, _Computation], str]:
    """Returns a program's computations by name, and the name of the one that is run."""
    computations: dict[str, _Computation] = {}
    name = entry = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            found = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
            name = found[2] if found else ""
            computations[name] = {}
            entry = name if found and found[1] else entry
        elif name and (found := _LINE.match(line)):
            root, own, shape, kind, operands, rest = found.groups()
            names = [x.strip().split(" ")[-1].lstrip("%") for x in operands.split(",")]
            made = _Instruction(own, shape, kind, names, rest)
            computations[name][own] = made
            if root:
                computations[name]["ROOT"] = made
    for computation in computations.values():  # the last instruction stands for both
        if "ROOT" in computation:
            computation.pop(computation["ROOT"].name)
    return computations, entry


def _traffic(name: str, computations: Mapping[str, _Computation], unknown: int = 1) -> Traffic:
    """Returns what a computation does, with the loops and branches in it.

    Args:
      unknown: turns of loops without a known number of turns.
    """
    total = Traffic()
    known = {x.name: x for x in computations.get(name, {}).values()}
    for x in known.values():
        if x.kind in _FREE or x.kind.endswith("-done"):
            continue
        if x.kind == "while":
            inside = _traffic(_called(x, "body"), computations, unknown)
            turns = _turns(x, computations)
            total = total.plus(inside, unknown if turns is None else turns)
        elif x.kind == "conditional":
            branches = [_traffic(b, computations, unknown) for b in _branches(x)]
            total = total.plus(min(branches, key=lambda b: b.nbytes, default=Traffic()))
        elif x.kind == "call":
            total = total.plus(_traffic(_called(x, "to_apply"), computations, unknown))
        else:
            total = total.plus(_kernel(x, known, computations))
    return total


def _kernel(
    x: _Instruction, known: Mapping[str, _Instruction], computations: Mapping[str, _Computation]
) -> Traffic:
    """Returns what one kernel does."""
    sizes = [_size(known[name].shape) if name in known else 0 for name in x.operands]
    written = _size(x.shape)
    if x.kind.endswith("-start"):  # its result names its operands too
        written = sum(sizes)
    elif x.kind == "dynamic-update-slice":
        written, sizes[0] = sizes[1], 0
    elif x.kind in _SLICES:
        sizes[0] = written
    elif x.kind == "fusion":
        inside = computations.get(_called(x, "calls"), {})
        fused = {y.name: y for y in inside.values()}
        root = inside["ROOT"].name if "ROOT" in inside else ""
        sizes = [_read_by(fused, root, i, size) for i, size in enumerate(sizes)]
        written = _written_by(fused, computations.get(_called(x, "calls"), {}), written)
    target = re.search(r'custom_call_target="([^"]+)"', x.rest)
    kind = x.kind.removesuffix("-start")
    name = target[1] if target else kind if kind in _COLLECTIVES else None
    exchanged = {kind: _size(x.shape)} if kind in _COLLECTIVES else {}
    return Traffic(1, sum(sizes), written, {} if name is None else {name: 1}, exchanged)


def _read_by(fused: Mapping[str, _Instruction], root: str, index: int, size: int) -> int:
    """Returns the bytes that a fusion reads of an operand: those of the entries that it needs."""
    own = {y.name for y in fused.values() if y.kind == "parameter" and y.operands == [str(index)]}
    users: dict[str, list[_Instruction]] = {}
    for y in fused.values():
        for name in set(y.operands):
            users.setdefault(name, []).append(y)

    @functools.cache
    def share(name: str) -> float:
        """Returns the share of an array's entries that the fusion's results need."""
        if name == root:
            return 1.0
        return min(1.0, sum(_needed(fused[name], y, share) for y in users.get(name, ())))

    return math.ceil(size * max((share(name) for name in own), default=1.0))


def _needed(x: _Instruction, user: _Instruction, share: Callable[[str], float]) -> float:
    """Returns the share of an array's entries that one of its users in a fusion needs."""
    if user.kind == "dynamic-update-slice" and user.operands[0] == x.name:
        return 0.0  # in place
    needed = share(user.name)
    if user.kind in _SLICES and user.operands[0] == x.name:
        return needed * _size(user.shape) / max(_size(x.shape), 1)
    if user.kind in ("broadcast", "reduce", "dot", "convolution", "scatter", "reduce-window"):
        return float(needed > 0)
    return needed


def _written_by(fused: Mapping[str, _Instruction], computation: _Computation, size: int) -> int:
    """Returns the bytes that a fusion writes."""
    root = computation.get("ROOT")
    if root is None:
        return size
    results = [fused.get(n) for n in root.operands] if root.kind == "tuple" else [root]
    total = 0
    for y in results:
        while y is not None and y.kind == "bitcast":
            y = fused.get(y.operands[0])
        if y is not None and y.kind == "dynamic-update-slice":
            y = fused.get(y.operands[1])
        total += 0 if y is None else _size(y.shape)
    return min(total, size)


def _size(shape: str) -> int:
    """Returns the bytes of an array, or of the arrays of a tuple."""
    total = 0
    for bits, dims, layout in _ARRAY.findall(shape):
        if "S(1)" not in layout:
            total += math.prod(int(d) for d in dims.split(",") if d) * int(bits or 8) // 8
    return total


def _called(x: _Instruction, role: str) -> str:
    found = re.search(rf"\b{role}=%?([\w.\-]+)", x.rest)
    return found[1] if found else ""


def _branches(x: _Instruction) -> list[str]:
    found = re.search(r"branch_computations=\{([^}]*)\}", x.rest)
    if found:
        return [name.strip().lstrip("%") for name in found[1].split(",")]
    return [_called(x, role) for role in ("true_computation", "false_computation")]


def _turns(x: _Instruction, computations: Mapping[str, _Computation]) -> int | None:
    """Returns the turns of a loop; a TPU's program has them only in its condition ``i < n``."""
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"', x.rest)
    if found:
        return int(found[1])
    condition = computations.get(_called(x, "condition"), {})
    end = condition.get("ROOT")
    if end is None or end.kind != "compare" or "direction=LT" not in end.rest:
        return None
    limit = condition.get(end.operands[-1])
    return int(limit.operands[0]) if limit is not None and limit.kind == "constant" else None
