"""The ranking of runs by their scores, and its result in one sentence."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_peft.report import plots, separation
from fedjax_peft.report.records import SEED, RunRecord
from fedjax_peft.report.separation import Group, Measurement, Ranking
from fedjax_peft.simulation.rows import headline, headline_is_lower_better, number
from fedjax_peft.simulation.summaries import series, summary
from fedjax_peft.support.nested import flatten

__all__ = [
    "Judgement",
    "capital",
    "gap_text",
    "judge",
    "listing",
    "obstacle",
    "printed",
    "sampling_variance",
    "score_text",
    "verdict",
    "word",
]

_SHARE_OF_EXAMPLES = re.compile(r"(\w+)_(accuracy|exact_match)(_mean|_weighted)?")
"""Fields that are means of values between 0 and 1 over examples. The binomial variance is an upper
bound of their variance. Other scores, such as the F1 of entities, are not means over examples. A
field that ends in ``_mean`` or ``_weighted`` is about the examples of all clients' tests."""


class Judgement(NamedTuple):
    """The scores by which the rows of a table, each a group of runs, are ranked."""

    what: str
    """The score in words, such as ``final test accuracy``."""
    text: Callable[[float], str]
    """Prints a score with its unit."""
    gap: Callable[[float], str]
    """Prints the difference of two scores with its unit."""
    on_test: bool
    """Whether the score is on the test set; otherwise it is the mean over clients' tests."""
    rows: Mapping[str, int]
    """Group -> index of its row."""
    ranking: Ranking

    @property
    def best(self) -> set[int]:
        """The row to mark as the best: it is separated from all others. Empty if there is none."""
        return {self.rows[self.ranking.winner.name]} if self.ranking.winner else set()


def judge(runs: Sequence[RunRecord]) -> Judgement | None:
    """Returns the ranking of runs with different names and one seed each; None without a score.

    A run with the config and the seed of an earlier one is not compared.
    """
    facts = [summary(run.rows) for run in runs]
    on_test = any(fact["final_score"] is not None for fact in facts)
    metric = plots.common((fact["headline"] for fact in facts), "score")
    groups, rows, known = [], {}, set()
    for i, (run, fact) in enumerate(zip(runs, facts, strict=True)):
        config = json.dumps(printed({**run.config, "name": ""}), sort_keys=True)
        same = config if "model" in run.config else i  # Python's runs record not all settings
        score = (_on_test if on_test else _on_clients)(run, fact)
        if score is not None and same not in known:
            known.add(same)
            groups.append(Group(run.name, {_seed(run.config): score}))
            rows[run.name] = i
    if not groups:
        return None
    used = [runs[i] for i in rows.values()]
    share = all(plots.is_share(fact["headline"]) for fact in facts)
    return Judgement(
        what=f"final test {word(metric)}" if on_test else f"mean of the clients’ {word(metric)}",
        text=score_text(share),
        gap=gap_text(share),
        on_test=on_test,
        rows=rows,
        ranking=separation.rank(
            groups,
            lower_is_better=all(headline_is_lower_better(run.rows) for run in used),
            obstacle=obstacle(used),
        ),
    )


def obstacle(runs: Sequence[RunRecord]) -> str | None:
    """Returns the reason why the scores of runs cannot be compared; None if they can."""
    metrics = {(headline(run.rows), headline_is_lower_better(run.rows)) for run in runs}
    if len(metrics) > 1:
        return "different metrics"
    if len({json.dumps(_source(run.config)) for run in runs}) > 1:
        return "different data"
    return None


def verdict(runs: Sequence[RunRecord], judged: Judgement | None) -> str:
    """Returns one or two sentences about the result of runs with one seed each.

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
    score = f"{judged.text(first.mean)}{_error(judged, first, runs)}"
    if len(judged.ranking.groups) == 1:
        return f"{capital(judged.what)}: {score}."
    if judged.ranking.winner:
        return (
            f"{first.name} has the best {judged.what}: {score}. The difference to every other run"
            " is larger than the margin of error. Each run has one seed only; other seeds may give"
            " another ranking."
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
    return f"{capital(judged.what)}: {listing(named)} are not separated; {why}.{rest}"


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


def gap_text(share: bool) -> Callable[[float], str]:
    """Returns the function that prints a difference of scores; in points for a ``share``."""
    return (lambda value: f"{100 * value:.1f} points") if share else "{:.3g}".format


def sampling_variance(run: RunRecord, field: str, value: float) -> float | None:
    """Returns the variance of a run's score over samples of test examples; None if unknown.

    A mean over clients counts as a mean over all their examples.

    Args:
      run: a run.
      field: a field of its rows, such as ``test_accuracy``.
      value: the value of the field in some round.
    """
    found = _SHARE_OF_EXAMPLES.fullmatch(field)
    if found is None or not 0 <= value <= 1:
        return None
    sizes = (number(row, f"{found[1]}_examples") for row in reversed(run.rows))
    examples = next((size for size in sizes if size), None)
    if examples is None and found[1] == "test":
        examples = _configured_size(run.config)
    return separation.binomial(value, int(examples)) if examples else None


# Scores of single runs.


def _on_test(run: RunRecord, fact: Mapping[str, Any]) -> Measurement | None:
    value = fact["final_score"]
    if value is None or not fact["final_round"]:
        return None
    variance = sampling_variance(run, f"test_{fact['headline']}", value)
    if variance is None:
        return Measurement(value)
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


# Words.


def _error(judged: Judgement, group: Group, runs: Sequence[RunRecord]) -> str:
    """Returns the standard error of a score, and the cost of the run."""
    (one,) = group.by_seed.values()
    error = ""
    if one.variance is not None:
        error = f" (standard error {judged.gap(math.sqrt(one.variance))})"
    return f"{error} {_after(runs[judged.rows[group.name]], judged)}"


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


def _others(n: int) -> str:
    return "One other run is" if n == 1 else f"{n} other runs are"


def capital(text: str) -> str:
    """Returns a text with a capital first letter."""
    return text[:1].upper() + text[1:]


def listing(items: Sequence[str], shown: int = 5) -> str:
    """Returns text such as "a, b and c" or "a, b and 7 more"."""
    if len(items) > shown:
        items = [*items[: shown - 1], f"{len(items) - shown + 1} more"]
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))
