"""The runs of a sweep, from a config and the command line.

    [sweep]
    choose_by = "validation_accuracy"      # the metric that chooses among the settings of a method
    baseline = "fedlr"                     # the method that the others are compared with
    constants = ["algorithm.gamma"]        # numbers that are compiled into the program
    [sweep.grid]
    seed = [0, 1, 2]
    "optimizer.learning_rate" = [1e-3, 3e-3, 1e-2]

A sweep runs every combination of the values in ``[sweep.grid]``, for every ``[methods.NAME]``. A
method can have its own ``[methods.NAME.sweep.grid]``, whose keys replace those of the config. On
the command line, ``key=v1,v2`` and ``key=0..4`` (a range of integers, both ends included) set a
key of the grid, and ``key=value`` gives it one value. ``methods.NAME.key=...`` does so for one
method, whatever ``key=...`` says.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_peft.config import config as configs
from fedjax_peft.config.keys import OF_A_STUDY
from fedjax_peft.config.labels import check_apart
from fedjax_peft.support import toml
from fedjax_peft.support.display import one_line, show
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.files import folder_names
from fedjax_peft.support.nested import flatten

_KEYS = ("choose_by", "baseline", "constants", "grid")
_RUNTIME = (
    *("optimizer", "algorithm", "aggregator", *configs.SCHEDULES, "transforms"),
    *("privacy", "attack"),
)
"""Tables whose numbers can be run-time values of the compiled program."""
_RANGE = re.compile(r"\s*(\d{1,18})\s*\.\.\s*(\d{1,18})\s*")
_SEED = re.compile(r"(^|\.|_)seed$")
_MOST = 10_000


class Point(NamedTuple):
    """One run of a sweep."""

    method: str
    """The name of its ``[methods.NAME]``; empty without methods."""
    name: str
    """Its settings in words, such as ``learning_rate=0.001,seed=0``."""
    config: dict[str, Any]
    """The complete config of the run."""

    @property
    def folder(self) -> str:
        """The directory of the run, relative to that of the sweep."""
        return f"{self.method}/{self.name}" if self.method else self.name


class Sweep(NamedTuple):
    """The points of a sweep, and how to read their results."""

    points: list[Point]
    """Methods come first, then seeds, so that early results cover all settings of a method."""
    keys: list[str]
    """The swept dotted keys, seeds included."""
    choose_by: str | None
    baseline: str | None
    executor: Any = None
    """The table ``[executor]``: where workers are submitted."""


def plan(raw: configs.Config, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> Sweep:
    """Returns the runs of a sweep; all configs are checked.

    Args:
      raw: a config as written, with or without ``[sweep]``.
      overrides: ``key=value`` fixes a key; ``key=v1,v2`` and ``key=0..4`` give it several values.
      only: the methods to run; by default all.

    Raises:
      InputError: a key, a value or a method is not known, or nothing is swept.
    """
    methods = configs.methods(raw, [text for text in overrides if axis(text) is None])
    given = [_values(raw, text) for text in overrides]
    chosen = configs.only(methods, only)
    points, keys = [], dict[str, None]()
    tables = {name: _table(one.get("sweep", {})) for name, one in chosen.items()}
    for method, config in chosen.items():
        grid = {_whole(config, key): values for key, values in _grid(tables[method]).items()}
        special = set[str]()
        for name, key, values, several in given:
            key = _whole(config, key)
            if name not in (None, method) or (name is None and key in special):
                continue
            special |= set() if name is None else {key}
            if several or (values and (key in grid or key == "seed")):
                grid[key] = values  # a single value too: the run of `seed=0` is that of `seed=0..4`
            else:
                grid.pop(key, None)
        if not grid and len(methods) > 1:
            grid = {"seed": [configs.resolve(config)["seed"]]}
        keys |= dict.fromkeys(grid)
        constants = [_whole(config, str(key)) for key in tables[method].get("constants", [])]
        plain = {key: x for key, x in config.items() if key not in OF_A_STUDY}
        points += _points(method, plain, grid, constants)
    apart = {point.folder: point.config for point in points}
    check_apart(apart, overrides, [point.method for point in points])
    if not keys:
        raise InputError(
            "Nothing is swept. Give a key several values, such as seed=0..4 or"
            " optimizer.learning_rate=1e-3,3e-3, or write them in the config's [sweep.grid]."
        )
    settings = next(iter(tables.values()))
    baseline = settings.get("baseline")
    if baseline is not None and baseline not in methods:
        advice = nearest(baseline, methods)
        raise InputError(f"The baseline {show(baseline)} is not a method of the config. {advice}")
    if baseline is not None:  # as tables call it
        baseline = one_line(methods[baseline].get("name") or baseline)
    executor = next(iter(chosen.values())).get("executor")
    return Sweep(points, list(keys), settings.get("choose_by"), baseline, executor)


def together(calls: Sequence[Sweep]) -> Sweep:
    """Returns the sweep of several calls; of points in one folder, that of the last call stays."""
    points = {point.folder: point for one in calls for point in one.points}
    keys = dict.fromkeys(key for one in calls for key in one.keys)
    return calls[-1]._replace(points=list(points.values()), keys=list(keys))


def _values(raw: configs.Config, text: str) -> tuple[str | None, str, list[Any], bool]:
    """Returns the method of an override (None: all), its key, its values, and if it can have many.

    An override that removes its key has no values.
    """
    if (several := axis(text)) is not None:
        return (*configs.of_method(raw, several[0]), several[1], True)
    key, _, value = text.partition("=")
    values = [toml.parse_value(value)] if value.strip() else []
    return (*configs.of_method(raw, key.strip()), values, False)


def read(path: str | Path, overrides: Sequence[str] = ()) -> tuple[configs.Config, list[str]]:
    """Returns the content of a config file, and the overrides with absolute paths.

    A file of an override is looked for in the working directory, then beside the config.

    Raises:
      InputError: the file is no config, or an override has not the form of one.
    """
    raw = configs.load(path)
    return raw, [_with_absolute_paths(raw, text, Path(path).parent) for text in overrides]


def _with_absolute_paths(raw: configs.Config, text: str, folder: Path) -> str:
    """Returns an override with absolute paths for files here, or else in ``folder``."""
    key, equals, value = text.partition("=")
    if not equals or not value.strip():
        return text
    try:
        _, given = axis(text) or (key, [toml.parse_value(value)])
    except ValueError:
        return text  # where it is applied, it is refused
    own = configs.of_method(raw, key.strip())[1]
    parts, found = written = configs.key_parts(raw, own), given
    for place in (Path(), folder):
        placed = [configs.placed(parts, one, place) for one in found]
        parts, found = placed[0][0], [one for _, one in placed]
    if (parts, found) == written:
        return text
    return f"{key.strip().removesuffix(own)}{'.'.join(parts)}={','.join(map(toml.literal, found))}"


def axis(text: str) -> tuple[str, list[Any]] | None:
    """Returns the key and the values of an override with several values, None for other texts.

    ``0..4`` is a range of integers. ``1e-3,3e-3`` is a list; a comma inside brackets or quotes does
    not separate values.
    """
    key, equals, value = text.partition("=")
    if not equals or not value.strip():
        return None
    if ends := _RANGE.fullmatch(value):
        first, last = map(int, ends.groups())
        if not first <= last < first + _MOST:
            raise InputError(f"The range {show(text)} must go up, over at most {_MOST:,} numbers.")
        return key.strip(), list(range(first, last + 1))
    values = _split(value)
    return (key.strip(), [toml.parse_value(one) for one in values]) if len(values) > 1 else None


def _split(text: str) -> list[str]:
    """Returns the parts of a text between its commas that are not in brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _table(given: Any) -> dict[str, Any]:
    """Returns the table ``[sweep]`` of a config, checked."""
    if not isinstance(given, dict):
        raise InputError(f"[sweep] must be a table, not {show(given)}.")
    for key in given:
        if key not in _KEYS:
            raise InputError(f"Unknown config key [sweep] {show(key)}. {nearest(key, _KEYS)}")
    for key, kind, words in (
        ("choose_by", str, "the name of a metric"),
        ("baseline", str, "the name of a method"),
        ("constants", list, "a list of keys"),
        ("grid", dict, "a table of keys and their values"),
    ):
        if key in given and not isinstance(given[key], kind):
            raise InputError(f"[sweep] {key} = {show(given[key])} must be {words}.")
    return given


def _grid(table: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns swept key -> values of a table ``[sweep]``."""
    grid = flatten(table.get("grid", {}))
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise InputError(
                f"[sweep.grid] {key} = {show(values)} must be a list of values. A key with dots is"
                ' quoted: "optimizer.learning_rate" = [1e-3, 3e-3].'
            )
    return grid


def _whole(config: configs.Config, key: str) -> str:
    """Returns a key with the names that the config has for a user's functions."""
    return ".".join(configs.key_parts(config, key))


def _points(
    method: str, raw: configs.Config, grid: Mapping[str, list[Any]], constants: Sequence[str]
) -> list[Point]:
    """Returns the runs of a method."""
    keys = sorted(grid, key=lambda key: not _SEED.search(key))  # seeds change least often
    short = {key: key.rpartition(".")[2] for key in keys}
    names = {k: x if list(short.values()).count(x) == 1 else k for k, x in short.items()}
    found, texts = {}, {}
    for values in itertools.product(*(grid[key] for key in keys)):
        chosen = dict(zip(keys, values, strict=True))
        config = raw
        for key, value in chosen.items():
            config = configs.override(config, f"{key}={toml.literal(value)}")
        point = json.dumps(values, default=str)
        texts[point] = ",".join(f"{names[key]}={_plain(chosen[key])}" for key in grid)
        resolved = configs.resolve(config)
        runtime = [key for key in grid if key not in constants and _is_runtime(resolved, key)]
        found[point] = {**resolved, "runtime": runtime or None}
        if len(found) > _MOST:
            raise InputError(f"The sweep has more than {_MOST:,} runs: give its keys fewer values.")
    folders = folder_names(texts)
    return [Point(method, folders[point], config) for point, config in found.items()]


def _is_runtime(config: configs.Config, key: str) -> bool:
    """Returns whether the value of a key becomes a run-time value: a number, but not 0.

    A 0 often switches a part of an algorithm off, and the program is then smaller. Some numbers
    decide sizes, so they stay constants.
    """
    value = flatten(config).get(key)
    if configs.is_constant(key):
        return False
    return key.split(".")[0] in _RUNTIME and isinstance(value, float) and value != 0


def _plain(value: Any) -> str:
    """Returns a value as a part of a directory's name."""
    text = value if isinstance(value, str) else toml.literal(value)
    return re.sub(r"[^\w.+\-\[\]]+", "_", text)
