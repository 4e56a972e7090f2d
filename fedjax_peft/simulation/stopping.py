"""Rules that end a run before its last round, as functions of its rows of metrics."""

import re
import statistics
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from fedjax_peft.contracts.part import part
from fedjax_peft.simulation.rows import (
    Row,
    field_is_lower_better,
    fields,
    has_field,
    headline,
    number,
)
from fedjax_peft.simulation.score_names import usual_scores
from fedjax_peft.support.checks import check_choice
from fedjax_peft.support.errors import InputError, nearest

Stop: TypeAlias = Callable[[Sequence[Row]], bool | str | None]
"""A function of all rows of the run so far; the last one is the newest. It returns True, or a
sentence with the reason, if the run should stop."""


@part
def early_stop(
    *,
    target: float | None = None,
    patience: int | None = None,
    metric: str | None = None,
    min_delta: float = 0.0,
    better: Literal["auto", "higher", "lower"] = "auto",
) -> Stop:
    """Returns a rule that ends a run at a target value, or when a metric stops improving.

    Args:
      target: stop at the first round whose metric has reached this value (row 0, before training,
        does not count).
      patience: stop after this number of evaluations in a row without an improvement on the best.
      metric: a field of the rows, such as ``test_loss`` or ``client_accuracy_mean``; by default the
        headline metric on the test set, or else its mean over the clients.
      min_delta: an evaluation improves if it is better by more than this.
      better: the direction that is better. ``auto`` uses the direction that the task or the
        algorithm declares for a score; of other fields, norms, errors and costs are better if
        lower.

    Raises:
      InputError: neither a target nor a patience is given, or a number is invalid. The rule itself
        raises it if the rows of the run do not have the metric.
    """
    if target is None and patience is None:
        raise InputError("early_stop needs a target, a patience, or both.")
    if patience is not None and patience < 1:
        raise InputError(f"patience = {patience!r} must be a positive whole number.")
    if not min_delta >= 0:
        raise InputError(f"min_delta = {min_delta!r} must be a number from 0 up.")
    check_choice("better", better, ("auto", "higher", "lower"))

    def stop(rows: Sequence[Row]) -> str | None:
        name = metric or _default_metric(rows)
        if not any(has_field(row, name) for row in rows):
            if len(rows) < 2:
                return None  # the metrics of training begin with round 1
            known = {key for row in rows for key in fields(row)} - {"round"}
            raise InputError(f"No row of this run has the metric {name!r}. {nearest(name, known)}")
        lower = field_is_lower_better(rows, name) if better == "auto" else better == "lower"
        sign = -1.0 if lower else 1.0
        found = [(row["round"], number(row, name)) for row in rows if has_field(row, name)]
        # A value that is not finite is None, and counts as no improvement.
        scores = [(r, float("-inf") if v is None else sign * v) for r, v in found]
        last, score = scores[-1]
        # Metrics are rounded to float32: 19 of 25 reach 0.76, although float32 has 0.7599999905.
        if target is not None and last > 0 and score >= sign * target - 1e-6:
            return f"{name} reached {target:g}"
        if patience is None:
            return None
        best, since = scores[0][1], 0
        for _, value in scores[1:]:
            best, since = (value, 0) if value > best + min_delta else (best, since + 1)
        if since >= patience:
            return f"{name} has not improved in {since} evaluations"
        return None

    return stop


def any_of(*rules: Stop | None) -> Stop | None:
    """Returns the rule that stops when one of the rules does; None if there are none."""
    given = [rule for rule in rules if rule is not None]

    def stop(rows: Sequence[Row]) -> bool | str | None:
        for rule in given:
            if answer := rule(rows):
                return answer
        return None

    return stop if given else None


def median_rule(finished: Sequence[Sequence[Row]], metric: str, least: int = 3) -> Stop:
    """Returns the median rule of Vizier (Golovin et al. 2017) for the runs of a sweep.

    A run stops in a round if its best value so far is worse than the median of the finished runs.
    The value of a finished run is the mean of its values up to that round.

    Args:
      finished: the rows of the finished runs; the caller may add to it.
      least: the rule never stops a run before this number of runs has finished.
    """

    def values(rows: Sequence[Row], last: int) -> list[float]:
        found = (number(row, metric) for row in rows if 0 < row["round"] <= last)
        return [value for value in found if value is not None]

    def stop(rows: Sequence[Row]) -> str | None:
        last = rows[-1]["round"]
        own = values(rows, last) if has_field(rows[-1], metric) else []
        others = [statistics.fmean(found) for one in finished if (found := values(one, last))]
        if not own or len(others) < least:
            return None
        lower = field_is_lower_better(rows, metric)
        best, middle = (min if lower else max)(own), statistics.median(others)
        if not (best > middle if lower else best < middle):
            return None
        return f"{metric} {best:.4g} is worse than {middle:.4g}, the median of {len(others)} runs"

    return stop


def pruned(trial: int) -> str:
    """Returns the reason of a run that Optuna's pruner has stopped."""
    return f"Optuna's pruner has given up trial {trial}"


_GIVEN_UP = re.compile(r"^Optuna's pruner has given up trial |, the median of \d+ runs$")


def was_given_up(rows: Sequence[Row]) -> bool:
    """Returns whether a run was ended because others were better: it does not compete with them.

    Its values are those of another round. A run that its own rule has ended, such as
    :func:`early_stop`, competes by its last value.
    """
    return bool(rows) and bool(_GIVEN_UP.search(str(rows[-1].get("stopped", ""))))


def _default_metric(rows: Sequence[Row]) -> str:
    names = usual_scores(headline(rows))
    known = {key for row in rows for key in row}
    return next((n for n in names if n in known), names[0])
