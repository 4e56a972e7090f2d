"""Sentences on what a comparison of runs or methods shows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_peft.report import tested
from fedjax_peft.report.cells import is_test
from fedjax_peft.report.columns import Column
from fedjax_peft.report.intervals import (
    FEWEST_RESAMPLED,
    MOST_SEEDS,
    POWER,
    largest_deviation,
    seeds_needed,
)
from fedjax_peft.report.judgement import Judgement
from fedjax_peft.report.records import RunRecord
from fedjax_peft.report.separation import TESTED, Group
from fedjax_peft.report.wording import (
    amount,
    are,
    capital,
    common,
    listing,
    signed,
    word,
)
from fedjax_peft.simulation.rows import headline, last_with, number
from fedjax_peft.simulation.score_names import usual_scores
from fedjax_peft.simulation.summaries import series, summary
from fedjax_peft.support.display import counted, plural
from fedjax_peft.support.errors import InputError

FEW = 3
"""Fewer seeds than this are warned of."""


# The result.


def lead_of_runs(
    runs: Sequence[RunRecord], facts: Sequence[Mapping[str, Any]], judged: Judgement | None
) -> str:
    """Returns one or two sentences; a winner is named only if it is separated from all others."""
    if judged is None:
        score = common((word(fact["headline"]) for fact in facts), "score")
        after = " after training" if any(fact["final_round"] == 0 for fact in facts) else ""
        which = "finite final test" if any(fact["final_round"] for fact in facts) else "test"
        return f"No {which} {score} has been recorded{after} yet."
    ranking = judged.ranking
    first, level = ranking.groups[0], ranking.level
    if ranking.winner or len(ranking.groups) == 1:
        score = f"{judged.text(first.mean)}{_error(judged, first, runs)}"
        if not ranking.winner:
            return f"{capital(judged.what)}: {score}."
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
    named = listing([f"{group.name} {judged.text(group.mean)}" for group in level])
    return f"{capital(judged.what)}: {named} are not separated; {why}.{rest}"


def _error(judged: Judgement, group: Group, runs: Sequence[RunRecord]) -> str:
    """Returns the standard error of a score, and the cost of the run."""
    (one,) = group.by_seed.values()
    error = ""
    if one.variance is not None:
        error = f" (standard error {judged.gap(math.sqrt(one.variance))})"
    return f"{error} {_after(runs[judged.rows[group.name]], on_test=judged.on_test)}"


def _after(run: RunRecord, *, on_test: bool) -> str:
    """Returns the cost of a run up to its last test, in words."""
    field = usual_scores(summary(run.rows)["headline"])[0 if on_test else 1]

    def spent(x: str) -> float:
        xs, _ = series(run.rows, x, field)
        return xs[-1] if xs else 0.0

    rounds = int(spent("round"))
    words = [counted(rounds, "round")]
    if moved := spent("bytes"):
        words.append(f"{amount('bytes', moved)} of communication")
    if seconds := spent("simulated_seconds"):
        words.append(f"{amount('simulated_seconds', seconds)} of simulated time")
    return f"after {listing(words)}"


def lead_of_methods(what: str, judged: Judgement | None) -> str:
    """Returns sentences on what the comparison shows."""
    if judged is None:
        return f"No {what} has been recorded."
    ranking = judged.ranking
    first = ranking.groups[0]
    score = f"{judged.text(first.mean)}{_spread(judged, first)}"
    if not ranking.comparisons:
        return f"{capital(what)} of {first.name}: {score}."
    reference = ranking.comparisons[0].reference
    if all(one.margin is None for one in ranking.comparisons):
        why = ", ".join(sorted({one.basis for one in ranking.comparisons}))
        return (
            f"{capital(what)}: no method is separated from {reference}, because there are no"
            f" intervals ({why})."
        )
    separated = [one for one in ranking.comparisons if one.separated]
    if not separated:
        return (
            f"No method is separated from {reference} in {what}: no difference, paired by"
            " seed, has its 95 % intervals on one side of 0."
        )
    best, where = "", f" in {what}"
    if ranking.winner:
        best = f"{first.name} has the best {what}, separated from every other: {score}. "
        where = ""
    unit = " points" if judged.share else ""
    texts = [
        f"{one.name} ({signed(one.difference.mean or 0.0, judged.share)}{unit})"
        for one in separated
    ]
    rest = [one.name for one in ranking.comparisons if not one.separated]
    others = f"; {listing(rest)} {are(rest)} not" if rest else ""
    return f"{best}{listing(texts)} {are(texts)} separated from {reference}{where}{others}."


def _spread(judged: Judgement, group: Group) -> str:
    found = group.summary
    if found.sd is None:
        return " (one seed)"
    return f" (mean of {found.n} seeds, standard deviation {judged.gap(found.sd)})"


# Cautions and explanations.


def captions(metric: str, columns: Sequence[Column], runs: Sequence[RunRecord]) -> list[str]:
    """Returns sentences that explain the columns."""
    found = ["Values are means ± standard deviations (n − 1) over seeds."]
    found += tested.captions(metric, runs)
    if is_test(metric) and any(column.title.startswith("Best ") for column in columns):
        found.append(
            "The best value over all rounds is chosen on the test set, so it is optimistic."
        )
    return found


def few_seeds(rows: Mapping[str, Mapping[Any, RunRecord]]) -> Iterator[str]:
    """Yields warnings of rows whose seeds are few."""
    few: dict[int, list[str]] = {}
    for name, by_seed in rows.items():
        if len(by_seed) < FEW:
            few.setdefault(len(by_seed), []).append(name)
    for n, names in few.items():
        who = f"{listing(names)} {'has' if len(names) == 1 else 'have'}"
        if n == 1:
            yield f"{who} one seed: no standard deviation and no interval."
        else:
            yield (
                f"{who} {n} seeds. Use at least {FEW}: intervals of fewer are so wide that they"
                " separate next to nothing."
            )


def not_finite(runs: Sequence[RunRecord], metric: str | None) -> Iterator[str]:
    """Yields a warning of runs that are not ranked, because their last score is not finite.

    Args:
      metric: the field of the score; None: that of each run's task.
    """
    found = []
    for run in runs:
        fields = usual_scores(headline(run.rows)) if metric is None else (metric,)
        field = next((one for one in fields if last_with(run.rows, one)), fields[0])
        if (last := last_with(run.rows, field)) and number(last, field) is None:
            found.append(f"{run.name} (round {last['round']})")
    if found:
        yield (f"Left out of the ranking, because the last score is not finite: {listing(found)}.")


def unpaired(judged: Judgement | None) -> Iterator[str]:
    """Yields warnings of seeds that only one of two compared rows has."""
    for one in judged.ranking.comparisons if judged else ():
        if seeds := one.difference.unpaired:
            yield (
                f"{one.name} and {one.reference} do not have the same seeds: the difference leaves"
                f" out {plural('seed', len(seeds))} {', '.join(map(str, seeds))}."
            )


def paired(judged: Judgement | None) -> str:
    """Returns what the intervals of the differences contain, and what separated means."""
    comparisons = judged.ranking.comparisons if judged else []
    if not comparisons:
        return ""
    texts = [
        "Differences are paired by seed. Separated: the 95 % intervals, by Student’s t and by the"
        " bootstrap, exclude 0."
    ]
    if any(1 < one.difference.n < FEWEST_RESAMPLED for one in comparisons):
        texts.append(f"With fewer than {FEWEST_RESAMPLED} seeds, only Student’s t has an interval.")
    if any(one.basis.endswith(TESTED) for one in comparisons):
        texts.append(
            "The intervals contain the chance of the seeds and of the test examples: the binomial"
            " variances of both scores, as if the methods were tested on different examples."
        )
    else:
        texts.append(
            "The intervals are about the seeds only, on these test examples, because the metric is"
            " no share of a known number of examples. Without a spread over seeds there is none."
        )
    texts.append(
        "Each comparison has 95 % confidence by itself. The best mean is bold only if it is"
        " separated from every other method with 95 % confidence over all pairs together"
        " (Bonferroni)."
    )
    return " ".join(texts)


def power(judged: Judgement | None, detect: float | None) -> str:
    """Returns how many seeds the comparisons need to find a difference; empty if it is not known.

    Raises:
      InputError: the difference is not above 0.
    """
    if detect is not None and not 0 < detect < math.inf:
        raise InputError(f"A difference to find must be above 0, such as 0.01, not {detect:g}.")
    size = detect or (0.01 if judged and judged.share else None)
    comparisons = judged.ranking.comparisons if judged else []
    sds = {one.name: sd for one in comparisons if (sd := one.difference.sd)}
    if size is None or judged is None or not sds:
        return ""
    known = {one.name: one.difference for one in comparisons if one.name in sds}
    needs = {name: seeds_needed(size, sd) or MOST_SEEDS + 1 for name, sd in sds.items()}
    order = sorted(needs, key=needs.__getitem__, reverse=True)
    texts = [_need(name, needs[name], known[name].n, judged.gap(sds[name])) for name in order]
    out = (
        f"To find a difference of {judged.gap(size)} to {comparisons[0].reference} in"
        f" {100 * POWER:.0f} % of studies (paired t test at 5 %), {listing(texts)}."
    )
    fewest = min(one.n for one in known.values())
    if fewest < FEWEST_RESAMPLED:
        out += (
            f" These are rough numbers: a standard deviation (sd) of {fewest} seeds can be"
            f" {largest_deviation(fewest):.2g} times as large in truth."
        )
    chance = max(one.tested for one in known.values())
    if chance >= size:
        out += (
            f" The chance of the test examples is up to ± {judged.gap(chance)} with any number of"
            " seeds: a difference of this size needs a larger test set too."
        )
    return out


def _need(name: str, needed: int, n: int, sd: str) -> str:
    """Returns the seeds that a comparison needs in words."""
    if needed > MOST_SEEDS:
        return f"{name} needs more than {MOST_SEEDS:,} seeds (sd {sd})"
    more = f"{needed - n} more" if needed > n else "no more"
    return f"{name} needs {needed} seeds ({more}; sd {sd})"
