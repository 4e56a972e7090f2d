"""The comparison of methods over seeds: one row a method, with its difference to a baseline.

Each method is shown with the setting that was chosen for it; a second table has all settings.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from fedjax_peft.report import separation, tested
from fedjax_peft.report.cells import At, Cell, Choice, Study, is_test, value_text
from fedjax_peft.report.columns import (
    CLIENTS,
    Column,
    cost_columns,
    difference_columns,
    mean_column,
    of_models,
)
from fedjax_peft.report.comparison import Comparison
from fedjax_peft.report.intervals import (
    FEWEST_RESAMPLED,
    MOST_SEEDS,
    POWER,
    largest_deviation,
    seeds_needed,
    summarise,
)
from fedjax_peft.report.judgement import Judgement, obstacle, sampling_variance
from fedjax_peft.report.records import RunRecord, unique
from fedjax_peft.report.runs import compare_runs
from fedjax_peft.report.separation import TESTED, Group, Measurement
from fedjax_peft.report.wording import (
    MISSING,
    are,
    capital,
    is_share,
    listing,
    plural,
    signed,
    word,
)
from fedjax_peft.simulation.summaries import mean, summary
from fedjax_peft.support.display import one_line
from fedjax_peft.support.errors import InputError, check_known

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
    detect: float | None = None
    """The difference for which the needed seeds are told; by default .01 of a fraction."""


def compare(study: Study, options: Options | None = None) -> Comparison:
    """Returns the comparison of a study: of its methods, or of its runs.

    Each run is a row if there is one seed and one setting of each method, and no option.

    Raises:
      InputError: as :func:`compare_methods`, or options are given and no run has finished.
    """
    asked = options is not None and options != Options()
    if asked and not study.cells:
        raise InputError(
            "No run has finished, so there is nothing to compare by a metric or with a baseline."
            " Wait for a run to end, watch all of them with --watch, or leave these options out."
        )
    if study.has_groups or asked:
        return compare_methods(study, options)
    return compare_runs(study.records)


def compare_methods(study: Study, options: Options | None = None) -> Comparison:
    """Returns the comparison of the methods of a study.

    A sweep's methods are shown with their chosen settings. Of runs without a sweep, all settings
    are shown, unless ``choose_by`` is given.

    Raises:
      InputError: no run has recorded a metric, or the baseline is unknown.
    """
    options = options or Options()
    metric, at = _metric(study, options), options.at
    choice, cells = Choice(None, {}, False, ()), study.cells
    if study.keys or options.choose_by is not None:
        choice = study.choice(options.choose_by, at)
        cells = list(choice.cells.values()) or cells
    rows = dict(zip(_row_names(cells), cells, strict=True))
    baseline = options.baseline if options.baseline is not None else study.baseline
    if baseline is not None:
        check_known("method", baseline, rows, " to compare with")
    firsts = {name: cell.first for name, cell in rows.items()}
    what = _words(metric, at, [*firsts.values()])
    judged = _judge(rows, metric, at, study, baseline, what)
    columns = _columns(rows, metric, at, choice, judged)
    several = any(len(found) > 1 for found in study.methods.values())
    basis = choice.notes[:1]
    if choice.on_test:
        basis = (f"The settings were chosen on test data ({choice.metric}).",)
    notes = choice.notes if choice.on_test else choice.notes[1:]
    names = list(rows)
    return Comparison(
        head="Method",
        title=f"Method {names[0]}" if len(names) == 1 else f"Comparison of {len(names)} methods",
        caption=capital(what),
        rows={name: cell.runs for name, cell in rows.items()},
        columns=columns,
        judged=judged,
        lead=" ".join([_lead(what, judged), *basis]),
        finals=_finals(names, judged),
        curve=word(metric),
        stem=re.sub(r"\W+", "_", metric),  # a nested metric has dots in its name
        metric=metric,
        captions=_captions(metric, columns, [*firsts.values()]),
        paired=_paired(judged),
        power=_power(judged, options.detect),
        warnings=[
            *tested.caution(metric, firsts),
            *notes,
            *_few_seeds(rows),
            *_unpaired(judged),
            *study.notes,
        ],
        settings=_settings(study, metric, at, choice) if several and choice.cells else None,
    )


def _metric(study: Study, options: Options) -> str:
    """Returns the metric to compare by."""
    if options.metric is not None:
        return study.require(options.metric)
    usual = (f"test_{study.headline}", f"client_{study.headline}_mean")
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


def _judge(
    cells: Mapping[str, Cell], metric: str, at: At, study: Study, baseline: str | None, what: str
) -> Judgement | None:
    """Returns the comparison of the rows; None if no row, or not the baseline, has the metric."""
    groups, rows = [], {}
    for i, (name, cell) in enumerate(cells.items()):
        if values := cell.values(metric, at):
            runs = {
                seed: Measurement(x, sampling_variance(cell.runs[seed], metric, x))
                for seed, x in values.items()
            }
            groups.append(Group(name, runs))
            rows[name] = i
    if not groups or (baseline is not None and baseline not in rows):
        return None
    return Judgement(
        what=what,
        share=is_share(metric),
        on_test=is_test(metric),
        rows=rows,
        ranking=separation.rank(
            groups,
            lower_is_better=study.lower_is_better(metric),
            obstacle=obstacle([run for name in rows for run in cells[name].runs.values()]),
            baseline=baseline,
            over_seeds=True,
        ),
    )


def _words(metric: str, at: At, runs: Sequence[RunRecord] = ()) -> str:
    """Returns a metric, of which models and at which round, such as ``final test accuracy``."""
    found = re.fullmatch(r"client_(\w+)_mean", metric)
    text = f"mean of the clients’ {word(found[1])}" if found else word(tested.plain(metric))
    text = " ".join(filter(None, [text, tested.models(metric, runs)]))
    return f"{text} in round {at}" if isinstance(at, int) else f"{at} {text}"


# Columns.


def _columns(
    rows: Mapping[str, Cell], metric: str, at: At, choice: Choice, judged: Judgement | None
) -> list[Column]:
    """Returns the columns of the rows, without those that are empty in all of them."""
    cells = list(rows.values())
    facts = [[summary(run.rows) for run in cell.runs.values()] for cell in cells]
    score = facts[0][0]["headline"] if facts else "accuracy"
    out = [
        _text_column(
            "Setting" if choice.metric is None else "Chosen setting",
            [cell.label or MISSING for cell in cells],
            short="Setting",
            is_text=True,
        ),
        _seeds(cells),
    ]
    if choice.metric is not None and choice.metric != metric:
        out += _score_columns(cells, choice.metric, at)
    out += _score_columns(cells, metric, at, best=judged.best if judged else set())
    if tested.plain(metric) == f"test_{score}" and at == "final":
        out += _score_columns(cells, metric, "best", prefix="best_")
    for key, title in CLIENTS.items():
        field = f"client_{score}_{key}"
        if field != metric:
            values = [summarise(_known(one, f"client_{key}")) for one in facts]
            found = mean_column(field, values, title, part="clients")
            out.append(found._replace(short=""))
    out += difference_columns(list(rows), judged)
    means = [{key: mean(_known(one, key)) for key in one[0]} for one in facts]
    out += [column._replace(part="costs", short="") for column in cost_columns(means)]
    return [column for column in out if not column.is_empty]


def _text_column(title: str, cells: list[str], *, short: str, is_text: bool = False) -> Column:
    return Column(title, f"\n{short}", cells, set(), is_text=is_text)


def _seeds(cells: Sequence[Cell]) -> Column:
    return _text_column("Seeds", [str(len(cell.runs)) for cell in cells], short="Seeds")


def _score_columns(
    cells: Sequence[Cell], metric: str, at: At, *, best: Set[int] = frozenset(), prefix: str = ""
) -> list[Column]:
    """Returns the means of a metric over seeds; global and personal models have a column each.

    Args:
      best: the rows with the best value of ``metric``.
    """
    plain, rows = tested.plain(metric), {*range(len(cells))}
    own = {i for i in rows if tested.personal(cells[i].first, plain)}
    compared = own if metric == plain else set()
    kinds = [("global", f"global_{plain}", rows, rows - compared)]
    kinds += [("personal", plain, own, compared)]
    columns = []
    for kind, field, shown, marked in kinds if own else [("", plain, rows, rows)]:
        values = [
            summarise(cell.values(field, at) if i in shown else {}) for i, cell in enumerate(cells)
        ]
        marks = {*best} & marked
        found = mean_column(field, values, _words(plain, at), best=marks, prefix=prefix)
        columns.append(of_models(found, kind))
    return columns


def _known(facts: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Returns the numbers of a figure of the runs of a row."""
    return [x for fact in facts if isinstance(x := fact[key], int | float)]


def _settings(study: Study, metric: str, at: At, choice: Choice) -> tuple[list[str], list[Column]]:
    """Returns names and columns of the table of all settings of all methods."""
    cells = [cell for found in study.methods.values() for cell in found]
    chosen = {id(cell) for cell in choice.cells.values()}
    columns = []
    for key in dict.fromkeys(key for cell in cells for key in cell.settings):
        title = one_line(key)
        texts = [
            value_text(cell.settings[key]) if key in cell.settings else MISSING for cell in cells
        ]
        columns.append(_text_column(title, texts, short=title.rpartition(".")[2]))
    columns.append(_seeds(cells))
    fields = dict.fromkeys(filter(None, (choice.metric, metric)))
    columns += [one for field in fields for one in _score_columns(cells, field, at)]
    marks = ["chosen" if id(cell) in chosen else MISSING for cell in cells]
    columns.append(_text_column("Choice", marks, short="Choice", is_text=True))
    return [cell.name for cell in cells], columns


# Sentences.


def _lead(what: str, judged: Judgement | None) -> str:
    """Returns sentences on what the comparison shows."""
    if judged is None:
        return f"No {what} has been recorded."
    ranking = judged.ranking
    first = ranking.groups[0]
    score = f"{judged.text(first.mean)}{_spread(judged, first)}"
    if not ranking.comparisons:
        return f"{capital(what)} of {first.name}: {score}."
    reference = ranking.comparisons[0].reference
    if all(one.margin is None for one in ranking.comparisons):
        why = ", ".join(sorted({one.basis for one in ranking.comparisons}))
        return (
            f"{capital(what)}: no method is separated from {reference}, because there are no"
            f" intervals ({why})."
        )
    separated = [one for one in ranking.comparisons if one.separated]
    if not separated:
        return (
            f"No method is separated from {reference} in {what}: no difference, paired by"
            " seed, has its 95 % intervals on one side of 0."
        )
    best, where = "", f" in {what}"
    if ranking.winner:
        best = f"{first.name} has the best {what}, separated from every other: {score}. "
        where = ""
    unit = " points" if judged.share else ""
    texts = [
        f"{one.name} ({signed(one.difference.mean or 0.0, judged.share)}{unit})"
        for one in separated
    ]
    rest = [one.name for one in ranking.comparisons if not one.separated]
    others = f"; {listing(rest)} {are(rest)} not" if rest else ""
    return f"{best}{listing(texts)} {are(texts)} separated from {reference}{where}{others}."


def _spread(judged: Judgement, group: Group) -> str:
    found = group.summary
    if found.sd is None:
        return " (one seed)"
    return f" (mean of {found.n} seeds, standard deviation {judged.gap(found.sd)})"


def _finals(names: Sequence[str], judged: Judgement | None) -> list[str]:
    """Returns the name and the mean of each row."""
    groups = judged.ranking.groups if judged else []
    means = {group.name: judged.text(group.mean) for group in groups if judged}
    return [f"{name} {means.get(name, MISSING)}" for name in names]


def _captions(metric: str, columns: Sequence[Column], runs: Sequence[RunRecord]) -> list[str]:
    """Returns sentences that explain the columns."""
    found = ["Values are means ± standard deviations (n − 1) over seeds."]
    found += tested.captions(metric, runs)
    if is_test(metric) and any(column.title.startswith("Best ") for column in columns):
        found.append(
            "The best value over all rounds is chosen on the test set, so it is optimistic."
        )
    return found


def _few_seeds(rows: Mapping[str, Cell]) -> Iterator[str]:
    few: dict[int, list[str]] = {}
    for name, cell in rows.items():
        if len(cell.runs) < FEW:
            few.setdefault(len(cell.runs), []).append(name)
    for n, names in few.items():
        who = f"{listing(names)} {'has' if len(names) == 1 else 'have'}"
        if n == 1:
            yield f"{who} one seed: no standard deviation and no interval."
        else:
            yield (
                f"{who} {n} seeds. Use at least {FEW}: intervals of fewer are so wide that they"
                " separate next to nothing."
            )


def _unpaired(judged: Judgement | None) -> Iterator[str]:
    for one in judged.ranking.comparisons if judged else ():
        if seeds := one.difference.unpaired:
            yield (
                f"{one.name} and {one.reference} do not have the same seeds: the difference leaves"
                f" out {plural('seed', len(seeds))} {', '.join(map(str, seeds))}."
            )


def _paired(judged: Judgement | None) -> str:
    """Returns what the intervals of the differences contain, and what separated means."""
    comparisons = judged.ranking.comparisons if judged else []
    if not comparisons:
        return ""
    texts = [
        "Differences are paired by seed. Separated: the 95 % intervals, by Student’s t and by the"
        " bootstrap, exclude 0."
    ]
    if any(1 < one.difference.n < FEWEST_RESAMPLED for one in comparisons):
        texts.append(f"With fewer than {FEWEST_RESAMPLED} seeds, only Student’s t has an interval.")
    if any(one.basis.endswith(TESTED) for one in comparisons):
        texts.append(
            "The intervals contain the chance of the seeds and of the test examples: the binomial"
            " variances of both scores, as if the methods were tested on different examples."
        )
    else:
        texts.append(
            "The intervals are about the seeds only, on these test examples, because the metric is"
            " no share of a known number of examples. Without a spread over seeds there is none."
        )
    texts.append(
        "Each comparison has 95 % confidence by itself. The best mean is bold only if it is"
        " separated from every other method with 95 % confidence over all pairs together"
        " (Bonferroni)."
    )
    return " ".join(texts)


def _power(judged: Judgement | None, detect: float | None) -> str:
    """Returns how many seeds the comparisons need to find a difference; empty if it is not known.

    Raises:
      InputError: the difference is not above 0.
    """
    if detect is not None and not 0 < detect < math.inf:
        raise InputError(f"A difference to find must be above 0, such as 0.01, not {detect:g}.")
    size = detect or (0.01 if judged and judged.share else None)
    comparisons = judged.ranking.comparisons if judged else []
    sds = {one.name: sd for one in comparisons if (sd := one.difference.sd)}
    if size is None or judged is None or not sds:
        return ""
    known = {one.name: one.difference for one in comparisons if one.name in sds}
    needs = {name: seeds_needed(size, sd) or MOST_SEEDS + 1 for name, sd in sds.items()}
    order = sorted(needs, key=needs.__getitem__, reverse=True)
    texts = [_need(name, needs[name], known[name].n, judged.gap(sds[name])) for name in order]
    out = (
        f"To find a difference of {judged.gap(size)} to {comparisons[0].reference} in"
        f" {100 * POWER:.0f} % of studies (paired t test at 5 %), {listing(texts)}."
    )
    fewest = min(one.n for one in known.values())
    if fewest < FEWEST_RESAMPLED:
        out += (
            f" These are rough numbers: a standard deviation (sd) of {fewest} seeds can be"
            f" {largest_deviation(fewest):.2g} times as large in truth."
        )
    tested = max(one.tested for one in known.values())
    if tested >= size:
        out += (
            f" The chance of the test examples is up to ± {judged.gap(tested)} with any number of"
            " seeds: a difference of this size needs a larger test set too."
        )
    return out


def _need(name: str, needed: int, n: int, sd: str) -> str:
    """Returns the seeds that a comparison needs in words."""
    if needed > MOST_SEEDS:
        return f"{name} needs more than {MOST_SEEDS:,} seeds (sd {sd})"
    more = f"{needed - n} more" if needed > n else "no more"
    return f"{name} needs {needed} seeds ({more}; sd {sd})"
