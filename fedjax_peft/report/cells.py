"""Cells of a study, and the choice of one setting for each method.

A *cell* is what one table row shows: a method with one choice of the swept settings, and its runs,
which differ in their seeds only.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from fedjax_peft.report.intervals import seed_order
from fedjax_peft.report.records import RunRecord
from fedjax_peft.simulation.rows import field_is_lower_better, fields, headline
from fedjax_peft.simulation.score_names import Score, usual_scores
from fedjax_peft.simulation.stopping import was_given_up
from fedjax_peft.simulation.summaries import final, series
from fedjax_peft.support.display import one_line, shorten
from fedjax_peft.support.errors import InputError, nearest

Seed: TypeAlias = int | str
At: TypeAlias = Literal["final", "best", "mean"] | int
"""Which value of a run: the last one, the best one over all rounds, the mean of the evaluations
after the start, or that of a round."""


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

    @property
    def first(self) -> RunRecord:
        """The run of the first seed, for what all seeds share, such as the config."""
        return next(iter(self.runs.values()))

    @property
    def learning_rate(self) -> float:
        """The learning rate of the clients' optimizer."""
        return float(self.first.config["optimizer"]["learning_rate"])

    def values(self, metric: str, at: At = "final") -> dict[Seed, float]:
        """Returns seed -> value of a metric; seeds without a finite value are missing.

        Args:
          metric: a field of the rows, such as ``test_accuracy`` or ``time.train_s``.
          at: ``"final"`` (the last evaluation), ``"best"`` (the best over all rounds, which is an
            optimistic figure on the test set), ``"mean"`` (of the evaluations after round 0), or
            the index of a round.
        """
        found = {seed: value(run, metric, at) for seed, run in self.runs.items()}
        return {seed: x for seed, x in found.items() if x is not None}

    @property
    def given_up(self) -> bool:
        """Whether a run was ended because others were better."""
        return any(was_given_up(run.rows) for run in self.runs.values())

    def series(self, metric: str, x: str = "round") -> dict[Seed, tuple[list[float], list[float]]]:
        """Returns seed -> the x and y coordinates of the metric's curve.

        Args:
          x: ``"round"``, ``"bytes"``, ``"simulated_seconds"`` or ``"wall_seconds"``
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
        known, score = self.metrics, self.headline
        names = [
            name
            for split in ("validation", "test")
            for name in (*usual_scores(score, split), Score(split, "loss").name)
        ]
        if self.choose_by is not None:
            names.insert(0, self.choose_by)
        if choose_by is not None:
            names = [self.require(choose_by)]
        metric = next((name for name in names if name in known), None)
        notes = [_about_choice(metric, self.cells)] if metric else []
        if choose_by is None and self.choose_by not in (None, metric):
            notes.append(f"No run has recorded {self.choose_by}, by which the sweep was to choose.")
        return metric, notes

    def _best(self, cells: Sequence[Cell], metric: str, at: At) -> tuple[Cell | None, list[str]]:
        """Returns the best cell of a method, and sentences about cells that cannot be chosen."""
        if len(cells) == 1:
            return cells[0], []
        values = [cell.values(metric, at) for cell in cells]
        seeds = set().union(*values)
        notes, candidates = [], []
        for cell, found in zip(cells, values, strict=True):
            if at in ("final", "best", "mean") and cell.given_up:
                continue  # its values are those of other rounds; `make_study` says so
            if missing := sorted(seeds - found.keys(), key=seed_order):
                of = f" for seed {', '.join(map(str, missing))}"
                notes.append(f"{cell.name} with {cell.label} has no {metric}{of}: not chosen.")
            elif found:
                candidates.append((statistics.fmean(found.values()), cell))
        if not candidates:
            return None, notes
        better = min if self.lower_is_better(metric) else max
        return better(candidates, key=lambda one: one[0])[1], notes


def value(run: RunRecord, metric: str, at: At) -> float | None:
    """Returns the value of a run's metric; see :meth:`Cell.values`."""
    rounds, values = series(run.rows, "round", metric)
    if not values:
        return None
    if at == "best":
        return (min if field_is_lower_better(run.rows, metric) else max)(values)
    if at == "final":
        return final(run.rows, metric)
    if at == "mean":
        after = [value for at, value in zip(rounds, values, strict=True) if at > 0]
        return statistics.fmean(after) if after else None
    return dict(zip(rounds, values, strict=True)).get(float(at))


def is_test(metric: str) -> bool:
    """Returns whether a metric is measured on test data, of the server or of the clients."""
    score = Score.read(metric)
    return score is not None and score.on_test


def _about_choice(metric: str, cells: Sequence[Cell]) -> str:
    """Returns a sentence about the metric that chose the settings."""
    if is_test(metric):
        return (
            f"The settings were chosen on test data ({metric}), so the test scores of the choice"
            " are optimistic. Log a validation metric to choose by."
        )
    configs = [run.config for cell in cells for run in cell.runs.values()]
    kinds = sorted({str(config.get("validation") or "") for config in configs} - {""})
    on = f" (validation examples: {', '.join(kinds)})" if kinds and "validation" in metric else ""
    return f"The settings were chosen by the mean of {metric}{on} over seeds."


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
