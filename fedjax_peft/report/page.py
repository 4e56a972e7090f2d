"""The report of one run or several as an HTML page with figures."""

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jinja2
from markupsafe import Markup

from fedjax_peft.report import figure_files, plots, tables
from fedjax_peft.report.details import Detail, details
from fedjax_peft.report.intervals import LEVEL
from fedjax_peft.report.methods import Methods, Options, methods_of
from fedjax_peft.report.records import SEED, RunRecord, distinct
from fedjax_peft.report.study import Study, make_study
from fedjax_peft.report.verdict import judge, listing, printed, verdict, word
from fedjax_peft.simulation.rows import Row, headline
from fedjax_peft.simulation.summaries import privacy_in_words, series, summary
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.files import replace_file
from fedjax_peft.support.nested import flatten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_report"]

Draw: TypeAlias = Callable[[str, bool], tuple["Figure", list[Any]]]
"""Function of the x axis and of ``narrow`` -> figure and its data."""

AXES = {
    "round": ("vs_round", "communication rounds"),
    "bytes": ("vs_bytes", "the bytes that all clients sent and received"),
    "simulated_seconds": ("vs_time", "simulated time"),
}
"""X axis -> end of the file's name (after the metric), and the axis in words."""


def write_report(
    runs: Sequence[RunRecord] | Study,
    out_dir: str | os.PathLike[str],
    *,
    target: float | None = None,
    options: Options | None = None,
    smooth: int = 1,
    x: str | None = None,
) -> Path:
    """Writes ``report.html``, which needs no other file, the folder ``figures``, and the tables.

    The table of results is written as ``table.md``, ``table.csv`` and ``table.tex``; with several
    settings of a method, all of them are in ``settings.md`` and so on.

    Runs of a sweep, or with several seeds, are shown by method (:mod:`fedjax_peft.report.methods`).
    Otherwise each run is a row. A score is bold only if it is separated from all others
    (:mod:`fedjax_peft.report.separation`).

    Args:
        runs: One or more runs, in the order of the table's rows; or a study.
        out_dir: The directory of the report; it is created if needed.
        target: A test score; the page shows the cost of reaching it. By default the best final
            score.
        options: The metric, its choice and the baseline; with any of them, runs are shown by
            method.
        smooth: Width of the rolling mean of curves, in evaluated rounds; the captions say it.
        x: Draw the curves against this axis alone: ``round``, ``bytes`` or ``simulated_seconds``.

    Returns:
        The path of ``report.html``.

    Raises:
        InputError: there are no runs, ``out_dir`` cannot be created, the target is not a possible
            value of the score, ``smooth`` is below 1, or an option names something unknown.
    """
    study = runs if isinstance(runs, Study) else make_study(runs)
    if not study.records:
        raise InputError("A report needs at least one run.")
    if smooth < 1:
        raise InputError(f"A rolling mean is over 1 round or more, not {smooth}.")
    if x not in (None, *AXES):
        raise InputError(f"There is no axis {x!r}. {nearest(str(x), AXES)}")
    methods = methods_of(study, options)
    shown = distinct(study.records)
    content = _of_runs(shown, target) if methods is None else _of_methods(methods, target)
    out = Path(out_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The report cannot be written to {out}: {error.strerror}.") from error
    draw, stem, files = (content.pop(key) for key in ("draw", "stem", "files"))
    by_seed = content.pop("by_seed")
    (out / "figures").mkdir(exist_ok=True)
    page = _template().render(
        **content,
        figures=_write_curves(functools.partial(draw, smooth=smooth), out, stem, x),
        details=[_write_detail(one, out) for one in details(by_seed, smooth=smooth)],
        smooth=smooth,
        paired="" if methods is None else methods.paired,
    )
    for stem, table in files.items():
        table.write(out / stem)
    replace_file(out / "report.html", page.encode(errors="replace"))
    return out / "report.html"


def _of_runs(runs: Sequence[RunRecord], target: float | None) -> dict[str, Any]:
    """Returns what the page shows of runs with one seed each: a row is a run."""
    targets = tables.targets([[run] for run in runs], target)
    text, judged = tables.score_printer(runs), judge(runs)
    finals = (summary(run.rows)["final_score"] for run in runs)
    columns, names = tables.columns(runs, judged), [run.name for run in runs]
    lead = verdict(runs, judged)
    title = f"Run {names[0]}" if len(runs) == 1 else f"Comparison of {len(runs)} runs"
    score = plots.common((headline(run.rows) for run in runs), "score")
    table = tables.text_table(title, "Run", names, columns)._replace(notes=[lead])
    return {
        "title": title,
        "row_head": "Run",
        "runs": names,
        "lead": lead,
        "warnings": _warnings(runs),
        "privacy": _promises(zip(names, runs, strict=True)),
        "columns": columns,
        "captions": [],
        "settings_table": None,
        "tuned": any(summary(run.rows)["tuned_score"] is not None for run in runs),
        "judged": judged,
        "level": f"{100 * (1 - LEVEL):g}",
        "curve": f"test {word(score)}",
        "stem": score,
        "finals": [
            f"{name} {tables.MISSING if final is None else text(final)}"
            for name, final in zip(names, finals, strict=True)
        ],
        "draw": functools.partial(_draw_runs, runs),
        "by_seed": {run.name: {None: run.rows} for run in runs},
        "coincident": _coincident(runs),
        "targets": targets,
        "goal": "best" if target is None else f"target {text(target)}",
        "config": _compare([run.config for run in runs]),
        "environment": _compare([run.environment for run in runs]),
        "files": {"table": table},
    }


def _of_methods(methods: Methods, target: float | None) -> dict[str, Any]:
    """Returns what the page shows of several seeds: a row is a method."""
    runs, names = methods.runs, methods.names
    targets = tables.targets(list(methods.rows.values()), target)
    first = [next(iter(cell.runs.values())) for cell in methods.cells]
    configs = [
        {k: v for k, v in flatten(run.config).items() if k != "name" and not SEED.search(k)}
        for run in first
    ]
    return {
        "title": f"Comparison of {len(names)} methods" if len(names) > 1 else f"Method {names[0]}",
        "row_head": "Method",
        "runs": names,
        "lead": methods.lead,
        "warnings": [*methods.warnings, *_warnings(runs, grouped=True)],
        "privacy": _promises(zip(names, first, strict=True)),
        "columns": methods.columns,
        "captions": list(methods.captions),
        "settings_table": methods.settings,
        "tuned": False,
        "judged": None,
        "level": "",
        "curve": word(methods.metric),
        "stem": re.sub(r"\W+", "_", methods.metric),  # a nested metric has dots in its name
        "finals": methods.finals,
        "draw": functools.partial(_draw_methods, methods),
        "by_seed": _rows_by_seed(methods),
        "coincident": [],
        "targets": targets,
        "goal": "best" if target is None else f"target {tables.score_printer(runs)(target)}",
        "config": _compare(configs),
        "environment": _compare([run.environment for run in first]),
        "files": methods.tables(),
    }


def _promises(runs: Iterable[tuple[str, RunRecord]]) -> list[tuple[str, str]]:
    """Returns (names, differential privacy in words); runs with the same words share an entry."""
    names: dict[str, list[str]] = {}
    for name, run in runs:
        if words := privacy_in_words(run.rows):
            names.setdefault(words, []).append(name)
    return [(listing(same), words) for words, same in names.items()]


def _write_curves(draw: Draw, out: Path, stem: str, x: str | None) -> list[dict[str, Any]]:
    """Writes the curves as files; returns them as SVG elements for wide and narrow windows."""
    figures = []
    for axis, (file, words) in AXES.items():
        if x in (None, axis):
            figure, data = draw(axis, False)
            small = draw(axis, True)[0]
            figures.append({**_write(figure, small, out, f"{stem}_{file}", data), "axis": words})
    return figures


def _write_detail(detail: Detail, out: Path) -> dict[str, Any]:
    """Writes another figure as files; returns it as :func:`_write_curves` does."""
    figures = (detail.draw(False), detail.draw(True))
    written = _write(*figures, out, detail.stem, detail.data)
    return {**written, "title": detail.title, "caption": detail.caption}


def _write(
    wide: "Figure", narrow: "Figure", out: Path, stem: str, data: list[dict[str, Any]]
) -> dict[str, Any]:
    """Writes a figure as files; returns the SVG elements for wide and narrow windows."""
    paths = figure_files.save(wide, out / "figures" / stem, data)
    small = figure_files.render(narrow, "svg")
    return {
        "wide": Markup(figure_files.svg(paths[1].read_bytes(), f"{stem}-")),
        "narrow": Markup(figure_files.svg(small, f"{stem}-narrow-")),
    }


def _draw_runs(
    runs: Sequence[RunRecord], x: str, narrow: bool, *, smooth: int
) -> tuple["Figure", list[Any]]:
    rows = {run.name: run.rows for run in runs}
    figure = plots.curves(rows, x, narrow=narrow, smooth=smooth)
    return figure, plots.curve_data(rows, x, smooth=smooth)


def _draw_methods(
    methods: Methods, x: str, narrow: bool, *, smooth: int
) -> tuple["Figure", list[Any]]:
    runs, metric = _rows_by_seed(methods), methods.metric
    return (
        plots.mean_curves(runs, x, metric, narrow=narrow, smooth=smooth),
        plots.mean_curve_data(runs, x, metric, smooth=smooth),
    )


def _rows_by_seed(methods: Methods) -> dict[str, dict[Any, list[Row]]]:
    """Returns the name of each method -> seed -> rows."""
    return {
        name: {seed: run.rows for seed, run in cell.runs.items()}
        for name, cell in zip(methods.names, methods.cells, strict=True)
    }


def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("fedjax_peft", "report")
    return jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report.html")


def _coincident(runs: Sequence[RunRecord]) -> list[str]:
    """Returns the names of runs with equal curves over rounds, one text for each group."""
    found: dict[Any, list[str]] = {}
    for run in runs:
        points = series(run.rows, "round", f"test_{headline(run.rows)}")
        if points[0]:
            found.setdefault(tuple(map(tuple, points)), []).append(run.name)
    return [listing(names, shown=len(names)) for names in found.values() if len(names) > 1]


# Configs and environments.


class Comparison(NamedTuple):
    """Settings of several runs, by dotted key."""

    differing: list[tuple[str, list[str]]]
    """Key and one value for each run."""
    shared: list[tuple[str, str]]
    """Key and the common value."""


def _compare(settings: Sequence[Mapping[str, Any]]) -> Comparison:
    """Returns the settings that differ between runs, and those that all runs share."""
    flat = [printed(one) for one in settings]
    out = Comparison([], [])
    for key in dict.fromkeys(itertools.chain(*flat)):
        values = [one.get(key, tables.MISSING) for one in flat]
        if len(set(values)) == 1:
            out.shared.append((key, values[0]))
        else:
            out.differing.append((key, values))
    return out


# Warnings.

_TEST_SET = re.compile(r"(^|\.|_)(test|dataset)($|\.|_)|^data(\.(name|path|source|split|subset))?$")
_UPLOADS = {
    "dropped": "not finite and excluded",
    "failed": "missing because clients dropped out",
    "late": "too late and excluded",
    "partial": "of partial work, because of the deadline",
}
"""Field of a row -> why the uploads of the clients in it were not aggregated, or incomplete."""
_ROUNDS = re.compile(r"(^|\.)rounds$")


def _warnings(runs: Sequence[RunRecord], *, grouped: bool = False) -> list[str]:
    """Returns the facts that a reader must know before comparing the numbers.

    With ``grouped``, runs differ in seeds on purpose.
    """
    out = []
    for run in runs:
        out += [f"{run.name}: {fact}" for fact in _run_warnings(run)]
    lengths = sorted({run.rows[-1]["round"] for run in runs if run.rows})
    if len(lengths) > 1:
        out.append(f"The runs have different lengths: {lengths[0]} to {lengths[-1]} rounds.")
    for key, values in _compare([run.config for run in runs]).differing:
        difference = f"{key} is {', '.join(dict.fromkeys(values))}"
        if SEED.search(key):
            if not grouped:
                out.append(
                    f"The runs have different seeds, so differences are partly chance:"
                    f" {difference}."
                )
        elif _TEST_SET.search(key):
            out.append(f"The runs may have different test sets: {difference}.")
    return out


def _run_warnings(run: RunRecord) -> Iterable[str]:
    for field, reason in _UPLOADS.items():
        found = [
            (row["round"], client)
            for row in run.rows
            if isinstance(row.get(field), list)
            for client in row[field]
        ]
        if found:
            rounds, clients = (set(column) for column in zip(*found, strict=True))
            yield (
                f"{len(found)} upload{'' if len(found) == 1 else 's'} {reason}:"
                f" {_numbered('client', clients)} in {_numbered('round', rounds)}."
            )
    if empty := [row["round"] for row in run.rows if row.get("clients") == []]:
        yield f"no client took part in {_numbered('round', empty)}."
    for key in dict.fromkeys(key for row in run.rows for key in row):
        if nulls := [row["round"] for row in run.rows if key in row and row[key] is None]:
            yield f"{key} was not finite in {_numbered('round', nulls)}."
    planned = {value for key, value in printed(run.config).items() if _ROUNDS.search(key)}
    done = str(run.rows[-1]["round"] if run.rows else 0)
    if len(planned) == 1 and done not in planned:
        yield f"unfinished or stopped early, after {done} of {planned.pop()} rounds."


def _numbered(noun: str, items: Iterable[int], shown: int = 8) -> str:
    """Returns text such as "round 3" or "rounds 3, 4 and 2 more"."""
    items = sorted(items)
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return f"{noun}{'' if len(items) == 1 else 's'} {', '.join(map(str, items[:shown]))}{more}"
