"""Descriptions of objects as plain values: the names and numbers that the objects were made from.

Algorithms, optimizers and mechanisms are closures. :func:`describe` reads the names of functions
and the values that they hold, such as the learning rate of an optimizer. Objects that were made by
the same calls have equal descriptions in every process.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import json
import math
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

Plain: TypeAlias = Any
"""None, a bool, a number, a string, or a list or dict of such values."""
Detail: TypeAlias = Literal["settings", "contents", "behaviour"]

CODE = "__code__"
"""The field of a function's code; a digest of it depends on the version of Python."""

_UNSTABLE = ("jax", "jaxlib", "numpy")
"""Packages whose functions are described without their modules, which move between versions."""
_FEW, _ITEMS, _NAMES, _CHARACTERS = 8, 16, 64, 200
"""Larger arrays, longer lists, larger tables and longer texts are described by a digest."""
_MOST_BYTES, _PIECES = 1 << 30, 1024
"""Of a larger array, this number of evenly spaced pieces of this total size is hashed."""


def describe(value: Any, detail: Detail = "settings") -> Plain:
    """Returns a value as nested lists and dicts of strings, numbers, bools and None.

    A function or an object is its name, or where it holds values, a dict with the name under
    ``""``.

    Args:
      value: anything; it is not changed and not called.
      detail: what is described beside names and numbers:

        * ``"settings"``: the shapes of arrays, and the decimal numbers in the code of the user's
          functions. Equal on all devices, and with all versions of Python and JAX; scalars of JAX
          are therefore rounded to six digits.
        * ``"contents"``: digests of arrays, and of the code of the user's functions.
        * ``"behaviour"``: also the code of all functions, and the identity of objects whose
          contents are unknown. Equal descriptions in one process mean equal behaviour.
    """
    return _Describer(detail)(value)


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


def digest(value: Any) -> str:
    """Returns a short digest of an array, of bytes, or of a description, 64 bits in hexadecimal."""
    if not isinstance(value, np.ndarray):
        text = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
        value = np.frombuffer(text, np.uint8)
    found = hashlib.sha256()  # processors have instructions for it
    for piece in _pieces(value):
        found.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:16]


def _pieces(x: np.ndarray) -> Iterator[np.ndarray]:
    """Yields an array, or evenly spaced rows of one that is too large to be read at once."""
    if x.nbytes <= _MOST_BYTES or x.ndim == 0:
        yield x
        return
    rows = max(1, len(x) * _MOST_BYTES // x.nbytes // _PIECES)
    for start in np.linspace(0, len(x) - rows, min(_PIECES, len(x))).astype(int):
        yield x[start : start + rows]


class _Describer:
    """Describes one object and everything in it; an object that occurs twice is read once."""

    def __init__(self, detail: Detail):
        self._settings, self._all = detail == "settings", detail == "behaviour"
        # The objects are kept as well: the id of an object is valid for its lifetime only.
        self._known: dict[int, tuple[Any, Plain]] = {}
        self._rules: dict[tuple[type, ...], Callable[[Any], Plain]] = {
            (enum.Enum,): lambda x: f"{type(x).__qualname__}.{x.name}",
            (np.dtype, Path, complex, slice): str,
            (str,): lambda x: self(str.__str__(x)),
            (int,): int,
            (float,): lambda x: float(x) if math.isfinite(x) else str(float(x)),
            (bytes,): digest,
            (jax.tree_util.PyTreeDef,): lambda x: re.sub(" at 0x[0-9a-f]+", "", str(x)),
            (type,): self._class,
            (types.ModuleType,): lambda x: x.__name__,
            (Mapping,): self._mapping,
            (tuple, list, range): self._sequence,
            (set, frozenset): lambda x: self._sequence(sorted(map(json.dumps, map(self, x)))),
            (functools.partial,): lambda x: self._fields(
                type(x), {"__func__": x.func, "__args__": x.args, **x.keywords}
            ),
            (types.MethodType,): lambda x: {"": self(x.__func__), "self": self(x.__self__)},
            (types.FunctionType,): self._function,
            (types.CodeType,): self._code,
        }

    def __call__(self, value: Any) -> Plain:
        if value is None or type(value) in (bool, int):
            return value
        if type(value) is str:
            many = len(value) > _CHARACTERS
            return f"{len(value)} characters {digest(value)}" if many else value
        if id(value) not in self._known:
            self._known[id(value)] = value, "itself"  # where an object contains itself
            self._known[id(value)] = value, self._one(value)
        return self._known[id(value)][1]

    def _one(self, value: Any) -> Plain:
        for kinds, rule in self._rules.items():
            if isinstance(value, kinds):
                return rule(value)
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return self._array(value)
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value) if field.compare]
            return self._fields(type(value), {name: getattr(value, name) for name in names})
        if hasattr(value, "__wrapped__"):  # such as a function under jax.jit
            return self(value.__wrapped__)
        return self._object(value)

    def _mapping(self, table: Mapping[Any, Any]) -> Plain:
        found = {str(key): self(table[key]) for key in sorted(table, key=str)}
        return f"{len(found)} names {digest(found)}" if len(found) > _NAMES else found or "(empty)"

    def _sequence(self, items: Collection[Any]) -> Plain:
        if hasattr(items, "_asdict"):  # a named tuple
            return self._fields(type(items), items._asdict())
        found = [self(item) for item in items]
        return f"{len(found)} items {digest(found)}" if len(found) > _ITEMS else found or "(empty)"

    def _function(self, value: types.FunctionType) -> Plain:
        code, own = value.__code__, not _is_installed(value.__module__)
        held: dict[str, Any] = {}
        if not (self._settings and _package(value.__module__) in _UNSTABLE):
            held = {"__defaults__": value.__defaults__, "__keywords__": value.__kwdefaults__}
            held = {name: given for name, given in held.items() if given}
            cells: Iterator[Any] = map(_content, value.__closure__ or ())
            if _package(value.__module__) == "optax":
                # Some schedules turn their whole numbers into floats when they are first called.
                cells = (float(x) if type(x) is int else x for x in cells)
            held |= dict(zip(code.co_freevars, cells, strict=True))
        if own:
            names = sorted(set(_globals_of(code)) & value.__globals__.keys())
            held |= {name: value.__globals__[name] for name in names}
        if own or self._all:
            held[CODE] = code
        return self._fields(value, held)

    def _code(self, code: types.CodeType) -> str:
        """Returns a digest of what a function does, or the decimal numbers in it."""
        if self._settings:
            return self(list(dict.fromkeys(_floats(code))))
        held = [self(x) for x in code.co_consts]
        return digest([code.co_code.hex(), held, list(code.co_names), list(code.co_varnames)])

    def _class(self, value: type) -> Plain:
        """Returns the name of a class, and a digest of the methods of a user's class."""
        if self._settings or _is_installed(value.__module__):
            return _name(value)
        kinds = (types.FunctionType, property, classmethod, staticmethod, bool, int, float, str)
        members = {
            key: self([x.fget, x.fset] if isinstance(x, property) else x)
            for key, x in sorted(vars(value).items())
            if isinstance(x, kinds) and (callable(x) or not key.startswith("__"))
        }
        bases = [self(base) for base in value.__bases__ if base is not object]
        return {"": _name(value), CODE: digest([members, bases])}

    def _object(self, value: Any) -> Plain:
        kind, contents = type(value), getattr(value, "__dict__", {})
        installed = _is_installed(kind.__module__)
        if installed and isinstance(getattr(value, "__name__", None), str):  # such as math.exp
            return _name(value)
        if not installed or _package(kind.__module__) in ("fedjax_peft", "flax"):
            return self._fields(kind, dict(sorted(contents.items())))
        if self._settings:  # a tokenizer, a logger: what they hold leads anywhere
            plain = {k: x for k, x in contents.items() if isinstance(x, bool | int | float | str)}
            return self._fields(kind, plain)
        return self._fields(kind, {"id": id(value)} if self._all else {})

    def _fields(self, head: Any, fields: Mapping[str, Any]) -> Plain:
        """Returns a description by a function or class, and named values; a name if that is all."""
        found = self(head) if isinstance(head, type) else _name(head)
        named = {name: self(x) for name, x in fields.items()}
        whole = found if isinstance(found, dict) else {"": found}
        return {**whole, **named} if named else found

    def _array(self, value: Any) -> Plain:
        """Returns a scalar as a number, and an array as its shape; also its contents, if asked."""
        shape = f"{value.dtype}{list(value.shape)}"
        if hasattr(value, "__jax_array__"):  # a variable of a module
            value = value.__jax_array__()
        if isinstance(value, jax.ShapeDtypeStruct | jax.core.Tracer):
            return shape
        on_device = isinstance(value, jax.Array)
        key = on_device and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        if self._settings and (key or value.shape):
            return shape
        x = np.asarray(jax.random.key_data(value) if key else value)
        if x.dtype == object:
            return f"{shape} {digest(self(x.tolist()))}"
        if x.ndim == 0 and isinstance(number := x.item(), bool | int | float | str):
            rounded = self._settings and on_device and isinstance(number, float)
            return self(float(f"{number:.6g}") if rounded else number)
        return f"{shape} {x.tolist() if x.size <= _FEW else digest(x)}"


def _content(cell: Any) -> Any:
    """Returns what a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _floats(constant: Any) -> Iterator[float]:
    """Yields the floats in a function's code, those of the functions in it included."""
    held = constant.co_consts if isinstance(constant, types.CodeType) else constant
    if isinstance(held, float):
        yield held
    for x in held if isinstance(held, tuple) else ():
        yield from _floats(x)


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """Yields the global names that a function and the functions in it read."""
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _globals_of(inner)


def _name(value: Any) -> str:
    """Returns the name of a function or class, with its module where this is the same everywhere.

    A user's file may have another name, or lie elsewhere, when a run is resumed.
    """
    module = getattr(value, "__module__", None) or "builtins"
    name, unstable = getattr(value, "__qualname__", value.__name__), _package(module) in _UNSTABLE
    return f"{module}.{name}" if _is_installed(module) and not unstable else name


def _package(module: str | None) -> str:
    return (module or "builtins").partition(".")[0]


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Returns whether a module is Python's, of an installed package, or of this library."""
    top = _package(module)
    if top in ("fedjax_peft", *sys.stdlib_module_names) and top != "__main__":
        return True
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
