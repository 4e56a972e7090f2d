"""Means, standard deviations and 95 % intervals of results over seeds.

With few seeds, an interval rests on assumptions. Student's t assumes that the values are roughly
normal. The bootstrap assumes nothing about their shape, but with fewer than about ten seeds it is
too narrow: three equal signs alone put 0 outside of it. A difference therefore counts as separated
only if both intervals exclude 0.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_peft.libraries import limit_blas_threads

__all__ = ["LEVEL", "Difference", "Summary", "paired", "student", "summarise"]

LEVEL = 0.05
"""One minus the confidence of an interval."""
RESAMPLES = 10_000
"""Resamples of the bootstrap."""


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


class Difference(NamedTuple):
    """The mean of the differences a - b, seed by seed."""

    mean: float | None
    """None without a common seed."""
    n: int
    """Number of common seeds."""
    low: float | None
    """Lower end of the 95 % interval by Student's t; None for fewer than two common seeds."""
    high: float | None
    boot_low: float | None
    """Lower end of the 95 % percentile interval of the bootstrap."""
    boot_high: float | None
    separated: bool
    """Whether both intervals exclude 0."""
    unpaired: tuple[int | str, ...] = ()
    """Seeds of only one of the two, which are not used."""

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


def paired(a: Mapping[Any, float], b: Mapping[Any, float], *, level: float = LEVEL) -> Difference:
    """Returns the mean difference a - b over the common seeds, with two intervals.

    Runs with equal seeds share what the seed draws (partition, order, initial weights), so that
    their difference varies less from seed to seed than their values. The interval by Student's t is
    that of a paired t test. The bootstrap draws 10,000 times n of the n differences, with a fixed
    seed, and takes the quantiles of their means.

    Args:
      a: seed -> value.
      b: seed -> value.
      level: one minus the confidence.
    """
    common = sorted(a.keys() & b.keys(), key=seed_order)
    unpaired = tuple(sorted(a.keys() ^ b.keys(), key=seed_order))
    differences = [float(a[seed]) - float(b[seed]) for seed in common]
    n = len(differences)
    if n < 2:
        mean = differences[0] if differences else None
        return Difference(mean, n, None, None, None, None, False, unpaired)
    mean = statistics.fmean(differences)
    margin = student(level, n - 1) * statistics.stdev(differences) / math.sqrt(n)
    draws = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
    means = np.array(differences)[draws].mean(axis=1)
    boot_low, boot_high = map(float, np.quantile(means, [level / 2, 1 - level / 2]))
    low, high = mean - margin, mean + margin
    separated = (low > 0 and boot_low > 0) or (high < 0 and boot_high < 0)
    return Difference(mean, n, low, high, boot_low, boot_high, separated, unpaired)


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
