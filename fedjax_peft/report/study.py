"""A study: runs of several methods, settings and seeds.

A *cell* is what one table row shows: a method with one choice of the swept settings, and its runs,
which differ in their seeds only. Runs are assigned to cells by their configs, never by the names of
their folders.

    study = read_study("runs/lr")
    for method, cell in study.chosen().items():
        print(method, cell.settings, summarise(cell.values("test_accuracy")).text(scale=100))
"""

import itertools
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from fedjax_peft.report.intervals import Difference, Summary, paired, seed_order, summarise
from fedjax_peft.report.records import SEED, RunRecord, find_runs, load_run, unique, unstarted
from fedjax_peft.simulation.earlier import new_key
from fedjax_peft.simulation.rows import field_is_lower_better, fields, has_field, headline, number
from fedjax_peft.simulation.summaries import privacy_together, series
from fedjax_peft.support.display import one_line, printable, shorten
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.nested import flatten
from fedjax_peft.support.toml import read_toml

__all__ = [
    "At",
    "Cell",
    "Choice",
    "Difference",
    "Study",
    "Summary",
    "make_study",
    "paired",
    "read_study",
    "summarise",
]

Seed: TypeAlias = int | str
At: TypeAlias = Literal["final", "best"] | int
"""Which value of a run: the last one, the best one over all rounds, or that of a round."""
SWEEP = "sweep.toml"
_NO_SETTINGS = ("name", "preset_changes", "runtime", "validation", "values")
"""Top-level keys of a config that are names, or that the program derives from the other keys."""


class Cell(NamedTuple):
    """A method with one choice of the swept settings, and its finished runs by seed."""

    name: str
    """Name of the method."""
    settings: dict[str, Any]
    """Swept dotted key, without seeds -> value; a key that the config lacks is missing."""
    runs: dict[Seed, RunRecord]

    @property
    def label(self) -> str:
        """The settings in words, such as ``learning_rate=0.001, rank=8``."""
        parts = (f"{key}={value_text(value)}" for key, value in _short(self.settings).items())
        return ", ".join(map(one_line, parts))

    def values(self, metric: str, at: At = "final") -> dict[Seed, float]:
        """Returns seed -> value of a metric; seeds without a finite value are missing.

        Args:
          metric: a field of the rows, such as ``test_accuracy`` or ``time.train_s``.
          at: ``"final"`` (the last evaluation), ``"best"`` (the best over all rounds, which is an
            optimistic figure on the test set), or the index of a round.
        """
        found = {seed: _value(run, metric, at) for seed, run in self.runs.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def series(self, metric: str, x: str = "round") -> dict[Seed, tuple[list[float], list[float]]]:
        """Returns seed -> the x and y coordinates of the metric's curve.

        Args:
          metric: see :meth:`values`.
          x: ``"round"``, ``"bytes"`` or ``"simulated_seconds"``
          (:func:`fedjax_peft.simulation.summaries.series`).
        """
        return {seed: series(run.rows, x, metric) for seed, run in self.runs.items()}


class Choice(NamedTuple):
    """The choice of one setting for each method."""

    metric: str | None
    """The metric whose mean over seeds chose; None if no method has several settings."""
    cells: dict[str, Cell]
    """Method -> its chosen setting."""
    on_test: bool
    """Whether a test metric chose, which makes the test scores of the choice optimistic."""
    notes: tuple[str, ...]
    """Sentences on what the choice was made on, and on settings that could not be chosen."""


class Study(NamedTuple):
    """Cells of several methods, with how their settings are chosen and compared."""

    cells: list[Cell]
    """Methods in the order of the runs, settings by size."""
    choose_by: str | None
    """The metric that ``sweep.toml`` names; None without such a file or name."""
    baseline: str | None
    """The method that ``sweep.toml`` names for comparison."""
    keys: tuple[str, ...]
    """Swept dotted keys, including seeds; empty for runs that are not from a sweep."""
    notes: tuple[str, ...] = ()
    """Sentences on runs that are left out."""
    records: tuple[RunRecord, ...] = ()
    """All runs that were read, also those that are left out."""

    @property
    def has_groups(self) -> bool:
        """Whether a cell has several seeds, or a sweep has several settings of a method."""
        several = any(len(cells) > 1 for cells in self.methods.values())
        return any(len(cell.runs) > 1 for cell in self.cells) or (bool(self.keys) and several)

    @property
    def methods(self) -> dict[str, list[Cell]]:
        """Name of a method -> its cells."""
        found: dict[str, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.name, []).append(cell)
        return found

    @property
    def headline(self) -> str:
        """The metric that the runs' task is judged by, such as ``accuracy``."""
        found = [run.rows for cell in self.cells for run in cell.runs.values() if run.rows]
        return headline(found[0]) if found else "accuracy"

    @property
    def metrics(self) -> list[str]:
        """Names of all numeric fields of the rows; a dot separates nested names."""
        found: dict[str, None] = {}
        for cell in self.cells:
            for run in cell.runs.values():
                found |= dict.fromkeys(name for row in run.rows for name in fields(row))
        return list(found)

    def require(self, metric: str) -> str:
        """Returns a metric that some run has recorded.

        Raises:
          InputError: no run has it; the message names the nearest ones.
        """
        if metric not in (known := self.metrics):
            raise InputError(f"No run has recorded {metric!r}. {nearest(metric, known)}")
        return metric

    def lower_is_better(self, metric: str) -> bool:
        """Returns whether lower values of a metric are better."""
        rows = next((run.rows for cell in self.cells for run in cell.runs.values()), [])
        return field_is_lower_better(rows, metric)

    def chosen(self, choose_by: str | None = None, at: At = "final") -> dict[str, Cell]:
        """Returns method -> its best setting; :meth:`choice` also says how it was chosen."""
        return self.choice(choose_by, at).cells

    def choice(self, choose_by: str | None = None, at: At = "final") -> Choice:
        """Returns the best setting of each method, by the mean of a metric over seeds.

        Cells that lack a seed of another cell of the same method (a run is missing, unfinished, or
        its metric is not finite) are not chosen, because means over different seeds do not compare.
        Of equal means, the first counts.

        Args:
          choose_by: a metric of the rows; by default that of ``sweep.toml``, else the validation
            metric of the task, and without one the test metric.
          at: see :meth:`Cell.values`.

        Raises:
          InputError: no run has recorded ``choose_by``.
        """
        methods = self.methods
        if all(len(cells) == 1 for cells in methods.values()):
            return Choice(None, {name: cells[0] for name, cells in methods.items()}, False, ())
        metric, notes = self._criterion(choose_by)
        if metric is None:
            return Choice(None, {}, False, (*notes, "No run has a metric to choose by."))
        chosen = {}
        for name, cells in methods.items():
            best, left_out = self._best(cells, metric, at)
            if best is not None:
                chosen[name] = best
            notes += left_out
        return Choice(metric, chosen, is_test(metric), tuple(notes))

    def _criterion(self, choose_by: str | None) -> tuple[str | None, list[str]]:
        """Returns the metric to choose by and sentences about it."""
        if choose_by is not None:
            return self.require(choose_by), _about_choice(choose_by, self.cells)
        known, score = set(self.metrics), self.headline
        names = [f"validation_{score}", f"client_validation_{score}_mean", "validation_loss"]
        names += [f"test_{score}", f"client_{score}_mean", "test_loss"]
        notes = []
        if self.choose_by is not None:
            if self.choose_by in known:
                return self.choose_by, _about_choice(self.choose_by, self.cells)
            notes = [f"No run has recorded {self.choose_by}, by which the sweep was to choose."]
        metric = next((name for name in names if name in known), None)
        return metric, [*(_about_choice(metric, self.cells) if metric else []), *notes]

    def _best(self, cells: Sequence[Cell], metric: str, at: At) -> tuple[Cell | None, list[str]]:
        """Returns the best cell of a method, and sentences about cells that cannot be chosen."""
        if len(cells) == 1:
            return cells[0], []
        values = [cell.values(metric, at) for cell in cells]
        seeds = set().union(*values)
        notes, candidates = [], []
        for cell, found in zip(cells, values, strict=True):
            if missing := sorted(seeds - found.keys(), key=seed_order):
                of = f" for seed {', '.join(map(str, missing))}"
                notes.append(f"{cell.name} with {cell.label} has no {metric}{of}: not chosen.")
            elif found:
                candidates.append((statistics.fmean(found.values()), cell))
        if not candidates:
            return None, notes
        better = min if self.lower_is_better(metric) else max
        return better(candidates, key=lambda one: one[0])[1], notes


def read_study(*paths: str | os.PathLike[str], unfinished: bool = False) -> Study:
    """Returns the study of sweeps, folders of runs and runs, read at any depth.

    Args:
      paths: directories; a sweep has the file ``sweep.toml``.
      unfinished: whether runs that have not done all their rounds are used too. Otherwise they are
        left out and named in ``notes``.

    Raises:
      InputError: a path contains no run, or a file is damaged.
    """
    runs: list[RunRecord] = []
    sweeps: dict[Path, dict[str, Any]] = {}
    notes: list[str] = []
    for path in map(Path, paths):
        for run in find_runs(path) or [path]:
            home = next((p for p in run.resolve().parents[:2] if (p / SWEEP).is_file()), None)
            if home is not None and home not in sweeps:
                sweeps[home] = _read_sweep(home / SWEEP)
            one = load_run(run)
            if home is not None and not one.config.get("name"):
                one = one._replace(name=one_line(home.name))
            runs.append(one)
        if missing := unstarted(path):
            notes.append(f"{_named(missing)} started no round and {_is(missing)} left out.")

    def first(key: str) -> Any:
        return next((sweep[key] for sweep in sweeps.values() if key in sweep), None)

    keys = dict.fromkeys(key for sweep in sweeps.values() for key in sweep.get("keys", ()))
    study = make_study(
        runs,
        keys=tuple(keys),
        choose_by=first("choose_by"),
        baseline=first("baseline"),
        unfinished=unfinished,
    )
    return study._replace(notes=(*notes, *study.notes))


def make_study(
    runs: Sequence[RunRecord],
    *,
    keys: Sequence[str] = (),
    choose_by: str | None = None,
    baseline: str | None = None,
    unfinished: bool = False,
) -> Study:
    """Returns the study of runs.

    Runs belong to one cell if their configs differ in seeds only. If there are no swept ``keys``,
    the configs' names may differ too, and the cell is named after its first run. The config of a
    run made in Python does not contain all settings: it is a cell by itself if ``keys`` says
    nothing about it.

    Args:
      runs: records of runs.
      keys: swept dotted keys, including seeds.
      choose_by: see :class:`Study`.
      baseline: see :class:`Study`.
      unfinished: whether unfinished runs are used too.
    """
    notes = privacy_together([(_seed(run.config), run.rows) for run in runs])
    used = [run for run in runs if unfinished or run.finished]
    if left_out := [run.path for run in runs if not (unfinished or run.finished)]:
        notes.append(f"{_named(left_out)} {_is(left_out)} unfinished and left out.")
    groups: dict[Any, list[RunRecord]] = {}
    for i, run in enumerate(used):
        groups.setdefault(_identity(run, keys, i), []).append(run)
    swept = [key for key in keys if not SEED.search(key)]
    names = _names(list(groups.values()), keys)
    seed_of = _seeds(used)
    cells = []
    for name, members in zip(names, groups.values(), strict=True):
        by_seed: dict[Seed, RunRecord] = {}
        repeated = [run for run in members if by_seed.setdefault(seed_of(run), run) is not run]
        notes += [
            f"{printable(str(run.path))} repeats a seed of {name} and is left out."
            for run in repeated
        ]
        alike = [g[0] for n, g in zip(names, groups.values(), strict=True) if n == name]
        shown = [*swept, *(key for key in _differing(alike) if key not in swept)]
        config = flatten(members[0].config)
        ordered = {seed: by_seed[seed] for seed in sorted(by_seed, key=seed_order)}
        cells.append(Cell(name, {key: config[key] for key in shown if key in config}, ordered))
    cells.sort(key=lambda cell: (names.index(cell.name), *map(_by_size, cell.settings.items())))
    return Study(cells, choose_by, baseline, tuple(keys), tuple(notes), tuple(runs))


def _seed(config: Mapping[str, Any]) -> Any:
    """Returns the seed of a run's rounds, from its config or its point of a sweep."""
    point = config.get("point", {})
    return config.get("seed", point.get("seed", 0) if isinstance(point, Mapping) else 0)


def _by_size(setting: tuple[str, Any]) -> tuple[str, bool, Any, str]:
    """Returns the key that sorts settings: numbers by their size."""
    key, value = setting
    numeric = isinstance(value, int | float)
    return key, not numeric, value if numeric else 0, str(value)


def _read_sweep(path: Path) -> dict[str, Any]:
    try:
        found = read_toml(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    keys = found.get("keys", [])
    texts = [found.get(key, "") for key in ("choose_by", "baseline")]
    if not isinstance(keys, list) or not all(isinstance(one, str) for one in [*keys, *texts]):
        raise InputError(
            f"{path} cannot be read: choose_by and baseline must be names, keys a list of names."
        )
    return {**found, "keys": [new_key(key) for key in keys]}


def _identity(run: RunRecord, keys: Sequence[str], index: int) -> Any:
    """Returns what runs of one cell have in common."""
    config = flatten(run.config)
    if "model" not in run.config:
        own = {key: config[key] for key in keys if key in config and not SEED.search(key)}
        return (run.name, _text(own)) if any(key in config for key in keys) else index
    settings = {k: v for k, v in config.items() if _is_setting(k)}
    return (run.name if keys else None, _text(settings))


def _is_setting(key: str) -> bool:
    """Returns whether a dotted key of a config tells cells apart: not a seed, and not derived."""
    return not SEED.search(key) and key.partition(".")[0] not in _NO_SETTINGS


def _text(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


def _names(groups: Sequence[Sequence[RunRecord]], keys: Sequence[str]) -> list[str]:
    """Returns the name of each group's method.

    Without swept keys, a group is named after the common name of its runs, else its first run.
    Groups of one run with equal names are methods of their own only if they are runs of Python.
    """
    names: list[str] = []
    for group in groups:
        name = group[0].name
        python = "model" not in group[0].config and not keys
        names.append(unique(name, names) if python else name)
    return names


def _seeds(runs: Sequence[RunRecord]) -> Callable[[RunRecord], Seed]:
    """Returns the function run -> its seed: a number if one is enough to tell the runs apart."""
    of_run = {
        run.path: {k: v for k, v in flatten(run.config).items() if SEED.search(k)} for run in runs
    }
    names = dict.fromkeys(itertools.chain(*of_run.values()))
    varying = [k for k in names if len({_text({k: of.get(k)}) for of in of_run.values()}) > 1]

    def seed(run: RunRecord) -> Seed:
        own = of_run[run.path]
        values = [own.get(key) for key in varying or names]
        first = values[0] if values else None
        if isinstance(first, int) and all(value == first for value in values):
            return first
        return " ".join(f"{key}={value}" for key, value in own.items()) or 0

    return seed


def _differing(runs: Sequence[RunRecord]) -> list[str]:
    """Returns the dotted keys, without seeds and names, in which configs differ."""
    configs = [flatten(run.config) for run in runs]
    return [
        key
        for key in dict.fromkeys(itertools.chain(*configs))
        if _is_setting(key) and len({_text({key: config.get(key)}) for config in configs}) > 1
    ]


def _value(run: RunRecord, metric: str, at: At) -> float | None:
    """Returns the value of a run's metric; see :meth:`Cell.values`."""
    rounds, values = series(run.rows, "round", metric)
    if not values:
        return None
    if at == "best":
        return (min if field_is_lower_better(run.rows, metric) else max)(values)
    if at == "final":
        # A last evaluation that is not finite is no value: an earlier one would hide it.
        last = next(row for row in reversed(run.rows) if has_field(row, metric))
        return number(last, metric)
    return dict(zip(rounds, values, strict=True)).get(float(at))


def is_test(metric: str) -> bool:
    """Returns whether a metric is measured on test data, of the server or of the clients."""
    words = metric.replace(".", "_").split("_")
    return "test" in words or ("client" in words and "validation" not in words)


def _about_choice(metric: str, cells: Sequence[Cell]) -> list[str]:
    """Returns sentences about the metric that chose the settings."""
    if is_test(metric):
        return [
            f"The settings were chosen on test data ({metric}), so the test scores of the choice"
            " are optimistic. Log a validation metric to choose by."
        ]
    configs = [run.config for cell in cells for run in cell.runs.values()]
    kinds = sorted({str(config.get("validation") or "") for config in configs} - {""})
    on = f" (validation examples: {', '.join(kinds)})" if kinds and "validation" in metric else ""
    return [f"The settings were chosen by the mean of {metric}{on} over seeds."]


def value_text(value: Any) -> str:
    """Returns the value of a setting as a short text on one line."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return shorten(one_line(text), 60)


def _short(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings by the last parts of their keys where these are unique."""
    last = [key.rpartition(".")[2] for key in settings]
    return {
        (end if last.count(end) == 1 else key): value
        for end, (key, value) in zip(last, settings.items(), strict=True)
    }


def _named(paths: Sequence[Path], shown: int = 3) -> str:
    more = f" and {len(paths) - shown} more" if len(paths) > shown else ""
    return f"{', '.join(printable(str(path)) for path in paths[:shown])}{more}"


def _is(paths: Sequence[Path]) -> str:
    return "is" if len(paths) == 1 else "are"
