"""Descriptions of objects as plain values, equal in all processes that make the objects alike.

Functions are described by their names and by the values that they hold (closure, defaults), objects
by their types and fields, and arrays by their values or a digest of them. A number that a function
captures, such as the learning rate of an optimizer, is therefore a part of the description.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import json
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

__all__ = ["CODE", "Plain", "describe", "digest", "flat"]

Plain: TypeAlias = Any
"""None, a bool, a number, a string, or a dict of names and such values."""

CODE = "__code__"
"""The field with the digest of a function's byte code, which depends on the version of Python."""

_FEW = 8
"""Arrays of at most this number of elements are described by their values."""
_ITEMS, _NAMES = 16, 64
"""Longer lists, and larger tables, are described by a digest."""
_MOST_BYTES, _PIECES = 1 << 30, 1024
"""Of a larger array, this number of evenly spaced pieces of this total size is hashed."""


def describe(value: Any, *, strict: bool = False) -> Plain:
    """Returns the description of an object.

    Args:
      value: anything.
      strict: for objects of one process: describe the code of all functions, not only that of the
        user's own, and an object whose contents are unknown by its identity. Equal descriptions
        then mean equal behaviour.
    """
    return _Describer(strict)(value)


def flat(description: Plain, name: str) -> dict[str, Plain]:
    """Returns dotted name -> value of a description."""
    if not isinstance(description, dict):
        return {name: description}
    found: dict[str, Plain] = {}
    for key, value in description.items():
        found |= flat(value, f"{name}.{key}" if key else name)
    return found


def digest(value: Any) -> str:
    """Returns a short digest of an array, of bytes, or of a description."""
    found = hashlib.sha256()  # processors have instructions for it
    if isinstance(value, np.ndarray):
        for piece in _pieces(value):
            found.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    else:
        found.update(value if isinstance(value, bytes) else json.dumps(value).encode())
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

    def __init__(self, strict: bool):
        self._strict = strict
        # The objects are kept as well: the id of an object is valid for its lifetime only.
        self._known: dict[int, tuple[Any, Plain]] = {}
        self._rules: dict[tuple[type, ...], Callable[[Any], Plain]] = {
            (enum.Enum, np.dtype, Path, complex): str,
            (str,): lambda x: self(str.__str__(x)),
            (bytes,): digest,
            (jax.tree_util.PyTreeDef,): lambda x: re.sub(" at 0x[0-9a-f]+", "", str(x)),
            (type,): self._class,
            (types.ModuleType,): lambda x: x.__name__,
            (Mapping,): self._mapping,
            (tuple,): self._tuple,
            (list,): self._sequence,
            (set, frozenset): lambda x: self._sequence(sorted(map(json.dumps, map(self, x)))),
            (functools.partial,): self._partial,
            (types.MethodType,): lambda x: {**self(x.__func__), "self": self(x.__self__)},
            (types.FunctionType,): self._function,
        }

    def __call__(self, value: Any) -> Plain:
        """Returns the description of an object."""
        if value is None or type(value) in (bool, int, float):
            return value
        if type(value) is str:
            return value if len(value) <= 200 else f"{len(value)} characters {digest(value)}"
        if id(value) not in self._known:
            self._known[id(value)] = value, "(itself)"  # where an object contains itself
            self._known[id(value)] = value, self._one(value)
        return self._known[id(value)][1]

    def _one(self, value: Any) -> Plain:
        for kinds, rule in self._rules.items():
            if isinstance(value, kinds):
                return rule(value)
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return _array(value)
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value) if field.compare]
            return self._fields(value, {name: getattr(value, name) for name in names})
        if hasattr(value, "__wrapped__"):  # such as a function under jax.jit
            return self(value.__wrapped__)
        return self._object(value)

    def _mapping(self, table: Mapping[Any, Any]) -> Plain:
        found = self._named({str(key): table[key] for key in sorted(table, key=str)})
        return f"{len(found)} names {digest(found)}" if len(found) > _NAMES else found or "(empty)"

    def _sequence(self, items: Collection[Any]) -> Plain:
        found = {str(i): self(item) for i, item in enumerate(items)}
        return f"{len(found)} items {digest(found)}" if len(found) > _ITEMS else found or "(empty)"

    def _tuple(self, value: Any) -> Plain:
        named = hasattr(value, "_asdict")
        return self._fields(value, value._asdict()) if named else self._sequence(value)

    def _partial(self, value: functools.partial) -> Plain:
        given = {**{str(i): x for i, x in enumerate(value.args)}, **value.keywords}
        return {"": "functools.partial", "function": self(value.func), **self._named(given)}

    def _fields(self, value: Any, fields: Mapping[str, Any]) -> Plain:
        """Returns the description of an object by its type and fields."""
        return {**self._class(type(value)), **self._named(fields)}

    def _named(self, fields: Mapping[str, Any]) -> dict[str, Plain]:
        return {name: self(value) for name, value in fields.items()}

    def _function(self, value: types.FunctionType) -> Plain:
        cells = map(_content, value.__closure__ or ())
        held = dict(zip(value.__code__.co_freevars, cells, strict=True))
        defaults = {"__defaults__": value.__defaults__, "__keywords__": value.__kwdefaults__}
        held |= {name: given for name, given in defaults.items() if given}
        name, own = value.__qualname__, not _is_installed(value.__module__)
        if own:  # a file may have another name, or lie elsewhere, when a run is resumed
            names = sorted(set(_globals_of(value.__code__)) & value.__globals__.keys())
            held |= {name: value.__globals__[name] for name in names}
        code = {CODE: _code(value.__code__)} if own or self._strict else {}
        whole = name if own else f"{value.__module__}.{name}"
        return {"": whole, **code, **self._named(held)}

    def _class(self, value: type) -> dict[str, Plain]:
        """Returns the name of a class, and the digest of a user's class and of its methods."""
        if _is_installed(value.__module__):
            return {"": f"{value.__module__}.{value.__qualname__}"}
        kinds = (types.FunctionType, property, classmethod, staticmethod, bool, int, float, str)
        members = {
            key: [x.fget, x.fset] if isinstance(x, property) else x
            for key, x in sorted(vars(value).items())
            if isinstance(x, kinds) and (callable(x) or not key.startswith("__"))
        }
        bases = [self(base) for base in value.__bases__ if base is not object]
        return {"": value.__qualname__, CODE: digest([self._named(members), bases])}

    def _object(self, value: Any) -> Plain:
        kind, contents = type(value), getattr(value, "__dict__", None)
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        if isinstance(name, str) and _is_installed(kind.__module__):  # such as math.exp
            return f"{getattr(value, '__module__', '')}.{name}"
        readable = kind.__module__.partition(".")[0] in ("fedjax_peft", "flax")
        if contents is not None and (readable or not _is_installed(kind.__module__)):
            return self._fields(value, dict(sorted(contents.items())))
        return {**self._class(kind), **({"id": id(value)} if self._strict else {})}


def _array(value: Any) -> Plain:
    """Returns a scalar as a number, a small array with its values, and a large one by a digest."""
    shape = f"{value.dtype}{list(value.shape)}"
    if isinstance(value, jax.ShapeDtypeStruct):
        return shape
    if hasattr(value, "__jax_array__"):  # a variable of a module
        value = value.__jax_array__()
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    x = np.asarray(value)
    if x.dtype == object:
        return f"{shape} {digest(describe(x.tolist()))}"
    if x.ndim == 0:
        return x.item() if isinstance(x.item(), bool | int | float | str) else f"{shape} {x}"
    return f"{shape} {x.tolist() if x.size <= _FEW else digest(x)}"


def _content(cell: Any) -> Any:
    """Returns what a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _code(code: types.CodeType) -> str:
    """Returns a digest of what a function does, without line numbers and names of files."""
    held = [_code(x) if isinstance(x, types.CodeType) else describe(x) for x in code.co_consts]
    return digest([code.co_code.hex(), held, list(code.co_names), list(code.co_varnames)])


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """Yields the global names that a function and the functions in it read."""
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _globals_of(inner)


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Returns whether a module is Python's, of an installed package, or of this library."""
    top = (module or "builtins").partition(".")[0]
    if top in ("fedjax_peft", *sys.stdlib_module_names) and top != "__main__":
        return True
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
