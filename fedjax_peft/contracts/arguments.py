"""What the arguments of a part may be: declared in its signature, and checked here.

::

    def fedprox(optimizer: Optimizer, *, mu: Annotated[float, Ge(0)] = 0.01, ...

A range has the bounds of the library annotated-types (``Gt``, ``Ge``, ``Lt``, ``Le``, ``Len``,
``Interval``), and a choice is a ``Literal``. Numbers must be finite, unless a bound is infinite.
Configs, ``fedjax-peft explain`` and the reference read the same signatures.
"""

import math
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from inspect import BoundArguments, Parameter, signature, unwrap
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast

import numpy as np
from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt, MaxLen, MinLen
from jax import Array
from jax.core import Tracer

from fedjax_peft.contracts.types import RateSchedule
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, similar

F = TypeVar("F", bound=Callable[..., Any])

Positive: TypeAlias = Annotated[float, Gt(0)]
NotNegative: TypeAlias = Annotated[float, Ge(0)]
Share: TypeAlias = Annotated[float, Ge(0), Le(1)]
PositiveShare: TypeAlias = Annotated[float, Gt(0), Le(1)]
Fraction: TypeAlias = Annotated[float, Ge(0), Lt(1)]
Probability: TypeAlias = Annotated[float, Gt(0), Lt(1)]
Count: TypeAlias = Annotated[int, Ge(1)]
FromZero: TypeAlias = Annotated[int, Ge(0)]

_OBJECTS = {
    "GradientTransformation": ("optax optimizer", "optax", "optax.adamw(1e-3)"),
    "Aggregator": ("aggregator", "fp.aggregators", "fp.aggregators.mean()"),
    "Transform": ("upload transform", "fp.transforms", "fp.transforms.clip_norm(1.0)"),
    "RateSchedule": ("function", "fp.schedules", "fp.schedules.cosine(rounds=100)"),
}
"""Name of a type -> its objects in words, where they are made, and one of them."""


def kinds_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns argument -> its type, for all types whose names exist when the program runs."""
    kinds = {}
    names = getattr(unwrap(function), "__globals__", {})
    for name, kind in getattr(function, "__annotations__", {}).items():
        try:
            kinds[name] = eval(kind, names) if isinstance(kind, str) else kind
        except (NameError, AttributeError, TypeError):
            continue
    return kinds


def strict(function: F) -> F:
    """Decorates a function whose arguments are checked by their types (:func:`check`)."""
    bind, kinds = signature(function).bind, cache(lambda: kinds_of(function))

    @wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        try:
            bound = bind(*arguments, **options)
        except TypeError:
            return unwrap(function)(*arguments, **options)  # its own error names the function
        check(function, kinds(), bound)
        return function(*arguments, **options)

    return cast(F, checked)


def check(function: Callable[..., Any], kinds: Mapping[str, Any], call: BoundArguments) -> None:
    """Raises InputError for an argument that its type does not allow.

    An argument that is the default is not checked, nor the size of a number that is traced.

    Args:
      kinds: of :func:`kinds_of`.
      call: of the function, without defaults.
    """
    parameters, constants = call.signature.parameters, getattr(function, "constants", ())
    for name, value in call.arguments.items():
        if name not in kinds or value is parameters[name].default:
            continue
        for shown, one in _each(name, parameters[name].kind, value):
            fixed = name in constants and isinstance(one, Tracer)
            if fixed or not fits(kinds[name], one):
                what = f"{shown} = {show(one)} of {function.__name__}"
                advice = _advice(kinds[name], one)
                raise InputError(f"{what} must be {_or(kinds[name])}. {advice}".rstrip())


def _each(name: str, how: Any, value: Any) -> Iterable[tuple[str, Any]]:
    """Returns (name, value) of an argument; ``*arguments`` and ``**options`` have several."""
    if how is Parameter.VAR_KEYWORD:
        return cast(Iterable[tuple[str, Any]], value.items())
    return [(name, one) for one in (value if how is Parameter.VAR_POSITIONAL else (value,))]


def fits(kind: Any, value: Any, bounds: Sequence[Any] = ()) -> bool:
    """Returns whether a type allows a value; a type that is not known here allows everything."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return fits(inner[0], value, (*_flat(inner[1:]), *bounds))
    if origin in (typing.Union, types.UnionType):
        return any(fits(one, value, bounds) for one in inner)
    if kind in (int, float):
        return _is_number(kind, value, bounds)
    return _has_type(kind, origin, inner, value) and (value is None or _holds(bounds, value))


def _is_number(kind: type, value: Any, bounds: Sequence[Any]) -> bool:
    if isinstance(value, Array):
        return kind is float  # a run-time value, which was checked as a number before
    right = isinstance(value, numbers.Integral if kind is int else numbers.Real)
    if not right or isinstance(value, bool):
        return False
    return (Le(math.inf) in bounds or -math.inf < value < math.inf) and _holds(bounds, value)


def _has_type(kind: Any, origin: Any, inner: tuple[Any, ...], value: Any) -> bool:
    if origin is Literal:
        return isinstance(value, str | int | None) and value in inner
    if kind in (None, types.NoneType):
        return value is None
    if kind in (str, bool, Array):
        return isinstance(value, (bool, np.bool_) if kind is bool else kind)
    if kind is Path:
        return isinstance(value, os.PathLike)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(inner[-1], x) for x in value.values())
    if isinstance(origin, type) and issubclass(origin, Sequence):
        if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
            return False
        return all(fits(inner[0], x) for x in value)
    if origin is Callable:
        return callable(value)
    return all(hasattr(value, name) for name in getattr(kind, "_fields", ()))


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    for one in metadata:
        yield from one if isinstance(one, GroupedMetadata) else (one,)


def _holds(bounds: Sequence[Any], value: Any) -> bool:
    for bound in bounds:
        match bound:
            case Gt(gt=low):
                holds = value > low
            case Ge(ge=low):
                holds = value >= low
            case Lt(lt=high):
                holds = value < high
            case Le(le=high):
                holds = value <= high
            case MinLen(min_length=least):
                holds = len(value) >= least
            case MaxLen(max_length=most):
                holds = len(value) <= most
            case _:
                continue
        if not holds:
            return False
    return True


def in_words(kind: Any, bounds: Sequence[Any] = ()) -> str:
    """Returns a type in words: ``whole number from 1 up``, ``list of texts``, ``"a" or "b"``."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return in_words(inner[0], (*_flat(inner[1:]), *bounds))
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in inner)
    if origin in (typing.Union, types.UnionType):
        known = [one for one in inner if one not in (types.NoneType, Array)]
        return " or ".join(dict.fromkeys(in_words(one, bounds) for one in known))
    if isinstance(origin, type) and issubclass(origin, Mapping | Sequence):
        what = "table" if issubclass(origin, Mapping) else "list"
        plural = _plural(in_words(inner[-1]))
        least = "".join(f" (at least {b.min_length})" for b in bounds if isinstance(b, MinLen))
        return f"{what} of {plural}{least}" if plural else f"{what}{least}"
    if kind is bool:
        return "true or false"
    if origin is Callable:
        return "function"
    if (name := _name(kind)) in _OBJECTS:
        return _OBJECTS[name][0]
    text = {int: "whole number", float: "number"}.get(kind, "text")
    return f"{text}{_range(bounds)}"


def _range(bounds: Sequence[Any]) -> str:
    """Returns the limits of a number in words, such as `` from 0 to below 1``."""
    if Le(math.inf) in bounds:  # inf itself is allowed too
        return f"{_range([b for b in bounds if b != Le(math.inf)])}, or inf"
    low = next((f" above {_number(b.gt)}" for b in bounds if isinstance(b, Gt)), "")
    low = next((f" from {_number(b.ge)}" for b in bounds if isinstance(b, Ge)), low)
    high = next((f" below {_number(b.lt)}" for b in bounds if isinstance(b, Lt)), "")
    high = next((f" {_number(b.le)}" for b in bounds if isinstance(b, Le)), high)
    most = high if "below" in high else f" at most{high}" if high else ""
    if " from" in low:
        return f"{low} to{high}" if high else f"{low} up"
    return f"{low} and{most}" if low and high else low or most


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _plural(text: str) -> str:
    """Returns the plural of a type in words; empty for a union of types."""
    if '"' in text:
        return text
    if " or " in text:
        return ""
    return re.sub(r"^(list|table|text|number|whole number)\b", r"\1s", text)


def _or(kind: Any) -> str:
    """Returns a type in words, with articles."""
    plain = ('"', "true", "false")
    texts = in_words(kind).split(" or ")
    return " or ".join(
        text if text.startswith(plain) else f"{'an' if text[0] in 'aeo' else 'a'} {text}"
        for text in texts
    )


def _advice(kind: Any, value: Any) -> str:
    """Returns the nearest right value, or how to give one."""
    if isinstance(value, Tracer):
        return (
            "It cannot be a run-time value, because it decides a size: give it as a number. In a"
            " config, list its key in constants of [sweep]."
        )
    inner = (kind, *typing.get_args(kind))
    known = [x for one in inner if typing.get_origin(one) is Literal for x in typing.get_args(one)]
    if known and isinstance(value, str):
        return similar(value, known)
    for name in map(_name, inner):
        if name in _OBJECTS:
            _, home, example = _OBJECTS[name]
            if isinstance(value, str):
                return f"Give the object and not its name, such as {home}.{value}(...)."
            if callable(value):
                return f"Call it: {getattr(value, '__name__', 'the function')}(...)."
            return f"Give one such as {example}."
    return ""


def _name(kind: Any) -> str:
    return "RateSchedule" if kind == RateSchedule else getattr(kind, "__name__", "")
