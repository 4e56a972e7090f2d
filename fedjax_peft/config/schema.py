"""The types of a config's values, from the signatures that they are given to, and their check."""

import contextlib
import inspect
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic

from fedjax_peft.simulation.simulate import simulate
from fedjax_peft.support import toml
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest

Config = dict[str, Any]

OF_THE_RUN = ("seed", "rounds")
"""Arguments of functions that are by default the run's own keys."""


# Arguments of simulate that the command line sets, and a config does not.
_NOT_CONFIG = ("out", "resume", "progress")


def fields_of(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Returns what a config can set: name -> (type, default; ``...`` if required).

    These are the arguments of a function, or the fields of a record, of plain types. Models,
    optimizers and other objects have tables.
    """
    hints = typing.get_type_hints(function)
    fields = {}
    takes_optimizer = "optimizer" in inspect.signature(function).parameters
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        kind = hints.get(name, _unannotated(name, default))
        if not _is_plain(kind) or name in _NOT_CONFIG:
            continue
        if name in OF_THE_RUN and function is not simulate:
            kind, default = int | None, None  # None: that of the run
        if name == "learning_rate" and default is parameter.empty and takes_optimizer:
            kind, default = float | None, None  # None: that of [optimizer], see rate
        fields[name] = (
            str if kind == str | Path else kind,
            ... if default is parameter.empty else default,
        )
    return fields


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
    if origin in (typing.Union, types.UnionType, abc.Sequence, abc.Mapping):
        return all(_is_plain(k) for k in typing.get_args(kind))
    return kind in (int, float, str, bool, Path, types.NoneType)


def check_arguments(function: Callable[..., Any], given: Config) -> Config:
    """Returns all arguments of a function that takes plain values, with the defaults filled in.

    Raises:
      InputError: a key is unknown, or a value has the wrong type.
    """
    return checked_values("", fields_of(function), given)


def checked_values(
    table: str, fields: Mapping[str, tuple[Any, Any]], given: Config, others: Sequence[str] = ()
) -> Config:
    """Returns the values of all fields: the given ones, strictly checked, and the defaults."""
    where = f"[{table}] " if table else ""
    for key in given:
        if key not in fields and key not in others:
            known = [*fields, *others]
            raise InputError(f"Unknown config key {where}{show(key)}. {nearest(key, known)}")
    schema = pydantic.create_model(
        "schema",
        __config__=pydantic.ConfigDict(strict=True, arbitrary_types_allowed=True),
        **fields,  # type: ignore[call-overload]
    )
    try:
        return schema(**{k: v for k, v in given.items() if k in fields}).model_dump()
    except pydantic.ValidationError as error:
        raise InputError(_explain(table, fields, error)) from None


def _explain(
    table: str, fields: Mapping[str, tuple[Any, Any]], error: pydantic.ValidationError
) -> str:
    """Returns a sentence for each wrong field, with a corrected value where one can be guessed."""
    where = f"[{table}] " if table else ""
    wrong: dict[str, tuple[Any, list[str]]] = {}
    for item in error.errors():
        _, reasons = wrong.setdefault(str(item["loc"][0]), (item.get("input"), []))
        reasons.append(item["msg"][0].lower() + item["msg"][1:])
    sentences = []
    for key, (value, reasons) in wrong.items():
        if reasons == ["field required"]:
            sentences.append(f"The config key {where}{key!r} is missing.")
        else:
            sentences.append(
                f"The config key {where}{key!r} cannot be {show(value)}: {', or '.join(reasons)}."
            )
            if (guess := _corrected(fields[key][0], value)) is not None:
                literal = toml.literal(guess)
                shown = f"{table}.{key}" if table else key
                sentences.append(
                    f"Write {key} = {literal}, or on the command line '{shown}={literal}'."
                )
    return " ".join(sentences)


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
    check = pydantic.TypeAdapter(kind, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
    for guess in guesses:
        with contextlib.suppress(pydantic.ValidationError):
            if guess is not None:
                return check.validate_python(guess, strict=True)
    return None
