"""The report of one run or several as an HTML page with three figures."""

import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from fedjax_peft.errors import InputError
from fedjax_peft.files import replace_file
from fedjax_peft.report import figure_files, plots, tables
from fedjax_peft.report.records import SEED, RunRecord, distinct
from fedjax_peft.report.separation import LEVEL
from fedjax_peft.report.verdict import Judgement, judge, listing, printed, verdict, word
from fedjax_peft.rows import headline, series, summary

__all__ = ["write_report"]

FIGURES = (
    ("round", "vs_round", "communication rounds"),
    ("bytes", "vs_bytes", "the bytes that all clients sent and received"),
    ("simulated_seconds", "vs_time", "simulated time"),
)
"""X axis, end of the file's name (after the metric), and the axis in words."""


def write_report(
    runs: Sequence[RunRecord], out_dir: str | os.PathLike[str], *, target: float | None = None
) -> Path:
    """Writes ``report.html``, which needs no other file, and the folder ``figures``.

    A run is called the best, and its score is bold, only if the standard errors of the test set and
    of the seeds separate it from all others (:mod:`fedjax_peft.report.separation`).

    Args:
        runs: One or more runs, in the order of the table's rows.
        out_dir: The directory of the report; it is created if needed.
        target: A test score; the page shows the cost of reaching it. By default the best final
            score.

    Returns:
        The path of ``report.html``.

    Raises:
        InputError: there are no runs, ``out_dir`` cannot be created, or the target is not a
            possible value of the score.
    """
    if not runs:
        raise InputError("A report needs at least one run.")
    runs = distinct(runs)
    targets = tables.targets(runs, target)
    out = Path(out_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The report cannot be written to {out}: {error.strerror}.") from error
    score = plots.common((headline(run.rows) for run in runs), "score")
    text, judged = tables.score_printer(runs), judge(runs)
    finals = (summary(run.rows)["final_score"] for run in runs)
    page = _template().render(
        runs=[run.name for run in runs],
        lead=verdict(runs, judged),
        warnings=_warnings(runs, judged),
        columns=tables.columns(runs, judged),
        tuned=any(summary(run.rows)["tuned_score"] is not None for run in runs),
        judged=judged,
        level=f"{100 * (1 - LEVEL):g}",
        figures=_write_figures(runs, out, score),
        score=word(score),
        finals=[
            f"{run.name} {tables.MISSING if final is None else text(final)}"
            for run, final in zip(runs, finals, strict=True)
        ],
        coincident=_coincident(runs),
        targets=targets,
        goal="best" if target is None else f"target {text(target)}",
        config=_compare([run.config for run in runs]),
        environment=_compare([run.environment for run in runs]),
    )
    replace_file(out / "report.html", page.encode(errors="replace"))
    return out / "report.html"


def _write_figures(runs: Sequence[RunRecord], out: Path, score: str) -> list[dict[str, Any]]:
    """Writes the figures as files; returns them as SVG elements for wide and narrow windows."""
    folder, figures = out / "figures", []
    folder.mkdir(exist_ok=True)
    rows = {run.name: run.rows for run in runs}
    for x, file, axis in FIGURES:
        figure = plots.curves(rows, x)
        paths = figure_files.save(figure, folder / f"{score}_{file}", plots.curve_data(rows, x))
        wide = figure_files.svg(paths[1].read_bytes(), f"{x}-")
        small = figure_files.render(plots.curves(rows, x, narrow=True), "svg")
        narrow = figure_files.svg(small, f"{x}-narrow-")
        figures.append({"wide": Markup(wide), "narrow": Markup(narrow), "axis": axis})
    return figures


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
_EXCLUDED = {
    "dropped": "not finite and excluded",
    "failed": "missing because clients dropped out",
    "late": "too late and excluded",
}
"""Field of a row -> why the uploads of the clients in it were not aggregated."""
_ROUNDS = re.compile(r"(^|\.)rounds$")


def _warnings(runs: Sequence[RunRecord], judged: Judgement | None) -> list[str]:
    """Returns the facts that a reader must know before comparing the numbers."""
    grouped = judged is not None and any(len(rows) > 1 for rows in judged.members.values())
    out = []
    for run in runs:
        out += [f"{run.name}: {fact}" for fact in _run_warnings(run)]
    lengths = sorted({run.rows[-1]["round"] for run in runs if run.rows})
    if len(lengths) > 1:
        out.append(f"The runs have different lengths: {lengths[0]} to {lengths[-1]} rounds.")
    for key, values in _compare([run.config for run in runs]).differing:
        difference = f"{key} is {', '.join(dict.fromkeys(values))}"
        if SEED.search(key):
            if not grouped:  # otherwise the comparison itself explains the seeds
                out.append(
                    f"The runs have different seeds, so differences are partly chance:"
                    f" {difference}."
                )
        elif _TEST_SET.search(key):
            out.append(f"The runs may have different test sets: {difference}.")
    return out


def _run_warnings(run: RunRecord) -> Iterable[str]:
    for field, reason in _EXCLUDED.items():
        excluded = [
            (row["round"], client)
            for row in run.rows
            if isinstance(row.get(field), list)
            for client in row[field]
        ]
        if excluded:
            rounds, clients = (set(column) for column in zip(*excluded, strict=True))
            yield (
                f"{len(excluded)} upload{'' if len(excluded) == 1 else 's'} {reason}:"
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
