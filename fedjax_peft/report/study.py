"""A study: runs of several methods, settings and seeds.

Runs are assigned to cells (:mod:`fedjax_peft.report.cells`) by their configs, never by the names of
their folders.

    study = read_study("runs/lr")
    for method, cell in study.chosen().items():
        print(method, cell.settings, summarise(cell.values("test_accuracy")).text(scale=100))
"""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_peft.report.cells import At, Cell, Choice, Seed, Study
from fedjax_peft.report.intervals import Difference, Summary, paired, seed_order, summarise
from fedjax_peft.report.records import (
    SEED,
    RunRecord,
    chain_of,
    find_runs,
    is_whole,
    load_run,
    load_table,
    unique,
    unstarted,
)
from fedjax_peft.report.wording import are, listing
from fedjax_peft.simulation.stopping import was_given_up
from fedjax_peft.simulation.summaries import privacy_together
from fedjax_peft.support.display import counted, one_line, printable
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.nested import flatten

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

SWEEP = "sweep.toml"
METHODS = "methods.toml"
"""The file, beside the runs of several methods, with the complete config of each method."""
_NO_SETTINGS = ("name", "preset_changes", "runtime", "validation", "values")
"""Top-level keys of a config that are names, or that the program derives from the other keys."""


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
    tables: dict[Path, str] = {}  # the method of a run, which may have another name by now
    notes: list[str] = []
    for path in map(Path, paths):
        for run in find_runs(path) or [path]:
            one, homes = load_run(run), run.resolve().parents[:2]
            home = next((p for p in homes for f in (SWEEP, METHODS) if (p / f).is_file()), None)
            if home is not None:
                sweeps.setdefault(home, read_sweep(home / SWEEP))
                tables[one.path] = one_line(run.resolve().relative_to(home).parts[0])
                if not one.config.get("name"):
                    one = one._replace(name=one_line(home.name))
            runs.append(one)
        if missing := unstarted(path):
            notes.append(f"{_named(missing)} started no round and {are(missing)} left out.")

    order = [name for home, sweep in sweeps.items() for name in _methods(home, sweep)]
    names = [tables.get(run.path, run.name) for run in runs]
    places = [order.index(name) if name in order else len(order) for name in names]
    runs = [runs[i] for i in sorted(range(len(runs)), key=places.__getitem__)]

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


def _methods(home: Path, sweep: Mapping[str, Any]) -> Iterable[str]:
    """Returns the names of the methods of a folder of runs, in the order of its config."""
    config = sweep.get("config")
    methods = config.get("methods") if isinstance(config, Mapping) else load_table(home / METHODS)
    return map(one_line, methods) if isinstance(methods, Mapping) else ()


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
    the configs' names may differ too, and the cell is named after its first run. A run whose config
    does not hold all settings is a cell by itself if ``keys`` says nothing about it.

    Args:
      keys: swept dotted keys, including seeds.
    """
    notes = privacy_together([(_seed(run.config), run.rows) for run in runs])
    used = [run for run in runs if unfinished or run.finished]
    if left_out := [run.path for run in runs if not (unfinished or run.finished)]:
        notes.append(f"{_named(left_out)} {are(left_out)} unfinished and left out.")
    if early := sum(was_given_up(run.rows) for run in used):
        notes.append(
            f"{early} of {counted(len(used), 'run')} were given up before their last round because"
            " others were better. They are not chosen, and their values are those of earlier"
            " rounds."
        )
    groups: dict[Any, list[RunRecord]] = {}
    for i, run in enumerate(used):
        groups.setdefault(_identity(run, keys, i), []).append(run)
    swept = [key for key in keys if not SEED.search(key)]
    names = _names(list(groups.values()), keys)
    seed_of = _seeds(used)
    alike: dict[str, list[RunRecord]] = {}
    for name, members in zip(names, groups.values(), strict=True):
        alike.setdefault(name, []).append(members[0])
    shown = {name: dict.fromkeys([*swept, *_differing(firsts)]) for name, firsts in alike.items()}
    cells = []
    for name, members in zip(names, groups.values(), strict=True):
        by_seed: dict[Seed, RunRecord] = {}
        repeated = [run for run in members if by_seed.setdefault(seed_of(run), run) is not run]
        notes += [
            f"{printable(str(run.path))} repeats a seed of {name} and is left out."
            for run in repeated
        ]
        config = flatten(members[0].config)
        ordered = {seed: by_seed[seed] for seed in sorted(by_seed, key=seed_order)}
        settings = {key: config[key] for key in shown[name] if key in config}
        cells.append(Cell(name, settings, ordered))
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


def read_sweep(path: Path) -> dict[str, Any]:
    """Returns the content of a ``sweep.toml``, with ``keys``; without the file, no keys.

    Raises:
      InputError: the file is damaged.
    """
    found = load_table(path)
    keys = found.get("keys", [])
    texts = [found.get(key, "") for key in ("choose_by", "baseline")]
    if not isinstance(keys, list) or not all(isinstance(one, str) for one in [*keys, *texts]):
        raise InputError(
            f"{path} cannot be read: choose_by and baseline must be names, keys a list of names."
        )
    return {**found, "keys": keys}


def _identity(run: RunRecord, keys: Sequence[str], index: int) -> Any:
    """Returns what runs of one cell have in common."""
    config = flatten(run.config)
    if not is_whole(run.config):
        own = {key: config[key] for key in keys if key in config and not SEED.search(key)}
        return (run.name, _text(own)) if any(key in config for key in keys) else index
    settings = {k: v for k, v in config.items() if _is_setting(k)}
    return (run.name if keys else None, _text(settings), chain_of(run))


def _is_setting(key: str) -> bool:
    """Returns whether a dotted key of a config tells cells apart: not a seed, and not derived."""
    return not SEED.search(key) and key.partition(".")[0] not in _NO_SETTINGS


def _text(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


def _names(groups: Sequence[Sequence[RunRecord]], keys: Sequence[str]) -> list[str]:
    """Returns the name of each group's method: that of its first run.

    Groups with equal names are settings of one method. Runs whose configs do not hold all settings
    are, without swept keys, methods of their own, with different names.
    """
    names: list[str] = []
    for group in groups:
        name = group[0].name
        alone = not is_whole(group[0].config) and not keys
        names.append(unique(name, names) if alone else name)
    return names


def _seeds(runs: Sequence[RunRecord]) -> Callable[[RunRecord], Seed]:
    """Returns the function run -> its seed: a number if one is enough to tell the runs apart."""
    of_run = {
        run.path: {k: v for k, v in flatten(run.config).items() if SEED.search(k)} for run in runs
    }
    # A method may have seeds of its own; where they are the same in all of its runs, its runs pair
    # with those of methods that lack them.
    having: dict[str, list[str]] = {}
    for of in of_run.values():
        for key, value in of.items():
            having.setdefault(key, []).append(_text({key: value}))
    shared = [key for key, values in having.items() if len(values) == len(of_run)]
    varying = [key for key, values in having.items() if len(set(values)) > 1]
    keys = {*varying} if {*varying} & {*shared} else {*varying, *shared}

    def seed(run: RunRecord) -> Seed:
        own = {k: x for k, x in of_run[run.path].items() if k in keys}
        first = next(iter(own.values()), None)
        if isinstance(first, int) and all(value == first for value in own.values()):
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


def _named(paths: Sequence[Path]) -> str:
    return listing([printable(str(path)) for path in paths], shown=4)
