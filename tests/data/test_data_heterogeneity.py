"""Divergences equal numbers computed by hand and SciPy's numbers."""

import math

import numpy as np
import pytest
from closeness import approx, assert_close, roughly
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from scipy.spatial.distance import jensenshannon

import fedjax_peft as fp

EXAMPLE = [(0.9, 0.1), (0.1, 0.9)]

tables = st.integers(1, 6).flatmap(
    lambda classes: st.lists(
        st.lists(st.integers(0, 40), min_size=classes, max_size=classes).filter(any),
        min_size=1,
        max_size=6,
    )
)


@pytest.mark.parametrize(
    ("distances", "expected"),
    [
        (fp.heterogeneity.js_divergence(EXAMPLE), 0.5310),
        (fp.heterogeneity.js_divergence(EXAMPLE, base=math.e), 0.3681),
        (fp.heterogeneity.js_divergence(EXAMPLE, sqrt=True), 0.7287),
        (fp.heterogeneity.jeffreys(EXAMPLE, eps=0), 1.7578),
    ],
)
def test_two_clients_by_hand(distances, expected):
    assert distances == roughly(np.array([[0, expected], [expected, 0]]), abs=5e-5)


@settings(max_examples=60, deadline=None)
@given(tables, st.floats(1.1, 20))
def test_js_is_scipys(table, base):
    expected = np.array([[jensenshannon(p, q, base) for q in table] for p in table])
    # SciPy takes the root of rounding errors, also of those below 0.
    assert_close(
        fp.heterogeneity.js_divergence(table, base), np.nan_to_num(expected) ** 2, atol=1e-12
    )
    assert_close(
        fp.heterogeneity.js_divergence(table, base, sqrt=True), np.nan_to_num(expected), atol=1e-6
    )


@settings(max_examples=60, deadline=None)
@given(tables)
def test_divergences_are_symmetric_and_zero_for_equals(table):
    table = [*table, [3 * x for x in table[0]]]
    for distances in (fp.heterogeneity.js_divergence(table), fp.heterogeneity.jeffreys(table)):
        np.testing.assert_array_equal(distances, distances.T)
        assert np.all(np.diag(distances) == 0)
        assert np.all(distances >= 0)
        assert_close(distances[0, -1], 0, atol=1e-12)
    assert fp.heterogeneity.js_divergence(table).max() <= 1 + 1e-12


def test_jeffreys_of_strangers_is_infinite_or_as_large_as_eps_allows():
    table = [[5, 0, 5], [0, 2, 0]]
    assert fp.heterogeneity.jeffreys(table, eps=0)[0, 1] == np.inf
    for eps in (1e-3, 1e-6):
        p, q = (np.array(row) / sum(row) + eps for row in table)
        p, q = p / p.sum(), q / q.sum()
        expected = 0.5 * np.sum(p * np.log(p / q)) + 0.5 * np.sum(q * np.log(q / p))
        assert fp.heterogeneity.jeffreys(table, eps)[0, 1] == approx(expected)


def test_the_most_distant_come_first():
    distances = np.array([[0, 1, 1, 2], [1, 0, 1, 2], [1, 1, 0, 0], [2, 2, 0, 0.0]])
    assert fp.heterogeneity.sorted_order(distances).tolist() == [0, 1, 3, 2]
    assert fp.heterogeneity.mean_pairwise(distances) == approx(14 / 12)
    assert fp.heterogeneity.mean_pairwise(np.zeros((1, 1))) == 0


def test_histograms_count_labels_or_another_key():
    labels = np.array([0, 2, 2, 0, 2], np.int32)
    topic = np.array(["sea", "land", "sea", "air", "sea"])
    data = fp.Dataset({"labels": labels}, ("x", "y", "z"), meta={"topic": topic})
    rows = tuple(np.array(r, np.int32) for r in ([0, 1, 4], [], [2]))
    for of, by, names, first in (
        (data, None, ("x", "y", "z"), [1, 0, 2]),
        (data, "topic", ("air", "land", "sea"), [0, 1, 2]),
        (labels, None, ("0", "1", "2"), [1, 0, 2]),
    ):
        counts, found = fp.heterogeneity.histograms(fp.Clients(of, rows), by=by)
        assert (counts.tolist(), found) == ([first, [0, 0, 0], [0, 0, 1]], names)


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        ([[1, 2], [0, 0]], {}, r"Row 1 of the table of counts, \[0.0, 0.0\], .* not all of them 0"),
        ([[1, 2], [3, -1]], {}, r"Row 1 .*\[3.0, -1.0\], must hold numbers from 0 up"),
        ([[1, math.nan]], {}, "Row 0 .* from 0 up"),
        ([[1, math.inf]], {}, "Row 0 .* from 0 up"),
        ([1, 2], {}, r"not the shape \(2,\)"),
        (np.zeros((0, 3)), {}, r"not the shape \(0, 3\)"),
        ([[1, 2]], {"base": 1}, "above 1, but is 1"),
        ([[1, 2]], {"base": math.nan}, "above 1"),
    ],
)
def test_bad_tables_are_named(table, options, message):
    refused(message, fp.heterogeneity.js_divergence, table, **options)
    refused("eps must not be negative, but is -1", fp.heterogeneity.jeffreys, EXAMPLE, eps=-1)
