"""The command ``plan``: whether a config fits into a device's memory, and with how many lanes."""

import argparse
import re
from typing import Any

from fedjax_peft.cli.process import prepare_jax
from fedjax_peft.support.errors import InputError

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
        chosen = config["placement"]["lanes"]
        lanes = options.lanes or (chosen if isinstance(chosen, int) else 1)
        if name:
            print(f"{name}:")
        print(*table(planned, lanes, limit), sep="\n")
        if options.compile:
            size = _size(planned.compiled(lanes))
            print(f"  The compiler for {memory.platform()} plans {size} with {_lanes(lanes)}.")


def table(planned: Any, lanes: int, limit: float | None) -> list[str]:
    """Returns the lines of a plan's table.

    Args:
      planned: the plan (:class:`fedjax_peft.config.memory.Planned`).
    """
    plan, a = planned.plan, planned.plan.activations
    once = [
        ("frozen weights", plan.frozen),
        ("dequantized kernels of the layer at work", a.kernels),
        ("server's state", plan.server),
        ("sum of the uploads", plan.uploads),
        ("state that the clients keep between rounds", plan.clients),
        ("training data", plan.columns),
    ]
    each = [
        ("trained weights, gradient and optimizer state", plan.lane),
        (f"activations of {planned.shape}", a.residuals),
        ("activations of a block that is computed again", a.recomputed),
        (f"layer at work, largest array: {planned.largest}", a.working),
    ]
    total = f"together: {_size(plan.fixed)} + {lanes:,} x {_size(plan.per_lane)}"
    width = max(len(total), *(len(text) + 2 for text, _ in once + each))

    def rows(group: list[tuple[str, int]]) -> list[str]:
        return [f"    {text:{width - 2}}  {_size(n):>10}" for text, n in group if n]

    lines = ["  once, for all lanes", *rows(once), "  for each lane", *rows(each)]
    lines.append("  " + "-" * (width + 12))
    lines.append(f"  {total:{width}}  {_size(plan.total(lanes)):>10}")
    return lines if limit is None else lines + _verdict(planned, lanes, limit)


def _verdict(planned: Any, lanes: int, limit: float) -> list[str]:
    """Returns the lines that say whether a plan fits, and what makes it smaller."""
    plan, usable = planned.plan, _SHARE * limit
    most = plan.most_lanes(usable)
    does = "fits" if plan.total(lanes) <= usable else "does not fit"
    lines = [
        f"  {_lanes(lanes).capitalize()}: {does} into {_size(limit)}, of which {1 - _SHARE:.0%} are"
        f" left to the driver. Most lanes that fit: {most:,}."
    ]
    if planned.cohort is not None and most > planned.cohort:
        lines.append(f"  A round has {planned.cohort:,} clients; more lanes are of no use.")
    if plan.total(lanes) > usable:
        lines.append(f"  {_remedy(plan, lanes)}")
    return lines


def _remedy(plan: Any, lanes: int) -> str:
    """Returns what makes the largest part of a plan smaller."""
    a = plan.activations
    remat = "" if a.recomputed else 'model.remat="blocks", '
    parts = {
        'model.quantize="nf4", or model.dtype="bfloat16"': plan.frozen,
        'placement.client_state="host"': plan.clients,
        'aggregator={name="mean", error=false}, if the aggregator is "mean"': plan.uploads,
        "fewer lanes, or a PEFT method with fewer weights": lanes * plan.lane,
        f"{remat}fewer lanes, a smaller batch_size, or shorter texts": lanes * a.total,
    }
    return f"What makes the largest part smaller: {max(parts, key=lambda text: parts[text])}."


def _lanes(count: int) -> str:
    return f"{count:,} lane{'s' * (count != 1)}"


def _size(size: float) -> str:
    unit, power = ("GB", 1e9) if size >= 1e9 else ("MB", 1e6)
    return f"{size / power:,.2f} {unit}"
