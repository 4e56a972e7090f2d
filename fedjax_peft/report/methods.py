"""The comparison of methods over seeds: one row a method, with its difference to a baseline.

Each method is shown with the setting that was chosen for it; a second table has all settings.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from rich.table import Table

from fedjax_peft.report import plots, separation
from fedjax_peft.report.intervals import FEWEST_RESAMPLED
from fedjax_peft.report.records import RunRecord, unique
from fedjax_peft.report.separation import TESTED, Comparison, Group, Measurement
from fedjax_peft.report.study import (
    At,
    Cell,
    Choice,
    Study,
    Summary,
    is_test,
    summarise,
    value_text,
)
from fedjax_peft.report.table_files import TextTable
from fedjax_peft.report.tables import (
    MISSING,
    Column,
    Part,
    cost_columns,
    terminal_table,
    text_table,
)
from fedjax_peft.report.verdict import (
    Judgement,
    capital,
    gap_text,
    listing,
    obstacle,
    sampling_variance,
    score_text,
    word,
)
from fedjax_peft.simulation.summaries import summary
from fedjax_peft.support.display import one_line
from fedjax_peft.support.errors import InputError, nearest

__all__ = ["Methods", "Options", "compare_methods", "mean_text", "methods_of"]

FEW = 3
"""Fewer seeds than this are warned of."""


class Options(NamedTuple):
    """What a report of several seeds shows."""

    metric: str | None = None
    """A field of the rows; by default the task's metric on the test set, else of the clients."""
    at: At = "final"
    """Which value of a run; see :meth:`fedjax_peft.report.study.Cell.values`."""
    choose_by: str | None = None
    """The metric that chooses the settings; see :meth:`fedjax_peft.report.study.Study.choice`."""
    baseline: str | None = None
    """The method that the others are compared with; by default the sweep's, else the first."""


class Methods(NamedTuple):
    """The comparison of methods over seeds."""

    study: Study
    choice: Choice
    cells: list[Cell]
    """One for each row."""
    names: list[str]
    """The names of the rows."""
    metric: str
    what: str
    """The compared score in words."""
    judged: Judgement | None
    baseline: str | None
    columns: list[Column]
    settings: tuple[list[str], list[Column]] | None
    """Names and columns of the table of all settings; None if no method has several."""

    @property
    def lead(self) -> str:
        """Sentences about the result, the intervals, and what the settings were chosen on."""
        basis = self.choice.notes[:1]
        if self.choice.on_test:
            basis = (f"The settings were chosen on test data ({self.choice.metric}).",)
        return " ".join([_verdict(self), *basis])

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before comparing the numbers."""
        notes = self.choice.notes if self.choice.on_test else self.choice.notes[1:]
        return [*notes, *_few_seeds(self), *_unpaired(self), *self.study.notes]

    @property
    def paired(self) -> str:
        """Sentences on the columns of the differences; empty without them."""
        found = [one.difference for one in self.judged.ranking.comparisons] if self.judged else []
        if not found:
            return ""
        t_only = any(1 < one.n < FEWEST_RESAMPLED for one in found)
        return " ".join(_about_differences(self, t_only=t_only))

    @property
    def captions(self) -> list[str]:
        """Sentences that explain the columns."""
        found = ["Values are means ± standard deviations (n − 1) over seeds."]
        titles = [column.title for column in self.columns]
        if is_test(self.metric) and any(title.startswith("Best ") for title in titles):
            found.append(_BEST)
        return found

    @property
    def rows(self) -> dict[str, list[RunRecord]]:
        """Name of a row -> its runs."""
        runs = (list(cell.runs.values()) for cell in self.cells)
        return dict(zip(self.names, runs, strict=True))

    @property
    def runs(self) -> list[RunRecord]:
        """The runs of all rows, with names that tell their seeds."""
        return [
            run._replace(name=f"{name}, seed {seed}")
            for name, cell in zip(self.names, self.cells, strict=True)
            for seed, run in cell.runs.items()
        ]

    @property
    def finals(self) -> list[str]:
        """The name and the mean of each row."""
        means = {g.name: g.mean for g in self.judged.ranking.groups} if self.judged else {}
        text = self.judged.text if self.judged else str
        return [f"{name} {text(means[name]) if name in means else MISSING}" for name in self.names]

    def terminal_tables(self, width: int) -> list[Table]:
        """Returns the results, the differences and all settings for a terminal.

        Args:
          width: characters of the terminal.
        """
        parts = [[column for column in self.columns if column.part == "results"]]
        parts.append([column for column in self.columns if column.part == "difference"])
        found = [terminal_table("\nMethod", self.names, one, width) for one in parts if one]
        if self.settings is not None:
            found.append(terminal_table("\nMethod", *self.settings, width))
        return found

    def tables(self) -> dict[str, TextTable]:
        """Returns stem of the files -> table: ``table``, and ``settings`` if there are several."""
        shown = [column for column in self.columns if column.part != "costs"]
        found = text_table(capital(self.what), "Method", self.names, shown)
        notes = [self.lead, *self.captions, *filter(None, [self.paired]), *self.warnings]
        out = {"table": found._replace(notes=notes)}
        if self.settings is not None:
            out["settings"] = text_table("All settings", "Method", *self.settings)
        return out


def methods_of(study: Study, options: Options | None = None) -> Methods | None:
    """Returns the comparison of methods; None if each run is to be a row of its own.

    That is the case for runs with one seed and one setting each, without options.

    Raises:
      InputError: see :func:`compare_methods`.
    """
    asked = options is not None and options != Options()
    if not study.cells or not (study.has_groups or asked):
        return None
    return compare_methods(study, options)


def compare_methods(study: Study, options: Options | None = None) -> Methods:
    """Returns the comparison of the methods of a study.

    A sweep's methods are shown with their chosen settings. Of runs without a sweep, all settings
    are shown, unless ``choose_by`` is given.

    Raises:
      InputError: no run has recorded a metric, or the baseline is unknown.
    """
    options = options or Options()
    metric = options.metric and study.require(options.metric)
    if metric is None:
        usual = (f"test_{study.headline}", f"client_{study.headline}_mean")
        metric = next((one for one in usual if one in study.metrics), usual[0])
    if study.keys or options.choose_by is not None:
        choice = study.choice(options.choose_by, options.at)
        cells = list(choice.cells.values()) or study.cells
    else:
        choice, cells = Choice(None, {}, False, ()), study.cells
    names = _row_names(cells)
    baseline = options.baseline if options.baseline is not None else study.baseline
    if baseline is not None and baseline not in names:
        raise InputError(
            f"There is no method {baseline!r} to compare with. {nearest(baseline, names)}"
        )
    judged = _judge(cells, names, metric, options.at, study, baseline)
    several = [name for name, found in study.methods.items() if len(found) > 1]
    return Methods(
        study=study,
        choice=choice,
        cells=cells,
        names=names,
        metric=metric,
        what=_words(metric, options.at),
        judged=judged,
        baseline=baseline or (names[0] if names else None),
        columns=_columns(cells, names, metric, options.at, choice, judged),
        settings=_settings(study, metric, options.at, choice) if several and choice.cells else None,
    )


def _judge(
    cells: Sequence[Cell],
    names: Sequence[str],
    metric: str,
    at: At,
    study: Study,
    baseline: str | None,
) -> Judgement | None:
    """Returns the comparison of the rows; None if no row has the metric."""
    groups, rows = [], {}
    for i, (name, cell) in enumerate(zip(names, cells, strict=True)):
        if values := cell.values(metric, at):
            runs = {
                seed: Measurement(x, sampling_variance(cell.runs[seed], metric, x))
                for seed, x in values.items()
            }
            groups.append(Group(name, runs))
            rows[name] = i
    if not groups or (baseline is not None and baseline not in rows):
        return None
    share = plots.is_share(metric)
    return Judgement(
        what=_words(metric, at),
        text=score_text(share),
        gap=gap_text(share),
        on_test=is_test(metric),
        rows=rows,
        ranking=separation.rank(
            groups,
            lower_is_better=study.lower_is_better(metric),
            obstacle=obstacle([run for i in rows.values() for run in cells[i].runs.values()]),
            baseline=baseline,
            over_seeds=True,
        ),
    )


def _row_names(cells: Sequence[Cell]) -> list[str]:
    """Returns the methods' names, with the settings if a method has several rows."""
    methods = [cell.name for cell in cells]
    names: list[str] = []
    for cell in cells:
        several = methods.count(cell.name) > 1 and cell.label
        names.append(unique(f"{cell.name} ({cell.label})" if several else cell.name, names))
    return names


def _words(metric: str, at: At) -> str:
    """Returns a metric and which of its values in words, such as ``final test accuracy``."""
    found = re.fullmatch(r"client_(\w+)_mean", metric)
    text = f"mean of the clients’ {word(found[1])}" if found else word(metric)
    text = re.sub(r"\bf1\b", "F1", text)
    return f"{text} in round {at}" if isinstance(at, int) else f"{at} {text}"


# Columns.


def _columns(
    cells: Sequence[Cell],
    names: Sequence[str],
    metric: str,
    at: At,
    choice: Choice,
    judged: Judgement | None,
) -> list[Column]:
    """Returns the columns of the rows, without those that are empty in all of them."""
    facts = [[summary(run.rows) for run in cell.runs.values()] for cell in cells]
    of = partial(_of_facts, facts)
    best = judged.best if judged else set()
    score = facts[0][0]["headline"] if facts else "accuracy"
    settings = [cell.label or MISSING for cell in cells]
    out = [
        Column(
            "Setting" if choice.metric is None else "Chosen setting",
            "\nSetting",
            settings,
            set(),
            is_text=True,
        ),
        Column("Seeds", "\nSeeds", [str(len(cell.runs)) for cell in cells], set()),
    ]
    if choice.metric is not None and choice.metric != metric:
        values = [summarise(cell.values(choice.metric, at)) for cell in cells]
        out.append(_mean_column(choice.metric, values, title=_words(choice.metric, at)))
    main = [summarise(cell.values(metric, at)) for cell in cells]
    out.append(_mean_column(metric, main, title=_words(metric, at), best=best))
    if metric == f"test_{score}" and at == "final":
        values = [summarise(cell.values(metric, "best")) for cell in cells]
        title = _words(metric, "best")
        out.append(_mean_column(metric, values, title=title, prefix="best_"))
    for key, title in _CLIENTS.items():
        field = f"client_{score}_{key}"
        if field != metric:
            out.append(_mean_column(field, of(f"client_{key}"), title=title, part="clients"))
    out += _difference_columns(names, judged, metric)
    means = [{key: _mean(fact[key] for fact in one) for key in one[0]} for one in facts]
    out += [column._replace(part="costs", short="") for column in cost_columns(means)]
    return [column for column in out if set(column.cells) != {MISSING}]


_CLIENTS = {
    "mean": "Clients’ mean",
    "weighted": "Weighted by test size",
    "worst_tenth": "Worst 10 % of clients",
    "worst": "Worst client",
}
"""Figure of the clients' tests -> heading."""


def _of_facts(facts: Sequence[Sequence[dict[str, Any]]], key: str) -> list[Summary]:
    return [summarise(fact[key] for fact in one if fact[key] is not None) for one in facts]


def _mean(values: Iterator[Any]) -> float | None:
    known = [value for value in values if isinstance(value, int | float)]
    return sum(known) / len(known) if known else None


def _mean_column(
    field: str,
    values: Sequence[Summary],
    *,
    title: str,
    best: set[int] | None = None,
    part: Part = "results",
    prefix: str = "",
) -> Column:
    """Returns a column of means and standard deviations; fractions are in percent."""
    share = plots.is_share(field)
    heading = f"{capital(title)} (%)" if share else capital(title)
    # Two lines on a terminal: everything but the last word in the first.
    first, _, last = heading.removesuffix(" (%)").rpartition(" ")
    short = f"{first}\n{_SHORT.get(last, last)}{' %' if share else ''}"
    name = f"{prefix}{field}"
    data: dict[str, Sequence[object]] = {name: [one.mean for one in values]}
    data |= {f"{name}_sd": [one.sd for one in values], f"{name}_n": [one.n for one in values]}
    data |= {f"{name}_low": [v.low for v in values], f"{name}_high": [v.high for v in values]}
    cells = [mean_text(field, one) for one in values]
    return Column(heading, short, cells, best or set(), part, data)


_SHORT = {"accuracy": "acc."}


def mean_text(field: str, values: Summary) -> str:
    """Returns text such as ``81.2 ± 0.4``; fractions are in percent, without the sign."""
    if plots.is_share(field) or values.mean is None:
        return values.text(100)
    return f"{values.mean:.4g}" + ("" if values.sd is None else f" ± {values.sd:.2g}")


def _difference_columns(
    names: Sequence[str], judged: Judgement | None, metric: str
) -> list[Column]:
    """Returns the columns of the paired differences; none for a single row."""
    if judged is None or len(judged.ranking.groups) < 2:
        return []
    reference = judged.ranking.comparisons[0].reference
    found = {one.name: one for one in judged.ranking.comparisons}
    rows = [found.get(name) for name in names]
    share = plots.is_share(metric)

    def number(x: float) -> str:
        return (f"{100 * x:+.1f}" if share else f"{x:+.3g}").replace("-", "−")

    unit = " (points)" if share else ""

    def column(
        title: str, short: str, text: Callable[[Comparison], str], **data: Sequence[object]
    ) -> Column:
        cells = [
            "baseline" if name == reference and title.startswith("Diff") else MISSING
            if one is None else text(one)
            for name, one in zip(names, rows, strict=True)
        ]  # fmt: skip
        return Column(title, short, cells, set(), "difference", data, title == "Result")

    def interval(low: float | None, high: float | None) -> str:
        return MISSING if low is None or high is None else f"{number(low)} to {number(high)}"

    def data(key: str) -> list[Any]:
        return [None if one is None else getattr(one.difference, key) for one in rows]

    def mean(one: Comparison) -> str:
        return MISSING if one.difference.mean is None else number(one.difference.mean)

    columns = [
        column(
            f"Difference to {reference}{unit}",
            f"Difference to\n{plots.shorten(reference, 16)}{' (pts)' if share else ''}",
            mean,
            difference=data("mean"),
            difference_n=data("n"),
        ),
        column(
            "95 % interval (t)",
            "95 % interval\nt",
            lambda one: interval(one.difference.low, one.difference.high),
            t_low=data("low"),
            t_high=data("high"),
        ),
        column(
            "95 % interval (bootstrap)",
            "95 % interval\nbootstrap",
            lambda one: interval(one.difference.boot_low, one.difference.boot_high),
            bootstrap_low=data("boot_low"),
            bootstrap_high=data("boot_high"),
        ),
        column("Result", "\nResult", _result, result=[r and _result(r) for r in rows]),
    ]
    return columns


def _result(one: Comparison) -> str:
    if one.separated:
        return "separated"
    return "not separated" if one.margin is not None else f"not known: {one.basis}"


def _settings(study: Study, metric: str, at: At, choice: Choice) -> tuple[list[str], list[Column]]:
    """Returns names and columns of the table of all settings of all methods."""
    cells = [cell for found in study.methods.values() for cell in found]
    chosen = [id(cell) for cell in choice.cells.values()]
    keys = dict.fromkeys(key for cell in cells for key in cell.settings)
    columns = []
    for key in keys:
        texts = [
            value_text(cell.settings[key]) if key in cell.settings else MISSING for cell in cells
        ]
        title = one_line(key)
        columns.append(Column(title, f"\n{title.rpartition('.')[2]}", texts, set()))
    columns.append(Column("Seeds", "\nSeeds", [str(len(cell.runs)) for cell in cells], set()))
    fields = dict.fromkeys(filter(None, (choice.metric, metric)))
    for field in fields:
        values = [summarise(cell.values(field, at)) for cell in cells]
        columns.append(_mean_column(field, values, title=_words(field, at)))
    marks = ["chosen" if id(cell) in chosen else MISSING for cell in cells]
    columns.append(Column("Choice", "\nChoice", marks, set(), is_text=True))
    return [cell.name for cell in cells], columns


# Sentences.


def _verdict(methods: Methods) -> str:
    """Returns sentences on what the comparison shows."""
    judged = methods.judged
    if judged is None:
        return f"No {methods.what} has been recorded."
    ranking = judged.ranking
    first = ranking.groups[0]
    score = f"{judged.text(first.mean)}{_spread(judged, first)}"
    if len(ranking.groups) == 1:
        return f"{capital(judged.what)} of {first.name}: {score}."
    reference = ranking.comparisons[0].reference
    known = [one for one in ranking.comparisons if one.margin is not None]
    if not known:
        why = ", ".join(sorted({one.basis for one in ranking.comparisons}))
        return (
            f"{capital(judged.what)}: no method is separated from {reference}, because there are no"
            f" intervals ({why})."
        )
    separated = [one for one in ranking.comparisons if one.separated]
    if not separated:
        return (
            f"No method is separated from {reference} in {judged.what}: no difference, paired by"
            " seed, has its 95 % intervals on one side of 0."
        )
    best = ""
    if ranking.winner:
        best = f"{first.name} has the best {judged.what}, separated from every other: {score}. "
    texts = [f"{one.name} ({_signed(judged, one.difference.mean)})" for one in separated]
    rest = [one.name for one in ranking.comparisons if not one.separated]
    others = f"; {listing(rest)} {'is' if len(rest) == 1 else 'are'} not" if rest else ""
    verb = "is" if len(texts) == 1 else "are"
    what = "" if best else f" in {judged.what}"
    return f"{best}{listing(texts)} {verb} separated from {reference}{what}{others}."


def _signed(judged: Judgement, difference: float | None) -> str:
    size = judged.gap(abs(difference or 0.0))
    return f"+{size}" if (difference or 0.0) > 0 else f"−{size}"


def _spread(judged: Judgement, group: Group) -> str:
    found = group.summary
    if found.sd is None:
        return " (one seed)"
    return f" (mean of {found.n} seeds, standard deviation {judged.gap(found.sd)})"


def _few_seeds(methods: Methods) -> Iterator[str]:
    few: dict[int, list[str]] = {}
    for name, cell in zip(methods.names, methods.cells, strict=True):
        if len(cell.runs) < FEW:
            few.setdefault(len(cell.runs), []).append(name)
    for n, names in few.items():
        have = "has" if len(names) == 1 else "have"
        if n == 1:
            yield f"{listing(names)} {have} one seed: no standard deviation and no interval."
        else:
            yield (
                f"{listing(names)} {have} {n} seeds. Use at least {FEW}: intervals of fewer are so"
                " wide that they separate next to nothing."
            )


def _unpaired(methods: Methods) -> Iterator[str]:
    for one in methods.judged.ranking.comparisons if methods.judged else ():
        if seeds := one.difference.unpaired:
            yield (
                f"{one.name} and {one.reference} do not have the same seeds: the difference leaves"
                f" out seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}."
            )


def _about_differences(methods: Methods, *, t_only: bool) -> Iterator[str]:
    """Yields what the intervals of the differences contain, and what separated means.

    Args:
      methods: the comparison.
      t_only: whether a difference has too few seeds for the bootstrap.
    """
    yield (
        "Differences are paired by seed. Separated: the 95 % intervals, by Student’s t and by the"
        " bootstrap, exclude 0."
    )
    if t_only:
        yield f"With fewer than {FEWEST_RESAMPLED} seeds, only Student’s t has an interval."
    comparisons = methods.judged.ranking.comparisons if methods.judged else ()
    if any(one.basis.endswith(TESTED) for one in comparisons):
        yield (
            "The intervals contain the chance of the seeds and of the test examples: the binomial"
            " variances of both scores, as if the methods were tested on different examples."
        )
    else:
        yield (
            "The intervals are about the seeds only, on these test examples, because the metric is"
            " no share of a known number of examples. Without a spread over seeds there is none."
        )
    yield (
        "Each comparison has 95 % confidence by itself. The best mean is bold only if it is"
        " separated from every other method with 95 % confidence over all pairs together"
        " (Bonferroni)."
    )


_BEST = "The best value over all rounds is chosen on the test set, so it is optimistic."
