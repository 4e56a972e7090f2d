"""Tables of one run or several: the comparison, and the cost of reaching a target."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fedjax_peft.report import plots
from fedjax_peft.report.records import RunRecord, distinct
from fedjax_peft.report.table_files import Bold, TextTable
from fedjax_peft.report.verdict import Judgement, judge, score_text, verdict, word
from fedjax_peft.simulation.rows import headline, headline_is_lower_better
from fedjax_peft.simulation.summaries import rounds_to, series, summary
from fedjax_peft.support.errors import InputError

__all__ = [
    "MISSING",
    "Column",
    "Part",
    "Target",
    "columns",
    "conclusion",
    "cost_columns",
    "explanations",
    "percent",
    "score_printer",
    "table",
    "target_table",
    "targets",
    "terminal_table",
    "text_table",
]

MISSING = "-"
"""The text of a cell without a value."""
NAME_WIDTH = 16
"""Characters for the name of a run in a terminal's table; a longer name is wrapped."""
TARGETS = (90, 95, 99)
"""Percentages of the target (by default the best final score), as in FeDeRA's Table 5."""
UNTRAINED = "untrained"
"""The cell of a run whose model reached the target before any training, at no cost."""


Part: TypeAlias = Literal["results", "clients", "difference", "costs"]


class Column(NamedTuple):
    """A column of a table with one row for each run, or for each method."""

    title: str
    short: str
    """The heading on a terminal, in two lines; empty if only the page shows the column."""
    cells: list[str]
    best: set[int]
    """The rows with the best value; empty if no value is better than the others."""
    part: Part = "results"
    """The table of the page that has the column."""
    data: Mapping[str, Sequence[object]] | None = None
    """Heading -> numbers, which CSV has instead of the cells."""
    is_text: bool = False
    """Whether the page aligns the cells at the left."""


class Target(NamedTuple):
    """The cost, for each run, of reaching a percentage of the target."""

    share: int
    """Percent of the target."""
    score: str
    columns: list[Column]


def table(runs: Sequence[RunRecord], width: int = 80) -> Table:
    """Returns the comparison of runs for a terminal of ``width`` characters.

    See :func:`terminal_table`.
    """
    runs = distinct(runs)
    shown = [column for column in columns(runs, judge(runs)) if column.short]
    return terminal_table("\nRun", [run.name for run in runs], shown, width)


_EXPLAINED = {
    "Sim.": "Sim.: time by the time model of the clients' devices and links, not of this machine.",
    "Agg.": "Agg. err.: distance of the aggregated LoRA from the exact average of the clients'.",
}
"""The first line of a heading on a terminal -> a sentence about its column."""


def explanations(shown: Sequence[Table]) -> list[str]:
    """Returns a sentence for each column of terminal tables whose heading does not explain it."""
    heads = {str(column.header).split("\n")[0] for table in shown for column in table.columns}
    return [text for head, text in _EXPLAINED.items() if head in heads]


def conclusion(runs: Sequence[RunRecord]) -> str:
    """Returns one or two sentences about the scores of the runs."""
    runs = distinct(runs)
    return verdict(runs, judge(runs))


def target_table(rows: Mapping[str, Sequence[RunRecord]], target: float, width: int = 80) -> Table:
    """Returns the cost, for each row, of reaching 90, 95 and 99 percent of a test score.

    Args:
        rows: Name -> runs, which differ in seeds only.
        target: See :func:`targets`.
        width: Characters of the terminal.

    Raises:
        InputError: the target is not a possible value of the score.
    """
    reached = targets(list(rows.values()), target)
    named = [
        column._replace(short=f"{'' if i else f'{one.share} %'}\n{column.title}")
        for one in reached
        for i, column in enumerate(one.columns)
    ]
    runs = [run for row in rows.values() for run in row]
    head = f"To {score_printer(runs)(target)}\nRun"
    return terminal_table(head, list(rows), named, width, gap=1)


def terminal_table(
    head: str, names: Sequence[str], columns: Sequence[Column], width: int, *, gap: int = 2
) -> Table:
    """Returns a table for a terminal of ``width`` characters, with ``names`` in the first column.

    If the terminal is too narrow for all columns, the last ones are omitted and the caption says
    so.

    Args:
      head: the heading of the first column.
      names: the names of the rows.
      columns: columns with short headings.
      width: characters of the terminal.
      gap: spaces between columns.
    """

    def text_width(texts: Iterable[str]) -> int:
        return max(cell_len(line) for text in texts for line in text.split("\n"))

    widths = [text_width([column.short, *column.cells]) + gap for column in columns]
    name = min(text_width([head, *names]), NAME_WIDTH) + gap
    shown = len(columns)
    while shown and name + sum(widths[:shown]) > width + gap:
        shown -= 1
    out = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    out.add_column(head, overflow="fold", min_width=name - gap)
    for column in columns[:shown]:
        out.add_column(column.short, justify="right", no_wrap=True)
    for i, row in enumerate(names):
        cells = (Text(c.cells[i], "bold green" if i in c.best else "") for c in columns[:shown])
        out.add_row(Text(row), *cells)
    if omitted := len(columns) - shown:
        out.caption = f"{omitted} more column{'' if omitted == 1 else 's'}: widen the terminal."
        out.caption_justify = "left"
    return out


def text_table(title: str, head: str, names: Sequence[str], columns: Sequence[Column]) -> TextTable:
    """Returns columns as a table for files; the best values are bold.

    Args:
      title: the title of the table.
      head: the heading of the first column.
      names: the names of the rows.
      columns: the columns with their full headings.
    """
    cells = [[Bold(x) if i in c.best else x for i, x in enumerate(c.cells)] for c in columns]
    data: dict[str, Sequence[object]] = {head: names}
    for column in columns:
        data |= column.data or {column.title: column.cells}
    return TextTable(
        title,
        [head, *(column.title for column in columns)],
        [*zip(names, *cells, strict=True)],
        data=data,
    )


def columns(runs: Sequence[RunRecord], judged: Judgement | None) -> list[Column]:
    """Returns the columns of the comparison, without those that are empty for all runs.

    All values of a column have the same unit.

    Args:
        runs: runs with different names.
        judged: the result of :func:`fedjax_peft.report.verdict.judge` for these runs.
    """
    facts = [summary(run.rows) for run in runs]
    built = [*_score_columns(facts, judged), *cost_columns(facts)]
    return [column for column in built if set(column.cells) != {MISSING}]


def _score_columns(facts: Sequence[dict[str, Any]], judged: Judgement | None) -> list[Column]:
    """Returns the columns of rounds and scores."""

    def get(key: str) -> list[Any]:
        return [fact[key] for fact in facts]

    metrics = get("headline")
    score = word(plots.common(metrics, "score"))
    short = {"accuracy": "acc."}.get(score, score)
    share = all(map(plots.is_share, metrics))
    text = percent if share else "{:.4g}".format
    unit, sign = (" (%)", " %") if share else ("", "")
    tested = any(final is not None for final in get("final_score"))
    best = judged.best if judged else set()
    deviations = ["" if std is None else f" ± {text(std)}" for std in get("client_std")]
    tuned = ["" if std is None else f" ± {text(std)}" for std in get("tuned_client_std")]
    counts = {group: get(f"client_count_{group}") for group in ("seen", "unseen")}
    grouped = any(counts["unseen"])  # otherwise all clients have trained
    by_group = [
        _column(
            f"{group.capitalize()} clients’ mean{unit}, clients",
            get(f"client_mean_{group}") if grouped else [None] * len(facts),
            text,
            notes=[f" ({MISSING if n is None else round(n)})" for n in counts[group]],
            part="clients",
        )
        for group in ("seen", "unseen")
    ]
    return [
        _column("Rounds", get("rounds"), str, short="\nRounds"),
        _column(
            f"Final {score}{unit}",
            get("final_score"),
            text,
            best if tested else None,
            short=f"Final\n{short}{sign}",
        ),
        _column(f"Tuned {score}{unit}", get("tuned_score"), text, short=f"Tuned\n{short}{sign}"),
        _column(
            f"Best {score}{unit}, round",
            get("best_score"),
            text,
            short=f"Best {short}\n{sign.strip()} (round)".replace("\n (", "\n("),
            notes=[f" ({best})" for best in get("best_round")],
        ),
        _column(
            f"Clients’ mean{unit}",
            get("client_mean"),
            text,
            None if tested else best,
            short="" if tested else f"Clients’\n{short}{sign}",
            notes=deviations,
            part="clients",
        ),
        _column(f"Weighted by test size{unit}", get("client_weighted"), text, part="clients"),
        *by_group,
        _column(f"Worst client{unit}", get("client_worst"), text, part="clients"),
        _column(f"Worst 10 % of clients{unit}", get("client_worst_tenth"), text, part="clients"),
        _column(
            f"Clients’ mean, tuned{unit}",
            get("tuned_client_mean"),
            text,
            notes=tuned,
            part="clients",
        ),
    ]


def cost_columns(facts: Sequence[dict[str, Any]]) -> list[Column]:
    """Returns the columns of parameters, communication and time, and the aggregation error."""

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
    one, total = _scale(plots.byte_unit, upload), _scale(plots.byte_unit, up + down)
    clock, wall_clock = _scale(plots.time_unit, simulated), _scale(plots.time_unit, wall)
    return [
        _privacy_column(get("epsilon"), get("delta")),
        _column("Trained parameters", get("trained"), "{:,.0f}".format),
        _column(f"Upload per client and round ({one.unit})", upload, one.text, min),
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
        _column("Slots in use (%)", get("slot_utilisation"), percent),
        _error_column(get("aggregation_error_relative"), get("aggregation_error")),
    ]


def _privacy_column(epsilon: Sequence[float | None], delta: Sequence[float | None]) -> Column:
    """Returns the guarantee of differential privacy after the last round."""
    cells = [
        MISSING if e is None else "none" if d is None or not math.isfinite(e) else f"{e:.3g}, {d:g}"
        for e, d in zip(epsilon, delta, strict=True)
    ]
    data = {"epsilon": epsilon, "delta": delta}
    return Column("Privacy (ε, δ)", "Privacy\nε, δ", cells, set(), data=data)


def _error_column(relative: Sequence[float | None], absolute: Sequence[float | None]) -> Column:
    """Returns the aggregation error; the relative one, which compares better, if it is known."""
    title = "Mean aggregation error"
    if any(value is not None for value in relative):
        return _column(f"{title} (%)", relative, percent, short="Agg.\nerr. %")
    return _column(title, absolute, "{:.2g}".format, short="Agg.\nerror")


def _column(
    title: str,
    values: Sequence[float | None],
    text: Callable[[float], str],
    best: Callable[[Iterable[float]], float] | set[int] | None = None,
    *,
    short: str = "",
    notes: Sequence[str] | None = None,
    part: Part = "results",
) -> Column:
    """Returns a column.

    Args:
        title: the heading.
        values: one value for each run.
        text: the function that prints a value.
        best: the rows to mark as the best; or ``max`` or ``min``, for values without an error.
        short: the heading in a terminal.
        notes: text after each value.
        part: see :class:`Column`.
    """
    notes = notes or [""] * len(values)
    cells = [
        MISSING if value is None else text(value) + note
        for value, note in zip(values, notes, strict=True)
    ]
    if not callable(best):
        return Column(title, short, cells, best or set(), part)
    known = [value for value in values if value is not None]
    marked = set()
    if len(set(map(text, known))) > 1:
        # Compare the printed texts, so that cells with equal texts are marked together.
        first = text(best(known))
        marked = {i for i, v in enumerate(values) if v is not None and text(v) == first}
    return Column(title, short, cells, marked, part)


def targets(rows: Sequence[Sequence[RunRecord]], target: float | None) -> list[Target]:
    """Returns the rounds, bytes and simulated time to each percentage of the target.

    The list is empty if no run was tested after training. For a metric where lower is better, 90
    percent of the target is target / 0.9.

    Args:
        rows: The runs of each row, which differ in seeds only. A cell is the mean over them; it is
            empty if one of them did not reach the target.
        target: A test score; by default the best mean of the rows' final scores.

    Raises:
        InputError: the target is not a possible value of the score.
    """
    runs = [run for row in rows for run in row]
    lower = all(headline_is_lower_better(run.rows) for run in runs)
    share = all(plots.is_share(headline(run.rows)) for run in runs)
    if target is None:
        finals = (_mean([_final(run) for run in row]) for row in rows)
        known = [final for final in finals if final is not None]
        target = (min if lower else max)(known, default=None)
        if target is None:
            return []
    elif share and not 0 < target <= 1:
        raise InputError(f"The target {target:g} must be a fraction, such as 0.8 for 80 %.")
    elif not 0 < target < math.inf:
        raise InputError(f"The target {target:g} must be above 0.")
    sizes = [[_spent(run, "bytes") for run in row] for row in rows]
    times = [[_spent(run, "simulated_seconds") for run in row] for row in rows]
    size = _scale(plots.byte_unit, (n for row in sizes for one in row for n in one.values()))
    clock = _scale(plots.time_unit, (n for row in times for one in row for n in one.values()))
    out = []
    for percent in TARGETS:
        part = target * 100 / percent if lower else percent * target / 100
        rounds = [[rounds_to(run.rows, part) for run in row] for row in rows]
        cost_columns = [
            _column("Round", list(map(_mean, rounds)), lambda r: f"{r:.3g}" if r else UNTRAINED),
            _column(size.unit, _at(sizes, rounds), size.text),
            _column(clock.unit, _at(times, rounds), clock.text),
        ]
        out.append(Target(percent, score_printer(runs)(part), cost_columns))
    return out


def _final(run: RunRecord) -> float | None:
    """Returns the last score of a run that was tested after training."""
    fact = summary(run.rows)
    return fact["final_score"] if fact["final_round"] else None


def _at(
    spent: Sequence[Sequence[Mapping[int | None, float]]],
    rounds: Sequence[Sequence[int | None]],
) -> list[float | None]:
    """Returns the mean cost of each row up to the rounds of its runs.

    Round 0 is the untrained model: it cost nothing, so the cell stays empty.
    """
    return [
        _mean([one.get(r or None) for one, r in zip(row, reached, strict=True)])
        for row, reached in zip(spent, rounds, strict=True)
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean; None if a value is missing, or there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _spent(run: RunRecord, x: str) -> dict[int | None, float]:
    """Returns round -> bytes or seconds up to and including this round."""
    spent, rounds = series(run.rows, x, "round")
    return {int(r): n for r, n in zip(rounds, spent, strict=True)}


def score_printer(runs: Sequence[RunRecord]) -> Callable[[float], str]:
    """Returns the function that prints a score of these runs with its unit."""
    share = all(plots.is_share(headline(run.rows)) for run in runs)
    return score_text(share)


class _Scale(NamedTuple):
    """The unit of a column, and the function that prints a value in it."""

    unit: str
    text: Callable[[float | None], str]


def _scale(choose: Callable[[float], plots.Unit], values: Iterable[float | None]) -> _Scale:
    unit = choose(max((value for value in values if value is not None), default=0.0))
    return _Scale(unit.symbol, lambda n: MISSING if n is None else plots.digits(n / unit.size))


def percent(share: float) -> str:
    return f"{100 * share:.1f}"
