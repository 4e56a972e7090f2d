"""The report of one run or a comparison of several: a table, three figures and one HTML page."""

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fedjax_peft.errors import InputError
from fedjax_peft.files import replace_file
from fedjax_peft.report import plots
from fedjax_peft.report.records import RunRecord
from fedjax_peft.report.separation import LEVEL
from fedjax_peft.report.verdict import (
    SEED,
    Judgement,
    judge,
    listing,
    printed,
    score_text,
    unique,
    verdict,
    word,
)
from fedjax_peft.rows import (
    headline,
    headline_is_lower_better,
    rounds_to,
    series,
    summary,
)

__all__ = [
    "conclusion",
    "table",
    "target_table",
    "write_report",
]

MISSING = "-"
NAME_WIDTH = 16
"""Characters that the name of a run has in a terminal's table; a longer one is folded."""
TARGETS = (90, 95, 99)
"""Percent of the target (by default the best final accuracy) that its table asks for, as in
FeDeRA's Table 5."""
FIGURES = (
    ("round", "vs_round.svg", "communication rounds"),
    ("bytes", "vs_bytes.svg", "what all clients together sent and received"),
    ("simulated_seconds", "vs_time.svg", "simulated time"),
)
"""X axis, end of the file's name (the metric comes first), and what the axis is in words."""


def table(runs: Sequence[RunRecord], width: int = 80) -> Table:
    """Returns the comparison for a terminal of so many columns.

    Names of runs keep their place. Where the terminal is too narrow, the last columns are left
    out, which the caption says.
    """
    runs = _distinct(runs)
    columns = [column for column in _columns(runs, judge(runs)) if column.short]
    return _terminal_table("\nRun", runs, columns, [c.short for c in columns], width, gap=2)


def conclusion(runs: Sequence[RunRecord]) -> str:
    """Returns what the scores of the runs say, in a sentence or two."""
    runs = _distinct(runs)
    return verdict(runs, judge(runs))


def target_table(runs: Sequence[RunRecord], target: float, width: int = 80) -> Table:
    """Returns what it took each run to come to 90, 95 and 99 percent of a test score.

    Raises:
        InputError: if the target cannot be a value of the score.
    """
    runs = _distinct(runs)
    targets = _targets(runs, target)
    columns = [column for one in targets for column in one.columns]
    heads = [
        f"{'' if i else f'{one.share} %'}\n{column.title}"
        for one in targets
        for i, column in enumerate(one.columns)
    ]
    head = f"To {_scores(runs)(target)}\nRun"
    return _terminal_table(head, runs, columns, heads, width, gap=1)


def _terminal_table(
    head: str,
    runs: Sequence[RunRecord],
    columns: Sequence["Column"],
    heads: Sequence[str],
    width: int,
    *,
    gap: int,
) -> Table:
    """Returns a table whose first column has the names of the runs, ``gap`` between columns."""

    def wide(texts: Iterable[str]) -> int:
        return max(cell_len(line) for text in texts for line in text.split("\n"))

    widths = [wide([title, *c.cells]) + gap for title, c in zip(heads, columns, strict=True)]
    name = min(wide([head, *(run.name for run in runs)]), NAME_WIDTH) + gap
    shown = len(columns)
    while shown and name + sum(widths[:shown]) > width + gap:
        shown -= 1
    out = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    out.add_column(head, overflow="fold", min_width=name - gap)
    for title in heads[:shown]:
        out.add_column(title, justify="right", no_wrap=True)
    for i, run in enumerate(runs):
        cells = (Text(c.cells[i], "bold green" if i in c.best else "") for c in columns[:shown])
        out.add_row(Text(run.name), *cells)
    if left := len(columns) - shown:
        out.caption = f"{left} more column{'' if left == 1 else 's'}: widen the terminal."
        out.caption_justify = "left"
    return out


def write_report(
    runs: Sequence[RunRecord], out_dir: str | os.PathLike[str], *, target: float | None = None
) -> Path:
    """Writes ``report.html``, which needs no other file, and its three figures as SVG.

    A run is called the best, and its score is set in bold, only where the standard errors of the
    test set and of the seeds separate it from all others (:mod:`fedjax_peft.report.separation`).

    Args:
        runs: One or more, in the order of the table's rows.
        out_dir: Made if it does not exist.
        target: Test score (accuracy, F1) whose cost is told; by default the best final one.

    Returns:
        The path of ``report.html``.

    Raises:
        InputError: if there are no runs, ``out_dir`` cannot be made, or the target cannot be a
            value of the score.
    """
    if not runs:
        raise InputError("A report needs at least one run.")
    runs = _distinct(runs)
    targets = _targets(runs, target)
    out = Path(out_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The report cannot be written to {out}: {error.strerror}.") from error
    figures = []
    score = plots.common((headline(run.rows) for run in runs), "score")
    curves = {run.name: run.rows for run in runs}
    for x, file, against in FIGURES:
        figure = plots.curves(curves, x)
        plots.save(figure, out / f"{score}_{file}")
        wide = plots.svg(figure, f"{x}-")
        narrow = plots.svg(plots.curves(curves, x, narrow=True), f"{x}-narrow-")
        figures.append({"wide": Markup(wide), "narrow": Markup(narrow), "against": against})
    text, judged = _scores(runs), judge(runs)
    finals = (summary(run.rows)["final_score"] for run in runs)
    page = _template().render(
        runs=[run.name for run in runs],
        lead=verdict(runs, judged),
        warnings=_warnings(runs, judged),
        columns=_columns(runs, judged),
        judged=judged,
        level=f"{100 * (1 - LEVEL):g}",
        figures=figures,
        score=word(score),
        finals=[
            f"{run.name} {MISSING if final is None else text(final)}"
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


def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("fedjax_peft", "report")
    return jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report.html")


# Runs and their names.


def _distinct(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Returns the runs under unique names: namesakes also show where their paths differ.

    What still has the same name, such as one run given twice, is numbered.
    """
    paths = [run.path.resolve() for run in runs]
    names: list[str] = []
    for run, path in zip(runs, paths, strict=True):
        namesakes = {p for other, p in zip(runs, paths, strict=True) if other.name == run.name}
        part = os.path.relpath(path, os.path.commonpath(namesakes))
        if len({p.name for p in namesakes}) == 1:
            part = os.path.dirname(part) or part  # the last component does not tell them apart
        name = run.name if part == "." else f"{run.name} ({plots.one_line(part)})"
        names.append(unique(name, names))
    return [run._replace(name=name) for run, name in zip(runs, names, strict=True)]


# The comparison.


class Column(NamedTuple):
    """A column of a table that has one row a run."""

    title: str
    short: str
    """The heading on a terminal, in two lines; empty if only the page shows the column."""
    cells: list[str]
    best: set[int]
    """The rows with the best value; empty where none is better than the others."""
    of_clients: bool = False
    """Whether it is about the clients' own tests, which have a table of their own on the page."""


def _column(
    title: str,
    values: Sequence[float | None],
    text: Callable[[float], str],
    best: Callable[[Iterable[float]], float] | set[int] | None = None,
    *,
    short: str = "",
    notes: Sequence[str] | None = None,
    of_clients: bool = False,
) -> Column:
    """Returns a column.

    Args:
        title: its heading.
        values: one for each run.
        text: prints a value.
        best: the rows to mark; or ``max`` or ``min``, for exact values without any error.
        short: the heading in a terminal.
        notes: what follows each value.
        of_clients: whether it is about the clients' own tests.
    """
    notes = notes or [""] * len(values)
    cells = [
        MISSING if value is None else text(value) + note
        for value, note in zip(values, notes, strict=True)
    ]
    if not callable(best):
        return Column(title, short, cells, best or set(), of_clients)
    known = [value for value in values if value is not None]
    marked = set()
    if len(set(map(text, known))) > 1:
        # By what is printed, so that of two equal cells not only one is marked.
        first = text(best(known))
        marked = {i for i, v in enumerate(values) if v is not None and text(v) == first}
    return Column(title, short, cells, marked, of_clients)


def _columns(runs: Sequence[RunRecord], judged: Judgement | None) -> list[Column]:
    """Returns the columns of the comparison, each in one unit, without those no run can fill."""
    facts = [summary(run.rows) for run in runs]

    def get(key: str) -> list[Any]:
        return [fact[key] for fact in facts]

    up, down = get("bytes_up"), get("bytes_down")
    upload = [
        fact["bytes_up"] / fact["client_rounds"]
        if fact["bytes_up"] is not None and fact["client_rounds"]
        else None
        for fact in facts
    ]
    simulated, wall = get("simulated_seconds"), get("wall_seconds")
    best_rounds = [f" ({best})" for best in get("best_round")]
    score = word(plots.common(get("headline"), "score"))
    short = {"accuracy": "acc."}.get(score, score)
    share = all(map(plots.is_share, get("headline")))
    text = _percent if share else "{:.4g}".format
    unit, sign = (" (%)", " %") if share else ("", "")
    tested = any(final is not None for final in get("final_score"))
    best = judged.best if judged else set()
    spread = ["" if std is None else f" ± {text(std)}" for std in get("client_std")]
    counts = {group: get(f"client_count_{group}") for group in ("seen", "unseen")}
    told = any(counts["unseen"])  # or all clients have trained
    by_group = [
        _column(
            f"{group.capitalize()} clients’ mean{unit}, clients",
            get(f"client_mean_{group}") if told else [None] * len(runs),
            text,
            notes=[f" ({MISSING if n is None else round(n)})" for n in counts[group]],
            of_clients=True,
        )
        for group in ("seen", "unseen")
    ]
    one, total = _scale(plots.byte_unit, upload), _scale(plots.byte_unit, up + down)
    clock, wall_clock = _scale(plots.time_unit, simulated), _scale(plots.time_unit, wall)
    columns = [
        _column("Rounds", get("rounds"), str, short="\nRounds"),
        _column(
            f"Final {score}{unit}",
            get("final_score"),
            text,
            best if tested else None,
            short=f"Final\n{short}{sign}",
        ),
        _column(
            f"Best {score}{unit}, round",
            get("best_score"),
            text,
            short=f"Best {short}\n{sign.strip()} (round)".replace("\n (", "\n("),
            notes=best_rounds,
        ),
        _column(
            f"Clients’ mean{unit}",
            get("client_mean"),
            text,
            None if tested else best,
            short="" if tested else f"Clients’\n{short}{sign}",
            notes=spread,
            of_clients=True,
        ),
        _column(f"Weighted by test size{unit}", get("client_weighted"), text, of_clients=True),
        *by_group,
        _column(f"Worst client{unit}", get("client_worst"), text, of_clients=True),
        _column("Trained parameters", get("trained"), "{:,.0f}".format),
        _column(f"Client upload a round ({one.unit})", upload, one.text, min),
        _column(
            f"Total up / down ({total.unit})",
            up,
            total.text,
            short=f"Up / down\n{total.unit}",
            notes=[f" / {total.text(n)}" for n in down],
        ),
        _column(
            f"Simulated time ({clock.unit})", simulated, clock.text, short=f"Sim.\n{clock.unit}"
        ),
        _column(
            f"Wall time ({wall_clock.unit})",
            wall,
            wall_clock.text,
            short=f"Wall\n{wall_clock.unit}",
        ),
        _column("Slots in use (%)", get("slot_utilisation"), _percent),
        _error_column(get("aggregation_error_relative"), get("aggregation_error")),
    ]
    return [column for column in columns if set(column.cells) != {MISSING}]


def _error_column(relative: Sequence[float | None], absolute: Sequence[float | None]) -> Column:
    """Returns the aggregation error, relative if any run tells it: it compares better."""
    title = "Mean aggregation error"
    if any(value is not None for value in relative):
        return _column(f"{title} (%)", relative, _percent, short="Agg.\nerr. %")
    return _column(title, absolute, "{:.2g}".format, short="Agg.\nerror")


def _coincident(runs: Sequence[RunRecord]) -> list[str]:
    """Returns the names of runs whose curves over rounds are the same, one text for each group."""
    found: dict[Any, list[str]] = {}
    for run in runs:
        points = series(run.rows, "round", f"test_{headline(run.rows)}")
        if points[0]:
            found.setdefault(tuple(map(tuple, points)), []).append(run.name)
    return [listing(names, shown=len(names)) for names in found.values() if len(names) > 1]


class _Scale(NamedTuple):
    """One unit for a whole column."""

    unit: str
    text: Callable[[float | None], str]


def _scale(choose: Callable[[float], plots.Unit], values: Iterable[float | None]) -> _Scale:
    unit = choose(max((value for value in values if value is not None), default=0.0))
    return _Scale(unit.symbol, lambda n: MISSING if n is None else plots.digits(n / unit.size))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _scores(runs: Sequence[RunRecord]) -> Callable[[float], str]:
    """Returns what prints a score of these runs with its unit."""
    share = all(plots.is_share(headline(run.rows)) for run in runs)
    return score_text(share)


class Target(NamedTuple):
    """What it took each run to come to a share of the target."""

    share: int
    score: str
    columns: list[Column]


UNTRAINED = "untrained"
"""A cell: the model was there before any training, at no cost."""


def _targets(runs: Sequence[RunRecord], target: float | None) -> list[Target]:
    """Returns rounds, bytes and simulated time to each of the ``TARGETS``.

    Without a target it is the best final score; there is none before a run was tested after
    training. Where less is better, a model is at 90 percent of the target at target / 0.9.
    """
    lower = all(headline_is_lower_better(run.rows) for run in runs)
    share = all(plots.is_share(headline(run.rows)) for run in runs)
    if target is None:
        facts = [summary(run.rows) for run in runs]
        finals = (f["final_score"] for f in facts if f["final_round"])
        target = (min if lower else max)(finals, default=None)
        if target is None:
            return []
    elif share and not 0 < target <= 1:
        raise InputError(f"The target {target:g} must be a share, such as 0.8 for 80 %.")
    elif not 0 < target < math.inf:
        raise InputError(f"The target {target:g} must be above 0.")
    sizes = [_spent(run, "bytes") for run in runs]
    times = [_spent(run, "simulated_seconds") for run in runs]
    size = _scale(plots.byte_unit, (n for spent in sizes for n in spent.values()))
    clock = _scale(plots.time_unit, (n for spent in times for n in spent.values()))
    out = []
    for percent in TARGETS:
        part = target * 100 / percent if lower else percent * target / 100
        rounds = [rounds_to(run.rows, part) for run in runs]
        # A start that is good enough cost nothing, which is no merit of the run.
        after = [r or None for r in rounds]
        at_bytes = [spent.get(r) for spent, r in zip(sizes, after, strict=True)]
        at_time = [spent.get(r) for spent, r in zip(times, after, strict=True)]
        columns = [
            _column("Round", rounds, lambda r: str(r) if r else UNTRAINED),
            _column(size.unit, at_bytes, size.text),
            _column(clock.unit, at_time, clock.text),
        ]
        out.append(Target(percent, _scores(runs)(part), columns))
    return out


def _spent(run: RunRecord, x: str) -> dict[int | None, float]:
    """Returns round -> what was spent up to and with it."""
    spent, rounds = series(run.rows, x, "round")
    return {int(r): n for r, n in zip(rounds, spent, strict=True)}


# Configs and environments.


class Comparison(NamedTuple):
    """Settings of several runs, by dotted key."""

    differing: list[tuple[str, list[str]]]
    """Key and one value a run."""
    shared: list[tuple[str, str]]


def _compare(settings: Sequence[Mapping[str, Any]]) -> Comparison:
    """Returns what differs and what does not."""
    flat = [printed(one) for one in settings]
    out = Comparison([], [])
    for key in dict.fromkeys(itertools.chain(*flat)):
        values = [one.get(key, MISSING) for one in flat]
        if len(set(values)) == 1:
            out.shared.append((key, values[0]))
        else:
            out.differing.append((key, values))
    return out


# Warnings.

_TEST_SET = re.compile(r"(^|\.|_)(test|dataset)($|\.|_)|^data(\.(name|path|source|split|subset))?$")
_AWAY = {
    "dropped": "not finite and left out",
    "failed": "missing because their clients dropped out",
    "late": "too late and left out",
}
"""Field of a row -> what became of the uploads of the clients that it lists."""
_ROUNDS = re.compile(r"(^|\.)rounds$")


def _warnings(runs: Sequence[RunRecord], judged: Judgement | None) -> list[str]:
    """Returns what a reader must know before comparing the numbers."""
    grouped = judged is not None and any(len(rows) > 1 for rows in judged.members.values())
    out = []
    for run in runs:
        out += [f"{run.name}: {fact}" for fact in _troubles(run)]
    lengths = sorted({run.rows[-1]["round"] for run in runs if run.rows})
    if len(lengths) > 1:
        out.append(f"The runs have different lengths: {lengths[0]} to {lengths[-1]} rounds.")
    for key, values in _compare([run.config for run in runs]).differing:
        told = f"{key} is {', '.join(dict.fromkeys(values))}"
        if SEED.search(key):
            if grouped:  # the comparison says what the seeds are for
                continue
            out.append(f"The runs differ in their seed, so a part is chance: {told}.")
        elif _TEST_SET.search(key):
            out.append(f"The runs may have different test sets: {told}.")
    return out


def _troubles(run: RunRecord) -> Iterable[str]:
    for field, what in _AWAY.items():
        away = [
            (row["round"], client)
            for row in run.rows
            if isinstance(row.get(field), list)
            for client in row[field]
        ]
        if away:
            rounds, clients = (set(column) for column in zip(*away, strict=True))
            yield (
                f"{len(away)} upload{'' if len(away) == 1 else 's'} {what}, "
                f"of {_listed('client', clients)} in {_listed('round', rounds)}."
            )
    if idle := [row["round"] for row in run.rows if row.get("clients") == []]:
        yield f"nobody took part in {_listed('round', idle)}."
    for key in dict.fromkeys(key for row in run.rows for key in row):
        if nulls := [row["round"] for row in run.rows if key in row and row[key] is None]:
            yield f"{key} was not finite in {_listed('round', nulls)}."
    planned = {value for key, value in printed(run.config).items() if _ROUNDS.search(key)}
    done = str(run.rows[-1]["round"] if run.rows else 0)
    if len(planned) == 1 and done not in planned:
        yield f"unfinished or cut short, it has {done} of {planned.pop()} rounds."


def _listed(noun: str, items: Iterable[int], shown: int = 8) -> str:
    """Returns "round 3" or "rounds 3, 4 and 2 more"."""
    items = sorted(items)
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return f"{noun}{'' if len(items) == 1 else 's'} {', '.join(map(str, items[:shown]))}{more}"
