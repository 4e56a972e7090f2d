"""Sentences on methods that help clients on average and harm the worst of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_peft.report.intervals import Difference, paired
from fedjax_peft.report.judgement import Judgement
from fedjax_peft.report.records import RunRecord
from fedjax_peft.report.wording import is_share, listing, signed, word
from fedjax_peft.simulation.summaries import summary
from fedjax_peft.support.display import counted

_FIGURES = {"client_mean": "their mean", "client_worst_tenth": "the worst 10 %"}
"""Figure of a run's summary -> whose score it is. Both are of the clients' own tests, so that a
larger or smaller common test set plays no part."""


def trade_offs(
    rows: Mapping[str, Mapping[Any, RunRecord]],
    judged: Judgement | None,
    *,
    lower: bool,
) -> Iterator[str]:
    """Yields a sentence for each method whose clients' mean is better than the baseline's, and
    whose worst tenth of the clients is worse.

    Both are mean differences over common seeds. The sentence has their intervals, because a
    difference of the worst clients, who are few, is often chance.

    Args:
      rows: name of a method -> seed -> run.
      judged: names the baseline.
      lower: whether lower scores are better.
    """
    if judged is None or not judged.ranking.comparisons:
        return
    baseline = judged.ranking.comparisons[0].reference
    facts = {
        name: {seed: summary(run.rows) for seed, run in by_seed.items()}
        for name, by_seed in rows.items()
    }
    metric = next(iter(facts[baseline].values()))["headline"]
    for name, mine in facts.items():
        mean, worst = (_difference(mine, facts[baseline], figure) for figure in _FIGURES)
        if mean.mean is None or worst.mean is None:
            continue
        if (mean.mean < 0 < worst.mean) if lower else (mean.mean > 0 > worst.mean):
            yield _in_words(name, baseline, metric, (mean, worst))


def _difference(
    mine: Mapping[Any, Mapping[str, Any]], other: Mapping[Any, Mapping[str, Any]], figure: str
) -> Difference:
    """Returns the difference of a figure, paired by seed."""
    known = (
        {seed: x for seed, fact in facts.items() if (x := fact[figure]) is not None}
        for facts in (mine, other)
    )
    return paired(*known)


def _in_words(name: str, baseline: str, metric: str, found: Sequence[Difference]) -> str:
    """Returns the sentence on the differences of the clients' mean and of the worst tenth."""
    share, n = is_share(metric), found[0].n
    texts = []
    for who, one in zip(_FIGURES.values(), found, strict=True):
        text = f"{who} {signed(one.mean or 0.0, share)}{' points' if share else ''}"
        if one.low is not None and one.high is not None:
            text += f" (95 % interval {signed(one.low, share)} to {signed(one.high, share)})"
        texts.append(text)
    chance = [who for who, one in zip(_FIGURES.values(), found, strict=True) if not one.separated]
    doubt = f" Not separated from 0 over seeds: {listing(chance)}." if chance else ""
    return (
        f"{name} is better than {baseline} for its clients on average, and worse for the worst of"
        f" them: {word(metric)} on the clients’ tests, {' and '.join(texts)}, over"
        f" {counted(n, 'seed')}, paired.{doubt}"
    )
