"""Decides whether differences between methods are larger than chance.

Two sources of chance are considered:

* Training is random. Runs that differ in their seeds only form a group. Two groups with at least
  two common seeds are compared seed by seed (:func:`fedjax_peft.report.intervals.paired`).
* The test set is a sample. The accuracy p on n examples has the standard error sqrt(p (1 - p) / n)
  (binomial). For the difference of two accuracies the variances are added, as if the runs were
  tested on different examples. This is conservative, because the examples are the same, and rows do
  not record which of them each run answered correctly. Over seeds, the variance of the difference
  is its mean over the common seeds, and widens their interval. For groups of a single seed, the
  test set is the only chance that is known. There, a mean over the models of K clients has the
  standard error s / sqrt(K), where s is the standard deviation over clients; its margin uses
  Student's t. On a common test set the two variances are added.

With several seeds, all groups are compared with a baseline, and each interval has 95 % confidence.
With one seed, the best run is compared with all others. In both cases a group is called the best
only if it is separated from every other one with 95 % confidence over all pairs together
(Bonferroni). Two groups without an interval are not separated.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedjax_peft.report.intervals import LEVEL, Difference, Summary, paired, student, summarise

TESTED = "test examples"
"""The end of the basis of a comparison whose interval contains the chance of the test examples."""


class Measurement(NamedTuple):
    """The score of a run."""

    value: float
    variance: float | None = None
    """Variance of the value over samples of test examples; None if it is not known."""
    freedom: float = math.inf
    """Degrees of freedom of that variance."""


class Group(NamedTuple):
    """Runs that differ in their seeds only."""

    name: str
    by_seed: Mapping[int | str, Measurement]
    """Seed -> score."""

    @property
    def values(self) -> dict[int | str, float]:
        """Seed -> value of the score."""
        return {seed: one.value for seed, one in self.by_seed.items()}

    @property
    def summary(self) -> Summary:
        """The score over the seeds."""
        return summarise(self.values)

    @property
    def mean(self) -> float:
        """The mean score over the seeds."""
        return statistics.fmean(self.values.values())


class PairComparison(NamedTuple):
    """The comparison of a group with the reference."""

    name: str
    reference: str
    difference: Difference
    """Score of the group minus that of the reference."""
    basis: str
    """The source of chance in the interval, or the reason why there is no interval."""

    @property
    def separated(self) -> bool:
        """Whether the interval excludes 0."""
        return self.difference.separated

    @property
    def margin(self) -> float | None:
        """Half of the interval's width; None without an interval."""
        low, high = self.difference.low, self.difference.high
        return None if low is None or high is None else (high - low) / 2


class Ranking(NamedTuple):
    """Groups, their comparisons with a reference, and the best one if there is one."""

    groups: list[Group]
    """The groups, the one with the best mean first."""
    comparisons: list[PairComparison]
    """Every other group compared with the reference, in the order of ``groups``."""
    winner: Group | None
    """The first group if it is separated from all others (Bonferroni), otherwise None."""

    @property
    def level(self) -> list[Group]:
        """The first group and the groups that are not separated from it, if it is the reference."""
        separated = {one.name for one in self.comparisons if one.separated}
        return [group for group in self.groups if group.name not in separated]


def rank(
    groups: Sequence[Group],
    *,
    lower_is_better: bool,
    obstacle: str | None = None,
    baseline: str | None = None,
    over_seeds: bool = False,
) -> Ranking:
    """Returns the groups sorted by mean score, and their comparisons with a reference.

    Args:
      groups: groups with different names; groups with equal scores keep their order.
      obstacle: the reason why no comparison is possible, if there is one.
      over_seeds: whether the groups have several seeds, and are compared with a baseline.
      baseline: name of the reference; by default the first of ``groups`` with ``over_seeds``, else
        the best one.
    """
    sign = 1 if lower_is_better else -1
    ordered = sorted(groups, key=lambda group: sign * group.mean)
    strict = LEVEL / max(math.comb(len(ordered), 2), 1)
    reference = (groups if over_seeds else ordered)[0]
    if baseline is not None:
        reference = next(group for group in groups if group.name == baseline)
    comparisons = [
        _compare(group, reference, LEVEL if over_seeds else strict, obstacle, over_seeds)
        for group in ordered
        if group is not reference
    ]
    best, *others = ordered
    with_best = [_compare(best, other, strict, obstacle, over_seeds) for other in others]
    wins = bool(with_best) and all(
        one.separated and sign * (one.difference.mean or 0) < 0 for one in with_best
    )
    return Ranking(ordered, comparisons, best if wins else None)


def binomial(share: float, examples: int) -> float:
    """Returns the variance of a share of ``examples`` examples.

    One example of each outcome is added, so that the variance is positive for a share of 0 or 1.
    """
    near = (share * examples + 1) / (examples + 2)
    return near * (1 - near) / examples


def wilson(share: float, examples: int) -> tuple[float, float]:
    """Returns the ends of Wilson's 95 % interval of a share: also right near 0 and 1."""
    z2 = student(LEVEL, math.inf) ** 2
    middle = (share * examples + z2 / 2) / (examples + z2)
    half = math.sqrt(z2 * (share * (1 - share) * examples + z2 / 4)) / (examples + z2)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _compare(
    group: Group, reference: Group, level: float, obstacle: str | None, over_seeds: bool
) -> PairComparison:
    variance = _tested_variance(group, reference)
    difference = paired(group.values, reference.values, level=level, variance=variance)

    def result(basis: str, margin: float | None = None) -> PairComparison:
        found = difference._replace(separated=False)
        if difference.n == 0:  # the means of different seeds, for orientation
            found = found._replace(mean=group.mean - reference.mean)
        if margin is not None and found.mean is not None:
            low, high = found.mean - margin, found.mean + margin
            found = found._replace(low=low, high=high, separated=abs(found.mean) > margin)
        return PairComparison(group.name, reference.name, found, basis)

    if obstacle is not None:
        return result(obstacle)
    if difference.n > 1:
        seeds = f"{difference.n} seeds, paired"
        if difference.low is None:
            seeds = "the same difference with every seed"
        basis = seeds if variance is None else f"{seeds}, and {TESTED}"
        return PairComparison(group.name, reference.name, difference, basis)
    if difference.n == 0:
        return result("no common seed")
    if over_seeds:
        return result("one common seed" if difference.unpaired else "one seed")
    tested = [*group.by_seed.values(), *reference.by_seed.values()]
    variances = [one.variance for one in tested if one.variance is not None]
    if len(variances) < len(tested):
        return result("size of the test set unknown")
    freedom = min(one.freedom for one in tested)
    basis = "test set" if math.isinf(freedom) else "tests and clients"
    return result(basis, student(level, freedom) * math.sqrt(sum(variances)))


def _tested_variance(one: Group, other: Group) -> float | None:
    """Returns the variance of a difference over samples of test examples, a mean over seeds.

    None if it is unknown for a run, or without a common seed.
    """
    common = one.by_seed.keys() & other.by_seed.keys()
    runs = [group.by_seed[seed].variance for group in (one, other) for seed in common]
    known = [variance for variance in runs if variance is not None]
    return sum(known) / len(common) if common and len(known) == len(runs) else None
