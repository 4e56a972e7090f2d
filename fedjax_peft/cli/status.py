"""The command ``status``: what has become of every point of a study."""

import argparse
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedjax_peft.cli import sweep_file
from fedjax_peft.report.records import find_runs, load_table, unstarted
from fedjax_peft.report.study import METHODS, SWEEP, read_sweep
from fedjax_peft.simulation.points import is_finished, read_rows
from fedjax_peft.simulation.progress import duration
from fedjax_peft.simulation.rows import Row
from fedjax_peft.simulation.sharing import read_failure
from fedjax_peft.simulation.storage.lock import RunLock
from fedjax_peft.support.display import one_line, printable
from fedjax_peft.support.errors import InputError

Kind = Literal["waiting", "running", "done", "failed"]


class State(NamedTuple):
    """What has become of a point."""

    kind: Kind
    more: str
    """Its round, and who runs it or why it failed."""
    holder: str = ""
    """The process that runs it."""

    def line(self, name: str, width: int) -> str:
        """Returns the line of a table in which names have ``width`` characters."""
        return printable(f"{name:{width}}  {self.kind:8}  {one_line(self.more)}".rstrip())


def status(options: argparse.Namespace) -> None:
    """Prints a line for each point, and how many there are of each kind."""
    found = {run: state(run, read_rows(run), n) for run, n in points(options.study).items()}
    names = names_of(found, options.study)
    width = max(map(len, names))
    for name, one in zip(names, found.values(), strict=True):
        if not options.quiet:
            print(one.line(name, width))
    print(counts(found.values()))


def names_of(runs: Iterable[Path], home: Path) -> list[str]:
    """Returns the names of points: their paths in ``home``, the folder of all of them."""
    names = [Path(os.path.relpath(run, home)).as_posix() for run in runs]
    return [home.resolve().name if name == "." else name for name in names]


def counts(states: Iterable[State]) -> str:
    """Returns how many points there are of each kind, in the order in which they occur."""
    numbers = Counter(one.kind for one in states)
    return ", ".join(f"{number} {kind}" for kind, number in numbers.items())


def points(study: Path) -> dict[Path, int]:
    """Returns the directory of each point, and its rounds; of all points, also those not begun.

    Args:
      study: the directory of a sweep or a run, or a folder of runs.

    Raises:
      InputError: it is none of them.
    """
    if calls := sweep_file.read(study):
        return {study / p.folder: p.config["rounds"] for p in sweep_file.plan(calls).points}
    known = {study / name: n for name, n in read_sweep(study / SWEEP).get("points", {}).items()}
    found: dict[Path, Any] = {study / n: one for n, one in load_table(study / METHODS).items()}
    found |= {
        run: load_table(run / "config.toml") for run in [*find_runs(study), *unstarted(study)]
    }
    known |= {run: config.get("rounds", 0) for run, config in found.items()}
    if not known:
        raise InputError(f"{study} is no study: it has neither {SWEEP} nor runs inside.")
    return known


def state(run: Path, rows: Sequence[Row], rounds: int) -> State:
    """Returns what has become of a point.

    Args:
      run: the directory of the point.
      rows: those of the point, or the last one alone.
      rounds: that it is to do.
    """
    done = f"round {rows[-1]['round'] if rows else 0} of {rounds}"
    if (holder := RunLock.holder(run)) is not None:
        silent = f", silent for {duration(holder.silent)}" if holder.silent > _SILENT else ""
        more = f"{done}, by {holder} since {holder.since}{silent}"
        return State("running", more, f"{holder} since {holder.since}")
    if is_finished(run, rows, rounds):
        return State("done", done if rows[-1]["round"] == rounds else f"{done}: ended early")
    if (failure := read_failure(run)) is not None:
        return State("failed", str(failure))
    return State("waiting", done if rows else "")


_SILENT = 600.0
"""Seconds without a sign of life of which the table speaks."""
