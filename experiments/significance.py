"""P-values of paired differences over seeds, adjusted for families of tests."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy.special import stdtr

from fedjax_peft.report.intervals import are_equal, paired


def p_value(a: Mapping[Any, float], b: Mapping[Any, float]) -> float | None:
    """Returns the two-sided p-value of a paired t test over the common seeds.

    None for fewer than two common seeds, and for differences that are all equal.
    """
    common = a.keys() & b.keys()
    differences = [float(a[seed]) - float(b[seed]) for seed in common]
    if len(common) < 2 or are_equal(differences, [float(x[s]) for x in (a, b) for s in common]):
        return None
    error = statistics.stdev(differences) / math.sqrt(len(common))
    return float(2 * stdtr(len(common) - 1, -abs(statistics.fmean(differences)) / error))


def holm(ps: Sequence[float]) -> list[float]:
    """Returns p-values that are adjusted for a family of tests (Holm 1979), in the given order.

    The i-th smallest of m is multiplied by m - i + 1, and none is below a smaller one's. A test
    whose adjusted value is below a level holds at this level over the whole family.
    """
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    adjusted, highest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = highest
    return adjusted


def differences_in_words(
    pairs: Sequence[tuple[Mapping[Any, float], Mapping[Any, float]]], scale: float = 1.0
) -> list[str]:
    """Returns the text of each paired difference, with p-values by Holm over all of them."""
    ps = [p_value(a, b) for a, b in pairs]
    known = [i for i, p in enumerate(ps) if p is not None]
    adjusted = dict(zip(known, holm([ps[i] for i in known]), strict=True))  # type: ignore[misc]
    texts = [paired(a, b).text(scale) for a, b in pairs]
    return [f"{x}, {_p_text(adjusted[i])}" if i in adjusted else x for i, x in enumerate(texts)]


def _p_text(p: float) -> str:
    """Returns a p-value in words, such as ``p = .034``."""
    return "p < .001" if p < 0.001 else f"p = {p:.3f}".replace("0.", ".", 1)
