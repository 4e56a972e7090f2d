"""Plain descriptions of settings: an object as the names and numbers that it was made from.

Algorithms, optimizers and mechanisms are closures. :func:`describe` reads the names of functions
and what they hold. Objects that were made by the same calls have equal descriptions, in every
process, on every device, and with every version of JAX: no address, no compiled program and no
value that a device computed is a part of one.
"""

import dataclasses
import enum
import types
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any

import jax
import numpy as np

__all__ = ["describe"]

_LIBRARIES = ("fedjax_peft", "optax", "flax", "jax", "jaxlib", "numpy")
"""Packages whose functions are known by their names; of others, the constants are described too."""
_PLAIN = (bool, int, float, str)
_UNSTABLE = ("jax", "jaxlib", "numpy")
"""Packages whose functions are described by their last names: their modules move."""


def describe(value: Any) -> Any:
    """Returns a value as nested lists and dicts of strings, numbers, bools and None.

    * Numbers and strings are themselves. Scalars of JAX are rounded to six digits.
    * An array is its shape and dtype; what it holds is data and no setting.
    * A function is its qualified name, its defaults, and what it captures. A user's function also
      has the numbers in its code, and those of the global variables that it reads.
    * A named tuple, a dataclass and a callable object is the name of its type and its fields; any
      other object only has those of its fields that are numbers and strings.

    Args:
      value: anything; it is not changed and not called.
    """
    return _described(value, ())


def _described(value: Any, around: tuple[int, ...]) -> Any:
    """Returns the description; ``around`` are the ids of the objects that hold ``value``."""
    if value is None or isinstance(value, bool | int | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, float):
        return float(value) if np.isfinite(value) else str(float(value))
    if isinstance(value, complex | bytes | np.dtype):
        return str(value)
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
        return _described(value.item(), around)
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return _array(value)
    if id(value) in around:
        return "itself"
    inner = partial(_described, around=(*around, id(value)))
    if isinstance(value, type):
        return _name(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, Mapping):
        return {str(key): inner(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = dict(zip(value._fields, value, strict=True))
        return {"type": _name(type(value)), **_fields(named, inner)}
    if isinstance(value, Set):
        return sorted((inner(x) for x in value), key=str)
    if isinstance(value, Sequence | range):
        return [inner(x) for x in value]
    if isinstance(value, partial):
        return {"partial": inner(value.func), "args": inner(value.args), **inner(value.keywords)}
    if isinstance(value, types.MethodType):
        return {"method": inner(value.__func__), "of": inner(value.__self__)}
    if isinstance(value, types.FunctionType):
        return _function(value, inner)
    if hasattr(value, "__wrapped__"):  # jax.jit, functools.wraps
        return inner(value.__wrapped__)
    own = vars(value) if hasattr(value, "__dict__") else {}
    if dataclasses.is_dataclass(value):
        own = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif not callable(value):  # a tokenizer, a logger: what they hold leads anywhere
        own = {name: x for name, x in own.items() if isinstance(x, _PLAIN)}
    return {"type": _name(type(value)), **_fields(own, inner)}


def _array(x: Any) -> Any:
    """Returns the shape and dtype of an array; the number, if a scalar on a device has one."""
    known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.ndim == 0
    if known and np.issubdtype(x.dtype, np.number):
        return _described(float(f"{float(x):.6g}"), ())
    return f"{x.dtype}{list(x.shape)}"


def _fields(values: Mapping[str, Any], inner: Any) -> dict[str, Any]:
    return {name: inner(value) for name, value in values.items() if not name.startswith("__")}


def _function(function: types.FunctionType, inner: Any) -> Any:
    """Returns the name of a function, and what it holds."""
    package = function.__module__.partition(".")[0] if function.__module__ else ""
    if package in _UNSTABLE:
        return function.__name__
    code, names = function.__code__, function.__code__.co_freevars
    cells = zip(names, function.__closure__ or (), strict=True)
    held = {name: _cell(cell, inner) for name, cell in cells}
    made = {"function": _name(function), "captures": dict(sorted(held.items()))}
    if function.__defaults__ or function.__kwdefaults__:
        made["defaults"] = inner([function.__defaults__, function.__kwdefaults__])
    if package not in _LIBRARIES:
        made["constants"] = _constants(code)
        read = {n: function.__globals__.get(n) for n in sorted(code.co_names)}
        made["globals"] = {n: inner(x) for n, x in read.items() if isinstance(x, _PLAIN)}
    return made


def _cell(cell: Any, inner: Any) -> Any:
    try:
        return inner(cell.cell_contents)
    except ValueError:  # not filled yet
        return None


def _constants(code: types.CodeType) -> list[Any]:
    """Returns the floats in a function's code, those of the functions inside it included."""
    found: list[Any] = [x for x in code.co_consts if isinstance(x, float)]
    return found + [_constants(x) for x in code.co_consts if isinstance(x, types.CodeType)]


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
