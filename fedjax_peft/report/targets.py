"""The cost of reaching a target score."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich.table import Table

from fedjax_peft.report.columns import Column, column, in_unit
from fedjax_peft.report.comparison import Rows
from fedjax_peft.report.records import RunRecord
from fedjax_peft.report.tables import terminal_table
from fedjax_peft.report.tested import comparable
from fedjax_peft.report.wording import is_share, score_text
from fedjax_peft.simulation.rows import headline, headline_is_lower_better
from fedjax_peft.simulation.summaries import rounds_to, series, summary
from fedjax_peft.support.errors import InputError

SHARES = (90, 95, 99)
"""Percentages of the target (by default the best final score), as in FeDeRA's Table 5."""
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
    shared = bool(runs) and comparable(f"test_{headline(runs[0].rows)}", runs).startswith("global_")
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
    for share in SHARES:
        part = target * 100 / share if lower else share * target / 100
        rounds = [[_rounds(run, part, shared) for run in group] for group in groups]
        means = [_mean(row) for row in rounds]
        first = column("Round", means, lambda r: f"{r:.3g}" if r else UNTRAINED)
        costs = [_cost(groups, rounds, x) for x in ("bytes", "simulated_seconds")]
        out.append(Target(share, text(part), [first, *costs]))
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
    return terminal_table(head, list(rows), named, width, gap=1)


def score_printer(runs: Sequence[RunRecord]) -> Callable[[float], str]:
    """Returns the function that prints a score of these runs with its unit."""
    return score_text(all(is_share(headline(run.rows)) for run in runs))


def _cost(
    groups: Sequence[Sequence[RunRecord]], rounds: Sequence[Sequence[int | None]], x: str
) -> Column:
    """Returns the mean cost of each row up to the rounds of its runs, a column headed by its unit.

    Round 0 is the untrained model: it cost nothing, so the cell stays empty.
    """
    spent = [[_spent(run, x) for run in group] for group in groups]
    unit, text = in_unit(x, (n for row in spent for one in row for n in one.values()))
    means = [
        _mean([one.get(r or None) for one, r in zip(row, reached, strict=True)])
        for row, reached in zip(spent, rounds, strict=True)
    ]
    return column(unit, means, text)


def _spent(run: RunRecord, x: str) -> Mapping[int | None, float]:
    """Returns round -> bytes or seconds up to and including this round."""
    spent, rounds = series(run.rows, x, "round")
    return {int(r): n for r, n in zip(rounds, spent, strict=True)}


def _rounds(run: RunRecord, score: float, shared: bool) -> int | None:
    """Returns the first round in which a run, or its global model (``shared``), has a score."""
    metric = f"test_{headline(run.rows)}"
    return rounds_to(run.rows, score, f"global_{metric}" if shared else metric)


def _final(run: RunRecord, shared: bool) -> float | None:
    """Returns the last score of a run, or its global model, that was tested after training."""
    fact = summary(run.rows)
    return fact["global_score" if shared else "final_score"] if fact["final_round"] else None


def _mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean; None if a value is missing, or there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
