"""What algorithms ask of their options and of the model, in a paragraph for what does not fit."""

from collections.abc import Callable, Mapping

from fedjax_peft.aggregators.lora import pairs
from fedjax_peft.algorithms.common import HeadPolicy
from fedjax_peft.errors import InputError

__all__ = [
    "at_least",
    "dual_adapters",
    "fraction",
    "lora_model",
    "only_head",
    "positive",
    "whole",
]


def at_least(low: float, **options: float) -> None:
    """Raises InputError for an option that is below ``low`` or not finite."""
    for name, value in options.items():
        if not low <= value < float("inf"):
            raise InputError(f"{name} = {value!r} must be a finite number from {low} up.")


def positive(**options: float) -> None:
    """Raises InputError for an option that is not above 0, or not finite."""
    for name, value in options.items():
        if not 0 < value < float("inf"):
            raise InputError(f"{name} = {value!r} must be a positive finite number.")


def whole(low: int, **options: int) -> None:
    """Raises InputError for an option that is no whole number, or is below ``low``."""
    for name, value in options.items():
        if not isinstance(value, int) or value < low:
            raise InputError(f"{name} = {value!r} must be a whole number from {low} up.")


def fraction(**options: float) -> None:
    """Raises InputError for an option that is not from 0 to below 1."""
    for name, value in options.items():
        if not 0 <= value < 1:
            raise InputError(f"{name} = {value!r} must be a number from 0 to below 1.")


def only_head(algorithm: str, given: HeadPolicy, wanted: HeadPolicy) -> None:
    """Raises InputError for a head policy with which an algorithm would be another one."""
    if given != wanted:
        other = {"shared": "fedavg", "private": "fedper", "frozen": "fedbabu"}.get(given)
        advice = f" For a {given} head there is {other!r}." if other else ""
        raise InputError(f"The head of {algorithm!r} must be {wanted!r}, not {given!r}.{advice}")


def dual_adapters(algorithm: str) -> Callable[[Mapping[str, str], int], None]:
    """Returns the check that a model has a global and a private adapter at its sites."""

    def check(kinds: Mapping[str, str], clients: int) -> None:
        del clients
        if not all(any(f".{own}_adapter." in n for n in kinds) for own in ("global", "private")):
            raise InputError(
                f"{algorithm} needs a model with a global and a private adapter at every site:"
                " attach peft.dual()."
            )

    return check


def lora_model(algorithm: str, *, alone: bool = False) -> Callable[[Mapping[str, str], int], None]:
    """Returns an ``Algorithm.check`` for a model with LoRA.

    Args:
      algorithm: its name, for the message.
      alone: LoRA's factors must be all that the method trains: the adapted weight is ``W + s·AB``.
    """

    def check(kinds: Mapping[str, str], clients: int) -> None:
        del clients
        factors = {name for pair in pairs(kinds).values() for name in pair}
        if not factors:
            raise InputError(
                f"{algorithm!r} is about LoRA's factors A and B, and this model has none: attach"
                " LoRA, or use 'fedavg'."
            )
        others = sorted(n for n, kind in kinds.items() if kind == "adapter" and n not in factors)
        if alone and others:
            raise InputError(
                f"{algorithm!r} folds LoRA's products into the frozen weights, which is only right"
                f" where they are all that is added, and this model also trains {others[0]!r}:"
                " attach plain LoRA, or use 'fedavg'."
            )

    return check
