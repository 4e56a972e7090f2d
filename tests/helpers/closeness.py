"""Every closeness that a test asserts, and how near it came to its tolerance.

Two programs that compute the same in float32 differ by rounding: a processor with other vector
units adds in another order. A tolerance must leave room for that, so it comes from the arithmetic
(the type, the length of the sums, the condition of the problem), not from what one machine printed.
With ``CLOSENESS=FOLDER`` in the environment each comparison adds a line to a file there: the test,
the place and error / tolerance. ``make portable`` runs the numeric tests so, under several settings
of the compiler, and lists all that use more than .3 of their tolerance.

Bits (``np.testing.assert_array_equal``) are only asserted between runs of one program, or of values
that no program rounds.
"""

import collections.abc
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

__all__ = [
    "EXACT",
    "ROUNDOFF",
    "approx",
    "assert_close",
    "assert_small",
    "assert_trees_close",
    "roughly",
]

ROUNDOFF = 2.0**-24
"""The largest relative error of one float32 operation."""
EXACT = {"rtol": 0, "atol": 2e-5}
"""Of two libraries in float32, for outputs of order one: sums of up to 384 terms, times 6e-8."""
FOLDER = os.environ.get("CLOSENESS")


def assert_close(got, expected, rtol=1e-7, atol=0.0, err_msg=""):
    """Raises if |got - expected| exceeds atol + rtol |expected| anywhere."""
    if FOLDER:
        _record(_share(got, expected, lambda x: atol + rtol * np.abs(x)))
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol, err_msg=err_msg)


def assert_trees_close(got, expected, rtol=1e-5, atol=1e-6):
    """Raises if two pytrees have other structures, or leaves that are not close."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, rtol=rtol, atol=atol)


def assert_small(error, bound, err_msg=""):
    """Raises if a number that only rounding makes different from zero exceeds a bound."""
    assert_close(error, 0.0, rtol=0, atol=bound, err_msg=err_msg)


def approx(expected, rel=None, abs=None):
    """Returns what equals all values as close to ``expected`` as ``pytest.approx`` asks."""
    close = pytest.approx(expected, rel=rel, abs=abs)
    return _Recorded(close, expected, rel, abs) if FOLDER else close


def roughly(expected, rel=None, abs=None):
    """Returns ``pytest.approx`` for a distance that is not rounding, and is not recorded.

    It may be near its tolerance on every processor: a mean of drawn numbers beside what they are
    drawn from, a printed figure beside the exact one, a difference quotient beside the slope.
    """
    return pytest.approx(expected, rel=rel, abs=abs)


class _Recorded:
    """``pytest.approx`` that records each comparison."""

    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, close, expected, rel, abs):
        self.close, self.expected = close, expected
        self.tolerance = _tolerance(rel, abs)

    def __eq__(self, got):
        if type(got) is not bool:
            _record(_share(got, self.expected, self.tolerance))
        return self.close == got

    def __ne__(self, got):  # how far apart two numbers are says nothing about a tolerance
        return not self.close == got

    def __repr__(self):
        return repr(self.close)


def _tolerance(rel, abs_):
    """Returns the tolerance of ``pytest.approx`` as a function of the expected values."""
    if rel is None and abs_ is not None:
        return lambda x: np.full(np.shape(x), abs_)
    rel, abs_ = 1e-6 if rel is None else rel, 1e-12 if abs_ is None else abs_
    return lambda x: np.maximum(rel * np.abs(x), abs_)


def _share(got: Any, expected: Any, tolerance) -> float:
    """Returns the largest error / tolerance; infinity where the two cannot be compared."""
    if isinstance(expected, collections.abc.Mapping):
        pairs = [(got[n], x) for n, x in expected.items() if n in got]
        return max((_share(*pair, tolerance) for pair in pairs), default=0.0)
    try:
        got, expected = (np.asarray(x, np.float64) for x in (got, expected))
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
        error = np.abs(np.where(same, 0.0, got) - np.where(same, 0.0, expected))  # inf - inf: NaN
        share = error / np.maximum(tolerance(expected), 1e-300)
    except (TypeError, ValueError):  # such as texts and None, or other shapes
        return 0.0
    return float(np.max(np.where(same, 0.0, share), initial=0.0))


def _record(share: float) -> None:
    """Adds a line to the file of this process."""
    frame = sys._getframe(2)
    while "/tests/" not in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]
    with (Path(FOLDER) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"share": round(share, 4), "place": place, "test": test}) + "\n")
