"""The comparison of runs with one seed each: one row a run, ranked by its score."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_peft.report import separation, tested, wording
from fedjax_peft.report.columns import cost_columns, score_columns
from fedjax_peft.report.comparison import Comparison
from fedjax_peft.report.judgement import Judgement, obstacle, sampling_variance
from fedjax_peft.report.records import SEED, RunRecord, distinct
from fedjax_peft.report.separation import Group, Measurement
from fedjax_peft.report.settings import printed
from fedjax_peft.simulation.rows import headline_is_lower_better
from fedjax_peft.simulation.summaries import series, summary


def compare_runs(runs: Sequence[RunRecord]) -> Comparison:
    """Returns the comparison of runs; equal names are extended by what tells them apart."""
    runs = distinct(runs)
    facts = [summary(run.rows) for run in runs]
    field = tested.comparable(f"test_{facts[0]['headline']}", runs) if facts else ""
    compared = "global_score" if field.startswith("global_") else "final_score"
    judged = _judge(runs, facts, compared)
    score = wording.common((fact["headline"] for fact in facts), "score")
    text = wording.score_text(all(wording.is_share(fact["headline"]) for fact in facts))
    finals = [wording.MISSING if (x := fact[compared]) is None else text(x) for fact in facts]
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"Comparison of {len(runs)} runs"
    columns = [*score_columns(facts, judged), *cost_columns(facts)]
    return Comparison(
        head="Run",
        title=title,
        caption=title,
        rows={run.name: {None: run} for run in runs},
        columns=[column for column in columns if not column.is_empty],
        judged=judged,
        lead=_lead(runs, facts, judged),
        finals=[f"{run.name} {final}" for run, final in zip(runs, finals, strict=True)],
        curve=f"test {wording.word(score)}",
        stem=score,
        metric=field if compared == "global_score" else None,
        captions=tested.captions(field, runs),
        warnings=tested.caution(field, {run.name: run for run in runs}),
    )


# Scores.


def _judge(
    runs: Sequence[RunRecord], facts: Sequence[Mapping[str, Any]], compared: str
) -> Judgement | None:
    """Returns the ranking of runs with different names and one seed each; None without a score.

    A run with the config and the seed of an earlier one is not compared.

    Args:
      compared: the figure of the test scores that are compared, ``final_score`` or
        ``global_score``.
    """
    on_test = any(fact["final_score"] is not None for fact in facts)
    metric = wording.word(wording.common((fact["headline"] for fact in facts), "score"))
    groups, rows, known = [], {}, set()
    for i, (run, fact) in enumerate(zip(runs, facts, strict=True)):
        config = json.dumps(printed({**run.config, "name": ""}), sort_keys=True)
        same = config if "model" in run.config else i  # Python's runs record not all settings
        score = _on_test(run, fact, compared) if on_test else _on_clients(run, fact)
        if score is not None and same not in known:
            known.add(same)
            groups.append(Group(run.name, {_seed(run.config): score}))
            rows[run.name] = i
    if not groups:
        return None
    used = [runs[i] for i in rows.values()]
    lower = all(headline_is_lower_better(run.rows) for run in used)
    return Judgement(
        what=_words(metric, compared, used) if on_test else f"mean of the clients’ {metric}",
        share=all(wording.is_share(fact["headline"]) for fact in facts),
        on_test=on_test,
        rows=rows,
        ranking=separation.rank(groups, lower_is_better=lower, obstacle=obstacle(used)),
    )


def _words(metric: str, compared: str, runs: Sequence[RunRecord]) -> str:
    """Returns the compared test score in words."""
    field = f"test_{metric}" if compared == "final_score" else f"global_test_{metric}"
    return " ".join(filter(None, [f"final test {metric}", tested.models(field, runs)]))


def _on_test(run: RunRecord, fact: Mapping[str, Any], compared: str) -> Measurement | None:
    """Returns the last score on the test set after training."""
    value = fact[compared]
    if value is None or not fact["final_round"]:
        return None
    variance = sampling_variance(run, f"test_{fact['headline']}", value)
    if variance is None:
        return Measurement(value)
    deviation, count = fact["test_std"], fact["test_count"]
    if deviation is None or not count or compared == "global_score":
        return Measurement(value, variance)
    if count < 2:
        return Measurement(value)
    # The score is a mean over clients' models, and these clients are a sample too.
    return Measurement(value, variance + deviation**2 / (count - 1), count - 1)


def _on_clients(run: RunRecord, fact: Mapping[str, Any]) -> Measurement | None:
    """Returns the last mean over the clients' tests after training."""
    value, deviation, count = (fact[f"client_{kind}"] for kind in ("mean", "std", "count"))
    if value is None or not fact["rounds"]:
        return None
    if deviation is None or not count or count < 2:
        return Measurement(value)
    return Measurement(value, deviation**2 / (count - 1), count - 1)


def _seed(config: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in printed(config).items() if SEED.search(key))


# Sentences.


def _lead(
    runs: Sequence[RunRecord], facts: Sequence[Mapping[str, Any]], judged: Judgement | None
) -> str:
    """Returns one or two sentences; a winner is named only if it is separated from all others."""
    if judged is None:
        score = wording.common((wording.word(fact["headline"]) for fact in facts), "score")
        after = " after training" if any(fact["final_round"] == 0 for fact in facts) else ""
        return f"No test {score} has been recorded{after} yet."
    ranking = judged.ranking
    first, level = ranking.groups[0], ranking.level
    if ranking.winner or len(ranking.groups) == 1:
        score = f"{judged.text(first.mean)}{_error(judged, first, runs)}"
        if not ranking.winner:
            return f"{wording.capital(judged.what)}: {score}."
        return (
            f"{first.name} has the best {judged.what}: {score}. The difference to every other run"
            " is larger than the margin of error. Each run has one seed only; other seeds may give"
            " another ranking."
        )
    why = "their differences are within the margin of error"
    if unknown := {one.basis for one in ranking.comparisons if one.margin is None}:
        why = f"the margin of error is not known ({', '.join(sorted(unknown))})"
    behind = len(ranking.groups) - len(level)
    others = "One other run is" if behind == 1 else f"{behind} other runs are"
    rest = f" {others} worse by more than the margin." if behind else ""
    named = wording.listing([f"{group.name} {judged.text(group.mean)}" for group in level])
    return f"{wording.capital(judged.what)}: {named} are not separated; {why}.{rest}"


def _error(judged: Judgement, group: Group, runs: Sequence[RunRecord]) -> str:
    """Returns the standard error of a score, and the cost of the run."""
    (one,) = group.by_seed.values()
    error = ""
    if one.variance is not None:
        error = f" (standard error {judged.gap(math.sqrt(one.variance))})"
    return f"{error} {_after(runs[judged.rows[group.name]], on_test=judged.on_test)}"


def _after(run: RunRecord, *, on_test: bool) -> str:
    """Returns the cost of a run up to its last test, in words."""
    name = summary(run.rows)["headline"]
    field = f"test_{name}" if on_test else f"client_{name}_mean"

    def spent(x: str) -> float:
        xs, _ = series(run.rows, x, field)
        return xs[-1] if xs else 0.0

    rounds = int(spent("round"))
    words = [f"{rounds} {wording.plural('round', rounds)}"]
    if moved := spent("bytes"):
        words.append(f"{wording.amount('bytes', moved)} of communication")
    if seconds := spent("simulated_seconds"):
        words.append(f"{wording.amount('simulated_seconds', seconds)} of simulated time")
    return f"after {wording.listing(words)}"
