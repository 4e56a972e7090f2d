"""The runs of a sweep: finished ones are skipped, interrupted ones continue.

Runs go one after the other, or several at a time as one program (on an accelerator).
"""

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from fedjax_peft.engine.calls import Calling, alone
from fedjax_peft.engine.replicas import Replicas
from fedjax_peft.simulation.arguments import Given
from fedjax_peft.simulation.interrupts import noted
from fedjax_peft.simulation.rows import (
    Row,
    field_is_lower_better,
    has_ended,
    has_field,
    number,
    read_metrics,
)
from fedjax_peft.simulation.settings import check_recorded
from fedjax_peft.simulation.sharing import Queue, Share, note_failure
from fedjax_peft.simulation.simulate import simulating
from fedjax_peft.simulation.stopping import Stop, any_of, median_rule, was_given_up
from fedjax_peft.simulation.storage.lock import InUse
from fedjax_peft.support import memory
from fedjax_peft.support.display import counted
from fedjax_peft.support.errors import InputError, first_line

_REPLICAS = 8
"""Points side by side on an accelerator. A stack of more runs needs more memory."""


class Job(NamedTuple):
    """A point of a sweep that can be run."""

    name: str
    """The run's directory in that of the sweep."""
    rounds: int
    given: Callable[[Path | None, bool, Stop | None], Given]
    """(out, resume, a rule that can end the run) -> the arguments of the run."""
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
    replicas: int | Literal["auto"] = "auto",
    stop: Callable[[str], Stop | None] = lambda name: None,
    on_start: Callable[[int, Job], None] = lambda index, job: None,
    on_point: Callable[[PointDone], None] = lambda done: None,
    raises: bool = True,
    keep: bool = True,
    share: Share | None = None,
) -> dict[str, Any]:
    """Runs the points of a sweep and returns name -> run, without those that had finished before.

    A point that fails does not end the sweep: the others are run first.

    Args:
      out: the sweep's directory; a point continues the run that is already in its own directory.
      metric: the field of the rows by which points are compared.
      early_stop: end a point early by :func:`fedjax_peft.simulation.stopping.median_rule`.
      replicas: the number of points that run side by side, as one program. ``auto`` is 8 on an
        accelerator and 1 on a CPU, which one run keeps busy. With ``early_stop`` it is 1, because
        the rule compares a run with those that have finished.
      stop: returns another rule that can end the point of a name early.
      on_start: called before a point with the number of points that have ended.
      raises: raise the first reason at the end if points have failed.
      keep: return the runs; models and clients of all of them are then in memory.
      share: share the points with the other processes that work in ``out``.

    Raises:
      InputError: points failed; the message names them and the first reason. Or ``early_stop``
        without a metric; or as :class:`Queue`.
    """
    if early_stop and metric is None:
        raise InputError(
            "Stopping runs early compares them by a metric: give choose_by, such as"
            " 'validation_accuracy'."
        )
    usual = _REPLICAS if jax.default_backend() != "cpu" else 1
    count = 1 if early_stop else min(usual if replicas == "auto" else replicas, len(jobs))
    results = Results(jobs, out, metric, early_stop, stop, on_start, on_point, keep)
    missing = results.missing()
    if share is None or out is None:
        _run(results, missing, count)
    else:
        results.queue = queue = Queue(missing, out, share)
        while queue.left:
            _run(results, queue.free(results.ended_elsewhere), count)
            with noted(_WAITING) as request:
                queue.wait(request.check)
    if raises:
        results.check()
    return results.runs


def _run(results: "Results", jobs: Iterable[Job], count: int) -> None:
    """Runs points, ``count`` at a time; each is asked for when the one before it has ended."""
    if count <= 1:
        for job in jobs:
            alone(results.running(job, None))
        return
    together = Replicas(count)
    with noted(_NOTES) as request:
        together.run((results.running(job, together.program) for job in jobs), request.check)


def _notes(text: bytes) -> dict[int, bytes]:
    names = {signal.SIGINT: b"Ctrl-C", signal.SIGTERM: b"SIGTERM"}
    return {n: b"\nfedjax_peft: %b: %b.\n" % (name, text) for n, name in names.items()}


_NOTES = _notes(b"the runs side by side end at once. They continue from their last checkpoints")
_WAITING = _notes(b"this process ends; the others go on")


@dataclass
class Results:
    """The points that have ended, and the best of them; the fields are those of `run_points`."""

    jobs: Sequence[Job]
    out: Path | None
    metric: str | None
    early_stop: bool = False
    stop: Callable[[str], Stop | None] = lambda name: None
    on_start: Callable[[int, Job], None] = lambda index, job: None
    on_point: Callable[[PointDone], None] = lambda done: None
    keep: bool = False
    queue: Queue | None = None

    def __post_init__(self) -> None:
        self.runs: dict[str, Any] = {}
        self._rows: dict[str, list[list[Row]]] = {}
        self._best: tuple[str, float] | None = None
        self._failed: dict[str, str] = {}
        self._ended, self._computed = 0, 0
        self._began = time.perf_counter()

    def missing(self) -> list[Job]:
        """Reports the points that had finished before, and returns the others."""
        left, out = list[Job](), self.out
        for job in self.jobs:
            rows = [] if out is None else read_rows(out / job.name)
            if out is None or not is_finished(out / job.name, rows, job.rounds):
                left.append(job)
                continue
            try:
                check_recorded(job.given(out / job.name, True, None))
            except InputError as problem:
                self.end(job, [], error=str(problem))
            else:
                self.end(job, rows)
        return left

    def running(self, job: Job, engine: Any) -> Calling[None]:
        """Runs a point and reports it."""
        self.on_start(self._ended, job)
        others = self._rows.setdefault(job.group, [])
        median = median_rule(others, str(self.metric)) if self.early_stop else None
        path = None if self.out is None else self.out / job.name
        # Another process may begin or end this point before this one has its lock.
        resume = self.queue is not None or (path is not None and (path / "config.toml").exists())
        began = time.perf_counter()
        try:
            given = job.given(path, resume, any_of(median, self.stop(job.name)))
            if engine is not None:
                given = replace(given, placement=replace(given.placement, engine=engine))
            run = yield from simulating(given)
        except InputError as problem:
            if self.queue is not None and isinstance(problem, InUse):
                self.queue.give_back(job)
            else:
                self.end(job, [], time.perf_counter() - began, str(problem))
        except Exception as problem:
            # Points side by side may have room one after the other: the user can ask for this.
            if engine is not None or not memory.is_exhausted(problem):
                if path is not None:  # else each worker of a shared study would end by this point
                    note_failure(path, f"{type(problem).__name__}: {first_line(problem)}")
                raise
            reason = f"there is not enough memory: {first_line(problem)}"
            self.end(job, [], time.perf_counter() - began, reason)
        else:
            if self.keep:
                self.runs[job.name] = run
            self.end(job, run.metrics, time.perf_counter() - began)

    def ended_elsewhere(self, job: Job, error: str | None) -> bool:
        """Reports a point that another process has finished, or which failed there."""
        assert self.out is not None
        path = self.out / job.name
        rows = read_rows(path) if error is None else []
        if error is None and not is_finished(path, rows, job.rounds):
            return False
        self.end(job, rows, error=error)
        return True

    def end(
        self, job: Job, rows: list[Row], seconds: float | None = None, error: str | None = None
    ) -> None:
        """Reports a point; ``seconds`` is None for one that had finished before."""
        self._rows.setdefault(job.group, []).append(rows)
        if error is not None:
            self._failed[job.name] = error
        if self.out is not None and seconds is not None:
            note_failure(self.out / job.name, error)
        value, best = _last(rows, self.metric), self._best
        if was_given_up(rows):
            pass
        elif value is not None and (best is None or _better(rows, self.metric, value, best[1])):
            self._best = job.name, value
        self._ended += 1
        self._computed += seconds is not None
        each = (time.perf_counter() - self._began) / max(self._computed, 1)
        total = len(self.jobs)
        left = (total - self._ended) * each if self._computed else None
        self.on_point(PointDone(self._ended, total, job, value, self._best, seconds, left, error))

    def check(self) -> None:
        """Raises InputError if points have failed."""
        if not self._failed:
            return
        name, reason = next(iter(self._failed.items()))
        rest = "" if len(self._failed) == len(self.jobs) else " The others are complete."
        raise InputError(
            f"{len(self._failed)} of {counted(len(self.jobs), 'run')} of the sweep failed.{rest}"
            f" The first failure, of {name}: {reason}"
        )


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of a run's directory, [] if it has none yet."""
    file = path / "metrics.jsonl"
    return read_metrics(file) if file.is_file() else []


def is_finished(path: Path, rows: Sequence[Row], rounds: int) -> bool:
    """Returns whether a run has ended: after its last round, or because of a stop rule.

    Args:
      path: the directory of the run.
      rows: those of the run, or the last one alone.
    """
    return has_ended(rows, rounds) and (path / "checkpoints" / str(rows[-1]["round"])).is_dir()


def _last(rows: Sequence[Row], metric: str | None) -> float | None:
    """Returns the last value of a metric, None without one."""
    found = [number(row, metric) for row in rows if has_field(row, metric)] if metric else []
    return found[-1] if found else None


def _better(rows: Sequence[Row], metric: str | None, value: float, other: float) -> bool:
    assert metric is not None
    return value < other if field_is_lower_better(rows, metric) else value > other
