"""The cost of reaching a target score."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.table import Table

from fedjax_peft.report.columns import Column, Frame, column, in_unit
from fedjax_peft.report.comparison import Rows
from fedjax_peft.report.records import RunRecord
from fedjax_peft.report.tables import terminal_table
from fedjax_peft.report.tested import comparable
from fedjax_peft.report.wording import is_share, score_text
from fedjax_peft.simulation.rows import headline, headline_is_lower_better
from fedjax_peft.simulation.score_names import Score, is_global, of_global
from fedjax_peft.simulation.summaries import rounds_to, series, summary
from fedjax_peft.support.errors import InputError

SHARES = (90, 95, 99)
"""Percentages of the target (by default the best final score), as in FeDeRA's Table 5."""
_COSTS = ("bytes", "simulated_seconds")
UNTRAINED = "untrained"
"""The cell of a row whose model reached the target before any training, at no cost."""


class Target(NamedTuple):
    """The cost, for each row, of reaching a percentage of the target."""

    share: int
    """Percent of the target."""
    score: str
    columns: list[Column]


def targets(rows: Rows, target: float | None) -> list[Target]:
    """Returns the rounds, bytes and simulated time to each percentage of the target.

    The list is empty if no run was tested after training. For a metric where lower is better, 90
    percent of the target is target / 0.9.

    Args:
        rows: The rows of a comparison. A cell is the mean over the runs of a row; it is empty if
            one of them did not reach the target.
        target: A test score; by default the best mean of the rows' final scores.

    Raises:
        InputError: the target is not a possible value of the score.
    """
    groups = [list(by_seed.values()) for by_seed in rows.values()]
    runs = [run for group in groups for run in group]
    lower = all(headline_is_lower_better(run.rows) for run in runs)
    shared = bool(runs) and is_global(comparable(_field(runs[0]), runs))
    if target is None:
        finals = (_mean([_final(run, shared) for run in group]) for group in groups)
        target = (min if lower else max)((x for x in finals if x is not None), default=None)
        if target is None:
            return []
    elif all(is_share(headline(run.rows)) for run in runs) and not 0 < target <= 1:
        raise InputError(f"The target {target:g} must be a fraction, such as 0.8 for 80 %.")
    elif not 0 < target < math.inf:
        raise InputError(f"The target {target:g} must be above 0.")
    text, out = score_printer(runs), []
    units = [
        in_unit(x, [n for run in runs for n in series(run.rows, x, "round")[0][-1:]])
        for x in _COSTS
    ]
    for share in SHARES:
        part = target * 100 / share if lower else share * target / 100
        reached = [[_reached(run, part, shared) for run in group] for group in groups]
        rounds, *costs = ([_mean([one[i] for one in row]) for row in reached] for i in range(3))
        first = column("Round", rounds, lambda r: f"{r:.3g}" if r else UNTRAINED)
        spent = [column(unit, cost, of) for (unit, of), cost in zip(units, costs, strict=True)]
        out.append(Target(share, text(part), [first, *spent]))
    return out


def target_table(rows: Rows, target: float, width: int = 80) -> Table:
    """Returns the cost, for each row, of reaching 90, 95 and 99 percent of a test score.

    Raises:
        InputError: the target is not a possible value of the score.
    """
    named = [
        column._replace(short=f"{'' if i else f'{one.share} %'}\n{column.title}")
        for one in targets(rows, target)
        for i, column in enumerate(one.columns)
    ]
    runs = [run for by_seed in rows.values() for run in by_seed.values()]
    head = f"To {score_printer(runs)(target)}\nRun"
    return terminal_table(Frame(head, list(rows), named), width, gap=1)


def score_printer(runs: Sequence[RunRecord]) -> Callable[[float], str]:
    """Returns the function that prints a score of these runs with its unit."""
    return score_text(all(is_share(headline(run.rows)) for run in runs))


def _reached(run: RunRecord, score: float, shared: bool) -> list[float | None]:
    """Returns the first round in which a run, or its global model, has a score, and the costs.

    Round 0 is the untrained model: it cost nothing, so its costs are None.
    """
    first = rounds_to(run.rows, score, of_global(_field(run)) if shared else _field(run))
    spent = (series(run.rows, x, "round") for x in _COSTS)
    by_round = [dict(zip(rounds, costs, strict=True)) for costs, rounds in spent]
    return [first, *(costs.get(first) if first else None for costs in by_round)]


def _field(run: RunRecord) -> str:
    """Returns the field of the score on the test set."""
    return Score("test", headline(run.rows)).name


def _final(run: RunRecord, shared: bool) -> float | None:
    """Returns the last score of a run, or its global model; None without a finite one.

    The score of a model before training is none.
    """
    fact = summary(run.rows)
    return fact["global_score" if shared else "final_score"] if fact["final_round"] else None


def _mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean; None if a value is missing, or there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
