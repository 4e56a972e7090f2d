"""Checks of arguments that the models of availability share."""

import math
from typing import Any

from fedjax_peft.display import show
from fedjax_peft.errors import InputError

__all__ = ["check_number"]


def check_number(
    model: str, name: str, value: Any, *, most: float = math.inf, positive: bool = False
) -> None:
    """Raises InputError for a value that is no number from 0 to ``most``, or is 0 if positive."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= most or math.isinf(value) or (positive and value == 0):
        limits = "above 0" if positive else "from 0 up"
        limits += "" if math.isinf(most) else f", at most {most:g}"
        raise InputError(f"{name} = {show(value)} of {model} must be a number {limits}.")
