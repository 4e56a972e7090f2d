"""Decides whether differences between runs are larger than chance.

Two sources of chance are considered:

* The test set is a sample. The accuracy p on n examples has the standard error sqrt(p (1 - p) / n)
  (binomial). For the difference of two accuracies the variances are added, as if the runs were
  tested on different examples. This is conservative, because the examples are the same. A mean over
  the models of K clients has the standard error s / sqrt(K), where s is the standard deviation over
  clients; its margin uses Student's t. On a common test set the two variances are added.
* Training is random. Runs that differ in their seeds only form a group; its score is the mean. Two
  groups with at least two common seeds are compared seed by seed: Student's t gives the confidence
  interval of the mean difference.

The margin of a difference is the square root of the sum of the two squared margins. Each margin
has 95 % confidence over all pairs of groups together (Bonferroni). Two groups are separated if
their difference is larger than its margin. Without a margin, they are not separated.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedjax_peft.libraries import limit_blas_threads

__all__ = ["LEVEL", "Comparison", "Group", "Measurement", "Ranking", "binomial", "rank"]

LEVEL = 0.05
"""Probability of any false separation in a comparison of several groups."""


class Measurement(NamedTuple):
    """The score of a run."""

    value: float
    variance: float | None = None
    """Variance of the value over test sets; None if it is not known."""
    freedom: float = math.inf
    """Degrees of freedom of that variance."""


class Group(NamedTuple):
    """Runs that differ in their seeds only."""

    name: str
    by_seed: Mapping[str, Measurement]
    """Seed -> score."""

    @property
    def mean(self) -> float:
        """The mean score over the seeds."""
        return statistics.fmean(one.value for one in self.by_seed.values())

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the score over the seeds; None for a single seed."""
        values = [one.value for one in self.by_seed.values()]
        return statistics.stdev(values) if len(values) > 1 else None

    def only(self, seeds: Sequence[str]) -> "Group":
        """Returns the group with the given seeds only."""
        return self._replace(by_seed={seed: self.by_seed[seed] for seed in seeds})


class Comparison(NamedTuple):
    """The comparison of the best group with another one."""

    best: str
    other: str
    difference: float
    """Mean score of the best group minus that of the other one."""
    margin: float | None
    """The margin of the difference; None if it is not known."""
    basis: str
    """The sources of chance in the margin, or the reason why the margin is not known."""

    @property
    def separated(self) -> bool:
        """Whether the difference is larger than its margin."""
        return self.margin is not None and abs(self.difference) > self.margin


class Ranking(NamedTuple):
    """Groups sorted by score, and the comparisons of the first group with the others."""

    groups: list[Group]
    """The groups, the best one first."""
    comparisons: list[Comparison]
    """The comparisons of the first group with each other group."""

    @property
    def winner(self) -> Group | None:
        """The first group if it is separated from all others, otherwise None."""
        separated = self.comparisons and all(one.separated for one in self.comparisons)
        return self.groups[0] if separated else None

    @property
    def level(self) -> list[Group]:
        """The first group and the groups that are not separated from it."""
        others = zip(self.groups[1:], self.comparisons, strict=True)
        return [*self.groups[:1], *(group for group, one in others if not one.separated)]


def rank(groups: Sequence[Group], *, lower_is_better: bool, obstacle: str | None = None) -> Ranking:
    """Returns the groups sorted by mean score, and the comparisons of the first with the others.

    Args:
      groups: groups with different names; groups with equal scores keep their order.
      lower_is_better: whether lower scores are better.
      obstacle: the reason why no comparison is possible, if there is one.
    """
    sign = 1 if lower_is_better else -1
    ordered = sorted(groups, key=lambda group: sign * group.mean)
    pairs = max(math.comb(len(ordered), 2), 1)
    comparisons = [_compare(ordered[0], other, LEVEL / pairs, obstacle) for other in ordered[1:]]
    return Ranking(ordered, comparisons)


def binomial(share: float, examples: int) -> float:
    """Returns the variance of a share of ``examples`` examples.

    One example of each outcome is added, so that the variance is positive for a share of 0 or 1.
    """
    near = (share * examples + 1) / (examples + 2)
    return near * (1 - near) / examples


def _compare(best: Group, other: Group, level: float, obstacle: str | None) -> Comparison:
    shared = sorted(best.by_seed.keys() & other.by_seed.keys())
    a, b = (group.only(shared) if shared else group for group in (best, other))
    difference = a.mean - b.mean

    def result(margin: float | None, basis: str) -> Comparison:
        return Comparison(best.name, other.name, difference, margin, basis)

    if obstacle is not None:
        return result(None, obstacle)
    if not shared:
        return result(None, "no common seed")
    squares, sources = [], []
    tested = [*a.by_seed.values(), *b.by_seed.values()]
    variances = [one.variance for one in tested if one.variance is not None]
    if len(variances) == len(tested):
        # All seeds share one test set, so its variance does not shrink with more seeds.
        error = math.sqrt(2 * statistics.fmean(variances))
        freedom = min(one.freedom for one in tested)
        squares.append((_critical(level, freedom) * error) ** 2)
        sources.append("test set" if math.isinf(freedom) else "tests and clients")
    if len(shared) > 1:
        differences = [a.by_seed[seed].value - b.by_seed[seed].value for seed in shared]
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        squares.append((_critical(level, len(differences) - 1) * error) ** 2)
        sources.append(f"{len(shared)} seeds, paired")
    if not squares:
        return result(None, "size of the test set unknown")
    return result(math.sqrt(sum(squares)), " and ".join(sources))


def _critical(level: float, freedom: float) -> float:
    """Returns the two-sided critical value in standard errors: normal, or else Student's t."""
    if math.isinf(freedom):
        return statistics.NormalDist().inv_cdf(1 - level / 2)
    limit_blas_threads()
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - level / 2))
