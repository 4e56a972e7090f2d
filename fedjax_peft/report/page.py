"""The report of one run or several as an HTML page with figures."""

import functools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from fedjax_peft.report import by_class, figure_files, plots
from fedjax_peft.report.cautions import cautions, coarse
from fedjax_peft.report.chart import chart, thinning
from fedjax_peft.report.columns import separations
from fedjax_peft.report.comparison import Comparison, Options, compare
from fedjax_peft.report.details import client_scores, details
from fedjax_peft.report.drawing import Runs
from fedjax_peft.report.inline_svg import svg
from fedjax_peft.report.intervals import LEVEL
from fedjax_peft.report.records import SEED, RunRecord
from fedjax_peft.report.settings import compare_settings, repeating
from fedjax_peft.report.study import Study, make_study
from fedjax_peft.report.targets import score_printer, targets
from fedjax_peft.report.wording import explained, listing
from fedjax_peft.simulation.rows import headline
from fedjax_peft.simulation.score_names import Score
from fedjax_peft.simulation.summaries import privacy_in_words, series, summary
from fedjax_peft.support.errors import InputError, check_known
from fedjax_peft.support.files import replace_file
from fedjax_peft.support.nested import flatten


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
        x: Draw the curves against this axis alone, a key of :data:`fedjax_peft.report.plots.AXES`.
            By default, a reader of the page chooses among the recorded ones.

    Returns:
        The path of ``report.html``.

    Raises:
        InputError: there are no runs, ``out_dir`` cannot be created, the target is not a possible
            value of the score, ``smooth`` is below 1, or an option names something unknown.
    """
    study = runs if isinstance(runs, Study) else make_study(runs)
    page, shown, axes = _page(study, target=target, options=options, smooth=smooth, x=x)
    out = Path(out_dir)
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The report cannot be written to {out}: {error.strerror}.") from error
    _write_figures(shown, axes, smooth, out / "figures")
    for stem, table in shown.files().items():
        table.write(out / stem)
    replace_file(out / "report.html", page.encode(errors="replace"))
    return out / "report.html"


def render_report(study: Study, *, version: str = "", **options: Any) -> str:
    """Returns the page of a study.

    Args:
        version: Of what is shown. With it, the page asks its server for the current version from
            time to time, and loads itself again when that is another one.
        **options: ``target``, ``options``, ``smooth`` and ``x`` of :func:`write_report`.
    """
    return _page(study, version=version, **options)[0]


def _page(
    study: Study,
    *,
    target: float | None = None,
    options: Options | None = None,
    smooth: int = 1,
    x: str | None = None,
    version: str = "",
) -> tuple[str, Comparison, list[str]]:
    """Returns the page, and the comparison and the axes that it shows."""
    if not study.records:
        raise InputError("A report needs at least one run.")
    if smooth < 1:
        raise InputError(f"A rolling mean is over 1 round or more, not {smooth}.")
    if x is not None:
        check_known("axis", x, plots.AXES)
    shown = compare(study, options)
    axes = [x] if x is not None else plots.recorded_axes(_rows(shown), shown.metric)
    rows, step = _thinned(_rows(shown)) if smooth == 1 else (_rows(shown), 1)  # means need all
    page = _template().render(
        **_content(shown, target),
        smooth=smooth,
        version=version,
        axes={axis: plots.AXES[axis].title for axis in axes},
        chart=chart(_rows(shown), axes, shown.metric, smooth=smooth),
        step=step,
        details=[
            (one, Markup(svg(one.figure, f"d{i}-")))
            for i, one in enumerate(details(rows, smooth=smooth))
        ],
    )
    return page, shown, axes


def _content(shown: Comparison, target: float | None) -> dict[str, Any]:
    """Returns what the page shows beside figures."""
    runs = shown.runs
    first = [next(iter(by_seed.values())) for by_seed in shown.rows.values()]
    configs = [flatten(run.config) for run in first]
    if shown.over_seeds:
        configs = [
            {k: v for k, v in one.items() if k != "name" and not SEED.search(k)} for one in configs
        ]
    tuned = any(summary(run.rows)["tuned_score"] is not None for run in runs)
    return {
        "shown": shown,
        "warnings": [*shown.warnings, *cautions(runs, over_seeds=shown.over_seeds)],
        "privacy": _promises(zip(shown.names, first, strict=True)),
        "tuned": tuned and not shown.over_seeds,
        "judged": None if shown.over_seeds else shown.judged,
        "separations": separations,
        "level": f"{100 * (1 - LEVEL):g}",
        "coincident": [] if shown.over_seeds else _coincident(runs),
        "targets": targets(shown.rows, target),
        "goal": "best" if target is None else f"target {score_printer(runs)(target)}",
        "config": compare_settings(configs),
        "environment": compare_settings([run.environment for run in first]),
        "coarse": coarse(runs),
        "clients": client_scores(_rows(shown)),
        "by_class": by_class.scores(_rows(shown)),
        "repeat": repeating(runs),
    }


def _promises(runs: Iterable[tuple[str, RunRecord]]) -> list[tuple[str, str]]:
    """Returns (names, differential privacy in words); runs with the same words share an entry."""
    names: dict[str, list[str]] = {}
    for name, run in runs:
        if words := privacy_in_words(run.rows):
            names.setdefault(words, []).append(name)
    return [(listing(same), words) for words, same in names.items()]


def _coincident(runs: Sequence[RunRecord]) -> list[str]:
    """Returns the names of runs with equal curves over rounds, one text for each group."""
    found: dict[Any, list[str]] = {}
    for run in runs:
        points = series(run.rows, "round", Score("test", headline(run.rows)).name)
        if points[0]:
            found.setdefault(tuple(map(tuple, points)), []).append(run.name)
    return [listing(names, shown=len(names)) for names in found.values() if len(names) > 1]


def _write_figures(shown: Comparison, axes: Sequence[str], smooth: int, out: Path) -> None:
    """Writes the figures as files with their data."""
    runs = _rows(shown)
    for x in axes:
        figure = plots.curves(runs, x, shown.metric, smooth=smooth)
        data = plots.curve_data(runs, x, shown.metric, smooth=smooth)
        figure_files.save(figure, out / f"{shown.stem}_{plots.AXES[x].ending}", data)
    for one in details(runs, smooth=smooth):
        figure_files.save(one.figure, out / one.stem, one.data)
    if (classes := by_class.scores(runs)) is not None:
        tables = {"by_class": classes.data, "confusion": classes.counts}
        for stem, data in tables.items():
            if data:
                replace_file(out / f"{stem}.csv", figure_files.table_csv(data).encode())


def _rows(shown: Comparison) -> dict[str, dict[Any, Any]]:
    """Returns name -> seed -> rows."""
    return {
        name: {seed: run.rows for seed, run in by_seed.items()}
        for name, by_seed in shown.rows.items()
    }


def _thinned(runs: Runs) -> tuple[Runs, int]:
    """Returns one of n evaluated rounds of each run, and the last one; and n, 1 for all rows."""
    kept: dict[str, dict[Any, Any]] = {
        name: {seed: [row for row in rows if "headline" in row] for seed, rows in by_seed.items()}
        for name, by_seed in runs.items()
    }
    step = thinning(sum(max(map(len, by_seed.values())) for by_seed in kept.values()))
    if step == 1:
        return runs, 1
    return {
        name: {seed: [*rows[:-1:step], *rows[-1:]] for seed, rows in by_seed.items()}
        for name, by_seed in kept.items()
    }, step


def _breakable(key: str) -> Markup:
    """Returns a key of a config that a narrow screen breaks between its words."""
    return Markup(re.sub(r"([._])", r"\1<wbr>", str(escape(key))))


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedjax_peft", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    environment.filters["explained"] = explained
    return environment.get_template("report.html")
