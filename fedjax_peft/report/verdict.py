"""The ranking of runs by their scores, and its result in one sentence."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_peft.nested import flatten
from fedjax_peft.report import plots, separation
from fedjax_peft.report.records import SEED, RunRecord, unique
from fedjax_peft.report.separation import Group, Measurement, Ranking
from fedjax_peft.rows import headline_is_lower_better, series, summary

__all__ = [
    "Judgement",
    "judge",
    "listing",
    "printed",
    "score_text",
    "verdict",
    "word",
]

_SHARES_OF_EXAMPLES = ("accuracy", "exact_match")
"""Metrics that are means of values between 0 and 1 over examples. The binomial variance is an upper
bound of their variance. Other scores, such as the F1 of entities, are not means over examples."""


class Judgement(NamedTuple):
    """The scores by which runs are ranked."""

    what: str
    """The score in words, such as ``final test accuracy``."""
    text: Callable[[float], str]
    """Prints a score with its unit."""
    gap: Callable[[float], str]
    """Prints the difference of two scores with its unit."""
    lower: bool
    """Whether lower scores are better."""
    on_test: bool
    """Whether the score is on the test set; otherwise it is the mean over clients' tests."""
    scores: Mapping[int, Measurement]
    """Index of a run -> score; runs that were not tested after training are missing."""
    members: Mapping[str, list[int]]
    """Group -> indices of its runs, in the order of their seeds' first appearance."""
    ranking: Ranking

    @property
    def best(self) -> set[int]:
        """The run to mark as the best: separated from all others, in a group of a single seed."""
        winner = self.ranking.winner
        runs = self.members[winner.name] if winner else []
        return set(runs) if len(runs) == 1 else set()


def judge(runs: Sequence[RunRecord]) -> Judgement | None:
    """Returns the ranking of runs with different names; None if no run has a score."""
    facts = [summary(run.rows) for run in runs]
    on_test = any(fact["final_score"] is not None for fact in facts)
    metrics = [fact["headline"] for fact in facts]
    metric = plots.common(metrics, "score")
    scores = {
        i: one
        for i, (run, fact) in enumerate(zip(runs, facts, strict=True))
        if (one := (_on_test if on_test else _on_clients)(run, fact)) is not None
    }
    if not scores:
        return None
    directions = {headline_is_lower_better(runs[i].rows) for i in scores}
    lower = directions == {True}
    obstacle = None
    if len(set(metrics)) > 1 or len(directions) > 1:
        obstacle = "different metrics"
    elif len({json.dumps(_source(runs[i].config)) for i in scores}) > 1:
        obstacle = "different data"
    members = _groups(runs, list(scores))
    groups = [
        Group(name, {_seed(runs[i].config): scores[i] for i in rows})
        for name, rows in members.items()
    ]
    ranking = separation.rank(groups, lower_is_better=lower, obstacle=obstacle)
    share = all(map(plots.is_share, metrics))
    return Judgement(
        what=f"final test {word(metric)}" if on_test else f"mean of the clients’ {word(metric)}",
        text=score_text(share),
        gap=(lambda x: f"{100 * x:.1f} points") if share else "{:.3g}".format,
        lower=lower,
        on_test=on_test,
        scores=scores,
        members=members,
        ranking=ranking,
    )


def verdict(runs: Sequence[RunRecord], judged: Judgement | None) -> str:
    """Returns one or two sentences about the result.

    A winner is named only if it is separated from all others.

    Args:
      runs: runs with different names.
      judged: the result of :func:`judge` for these runs.
    """
    if judged is None:
        scores = {word(summary(run.rows)["headline"]) for run in runs}
        untrained = any(summary(run.rows)["final_round"] == 0 for run in runs)
        score = plots.common(scores, "score")
        if untrained:
            return f"No test {score} has been recorded after training yet."
        return f"No test {score} has been recorded yet."
    first = judged.ranking.groups[0]
    if len(judged.ranking.groups) == 1:
        return f"{_capital(judged.what)}: {judged.text(first.mean)}{_error(judged, first, runs)}."
    if judged.ranking.winner:
        return (
            f"{first.name} has the best {judged.what}: {judged.text(first.mean)}"
            f"{_error(judged, first, runs)}. The difference to every other run is larger than the"
            f" margin of error.{_one_seed(judged)}"
        )
    level = judged.ranking.level
    named = [f"{group.name} {judged.text(group.mean)}" for group in level]
    behind = len(judged.ranking.groups) - len(level)
    unknown = {c.basis for c in judged.ranking.comparisons if c.margin is None}
    if unknown:
        why = f"the margin of error is not known ({', '.join(sorted(unknown))})"
    else:
        why = "their differences are within the margin of error"
    rest = f" {_others(behind)} worse by more than the margin." if behind else ""
    return f"{_capital(judged.what)}: {listing(named)} are not separated; {why}.{rest}"


def word(metric: str) -> str:
    """Returns a metric's name as it is written in a sentence."""
    return {"f1": "F1"}.get(metric, metric.replace("_", " "))


def printed(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns dotted key -> printed value."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for key, value in flatten(settings).items()
    }


def score_text(share: bool) -> Callable[[float], str]:
    """Returns the function that prints a score with its unit; a ``share`` is printed in percent."""
    return (lambda value: f"{100 * value:.1f} %") if share else "{:.4g}".format


# Scores and groups.


def _on_test(run: RunRecord, fact: Mapping[str, Any]) -> Measurement | None:
    value = fact["final_score"]
    if value is None or not fact["final_round"]:
        return None
    examples = fact["test_examples"] or _configured_size(run.config)
    if not examples or fact["headline"] not in _SHARES_OF_EXAMPLES or not 0 <= value <= 1:
        return Measurement(value)
    variance = separation.binomial(value, int(examples))
    deviation, count = fact["test_std"], fact["test_count"]
    if deviation is None or not count:
        return Measurement(value, variance)
    if count < 2:
        return Measurement(value)
    # The score is a mean over clients' models, and these clients are a sample too.
    return Measurement(value, variance + deviation**2 / (count - 1), count - 1)


def _on_clients(run: RunRecord, fact: Mapping[str, Any]) -> Measurement | None:
    value, deviation, count = (fact[f"client_{kind}"] for kind in ("mean", "std", "count"))
    if value is None or not fact["rounds"]:
        return None
    if deviation is None or not count or count < 2:
        return Measurement(value)
    return Measurement(value, deviation**2 / (count - 1), count - 1)


def _configured_size(config: Mapping[str, Any]) -> int | None:
    """Returns the config's number of test examples, which rows of older versions do not contain."""
    data = config.get("data")
    size = data.get("test_examples") if isinstance(data, dict) else None
    return size if type(size) is int and size > 0 else None


def _source(config: Mapping[str, Any]) -> list[Any]:
    """Returns the name and source of the data set from which the test set was sampled."""
    data = config.get("data")
    return [data.get("name"), data.get("source")] if isinstance(data, dict) else [data]


def _seed(config: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in printed(config).items() if SEED.search(key))


def _groups(runs: Sequence[RunRecord], tested: Sequence[int]) -> dict[str, list[int]]:
    """Returns group -> indices of its runs, which differ in their seeds only.

    Of runs with the same config and seed, only the first is used. The config of a run made in
    Python does not contain all settings, so this run is a group by itself.
    """
    found: dict[Any, dict[str, int]] = {}
    for i in tested:
        config = runs[i].config
        settings = [x for x in printed(config).items() if not SEED.search(x[0]) and x[0] != "name"]
        key: Any = tuple(sorted(settings)) if "model" in config else i
        found.setdefault(key, {}).setdefault(_seed(config), i)
    members = [list(seeds.values()) for seeds in found.values()]
    given = [{_given_name(runs[i]) for i in rows} for rows in members]
    names: dict[str, list[int]] = {}
    for rows, of_group in zip(members, given, strict=True):
        common = len(rows) > 1 and len(of_group) == 1 and given.count(of_group) == 1
        name = min(of_group) if common else runs[rows[0]].name
        names[unique(name, names)] = rows
    return names


def _given_name(run: RunRecord) -> str:
    return plots.one_line(str(run.config.get("name") or run.path.resolve().name))


# Words.


def _error(judged: Judgement, group: Group, runs: Sequence[RunRecord]) -> str:
    """Returns the seeds of a score; for one seed, its standard error and the cost of the run."""
    if group.deviation is not None:
        n = len(group.by_seed)
        return f" (mean of {n} seeds, standard deviation {judged.gap(group.deviation)})"
    (one,) = group.by_seed.values()
    error = ""
    if one.variance is not None:
        error = f" (standard error {judged.gap(math.sqrt(one.variance))})"
    run = runs[judged.members[group.name][0]]
    return f"{error} {_after(run, judged)}"


def _after(run: RunRecord, judged: Judgement) -> str:
    """Returns the cost of a run up to its last test, in words."""
    name = summary(run.rows)["headline"]
    field = f"test_{name}" if judged.on_test else f"client_{name}_mean"

    def spent(x: str) -> float:
        xs, _ = series(run.rows, x, field)
        return xs[-1] if xs else 0.0

    rounds = int(spent("round"))
    words = [f"{rounds} round{'' if rounds == 1 else 's'}"]
    if moved := spent("bytes"):
        words.append(f"{plots.amount(moved, plots.byte_unit(moved))} of communication")
    if seconds := spent("simulated_seconds"):
        words.append(f"{plots.amount(seconds, plots.time_unit(seconds))} of simulated time")
    return f"after {listing(words, shown=3)}"


def _one_seed(judged: Judgement) -> str:
    if any(group.deviation is None for group in judged.ranking.groups):
        return " Each run has one seed only; other seeds may give another ranking."
    return ""


def _others(n: int) -> str:
    return "One other run is" if n == 1 else f"{n} other runs are"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def listing(items: Sequence[str], shown: int = 5) -> str:
    """Returns text such as "a, b and c" or "a, b and 7 more"."""
    if len(items) > shown:
        items = [*items[: shown - 1], f"{len(items) - shown + 1} more"]
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))
