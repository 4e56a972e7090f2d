"""Whether differences between runs are larger than chance: of the test set, and of the seeds.

Two sources of chance are known here:

* The test set is a sample. The accuracy p on n examples has the standard error sqrt(p (1 - p) / n)
  (binomial). Of a difference of two accuracies the variances are added, as if the two runs had been
  tested on different examples. Both have seen the same ones, so this is cautious. A mean over K
  clients' models has the standard error of the clients, their standard deviation / sqrt(K), by
  Student's t; on a common test set the two variances are added.
* Training is random. Of runs that differ in their seeds only, the score is the mean. Two such
  groups with at least two seeds in common are compared seed by seed: the differences have a mean
  and, by Student's t, an interval.

The margin of a difference is the square root of the sum of the squares of the two margins. Each is
for 95 % confidence in all pairs of groups together (Bonferroni). A difference beyond its margin
separates two groups; what has no margin separates nothing.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedjax_peft.libraries import limit_blas_threads

__all__ = ["LEVEL", "Comparison", "Group", "Measurement", "Ranking", "binomial", "rank"]

LEVEL = 0.05
"""The chance of any false separation in a comparison of several groups."""


class Measurement(NamedTuple):
    """The score of a run."""

    value: float
    variance: float | None = None
    """Of the value, because the test is a sample; None if it is not known."""
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
        """The standard deviation of the score over the seeds, None of a single one."""
        values = [one.value for one in self.by_seed.values()]
        return statistics.stdev(values) if len(values) > 1 else None

    def only(self, seeds: Sequence[str]) -> "Group":
        """Returns the group with some of its seeds."""
        return self._replace(by_seed={seed: self.by_seed[seed] for seed in seeds})


class Comparison(NamedTuple):
    """The best group beside another one."""

    best: str
    other: str
    difference: float
    """Of the mean scores, best minus other."""
    margin: float | None
    """None if it is not known."""
    basis: str
    """What the margin is from, or why there is none."""

    @property
    def separated(self) -> bool:
        """Whether the difference is larger than chance."""
        return self.margin is not None and abs(self.difference) > self.margin


class Ranking(NamedTuple):
    """Groups in the order of their scores, and whether the first is ahead of the others."""

    groups: list[Group]
    """The best first."""
    comparisons: list[Comparison]
    """Of the first group with every other one."""

    @property
    def winner(self) -> Group | None:
        """The group that is separated from every other one, if there is one."""
        ahead = self.comparisons and all(one.separated for one in self.comparisons)
        return self.groups[0] if ahead else None

    @property
    def level(self) -> list[Group]:
        """The first group and those that are not separated from it."""
        apart = [one.separated for one in self.comparisons]
        others = zip(self.groups[1:], apart, strict=True)
        return [*self.groups[:1], *(group for group, ahead in others if not ahead)]


def rank(groups: Sequence[Group], *, lower_is_better: bool, obstacle: str | None = None) -> Ranking:
    """Returns groups in the order of their mean scores, the first compared with every other.

    Args:
      groups: with different names; of equal scores the earlier one comes first.
      lower_is_better: the direction of the score.
      obstacle: why no comparison is possible, if that is so.
    """
    sign = 1 if lower_is_better else -1
    ordered = sorted(groups, key=lambda group: sign * group.mean)
    pairs = max(math.comb(len(ordered), 2), 1)
    comparisons = [_compare(ordered[0], other, LEVEL / pairs, obstacle) for other in ordered[1:]]
    return Ranking(ordered, comparisons)


def binomial(share: float, examples: int) -> float:
    """Returns the variance of a share of so many examples.

    One example of each outcome is added, so that a share of 0 or 1 has a variance too.
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
    squares, parts = [], []
    tested = [*a.by_seed.values(), *b.by_seed.values()]
    variances = [one.variance for one in tested if one.variance is not None]
    if len(variances) == len(tested):
        # All seeds have the same test set, whose chance does not shrink with their number.
        error = math.sqrt(2 * statistics.fmean(variances))
        freedom = min(one.freedom for one in tested)
        squares.append((_critical(level, freedom) * error) ** 2)
        parts.append("test set" if math.isinf(freedom) else "tests and clients")
    if len(shared) > 1:
        apart = [a.by_seed[seed].value - b.by_seed[seed].value for seed in shared]
        error = statistics.stdev(apart) / math.sqrt(len(apart))
        squares.append((_critical(level, len(apart) - 1) * error) ** 2)
        parts.append(f"{len(shared)} seeds, paired")
    if not squares:
        return result(None, "size of the test unknown")
    return result(math.sqrt(sum(squares)), " and ".join(parts))


def _critical(level: float, freedom: float) -> float:
    """Returns how many standard errors a difference must have; Student's t, two-sided."""
    if math.isinf(freedom):
        return statistics.NormalDist().inv_cdf(1 - level / 2)
    limit_blas_threads()
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - level / 2))
