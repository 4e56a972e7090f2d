"""The command ``plan``: whether a config fits into a device, and how fast a round can be."""

import argparse
import re
from collections.abc import Callable, Iterator
from datetime import datetime

import jax

from fedjax_peft.config import config as configs
from fedjax_peft.config import hours, memory, sweeps
from fedjax_peft.config.memory import Planned
from fedjax_peft.simulation.planning import devices, product_rates
from fedjax_peft.simulation.planning.memory_plan import compiled_bytes
from fedjax_peft.support.accelerators import USABLE, Device, find_device
from fedjax_peft.support.display import counted
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.memory import in_bytes

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30}


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
    """Prints the memory of a config's runs, and the time on a device; nothing is trained."""
    if options.memory is not None and options.device is not None:
        raise InputError("--device has a memory of its own: leave --memory out.")
    device = None if options.device is None else find_device(options.device)
    limit = None if options.memory is None else read_bytes(options.memory)
    if options.lanes is not None and options.lanes < 1:
        raise InputError(f"--lanes must be 1 or more, not {options.lanes}.")
    if options.workers is not None and (options.workers < 1 or device is None):
        raise InputError("--workers is a number of devices, 1 or more: name them with --device.")
    written, options.overrides = sweeps.read(options.config, options.overrides)
    single = [text for text in options.overrides if sweeps.axis(text) is None]
    runs = {} if device is None else hours.runs_of(written, options.overrides)
    totals = []
    methods = configs.methods(written, single)
    resolved = {name: configs.resolve(raw) for name, raw in methods.items()}
    for name, config in resolved.items():
        planned = memory.planned(config, device)
        chosen = config["placement"]["lanes"]
        lanes = options.lanes or (chosen if isinstance(chosen, int) else 1)
        total, most = planned.plan.total(lanes), device.memory if device else limit
        if name:
            print(f"{name}:")
        print(*table(planned, lanes), sep="\n")
        if planned.reused is not None:
            print(planned.reused)
        if device is not None:
            found = planned.on_device(lanes)
            found = devices.asked(found, planned.parts) if options.compile else found
            total = found.needed
            print(found)
            step = _steps(device, lanes, config, found.seconds)
            totals.append(hours.hours_of(runs[name], step, lanes))
            print(f"  {totals[-1]}")
        elif options.compile:
            total = compiled_bytes(planned.parts, lanes)
            where, size = jax.default_backend(), in_bytes(total)
            print(f"  The compiler for {where} plans {size} with {counted(lanes, 'lane')}.")
        if limit is not None:
            print(_verdict(planned, lanes, limit, total))
        if most is not None:
            print(*_advice(options, name, planned, lanes, total, USABLE * most), sep="\n")
    for line in () if device else product_rates.notices(resolved.values()):
        print(line)
    if len(totals) > 1:
        print(hours.together(totals))
    if options.workers is not None:
        print(hours.on_workers(totals, options.workers, datetime.now()))


def _steps(
    device: Device, lanes: int, config: configs.Config, seconds: float
) -> Callable[[configs.Config], float]:
    """Returns the function resolved config -> the least seconds of its step, planned once each.

    Args:
      config: whose seconds are known.
    """
    known = {hours.program_of(config): seconds}

    def step(one: configs.Config) -> float:
        program = hours.program_of(one)
        if program not in known:
            known[program] = memory.planned(one, device).on_device(lanes).seconds
        return known[program]

    return step


def table(planned: Planned, lanes: int) -> list[str]:
    """Returns the lines of a plan's table."""
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
        ("what the algorithm's step holds besides", a.of_algorithm),
        (f"layer at work, largest array: {planned.largest}", a.working),
    ]
    total = f"together: {in_bytes(plan.fixed)} + {lanes:,} x {in_bytes(plan.per_lane)}"
    width = max(len(total), *(len(text) + 2 for text, _ in once + each))

    def rows(group: list[tuple[str, int]]) -> list[str]:
        return [f"    {text:{width - 2}}  {in_bytes(n):>10}" for text, n in group if n]

    lines = [
        "  once, for all lanes",
        *rows(once),
        "  for each lane, a client that trains beside others",
        *rows(each),
    ]
    lines.append("  " + "-" * (width + 12))
    lines.append(f"  {total:{width}}  {in_bytes(plan.total(lanes)):>10}")
    return lines


def _verdict(planned: Planned, lanes: int, limit: float, total: float) -> str:
    """Returns the line that says whether a plan fits into a memory, and how many lanes do.

    Args:
      total: the bytes that ``lanes`` lanes need; the compiler's, if it was asked. Other numbers of
        lanes are planned by arithmetic, which is taken to be wrong by the same factor.
    """
    missing = total - USABLE * limit
    most = planned.plan.most_lanes(USABLE * limit * planned.plan.total(lanes) / total)
    does = "fits" if missing <= 0 else f"is {in_bytes(missing)} too large to fit"
    return (
        f"  {counted(lanes, 'lane').capitalize()}: {does} into {in_bytes(limit)}, of which"
        f" {1 - USABLE:.0%} are left to the driver. Most lanes that fit:"
        f" {most:,}."
    )


def _advice(
    options: argparse.Namespace,
    name: str,
    planned: Planned,
    lanes: int,
    total: float,
    usable: float,
) -> Iterator[str]:
    """Yields lines about the lanes of no use, and the nearest setting that fits if none does.

    Args:
      total: the bytes that ``lanes`` lanes need; the compiler's, if it was asked.
    """
    if planned.cohort is not None and planned.plan.most_lanes(usable) > planned.cohort:
        yield f"  A round has {counted(planned.cohort, 'client')}; more lanes are of no use."
    if total > usable:
        # Other settings are planned by arithmetic, which is taken to be wrong by the same factor.
        # So `lanes` lanes do not fit by arithmetic either, and fewer are named.
        by_arithmetic = usable * (planned.plan.total(lanes) / total)
        yield f"  {_remedy(options, name, planned, by_arithmetic)}"


def _remedy(options: argparse.Namespace, name: str, planned: Planned, usable: float) -> str:
    """Returns the nearest setting that fits into ``usable`` bytes by arithmetic."""
    if most := planned.plan.most_lanes(usable):
        return f"The nearest setting that fits: --lanes {most}."
    least = ""
    for words in _smaller(planned, usable):
        try:
            raw = configs.methods(configs.load(options.config), [*options.overrides, *words])[name]
            plan = memory.planned(configs.resolve(raw), planned.device).plan
        except InputError:  # a method that cannot be quantised, a model without blocks
            continue
        least = f"{' '.join(words)} --lanes 1"
        if plan.most_lanes(usable):
            return f"The nearest setting that fits: {least}."
    return f"Not even {least or 'one lane'} fits."


def _smaller(planned: Planned, usable: float) -> Iterator[list[str]]:
    """Yields overrides with which a config needs less memory; the mildest come first."""
    plan, size = planned.plan, planned.parts[3]["mask"].shape[0]
    room = usable - plan.fixed - plan.lane
    fewer = max(int(size * room / max(plan.activations.total, 1)), 1)
    remat = [] if planned.remat else ["model.remat=blocks"]
    if remat:
        yield remat
    if fewer < size:
        yield [f"batch_size={fewer}"]
    for kind in ("int8", "nf4"):
        yield [f"model.quantize={kind}"]
        if remat:
            yield [f"model.quantize={kind}", *remat]
    yield ["model.quantize=nf4", *remat, "batch_size=1"]
