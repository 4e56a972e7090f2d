"""The comparison of runs or methods: what the terminal, the files of tables and the page show.

A run of one seed is a row of its own, ranked by its score. Of several seeds or settings, a row is a
method with the setting that was chosen for it, and its difference to a baseline.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from rich.table import Table

from fedjax_peft.report import columns, cost_columns, fairness, sentences, tested, wording
from fedjax_peft.report.cells import At, Cell, Choice, Study, is_test, value
from fedjax_peft.report.columns import Column, Frame, Part
from fedjax_peft.report.judgement import Judgement, judge, on_clients, on_test, sampling_variance
from fedjax_peft.report.records import SEED, RunRecord, chain_of, distinct, is_whole, unique
from fedjax_peft.report.separation import Measurement
from fedjax_peft.report.settings import printed
from fedjax_peft.report.table_files import TextTable
from fedjax_peft.report.tables import terminal_table, text_table
from fedjax_peft.report.wording import capital, word
from fedjax_peft.simulation.rows import headline_is_lower_better
from fedjax_peft.simulation.score_names import Score, is_global, usual_scores
from fedjax_peft.simulation.summaries import summary
from fedjax_peft.support.errors import InputError, check_known

Rows: TypeAlias = Mapping[str, Mapping[Any, RunRecord]]
"""Name of a row -> seed -> run. A row of a single run has the seed None."""


class Options(NamedTuple):
    """What a comparison over seeds shows."""

    metric: str | None = None
    """A field of the rows; by default the task's metric on the test set, else of the clients."""
    at: At = "final"
    """Which value of a run; see :meth:`fedjax_peft.report.study.Cell.values`."""
    choose_by: str | None = None
    """The metric that chooses the settings; see :meth:`fedjax_peft.report.study.Study.choice`."""
    baseline: str | None = None
    """The method that the others are compared with; by default the sweep's if it is a row, else
    the first."""
    detect: float | None = None
    """The difference for which the needed seeds are told; by default .01 of a fraction."""


class Comparison(NamedTuple):
    """The comparison of runs or of methods: one row each."""

    head: str
    """What a row is: ``Run`` or ``Method``."""
    rows: Rows
    columns: list[Column]
    judged: Judgement | None
    lead: str
    """Sentences about the result."""
    finals: list[str]
    """The name and the final score of each row."""
    curve: str
    """The metric of the curves in words."""
    stem: str
    """The metric of the curves in names of files."""
    caption: str = ""
    """The title of the table in files, if it is not that of the page."""
    metric: str | None = None
    """The field of the curves; None: the headline metric of each run on the test set."""
    captions: Sequence[str] = ()
    """Sentences that explain the columns."""
    paired: str = ""
    """Sentences on the columns of the differences; empty without them."""
    power: str = ""
    """How many seeds the comparisons need; empty if it is not known."""
    warnings: Sequence[str] = ()
    """What a reader must know before comparing the numbers."""
    settings: Frame | None = None
    """The table of all settings; None if no method has several."""

    @property
    def names(self) -> list[str]:
        """The names of the rows."""
        return list(self.rows)

    @property
    def title(self) -> str:
        """The title of the page."""
        if len(self.rows) == 1:
            return f"{self.head} {self.names[0]}"
        return f"Comparison of {len(self.rows)} {self.head.lower()}s"

    @property
    def over_seeds(self) -> bool:
        """Whether a row stands for several seeds."""
        return self.head == "Method"

    @property
    def runs(self) -> list[RunRecord]:
        """The runs of all rows, with names that tell their seeds."""
        return [
            run._replace(name=f"{name}, seed {seed}" if self.over_seeds else name)
            for name, by_seed in self.rows.items()
            for seed, run in by_seed.items()
        ]

    def frame(self, shows: Callable[[Column], bool]) -> Frame:
        """Returns the table of some of the columns."""
        return Frame(self.head, self.names, [column for column in self.columns if shows(column)])

    def part(self, part: Part) -> Frame:
        """Returns a table of the page; one without columns is not shown."""
        return self.frame(lambda column: column.part == part)

    @property
    def in_terminal(self) -> list[Frame]:
        """The results, the differences and all settings for a terminal."""
        shown = [
            self.frame(lambda c: bool(c.short) and c.part != "difference"),
            self.frame(lambda c: bool(c.short) and c.part == "difference"),
        ]
        return [*shown[: 1 + bool(shown[1].columns)], *filter(None, [self.settings])]

    def terminal_tables(self, width: int) -> list[Table]:
        """Returns these tables for a terminal of ``width`` characters."""
        return [terminal_table(frame, width) for frame in self.in_terminal]

    def files(self) -> dict[str, TextTable]:
        """Returns stem of the files -> table: ``table``, and ``settings`` if there are several."""
        notes = [self.lead, *self.captions, self.paired, self.power, *self.warnings]
        shown = self.frame(lambda column: column.part != "costs")
        table = text_table(self.caption or self.title, shown)
        out = {"table": table._replace(notes=[note for note in notes if note])}
        if self.settings is not None:
            out["settings"] = text_table("All settings", self.settings)
        return out


def compare(study: Study, options: Options | None = None) -> Comparison:
    """Returns the comparison of a study.

    Each run is a row if there is one seed and one setting of each method, and no option. Otherwise
    a row is a method. A sweep's methods are shown with their chosen settings. Of runs without a
    sweep, all settings are shown, unless ``choose_by`` is given.

    Raises:
      InputError: no run has recorded a metric, the baseline is unknown, or options are given and no
        run has finished.
    """
    asked = options is not None and options != Options()
    if asked and not study.cells:
        raise InputError(
            "No run has finished, so there is nothing to compare by a metric or with a baseline."
            " Wait for a run to end, watch all of them with --watch, or leave these options out."
        )
    of_methods = study.has_groups or asked
    options = options or Options()
    shown = _of_methods(study, options) if of_methods else _of_runs(distinct(study.records))
    if options.at != "final":
        return shown
    missing = sentences.not_finite(shown.runs, shown.metric)
    return shown._replace(warnings=[*shown.warnings, *missing])


# Runs.


def _of_runs(runs: Sequence[RunRecord]) -> Comparison:
    """Returns the comparison of runs with different names and one seed each."""
    facts = [summary(run.rows) for run in runs]
    metrics = [fact["headline"] for fact in facts]
    score, share = wording.common(metrics, "score"), all(map(wording.is_share, metrics))
    field = tested.comparable(Score("test", metrics[0]).name, runs) if facts else ""
    compared = "global_score" if is_global(field) else "final_score"
    tests = any(fact["final_round"] is not None for fact in facts)
    measure = partial(on_test, compared=compared) if tests else on_clients
    scored = _different([run for run in runs if measure(run) is not None])
    names = {run.name for run in scored}
    models = tested.models(field if is_global(field) else Score("test", score).name, scored)
    what = " ".join(filter(None, [f"final test {word(score)}", models]))
    judged = judge(
        {run.name: {_seed(run): run} for run in runs},
        lambda run: measure(run) if run.name in names else None,
        what=what if tests else f"mean of the clients’ {word(score)}",
        share=share,
        on_test=tests,
        lower_is_better=all(headline_is_lower_better(run.rows) for run in scored),
    )
    text = wording.score_text(share)
    found = [*columns.of_runs(facts, judged, compared), *cost_columns.of_runs(facts)]
    return Comparison(
        head="Run",
        rows={run.name: {None: run} for run in runs},
        columns=[column for column in found if not column.is_empty],
        judged=judged,
        lead=sentences.lead_of_runs(runs, facts, judged),
        finals=[
            f"{run.name} {wording.MISSING if (x := fact[compared]) is None else text(x)}"
            for run, fact in zip(runs, facts, strict=True)
        ],
        curve=f"test {word(score)}",
        stem=score,
        metric=field if is_global(field) else None,
        captions=tested.captions(field, runs),
        warnings=tested.caution(field, {run.name: run for run in runs}),
    )


def _different(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Returns the runs without those that have the config and the seed of an earlier one."""
    found: dict[Any, RunRecord] = {}
    for i, run in enumerate(runs):
        config = json.dumps(printed({**run.config, "name": ""}), sort_keys=True)
        found.setdefault((config, chain_of(run)) if is_whole(run.config) else i, run)
    return list(found.values())


def _seed(run: RunRecord) -> str:
    values = printed(run.config).items()
    return " ".join(f"{key}={value}" for key, value in values if SEED.search(key))


# Methods.


def _of_methods(study: Study, options: Options) -> Comparison:
    """Returns the comparison of the methods of a study."""
    metric, at = _metric(study, options), options.at
    choice, cells = Choice(None, {}, False, ()), study.cells
    if study.keys or options.choose_by is not None:
        choice = study.choice(options.choose_by, at)
        cells = list(choice.cells.values()) or cells
    cells_of = dict(zip(_row_names(cells), cells, strict=True))
    rows = {name: cell.runs for name, cell in cells_of.items()}
    baseline, missing = _baseline(study, options, rows)
    firsts = {name: cell.first for name, cell in cells_of.items()}

    def measure(run: RunRecord) -> Measurement | None:
        x = value(run, metric, at)
        return None if x is None else Measurement(x, sampling_variance(run, metric, x))

    judged = judge(
        rows,
        measure,
        what=(what := tested.words(metric, at, [*firsts.values()])),
        share=wording.is_share(metric),
        on_test=is_test(metric),
        lower_is_better=study.lower_is_better(metric),
        baseline=baseline,
        over_seeds=True,
    )
    groups = judged.ranking.groups if judged else []
    means = {group.name: judged.text(group.mean) for group in groups if judged}
    facts = [[summary(run.rows) for run in cell.runs.values()] for cell in cells]
    found = columns.of_methods(cells_of, facts, metric, at, choice, judged)
    found = [c for c in [*found, *cost_columns.of_methods(facts)] if not c.is_empty]
    several = any(len(found) > 1 for found in study.methods.values())
    basis, notes = choice.notes[:1], choice.notes[1:]
    if choice.on_test:
        basis, notes = (f"The settings were chosen on test data ({choice.metric}).",), choice.notes
    warnings = [*missing, *tested.caution(metric, firsts), *notes, *sentences.few_seeds(rows)]
    lower = study.lower_is_better(study.headline)
    warnings += fairness.trade_offs(rows, judged, lower=lower)
    return Comparison(
        head="Method",
        caption=capital(what),
        rows=rows,
        columns=found,
        judged=judged,
        lead=" ".join([sentences.lead_of_methods(what, judged), *basis]),
        finals=[f"{name} {means.get(name, wording.MISSING)}" for name in rows],
        curve=word(metric),
        stem=re.sub(r"\W+", "_", metric),  # a nested metric has dots in its name
        metric=metric,
        captions=sentences.captions(metric, found, [*firsts.values()]),
        paired=sentences.paired(judged),
        power=sentences.power(judged, options.detect),
        warnings=[*warnings, *sentences.unpaired(judged), *study.notes],
        settings=columns.all_settings(study, metric, at, choice)
        if several and choice.cells
        else None,
    )


def _baseline(study: Study, options: Options, rows: Rows) -> tuple[str | None, list[str]]:
    """Returns the row that the others are compared with, and a warning if the sweep's is missing.

    Raises:
      InputError: the baseline that was asked for is no row.
    """
    if options.baseline is not None:
        check_known("method", options.baseline, rows, " to compare with")
        return options.baseline, []
    if study.baseline is None or study.baseline in rows:
        return study.baseline, []
    why = "no chosen setting" if study.baseline in study.methods else "no finished run"
    return None, [f"{study.baseline}, the baseline of the sweep, has {why}."]


def _metric(study: Study, options: Options) -> str:
    """Returns the metric to compare by."""
    if options.metric is not None:
        return study.require(options.metric)
    usual = usual_scores(study.headline)
    found = next((one for one in usual if one in study.metrics), usual[0])
    return tested.comparable(found, [cell.first for cell in study.cells])


def _row_names(cells: Sequence[Cell]) -> list[str]:
    """Returns the methods' names, with the settings if a method has several rows."""
    methods = [cell.name for cell in cells]
    names: list[str] = []
    for cell in cells:
        several = methods.count(cell.name) > 1 and cell.label
        names.append(unique(f"{cell.name} ({cell.label})" if several else cell.name, names))
    return names
