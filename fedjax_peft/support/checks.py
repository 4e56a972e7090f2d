"""Checks of numbers that users give to servers and models of availability."""

import math
from typing import Any

from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError

__all__ = ["check_count", "check_number"]


def check_count(method: str, name: str, value: Any, least: int = 1) -> None:
    """Raises InputError for a value that is no whole number from ``least`` up."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(
            f"{name} = {show(value)} of {method} must be a whole number from {least} up."
        )


def check_number(
    method: str, name: str, value: Any, *, most: float = math.inf, positive: bool = False
) -> None:
    """Raises InputError for a value that is no number from 0 to ``most``, or is 0 if positive."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= most or math.isinf(value) or (positive and value == 0):
        limits = "above 0" if positive else "from 0 up"
        limits += "" if math.isinf(most) else f", at most {most:g}"
        raise InputError(f"{name} = {show(value)} of {method} must be a number {limits}.")
