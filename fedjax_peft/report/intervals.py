"""Means, standard deviations and 95 % intervals of results over seeds.

With few seeds, an interval rests on assumptions. Student's t assumes that the values are roughly
normal. The bootstrap assumes nothing about their shape, but with fewer than about ten seeds it is
too narrow. With two or three seeds it is left out: equal signs alone put 0 outside of it. A
difference counts as separated only if every interval that it has excludes 0.

Scores are shares of few test examples, so two seeds can have the same difference by chance. The
seeds then show no variance at all, which is no reason for an interval of width 0. The variance over
samples of test examples is therefore added to that of the seeds where it is known, and without it
equal differences have no interval.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_peft.support.libraries import limit_blas_threads

LEVEL = 0.05
"""One minus the confidence of an interval."""
RESAMPLES = 10_000
"""Resamples of the bootstrap."""
FEWEST_RESAMPLED = 4
"""Fewer differences than this have no bootstrap interval."""
POWER = 0.8
"""The share of studies that should find a difference which is there."""
MOST_SEEDS = 1000
"""Numbers of seeds above this are not told."""
_CERTAIN = 20.0
"""A difference of this many standard deviations is found with two seeds."""


class Summary(NamedTuple):
    """A metric over seeds."""

    mean: float | None
    """None without any value."""
    sd: float | None
    """Standard deviation with n - 1 in the denominator; None for fewer than two values."""
    n: int
    low: float | None
    """Lower end of the 95 % t interval of the mean; None for fewer than two values."""
    high: float | None

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        """Returns text such as ``81.2 ± 0.4``; the mean alone for one value, ``-`` for none.

        Args:
          scale: a factor, such as 100 for a fraction that is printed in percent.
          digits: decimal places.
        """
        if self.mean is None:
            return "-"
        spread = "" if self.sd is None else f" ± {scale * self.sd:.{digits}f}"
        return f"{scale * self.mean:.{digits}f}{spread}"

    def score_text(self, share: bool) -> str:
        """Returns the text of a score; a ``share`` is in percent, without the sign."""
        if share or self.mean is None:
            return self.text(100)
        return f"{self.mean:.4g}" + ("" if self.sd is None else f" ± {self.sd:.2g}")


class Difference(NamedTuple):
    """The mean of the differences a - b, seed by seed."""

    mean: float | None
    """None without a common seed."""
    n: int
    """Number of common seeds."""
    low: float | None
    """Lower end of the 95 % interval by Student's t; None for fewer than two common seeds, and for
    differences that are all equal without a known variance over test sets."""
    high: float | None
    boot_low: float | None
    """Lower end of the 95 % percentile interval of the bootstrap; None for two or three seeds."""
    boot_high: float | None
    separated: bool
    """Whether there is an interval, and every interval excludes 0."""
    unpaired: tuple[int | str, ...] = ()
    """Seeds of only one of the two, which are not used."""
    sd: float | None = None
    """Standard deviation of the differences; None without an interval."""
    tested: float = 0.0
    """Half-width of the 95 % interval of the test examples alone, which no seed narrows; 0 if their
    variance is not known."""

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        """Returns text such as ``+1.2 [+0.3, +2.1]`` with the t interval.

        Args:
          scale: a factor, such as 100 for fractions: the result is then in percentage points.
          digits: decimal places.
        """
        if self.mean is None:
            return "-"
        mean = f"{scale * self.mean:+.{digits}f}"
        if self.low is None or self.high is None:
            return mean
        return f"{mean} [{scale * self.low:+.{digits}f}, {scale * self.high:+.{digits}f}]"


def summarise(values: Mapping[Any, float] | Iterable[float]) -> Summary:
    """Returns mean, standard deviation and the 95 % t interval of the mean.

    Args:
      values: one value for each seed: a dict by seed, or the values alone.
    """
    found = [float(x) for x in (values.values() if isinstance(values, Mapping) else values)]
    if not found:
        return Summary(None, None, 0, None, None)
    mean, n = statistics.fmean(found), len(found)
    if n == 1:
        return Summary(mean, None, 1, None, None)
    sd = statistics.stdev(found)
    margin = student(LEVEL, n - 1) * sd / math.sqrt(n)
    return Summary(mean, sd, n, mean - margin, mean + margin)


def paired(
    a: Mapping[Any, float],
    b: Mapping[Any, float],
    *,
    level: float = LEVEL,
    variance: float | None = None,
) -> Difference:
    """Returns the mean difference a - b over the common seeds, with its intervals.

    Runs with equal seeds share what the seed draws (partition, order, initial weights), so that
    their difference varies less from seed to seed than their values. The interval by Student's t is
    that of a paired t test. The bootstrap draws 10,000 times n of the n differences, with a fixed
    seed, and takes the quantiles of their means.

    ``variance`` widens both: the half-width of the normal interval of the test examples is added to
    that of the seeds as the root of the sum of squares (the recovery of variances of Zou and
    Donner, 2008). The number of seeds does not divide it, because they share a test set.

    Args:
      level: one minus the confidence.
      variance: variance of a difference over samples of test examples; None: unknown, and the
        intervals are about the seeds only.
    """
    common = sorted(a.keys() & b.keys(), key=seed_order)
    unpaired = tuple(sorted(a.keys() ^ b.keys(), key=seed_order))
    differences = [float(a[seed]) - float(b[seed]) for seed in common]
    n = len(differences)
    mean = statistics.fmean(differences) if differences else None
    constant = are_equal(differences, [float(x[seed]) for x in (a, b) for seed in common])
    if mean is None or n < 2 or (constant and not variance):
        return Difference(mean, n, None, None, None, None, False, unpaired)
    tested = student(level, math.inf) * math.sqrt(variance or 0.0)
    sd = statistics.stdev(differences)
    margin = student(level, n - 1) * sd / math.sqrt(n)
    ends = [mean - math.hypot(margin, tested), mean + math.hypot(margin, tested)]
    if n >= FEWEST_RESAMPLED:
        draws = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
        means = np.array(differences)[draws].mean(axis=1)
        below, above = map(float, np.quantile(means, [level / 2, 1 - level / 2]))
        ends += [mean - math.hypot(mean - below, tested), mean + math.hypot(above - mean, tested)]
    separated = min(ends) > 0 or max(ends) < 0
    low, high, *boot = ends
    boot_low, boot_high = boot or (None, None)
    return Difference(mean, n, low, high, boot_low, boot_high, separated, unpaired, sd, tested)


def seeds_needed(difference: float, sd: float) -> int | None:
    """Returns how many common seeds a paired t test needs to find a difference.

    That is the smallest number with which the two-sided test finds the difference, with its sign,
    in 80 % of repeated studies (by the noncentral t distribution); None above :data:`MOST_SEEDS`.

    Args:
      difference: the true mean difference, not 0.
      sd: the standard deviation of the differences over seeds, above 0.
    """
    limit_blas_threads()
    from scipy.special import nctdtr, stdtrit

    n = np.arange(2, MOST_SEEDS + 1)
    shift = np.sqrt(n) * min(abs(difference) / sd, _CERTAIN)
    enough = n[1 - nctdtr(n - 1, shift, stdtrit(n - 1, 1 - LEVEL / 2)) >= POWER]
    return int(enough[0]) if len(enough) else None


def largest_deviation(n: int) -> float:
    """Returns the upper end of a standard deviation's one-sided interval over that of ``n`` values.

    The values are assumed to be normal: with three of them, the true deviation is below 4.4 times
    the measured one with 95 % confidence.
    """
    limit_blas_threads()
    from scipy.special import chdtri

    return math.sqrt((n - 1) / float(chdtri(n - 1, 1 - LEVEL)))


def are_equal(differences: Sequence[float], values: Sequence[float]) -> bool:
    """Returns whether differences of these values are equal up to rounding."""
    size = max(map(abs, values), default=0.0)
    return not differences or max(differences) - min(differences) <= 1e-6 * size


def student(level: float, freedom: float) -> float:
    """Returns the two-sided critical value of Student's t; of the normal for infinite freedom."""
    if math.isinf(freedom):
        return statistics.NormalDist().inv_cdf(1 - level / 2)
    limit_blas_threads()
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - level / 2))


def seed_order(seed: int | str) -> tuple[bool, int, str]:
    """Returns the key that sorts seeds: numbers first, by their size."""
    return (isinstance(seed, str), seed if isinstance(seed, int) else 0, str(seed))
