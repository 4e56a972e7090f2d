"""Presets: the settings of published systems, and of the papers' federations of a data set.

``system = "federa/fedlr"`` in a config puts the settings of one role of a paper (``systems.toml``)
under the config's own keys. ``partition = "paper"`` takes the clients that a paper gives the data
set, with its rounds and clients a round (:class:`fedjax_peft.data.catalog.Settings`).
"""

import copy
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_peft.data.catalog import DATASETS
from fedjax_peft.display import show
from fedjax_peft.errors import InputError, nearest
from fedjax_peft.nested import flatten, merge

__all__ = [
    "System",
    "changes",
    "describe",
    "expand",
    "lines",
    "missing_advice",
    "notices",
    "systems",
]

Config = dict[str, Any]
Merge = Callable[[Config, Config], Config]
"""(base, over) -> the base with the other's keys over its own."""

FILE = Path(__file__).with_name("systems.toml")
NEUTRAL = "baselines"
"""The section whose roles belong to no single paper: their names have no prefix."""


class System(NamedTuple):
    """A preset: one role of a published system."""

    about: str
    """One line."""
    paper: str
    settings: Config
    """Keys of a config."""
    left: Mapping[str, str]
    """Dotted keys that the user must choose -> what the paper says about them."""


@cache
def _file() -> Config:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def systems() -> dict[str, System]:
    """Returns the presets by name: ``federa``, ``federa/fedlr`` and so on."""
    result = {}
    for paper, section in _file().items():
        if paper == "renamed":
            continue
        for role, table in section["roles"].items():
            own = {k: v for k, v in table.items() if k not in ("about", "left")}
            settings = merge(section.get("all", {}), own)
            left = {**section.get("left", {}), **table.get("left", {})}
            name = role if paper == NEUTRAL or role == paper else f"{paper}/{role}"
            result[name] = System(table["about"], section["title"], settings, left)
    return result


def lines() -> dict[str, str]:
    """Returns what ``fedjax-peft list`` shows of the presets: a line, and what each leaves."""
    return {
        name: f"{one.about}\nleft to you: {', '.join(one.left)}" for name, one in systems().items()
    }


def describe(name: str) -> str:
    """Returns all that a preset sets and leaves, a line each (``fedjax-peft list system NAME``)."""
    system = systems()[name]
    said = [f"{key} = {_written(value)}" for key, value in flatten(system.settings).items()]
    left = [f"{key}: {why}" for key, why in system.left.items()]
    lines = [f"{name}: {system.about}", system.paper, "sets", *(f"  {x}" for x in said)]
    return "\n".join([*lines, "leaves to you", *(f"  {x}" for x in left)])


def expand(raw: Config, over: Merge) -> Config:
    """Returns a config with its system's settings, and below these its data set's, under its own.

    Args:
      raw: as written, every table a table.
      over: how a config goes over another.

    Raises:
      InputError: an unknown system (the nearest is named), or a data set without a paper's clients.
    """
    raw = copy.deepcopy(raw)
    base = _system(raw["system"]).settings if raw.get("system") is not None else {}
    if isinstance(raw.get("partition"), dict) and raw["partition"].get("name") == "paper":
        data = raw.get("data")
        found = _federation(data.get("name") if isinstance(data, dict) else None)
        raw["partition"] = {**found["partition"], **raw["partition"]}
        raw["partition"]["name"] = found["partition"]["name"]
        base = over(found, base)
    return over(base, raw)


def changes(config: Config) -> dict[str, str]:
    """Returns what a resolved config changes in its system's settings: key -> "16 -> 8".

    A key that the config's function does not have is left out: the change of the function says it.
    """
    if config.get("system") is None:
        return {}
    ours = flatten(config)
    result = {}
    for key, value in flatten(_system(config["system"]).settings).items():
        if key in ours and ours[key] != value:
            result[key] = f"{_written(value)} -> {_written(ours[key])}"
    return result


def notices(raw: Config, config: Config) -> Iterator[str]:
    """Yields what a user should know of a run's preset, one line each.

    Args:
      raw: the config as written.
      config: the resolved one.
    """
    name = config.get("system")
    if name is None:
        return
    system = _system(name)
    if changed := config.get("system_changes"):
        said = ", ".join(f"{key} {change}" for key, change in changed.items())
        yield (
            f"system {name!r}: this run's own settings replace the preset's: {said}"
            " (KEY= on the command line takes a preset's value back)"
        )
    given = {*flatten(raw), *raw, *flatten(system.settings)}
    partition = raw.get("partition")
    if (partition.get("name") if isinstance(partition, dict) else partition) == "paper":
        given |= {"rounds", "clients_per_round"}
    tables = {key.split(".")[0] for key in given}
    left = [k for k in system.left if k not in given and not (k in tables and "." not in k)]
    if left:
        values = flatten(config)
        said = ", ".join(f"{key} ({_written(values.get(key))})" for key in left)
        yield f"system {name!r} leaves to you, here at their defaults: {said}"


def missing_advice(raw: Config, message: str) -> str:
    """Returns what the system says about the keys that an error message calls missing, or ""."""
    if raw.get("system") is None or "is missing" not in message:
        return ""
    left = _system(raw["system"]).left
    said = [f"{key}: {why}" for key, why in left.items() if f"{key.split('.')[-1]!r} is" in message]
    return f" The system {raw['system']!r} leaves to you {'; '.join(said)}." if said else ""


def _system(name: Any) -> System:
    known = systems()
    if isinstance(name, str) and name in known:
        return known[name]
    renamed = _file()["renamed"]
    if isinstance(name, str) and name in renamed:
        raise InputError(
            f"The system {name!r} is now {renamed[name]!r}, whose settings are the paper's: some"
            " of its numbers have changed."
        )
    text = str(name)
    advice = nearest(text, known)
    if not advice.startswith("Did you mean"):
        # A role without its paper, such as "pfeiffer".
        role = text.rpartition("/")[2]
        same = [one for one in known if one.rpartition("/")[2] == role]
        advice = f"Did you mean {' or '.join(map(repr, same[:3]))}?" if same else advice
    raise InputError(f"There is no system {show(text)}. {advice} (`fedjax-peft list` shows all.)")


def _federation(data: Any) -> Config:
    """Returns the part of a config that a paper's federation of a data set is."""
    known = {name: one.settings for name, one in DATASETS.items() if one.settings.partition}
    if not isinstance(data, str) or data not in known:
        raise InputError(
            f"partition = 'paper' takes the clients that a paper gives a named data set; there are"
            f" none for {show(data)}. {nearest(str(data), known)}"
        )
    settings = known[data]
    counts = {"rounds": settings.rounds, "clients_per_round": settings.clients_per_round}
    result: Config = {key: value for key, value in counts.items() if value is not None}
    result["partition"] = copy.deepcopy(dict(settings.partition or {}))
    if settings.options:
        result["data"] = dict(settings.options)
    return result


def _written(value: Any) -> str:
    if value is None:
        return "not set"
    return f"{value:g}" if isinstance(value, float) else f"{value}"
