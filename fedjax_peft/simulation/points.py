"""The runs of a sweep one after the other: finished ones are skipped, interrupted ones continue."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedjax_peft.errors import InputError
from fedjax_peft.rows import Row, field_is_lower_better, number, read_metrics
from fedjax_peft.simulation.stopping import Stop, median_rule

__all__ = ["Job", "PointDone", "RunJob", "is_finished", "run_points"]


class RunJob(Protocol):
    """Runs one point."""

    def __call__(self, out: Path | None, resume: bool, stop: Stop | None, /) -> Any:
        """Returns a :class:`fedjax_peft.simulation.run.Run`."""


class Job(NamedTuple):
    """A point of a sweep that can be run."""

    name: str
    """The run's directory in that of the sweep."""
    rounds: int
    run: RunJob
    group: str = ""
    """Points of one group are compared by ``early_stop``."""


class PointDone(NamedTuple):
    """The report of a point that has ended."""

    place: int
    """Points that have ended, this one included."""
    total: int
    job: Job
    value: float | None
    """The last value of the metric that chooses."""
    best: tuple[str, float] | None
    """Name and value of the best point so far."""
    seconds: float | None
    """Duration of the run; None if it had finished before."""
    seconds_left: float | None
    """Estimate for the points that are left."""
    error: str | None = None
    """Why the run failed; None if it did not."""


def run_points(
    jobs: Sequence[Job],
    *,
    out: Path | None = None,
    metric: str | None = None,
    early_stop: bool = False,
    on_start: Callable[[int, Job], None] = lambda index, job: None,
    on_point: Callable[[PointDone], None] = lambda done: None,
) -> dict[str, Any]:
    """Runs the points of a sweep and returns name -> run, without those that had finished before.

    A point that fails does not end the sweep: the others are run first.

    Args:
      jobs: the points.
      out: the sweep's directory; a point continues the run that is already in its own directory.
      metric: the field of the rows by which points are compared.
      early_stop: end a point early by :func:`fedjax_peft.simulation.stopping.median_rule`.
      on_start: called before a point with its place, from 0.
      on_point: called after every point.

    Raises:
      InputError: points failed; the message names them and the first reason.
    """
    runs: dict[str, Any] = {}
    finished: dict[str, list[list[Row]]] = {}
    best: tuple[str, float] | None = None
    failed: dict[str, str] = {}
    durations: list[float] = []
    for index, job in enumerate(jobs):
        began, error = time.perf_counter(), None
        path = None if out is None else out / job.name
        rows: list[Row] = []
        others = finished.setdefault(job.group, [])
        if path is not None and is_finished(path, job.rounds):
            rows = read_metrics(path / "metrics.jsonl")
        else:
            on_start(index, job)
            rule = median_rule(others, metric) if early_stop and metric is not None else None
            resume = path is not None and (path / "config.toml").exists()
            try:
                runs[job.name] = job.run(path, resume, rule)
                rows = runs[job.name].metrics
            except InputError as problem:
                error = failed[job.name] = str(problem)
            durations.append(time.perf_counter() - began)
        others.append(rows)
        value = _last(rows, metric)
        if value is not None and (best is None or _better(rows, metric, value, best[1])):
            best = job.name, value
        spent = durations[-1] if job.name in runs or error else None
        left = (len(jobs) - index - 1) * sum(durations) / len(durations) if durations else None
        on_point(PointDone(index + 1, len(jobs), job, value, best, spent, left, error))
    if failed:
        name, reason = next(iter(failed.items()))
        rest = "" if len(failed) == len(jobs) else " The others are complete."
        raise InputError(
            f"{len(failed)} of {len(jobs)} runs of the sweep failed.{rest} The first failure, of"
            f" {name}: {reason}"
        )
    return runs


def is_finished(path: Path, rounds: int) -> bool:
    """Returns whether a run has ended: after its last round, or because of a stop rule."""
    if (path / "checkpoints" / str(rounds)).is_dir():
        return True
    if not (path / "metrics.jsonl").is_file():
        return False
    rows = read_metrics(path / "metrics.jsonl")
    last = rows[-1] if rows else {}
    return "stopped" in last and (path / "checkpoints" / str(last["round"])).is_dir()


def _last(rows: Sequence[Row], metric: str | None) -> float | None:
    """Returns the last value of a metric, None without one."""
    found = [number(row, metric) for row in rows if metric in row] if metric else []
    return found[-1] if found else None


def _better(rows: Sequence[Row], metric: str | None, value: float, other: float) -> bool:
    assert metric is not None
    return value < other if field_is_lower_better(rows, metric) else value > other
