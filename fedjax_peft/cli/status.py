"""The command ``status``: what has become of every point of a study."""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedjax_peft.cli import sweep_file
from fedjax_peft.report.records import find_runs, load_table, unstarted
from fedjax_peft.report.study import SWEEP, read_sweep
from fedjax_peft.simulation.points import is_finished
from fedjax_peft.simulation.progress import duration
from fedjax_peft.simulation.rows import read_metrics
from fedjax_peft.simulation.sharing import read_failure
from fedjax_peft.simulation.storage.lock import RunLock
from fedjax_peft.support.display import one_line, printable
from fedjax_peft.support.errors import InputError


def status(options: argparse.Namespace) -> None:
    """Prints a line for each point, and how many there are of each kind."""
    points = _points(options.study)
    width, counts = max(map(len, points)), Counter[str]()
    for name, rounds in points.items():
        kind, more = _state(options.study / name, rounds)
        counts[kind] += 1
        if not options.quiet:
            print(printable(f"{name:{width}}  {kind:8}  {one_line(more)}".rstrip()))
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()))


def _points(study: Path) -> dict[str, int]:
    """Returns the folder of each point and its rounds; of all points, also those not begun.

    Raises:
      InputError: the directory is no study.
    """
    if calls := sweep_file.read(study):
        return {p.folder: p.config["rounds"] for p in sweep_file.plan(calls).points}
    known: dict[str, Any] = read_sweep(study / SWEEP).get("points", {})
    found = {one.relative_to(study).as_posix(): one for one in _runs(study) if one != study}
    known |= {name: load_table(one / "config.toml").get("rounds", 0) for name, one in found.items()}
    if not known:
        raise InputError(f"{study} is no study: it has neither {SWEEP} nor runs inside.")
    return known


def _runs(study: Path) -> Iterator[Path]:
    yield from find_runs(study)
    yield from unstarted(study)


def _state(run: Path, rounds: int) -> tuple[str, str]:
    """Returns what has become of a point, in a word, and what there is to say of it."""
    rows = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
    done = f"round {rows[-1]['round'] if rows else 0} of {rounds}"
    if (holder := RunLock.holder(run)) is not None:
        silent = f", silent for {duration(holder.silent)}" if holder.silent > _SILENT else ""
        return "running", f"{done}, by {holder} since {holder.since}{silent}"
    if is_finished(run, rounds):
        return "done", done if rows[-1]["round"] == rounds else f"{done}: ended early"
    if (failure := read_failure(run)) is not None:
        return "failed", str(failure)
    return "waiting", done if rows else ""


_SILENT = 600.0
"""Seconds without a sign of life of which the table speaks."""
