"""The command ``plan``: whether a config fits into a device's memory, and with how many lanes."""

import argparse
import re
from typing import Any

from fedjax_peft.cli.process import prepare_jax
from fedjax_peft.errors import InputError

__all__ = ["plan", "read_bytes", "table"]

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SHARE = 0.9
"""The share of a device's memory that is planned; the rest is for the compiler and the driver."""


def read_bytes(text: str) -> float:
    """Returns a number of bytes from a text such as ``24GB`` or ``16GiB``.

    Raises:
      InputError: the text is not of this form.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if found is None or (found[2] or "") not in _UNITS:
        raise InputError(f"The memory {text!r} is not of the form 24GB or 16GiB.")
    return float(found[1]) * _UNITS[found[2] or ""]


def plan(options: argparse.Namespace) -> None:
    """Prints the memory of a config's runs; nothing is loaded or trained."""
    limit = None if options.memory is None else read_bytes(options.memory)
    if options.lanes is not None and options.lanes < 1:
        raise InputError(f"--lanes must be 1 or more, not {options.lanes}.")
    prepare_jax()
    from fedjax_peft.config import config as configs
    from fedjax_peft.config import memory

    for name, raw in configs.methods(configs.load(options.config), options.overrides).items():
        config = configs.resolve(raw)
        planned = memory.planned(config)
        lanes = options.lanes or (config["lanes"] if isinstance(config["lanes"], int) else 1)
        if name:
            print(f"{name}:")
        print(*table(planned.plan, planned.shape, lanes, limit), sep="\n")
        if options.compile:
            size = _size(planned.compiled(lanes)).strip()
            print(f"  The compiler for {memory.platform()} plans {size} with {_lanes(lanes)}.")


def table(plan: Any, shape: str, lanes: int, limit: float | None) -> list[str]:
    """Returns the lines of a plan's table.

    Args:
      plan: the plan (:class:`fedjax_peft.simulation.memory_plan.MemoryPlan`).
      shape: of a batch, in words.
      lanes: the number of lanes.
      limit: bytes of the device; None: not known.
    """
    a = plan.activations
    largest = " x ".join(map(str, a.largest))
    rows = [
        ("frozen weights, shared by all clients", plan.frozen),
        ("server's state", plan.server),
        ("state that the clients keep between rounds", plan.clients),
        ("training data", plan.columns),
        ("each lane: adapter, gradient and optimizer state", plan.lane),
        (f"each lane: activations of {shape}", a.residuals),
        (f"each lane: layer at work, largest array {largest}", a.working),
        (f"together, with {_lanes(lanes)}", plan.total(lanes)),
    ]
    width = max(len(text) for text, _ in rows)
    lines = [f"  {text:{width}}  {_size(value)}" for text, value in rows if value]
    lines.insert(-1, "  " + "-" * (len(lines[-1]) - 2))
    if limit is not None:
        usable = _SHARE * limit
        fits = "fits" if plan.total(lanes) <= usable else "does not fit"
        room = f"{_SHARE:.0%} of {_size(limit).strip()} (the rest is for the driver)"
        most = plan.most_lanes(usable)
        lines.append(f"  This {fits} into {room}. Most lanes that fit: {most:,}.")
    return lines


def _lanes(count: int) -> str:
    return f"{count:,} lane{'s' * (count != 1)}"


def _size(size: float) -> str:
    unit, power = ("GB", 1e9) if size >= 1e9 else ("MB", 1e6)
    return f"{size / power:8,.2f} {unit}"
