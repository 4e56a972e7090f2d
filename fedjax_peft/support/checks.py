"""Checks of options: of a choice, of a whole number."""

from collections.abc import Iterable
from typing import Any

from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest


def check_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises InputError for an option whose value is not one of the known ones."""
    if value not in (known := tuple(known)):
        raise InputError(f"{name} = {value!r} is unknown. {nearest(str(value), known)}")


def check_count(
    method: str, name: str, value: Any, least: int = 1, most: int | None = None
) -> None:
    """Raises InputError for a value that is no whole number from ``least`` up, or to ``most``."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        limits = f"from {least} " + ("up" if most is None else f"to {most:,}")
        raise InputError(f"{name} = {show(value)} of {method} must be a whole number {limits}.")
