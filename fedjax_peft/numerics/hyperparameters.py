"""Hyper-parameters that are run-time values of a compiled program.

A learning rate that is written into a program as a constant makes a new program for every value. A
*run-time value* is an argument of the program instead. One program then serves every value, and a
sweep over numbers compiles once. In Python, the algorithm is given as a function of its values::

    fp.simulate(model, lambda p: fp.algorithms.fedavg(optax.adamw(p["learning_rate"])), clients,
                values={"learning_rate": 1e-3}, rounds=10)

The function is called twice. First with the numbers themselves, so that wrong values are refused.
Then inside the program, where the values are traced: arrays without a known value. Checks and
Python's ``if`` skip traced values; the functions below tell them apart.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Transform, Wrapped
from fedjax_peft.support.errors import InputError

Values: TypeAlias = Mapping[str, Any]
"""Name -> number: a float outside of a program, a traced scalar inside."""


F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Maker:
    """A function of the run-time values that has more arguments.

    Makers of one function with equal arguments are equal, so that runs share compiled programs.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self, values: Values | None) -> Any:
        return self.function(values, *self.arguments)


class Makers(NamedTuple):
    """What a program makes of its run-time values."""

    wrapped: Callable[[Values], Wrapped]
    transform: Callable[[Values], Transform | None]


def is_traced(value: Any) -> bool:
    """Returns whether a number is a run-time value inside a program that is being compiled."""
    return isinstance(value, jax.core.Tracer)


def maybe_nonzero(value: Any) -> bool:
    """Returns False for a number that is known to be 0, and True for a traced value.

    A 0 often switches a part of an algorithm off. Sweeps therefore never make 0 a run-time value,
    and the part is left out of the program.
    """
    return is_traced(value) or bool(value)


def constants(*names: str) -> Callable[[F], F]:
    """Returns a decorator that marks parameters that decide shapes or sizes.

    They cannot be run-time values. A sweep over them compiles a program for each value.
    """

    def mark(function: F) -> F:
        function.__dict__["constants"] = names
        return function

    return mark


def constants_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the parameters that :func:`constants` marked."""
    return getattr(function, "constants", ())


def remembered(function: F, maxsize: int = 64) -> F:
    """Returns the function with a cache of its last results.

    Equal calls give the same object, by which compiled programs are found again. Calls with
    arguments that have no hash, such as run-time values and lists, are not kept.
    """
    known = functools.lru_cache(maxsize, typed=True)(function)

    @functools.wraps(function)
    def looked_up(*arguments: Any, **options: Any) -> Any:
        try:
            hash((arguments, *options.values()))
        except TypeError:
            return function(*arguments, **options)
        return known(*arguments, **options)

    return cast(F, looked_up)


def as_arrays(values: Values) -> dict[str, Array]:
    """Returns the values as float32 scalars, in the order of their names."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"The run-time value {name!r} must be a number, not {value!r}.")
    return {name: jnp.float32(value) for name, value in sorted(values.items())}


def parametrised(made: Any, values: Values | None) -> tuple[Any, Callable[[Values], Any] | None]:
    """Returns the object that a function makes from the values, and the function.

    Args:
      made: the object itself, which comes back with None, or a function of the values.
      values: None if nothing is a run-time value.
    """
    if values is None or isinstance(made, tuple) or not callable(made):
        return made, None
    try:
        return made(values), made
    except KeyError as error:
        raise InputError(
            f"A function of the run-time values asks for {error}, and values has"
            f" {', '.join(map(repr, values)) or 'none'}."
        ) from None
