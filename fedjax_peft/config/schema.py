"""The types of a config's values, from the signatures that they are given to, and their check."""

import contextlib
import functools
import inspect
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import pydantic
from jax import Array

from fedjax_peft.simulation.simulate import simulate
from fedjax_peft.support import toml
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest

Config = dict[str, Any]

OF_THE_RUN = ("seed", "rounds")
"""Arguments of functions that are by default the run's own keys."""

_NOT_CONFIG = ("out", "resume", "progress")
"""Arguments of simulate that the command line sets, and a config does not."""


@functools.cache
def fields_of(function: Callable[..., Any]) -> Mapping[str, tuple[Any, Any]]:
    """Returns what a config can set: name -> (type, default; ``...`` if required).

    These are the arguments of a function, or the fields of a record, of plain types. Models,
    optimizers and other objects have tables.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    fields = {}
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        default = parameter.default
        kind = hints.get(name, _unannotated(name, default))
        if Path in typing.get_args(kind):
            kind = str  # of what the argument takes, a config can write paths
        if Array in typing.get_args(kind):  # a run-time value
            kind = typing.Union[tuple(k for k in typing.get_args(kind) if k is not Array)]  # noqa: UP007
        if not _is_plain(kind) or name in _NOT_CONFIG:
            continue
        if name in OF_THE_RUN and function is not simulate:
            kind, default = hints.get(name, int) | None, None  # None: that of the run
        if name == "learning_rate" and default is parameter.empty and "optimizer" in parameters:
            kind, default = kind | None, None  # None: that of [optimizer], see rate
        fields[name] = (kind, ... if default is parameter.empty else default)
    return MappingProxyType(fields)


def _unannotated(name: str, default: Any) -> Any:
    """Returns the type of an argument without annotation, of a user's function.

    An argument without a default is a number, a string or a boolean, unless its name is that of an
    object.
    """
    if name in ("optimizer", "aggregator", "server_schedule", "data", "dataset", "train"):
        return object
    if default is None or default is inspect.Parameter.empty:
        return int | float | str | bool | None
    return int | float if type(default) is float else type(default)


def _is_plain(kind: Any) -> bool:
    """Returns whether TOML can express the values of a type (paths are strings)."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        return True
    if origin is Annotated:
        return _is_plain(typing.get_args(kind)[0])
    if origin in (typing.Union, types.UnionType, abc.Sequence, abc.Mapping):
        return all(_is_plain(k) for k in typing.get_args(kind))
    return kind in (int, float, str, bool, Path, types.NoneType)


def parts_in(function: Callable[..., Any], options: Config) -> Config:
    """Returns the options that are tables of parts, such as a transform inside another one."""
    parameters, plain = inspect.signature(function).parameters, fields_of(function)
    return {
        name: value
        for name, value in options.items()
        if name in parameters and name not in plain and _names_parts(value)
    }


def _names_parts(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_names_parts, value))
    return isinstance(value, Mapping) and isinstance(value.get("name"), str)


def checked_values(
    table: str, fields: Mapping[str, tuple[Any, Any]], given: Config, others: Sequence[str] = ()
) -> Config:
    """Returns the values of all fields: the given ones, strictly checked, and the defaults."""
    where = f"[{table}] " if table else ""
    for key in given:
        if key not in fields and key not in others:
            known = [*fields, *others]
            raise InputError(f"Unknown config key {where}{show(key)}. {nearest(key, known)}")
    values, wrong = {}, []
    for name, (kind, default) in fields.items():
        try:
            values[name] = _check(kind)(given[name]) if name in given else default
        except pydantic.ValidationError as error:
            wrong.append(_explain(table, name, kind, error))
        if values.get(name) is ...:
            wrong.append(f"The config key {where}{name!r} is missing.")
    if wrong:
        raise InputError(" ".join(wrong))
    return values


@functools.cache
def _check(kind: Any) -> Callable[[Any], Any]:
    """Returns the strict check of a type, which returns the value."""
    strict = pydantic.ConfigDict(strict=True, arbitrary_types_allowed=True)
    return pydantic.TypeAdapter(kind, config=strict).validate_python


def _explain(table: str, key: str, kind: Any, error: pydantic.ValidationError) -> str:
    """Returns why a value is wrong, with a corrected one where it can be guessed."""
    where = f"[{table}] " if table else ""
    value = error.errors()[0]["input"]
    reasons = [item["msg"][0].lower() + item["msg"][1:] for item in error.errors()]
    text = f"The config key {where}{key!r} cannot be {show(value)}: {', or '.join(reasons)}."
    if _is_several(kind, value):
        return f"{text} Several values are for `fedjax-peft sweep`, or for [sweep.grid]."
    if (guess := _corrected(kind, value)) is None:
        return text
    literal = toml.literal(guess)
    shown = f"{table}.{key}" if table else key
    return f"{text} Write {key} = {literal}, or on the command line '{shown}={literal}'."


def _is_several(kind: Any, value: Any) -> bool:
    """Returns whether a value is a list, ``a,b`` or ``0..4`` of values of this type."""
    texts = value.replace("..", ",").split(",") if isinstance(value, str) else None
    with contextlib.suppress(ValueError):  # also of pydantic
        parts = value if texts is None else [toml.parse_value(text) for text in texts]
        return isinstance(parts, list) and len([_check(kind)(part) for part in parts]) > 1
    return False


def _corrected(kind: Any, value: Any) -> Any:
    """Returns a value of the right type that the user may have meant; None if there is none.

    Corrected are single elements of lists (``diagnostics=clients``), and numbers and booleans that
    are not written as in TOML (``.5``, ``True``).
    """
    guesses: list[Any] = [[value]]
    if isinstance(value, str):
        guesses += [{"true": True, "false": False}.get(value.lower())]
        for number in (int, float):
            with contextlib.suppress(ValueError):
                guesses.append(number(value))
    for guess in guesses:
        with contextlib.suppress(pydantic.ValidationError):
            if guess is not None:
                return _check(kind)(guess)
    return None
