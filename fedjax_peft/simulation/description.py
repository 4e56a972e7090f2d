"""Descriptions of objects as plain values: what can be compared, written to a file and hashed.

A part is the call that made it. What has no call, such as a raw optax optimizer and a function of
the user, is its name, the values that it holds, and digests of the user's code.
"""

import contextlib
import dataclasses
import dis
import enum
import functools
import inspect
import json
import math
import re
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from fedjax_peft.contracts.part import Call, call_of
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.numerics.ragged import Ragged
from fedjax_peft.support.digests import digest

Plain: TypeAlias = Any
"""None, a bool, a number, a string, or a list or dict of such values."""

EMPTY = "(empty)"
CODE = "__code__"
"""The field of a user's code; a digest of it depends on the version of Python."""
_FEW, _ITEMS, _CHARACTERS = 8, 64, 200
"""Larger arrays, longer lists and tables, and longer texts are described by a digest."""
_MANY = 10_000
"""More arrays in a flat one are described together: a million take longer than a run."""


def describe(value: Any) -> Plain:
    """Returns a value as nested lists and dicts of strings, numbers, bools and None.

    An object that holds values is a dict, with its name under ``""``. Arrays are digests.

    Args:
      value: anything; it is not changed and not called.
    """
    return _described(value, {})


def flat(description: Plain, name: str) -> dict[str, Plain]:
    """Returns dotted name -> value of a description."""
    if isinstance(description, list):
        description = dict(enumerate(description))
    if not isinstance(description, dict):
        return {name: description}
    found: dict[str, Plain] = {}
    for key, value in description.items():
        found |= flat(value, name if key == "" else f"{name}.{key}")
    return found


def _described(value: Any, known: dict[int, tuple[Any, Plain]]) -> Plain:
    # What occurs twice is described once. It is kept, because ids are unique in its lifetime only.
    if id(value) not in known:
        known[id(value)] = value, "itself"  # where an object contains itself
        known[id(value)] = value, _one(value, functools.partial(_described, known=known))
    return known[id(value)][1]


def _one(value: Any, inner: functools.partial[Plain]) -> Plain:
    match value:
        case None | bool():
            return value
        case enum.Enum() | types.ModuleType():
            return str(value) if isinstance(value, enum.Enum) else value.__name__
        case int() | float():
            finite = isinstance(value, int) or math.isfinite(value)
            return (int if isinstance(value, int) else float if finite else str)(value)
        case str():
            text = str.__str__(value)
            return text if len(text) <= _CHARACTERS else f"{len(text)} characters {digest(text)}"
        case bytes() | types.CodeType():
            return digest(value if isinstance(value, bytes) else _code(value, inner))
        case np.dtype() | Path() | complex() | slice() | range() | jax.tree_util.PyTreeDef():
            return re.sub(" at 0x[0-9a-f]+", "", str(value))
        case set() | frozenset():
            return inner(sorted(json.dumps(inner(x)) for x in value))
    if not isinstance(value, type) and hasattr(value, "dtype") and hasattr(value, "shape"):
        return _array(value)
    if hasattr(value, "__wrapped__") and call_of(value) is None:  # such as under jax.jit
        return inner(value.__wrapped__)
    head, fields = _held(value)
    found = {str(name): inner(x) for name, x in fields.items()}
    if head:
        return {"": head, **found} if found else head
    if len(found) > _ITEMS:
        return f"{len(found)} items {digest(found)}"
    return (found if isinstance(value, Mapping) else list(found.values())) or EMPTY


def _array(value: Any) -> Plain:
    """Returns a scalar as a number, and a larger array as its shape with its values or a digest."""
    shape = f"{value.dtype}{list(value.shape)}"
    if hasattr(value, "__jax_array__"):  # a variable of a module
        value = value.__jax_array__()
    if isinstance(value, jax.ShapeDtypeStruct | jax.core.Tracer):
        return shape
    key = isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    x = np.asarray(jax.random.key_data(value) if key else value)
    if x.dtype == object:
        return f"{shape} {digest(describe(x.tolist()))}"
    if x.ndim == 0 and isinstance(number := x.item(), bool | int | float | str):
        return describe(number)
    return f"{shape} {x.tolist() if x.size <= _FEW else digest(x)}"


def _held(value: Any) -> tuple[str, Mapping[Any, Any]]:
    """Returns the name of a function or an object, or "", and what it holds by name."""
    call = value if isinstance(value, Call) else call_of(value)
    if call is not None and not isinstance(value, Dataset | Clients):  # files may change
        own = {CODE: inspect.unwrap(call.factory())} if ":" in call.name else {}
        return call.name, own | dict(call.arguments)
    if isinstance(value, Mapping):
        return "", dict(sorted(value.items(), key=lambda item: str(item[0])))
    if isinstance(value, type):
        return _name(value), {} if _is_installed(value) else _of_class(value)
    if hasattr(value, "_asdict"):
        return _name(type(value)), value._asdict()
    if isinstance(value, Ragged) and len(value) > _MANY:
        return _name(type(value)), {"flat": value.flat, "sizes": value.sizes}
    if isinstance(value, tuple | list | Ragged):
        return "", dict(enumerate(value))
    if isinstance(value, functools.partial):
        return "partial", {"__func__": value.func, "__args__": value.args, **value.keywords}
    if isinstance(value, types.MethodType):
        return "method", {"__func__": value.__func__, "self": value.__self__}
    if isinstance(value, types.FunctionType):
        return _name(value), _of_function(value)
    kind, named = type(value), isinstance(getattr(value, "__name__", None), str)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.compare]
        return _name(kind), {name: getattr(value, name) for name in names}
    if not _is_installed(kind):
        return _name(kind), {"__class__": kind, **getattr(value, "__dict__", {})}
    read = not named and kind.__module__.partition(".")[0] in ("fedjax_peft", "flax")
    return _name(value if named else kind), getattr(value, "__dict__", {}) if read else {}


def _of_function(value: types.FunctionType) -> dict[str, Any]:
    """Returns the defaults and the closure of a function; of a user's, also globals and code."""
    code = value.__code__
    defaults = {"__defaults__": value.__defaults__, "__keywords__": value.__kwdefaults__}
    held: dict[str, Any] = {name: given for name, given in defaults.items() if given}
    for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            held[name] = cell.cell_contents
        if (value.__module__ or "").startswith("optax.") and type(held.get(name)) is int:
            held[name] = float(held[name])  # as some schedules do when they are first called
    if _is_installed(value):
        return held
    names = {*_names(code)}
    read = {name: x for name, x in value.__globals__.items() if name in names}
    return held | dict(sorted(read.items())) | {CODE: code}


def _of_class(value: type) -> dict[str, Any]:
    """Returns what a user's class consists of, and the classes that it is derived from."""
    kinds = (types.FunctionType, property, classmethod, staticmethod, bool, int, float, str)
    own = {
        name: x.fget if isinstance(x, property) else x
        for name, x in sorted(vars(value).items())
        if isinstance(x, kinds) and (callable(x) or not name.startswith("__"))
    }
    return {CODE: {**own, "__bases__": [base for base in value.__bases__ if base is not object]}}


def _code(code: types.CodeType, inner: functools.partial[Plain]) -> list[Any]:
    held = [inner(x) for x in code.co_consts]
    return [code.co_code.hex(), held, list(code.co_names), list(code.co_varnames)]


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names that a function and the functions in it look up in their module."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in _LOOKS_UP)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


_LOOKS_UP = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
"""Instructions of a function, of the body of a class, and since Python 3.12 of scopes within."""


def _name(value: Any) -> str:
    """Returns the name of a function or class, with its module where this is the same everywhere.

    A user's file may have another name, or lie elsewhere, when a run is resumed, and modules of
    JAX and NumPy move between versions.
    """
    name = getattr(value, "__qualname__", value.__name__)
    stable = _is_installed(value) and not str(value.__module__).startswith(("jax", "numpy"))
    return f"{value.__module__}.{name}" if stable else name


def _is_installed(value: Any) -> bool:
    """Returns whether something is Python's, of an installed package, or of this library."""
    return _is_package((getattr(value, "__module__", None) or "builtins").partition(".")[0])


@functools.cache
def _is_package(top: str) -> bool:
    if top in ("fedjax_peft", *sys.stdlib_module_names) and top != "__main__":
        return True
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
