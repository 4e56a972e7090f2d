"""The scores by which the rows of a table are ranked, and whether they can be compared."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_peft.report import separation
from fedjax_peft.report.records import RunRecord
from fedjax_peft.report.separation import Group, Measurement, Ranking
from fedjax_peft.report.wording import score_text
from fedjax_peft.simulation.rows import headline, headline_is_lower_better, number
from fedjax_peft.simulation.score_names import Score
from fedjax_peft.simulation.summaries import summary

_SHARES_OF_EXAMPLES = ("accuracy", "exact_match")
"""Metrics that are means of values between 0 and 1 over examples. The binomial variance is an upper
bound of their variance. Other scores, such as the F1 of entities, are not means over examples. A
mean over clients is about the examples of all clients' tests."""


class Judgement(NamedTuple):
    """The scores by which the rows of a table, each a group of runs, are ranked."""

    what: str
    """The score in words, such as ``final test accuracy``."""
    share: bool
    """Whether the score is a fraction, which is printed in percent."""
    on_test: bool
    """Whether the score is on the test set; otherwise it is the mean over clients' tests."""
    rows: Mapping[str, int]
    """Group -> index of its row."""
    ranking: Ranking

    @property
    def best(self) -> set[int]:
        """The row to mark as the best: it is separated from all others. Empty if there is none."""
        return {self.rows[self.ranking.winner.name]} if self.ranking.winner else set()

    def text(self, score: float) -> str:
        """Returns a score with its unit."""
        return score_text(self.share)(score)

    def gap(self, difference: float) -> str:
        """Returns the difference of two scores with its unit: points for a fraction."""
        return f"{100 * difference:.1f} points" if self.share else f"{difference:.3g}"


def judge(
    rows: Mapping[str, Mapping[Any, RunRecord]],
    measure: Callable[[RunRecord], Measurement | None],
    *,
    what: str,
    share: bool,
    on_test: bool,
    **how: Any,
) -> Judgement | None:
    """Returns the ranking of the rows of a table; None without a score, or one of the baseline.

    Args:
      rows: name -> seed -> run. Rows without a score are left out.
      measure: run -> its score, or None.
      **how: for :func:`fedjax_peft.report.separation.rank`.
    """
    groups: list[Group] = []
    places: dict[str, int] = {}
    used: list[RunRecord] = []
    for i, (name, by_seed) in enumerate(rows.items()):
        found = {seed: measure(run) for seed, run in by_seed.items()}
        if scores := {seed: score for seed, score in found.items() if score is not None}:
            groups.append(Group(name, scores))
            places[name] = i
            used += by_seed.values()
    if not groups or how.get("baseline") not in (None, *places):
        return None
    ranking = separation.rank(groups, obstacle=_obstacle(used), **how)
    return Judgement(what, share, on_test, places, ranking)


def _obstacle(runs: Sequence[RunRecord]) -> str | None:
    """Returns the reason why the scores of runs cannot be compared; None if they can."""
    metrics = {(headline(run.rows), headline_is_lower_better(run.rows)) for run in runs}
    if len(metrics) > 1:
        return "different metrics"
    if len({json.dumps(_source(run.config)) for run in runs}) > 1:
        return "different data"
    return None


def _source(config: Mapping[str, Any]) -> list[Any]:
    """Returns the name and source of the data set from which the test set was sampled."""
    data = config.get("data")
    return [data.get("name"), data.get("source")] if isinstance(data, dict) else [data]


def sampling_variance(run: RunRecord, field: str, value: float) -> float | None:
    """Returns the variance of a run's score over samples of test examples; None if unknown."""
    examples = tested_examples(run, field, value)
    return separation.binomial(value, examples) if examples else None


def tested_examples(run: RunRecord, field: str, value: float) -> int | None:
    """Returns of how many examples a run's score is a share; None if it is none, or unknown.

    A mean over clients counts as a mean over all their examples.
    """
    score = Score.read(field)
    if score is None or score.metric not in _SHARES_OF_EXAMPLES or not 0 <= value <= 1:
        return None
    if score.group or score.statistic not in ("", "mean", "weighted"):
        return None
    size = Score(score.evaluation, "examples", tuned=score.tuned).name
    sizes = (number(row, size) for row in reversed(run.rows))
    examples = next((size for size in sizes if size), None)
    return int(examples) if examples else None


def on_test(run: RunRecord, compared: str) -> Measurement | None:
    """Returns the last score of a run on the test set after training; None if it is not finite.

    Args:
      compared: the figure of the run's summary, ``final_score`` or ``global_score``.
    """
    fact = summary(run.rows)
    value = fact[compared]
    if value is None or not fact["final_round"]:
        return None
    variance = sampling_variance(run, Score("test", fact["headline"]).name, value)
    if variance is None:
        return Measurement(value)
    deviation, count = fact["test_std"], fact["test_count"]
    if deviation is None or not count or compared == "global_score":
        return Measurement(value, variance)
    # The score is a mean over clients' models, and these clients are a sample too.
    return _over_clients(value, deviation, count, variance)


def on_clients(run: RunRecord) -> Measurement | None:
    """Returns the last mean over the clients' tests of a run after training."""
    fact = summary(run.rows)
    value, deviation, count = (fact[f"client_{kind}"] for kind in ("mean", "std", "count"))
    if value is None or not fact["rounds"]:
        return None
    return _over_clients(value, deviation, count)


def _over_clients(
    mean: float, deviation: float | None, count: float | None, variance: float = 0.0
) -> Measurement:
    """Returns a mean over clients, with ``variance`` beside that of the mean over them."""
    if deviation is None or not count or count < 2:
        return Measurement(mean)
    return Measurement(mean, variance + deviation**2 / (count - 1), count - 1)
