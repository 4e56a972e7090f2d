"""Presets: the settings of published systems, and the papers' partitions of data sets.

``preset = "federa/fedlr"`` in a config takes the settings of one role of a paper
(``presets.toml``) as defaults. ``partition = "paper"`` takes a paper's partition of the data set,
with its rounds and clients per round (:class:`fedjax_peft.data.catalog.Settings`).
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_peft.data.catalog import DATASETS
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.nested import flatten, merge
from fedjax_peft.support.toml import read_toml

Config = dict[str, Any]
Merge = Callable[[Config, Config], Config]
"""(base, over) -> ``base`` with the keys of ``over`` in place of its own."""

FILE = Path(__file__).with_name("presets.toml")
NEUTRAL = "baselines"
"""The section of roles that belong to no single paper; their names have no prefix."""


class Preset(NamedTuple):
    """A preset: one role of a published system."""

    description: str
    """One line."""
    paper: str
    settings: Config
    """The config keys that the preset sets."""
    user_choices: Mapping[str, str]
    """Dotted keys that the preset does not set -> what the paper says about them."""


@cache
def _file() -> Config:
    return read_toml(FILE)


@cache
def presets() -> Mapping[str, Preset]:
    """Returns the presets by name, such as ``federa`` and ``federa/fedlr``."""
    result = {}
    for paper, section in _file().items():
        for role, table in section["roles"].items():
            of_role = {k: v for k, v in table.items() if k not in ("description", "user_choices")}
            settings = merge(section.get("all", {}), of_role)
            choices = {**section.get("user_choices", {}), **table.get("user_choices", {})}
            name = role if paper == NEUTRAL or role == paper else f"{paper}/{role}"
            result[name] = Preset(table["description"], section["title"], settings, choices)
    return result


def lines() -> dict[str, str]:
    """Returns two lines for each preset: its description, and the keys that the user chooses."""
    return {
        name: f"{preset.description}\nyou choose: {', '.join(preset.user_choices)}"
        for name, preset in presets().items()
    }


def describe(name: str) -> str:
    """Returns a preset's settings and the user's choices, one on each line."""
    preset = presets()[name]
    settings = [f"  {key} = {_written(value)}" for key, value in flatten(preset.settings).items()]
    choices = [f"  {key}: {why}" for key, why in preset.user_choices.items()]
    head = [f"{name}: {preset.description}", preset.paper]
    return "\n".join([*head, "sets", *settings, "you choose", *choices])


def expand(raw: Config, over: Merge) -> Config:
    """Returns a config with the settings of its preset and of its data set's paper filled in.

    The config's own keys take precedence over the preset's, and these over the data set's.

    Args:
      raw: the config as written, with a table in place of each string that stands for one.
      over: the function that overlays one config on another.

    Raises:
      InputError: the preset is unknown (the message gives the nearest one), or there is no paper's
        partition of the data set.
    """
    raw = copy.deepcopy(raw)
    base = _preset(raw["preset"]).settings if raw.get("preset") is not None else {}
    if isinstance(raw.get("partition"), dict) and raw["partition"].get("name") == "paper":
        data = raw.get("data")
        found = _federation(data.get("name") if isinstance(data, dict) else None)
        raw["partition"] = {**found["partition"], **raw["partition"]}
        raw["partition"]["name"] = found["partition"]["name"]
        base = over(found, base)
    return over(base, raw)


def changes(config: Config) -> dict[str, str]:
    """Returns the preset's settings that a resolved config replaces: key -> "16 -> 8".

    Keys that the config's function does not have are left out; the changed name is listed.
    """
    if config.get("preset") is None:
        return {}
    values = flatten(config)
    result = {}
    for key, value in flatten(_preset(config["preset"]).settings).items():
        if key in values and values[key] != value:
            result[key] = f"{_written(value)} -> {_written(values[key])}"
    return result


def notices(raw: Config, config: Config) -> Iterator[str]:
    """Yields notes on a run's preset, one line each: replaced settings, and choices left open.

    Args:
      raw: the config as written.
      config: the resolved one.
    """
    name = config.get("preset")
    if name is None:
        return
    preset = _preset(name)
    if changed := config.get("preset_changes"):
        listed = ", ".join(f"{key} {change}" for key, change in changed.items())
        yield (
            f"preset {name!r}: this run's own settings replace the preset's: {listed}"
            " (KEY= on the command line restores a preset's value)"
        )
    given = {*flatten(raw), *raw, *flatten(preset.settings)}
    partition = raw.get("partition")
    if (partition.get("name") if isinstance(partition, dict) else partition) == "paper":
        given |= {"rounds", "clients_per_round"}
    tables = {key.split(".")[0] for key in given}
    choices = [
        key
        for key in preset.user_choices
        if key not in given and not (key in tables and "." not in key)
    ]
    if choices:
        values = flatten(config)
        listed = ", ".join(f"{key} ({_written(values.get(key))})" for key in choices)
        yield f"preset {name!r} does not set these keys, which have their defaults: {listed}"


def missing_advice(raw: Config, message: str) -> str:
    """Returns the preset's advice on keys that an error message calls missing; empty if none."""
    if raw.get("preset") is None or "is missing" not in message:
        return ""
    advice = [
        f"{key}: {why}"
        for key, why in _preset(raw["preset"]).user_choices.items()
        if f"{key.split('.')[-1]!r} is" in message
    ]
    if not advice:
        return ""
    return f" With the preset {raw['preset']!r} you choose {'; '.join(advice)}."


def _preset(name: Any) -> Preset:
    known = presets()
    if isinstance(name, str) and name in known:
        return known[name]
    text = str(name)
    advice = nearest(text, known)
    if not advice.startswith("Did you mean"):
        # The name can be a role without its paper, such as "pfeiffer".
        role = text.rpartition("/")[2]
        same = [one for one in known if one.rpartition("/")[2] == role]
        advice = f"Did you mean {' or '.join(map(repr, same[:3]))}?" if same else advice
    raise InputError(
        f"There is no preset {show(text)}. {advice} (`fedjax-peft list presets` shows all.)"
    )


def _federation(data: Any) -> Config:
    """Returns the config keys of a paper's partition of a data set."""
    known = {name: one.settings for name, one in DATASETS.items() if one.settings.partition}
    if not isinstance(data, str) or data not in known:
        raise InputError(
            f"partition = 'paper' takes the partition of a data set from a paper; there is none for"
            f" {show(data)}. {nearest(str(data), known)}"
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
