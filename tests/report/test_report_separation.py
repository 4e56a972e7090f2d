"""Equal methods are rarely separated, and real differences are found."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from closeness import approx

from fedjax_peft.report.intervals import paired
from fedjax_peft.report.separation import Group, Measurement, binomial, rank, wilson


def group(name, values, variance=None, freedom=math.inf):
    scores = {str(i): Measurement(float(v), variance, freedom) for i, v in enumerate(values)}
    return Group(name, scores)


@pytest.mark.parametrize(("n", "seeds"), [(20, 2), (100, 2), (100, 3)])
@pytest.mark.parametrize("weights", [(0.3, 0.6, 0.1), (0, 1, 0), (0, 0, 1)])
@pytest.mark.sample("weights0-20-2", "weights0-100-3", "weights1-100-2", "weights2-20-2")
def test_equal_accuracies_on_few_examples_are_separated_in_less_than_5_percent(n, seeds, weights):
    """Four methods that answer 80 % correctly are tested with few seeds on one small test set.

    The example, the method and the seed decide together which examples a run answers correctly. The
    seeds alone would separate up to 23 % of the pairs, because they show the last part only.
    """
    rng, trials, k = np.random.default_rng(0), 300, 4
    shapes = [(trials, 1, 1, n), (trials, k, 1, n), (trials, k, seeds, n)]
    parts = [math.sqrt(w) * rng.normal(size=s) for w, s in zip(weights, shapes, strict=True)]
    pairs = separated = winners = families = 0
    for scores in (sum(parts) < 0.8416).mean(axis=-1):
        groups = [
            Group(str(i), {s: Measurement(p, binomial(p, n)) for s, p in enumerate(own)})
            for i, own in enumerate(scores)
        ]
        ranking = rank(groups, lower_is_better=False, over_seeds=True)
        pairs += len(ranking.comparisons)
        separated += sum(one.separated for one in ranking.comparisons)
        winners += ranking.winner is not None
        tested = np.mean([[binomial(p, n) for p in own] for own in scores], axis=1)
        families += any(
            paired(
                groups[i].values,
                groups[j].values,
                level=0.05 / math.comb(k, 2),
                variance=tested[i] + tested[j],
            ).separated
            for i, j in itertools.combinations(range(k), 2)
        )
    assert separated / pairs < 0.05 + 2 * math.sqrt(0.05 * 0.95 / pairs)
    assert max(families, winners) / trials < 0.05 + 2 * math.sqrt(0.05 * 0.95 / trials)


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("k", [2, 5])
def test_equal_runs_are_separated_in_less_than_5_percent(k, seeds):
    """The test sets are independent, which is the case for which the margin is exact."""
    rng, n, trials, found = np.random.default_rng(0), 400, 1000, 0
    for _ in range(trials):
        hits = rng.binomial(n, 0.5, (k, seeds)) / n
        groups = [
            group(str(i), own + rng.normal(0, 0.04, seeds) * (seeds > 1), binomial(0.5, n))
            for i, own in enumerate(hits)
        ]
        ranking = rank(groups, lower_is_better=False)
        found += any(one.separated for one in ranking.comparisons)
    assert found / trials < 0.05 + 2 * math.sqrt(0.05 * 0.95 / trials)


def test_the_margin_of_two_accuracies():
    one, other = (group(name, [p], binomial(p, 400)) for name, p in (("a", 0.5), ("b", 0.4)))
    (found,) = rank([other, one], lower_is_better=False).comparisons
    expected = 1.959964 * math.sqrt((0.5 * 0.5 + 0.4 * 0.6) / 400)
    assert (found.reference, found.name) == ("a", "b")
    assert found.margin == approx(expected, rel=1e-2)
    assert found.separated
    assert rank([one, other], lower_is_better=True).groups[0] == other


def test_seeds_are_paired():
    seeds = np.array([0.50, 0.42, 0.55])
    one, other = group("a", seeds + np.array([0.03, 0.031, 0.029])), group("b", seeds)
    (found,) = rank([one, other], lower_is_better=False).comparisons
    # Student's t of 2 degrees of freedom is 4.3027.
    assert found.margin == approx(4.3027 * 0.001 / math.sqrt(3), rel=1e-3)
    assert found.difference.mean == approx(-0.03)
    assert found.separated


def test_the_level_is_divided_by_the_number_of_pairs():
    two, three = (
        rank([group(str(i), [0.1 * i], 1e-4) for i in range(k)], lower_is_better=False)
        for k in (2, 3)
    )
    assert two.comparisons[0].margin == approx(1.96 * math.sqrt(2e-4), rel=1e-3)
    assert three.comparisons[0].margin == approx(2.394 * math.sqrt(2e-4), rel=1e-3)


@pytest.mark.parametrize(
    ("one", "other", "obstacle", "basis"),
    [
        ([0.9], [0.1], None, "size of the test set unknown"),
        ([0.9], [0.1], "different data", "different data"),
    ],
)
def test_without_a_margin_groups_are_not_separated(one, other, obstacle, basis):
    ranking = rank([group("a", one), group("b", other)], lower_is_better=False, obstacle=obstacle)
    assert ranking.winner is None
    assert [c.basis for c in ranking.comparisons] == [basis]
    assert len(ranking.level) == 2


def test_a_share_of_all_examples_has_a_variance():
    assert 0 < binomial(1.0, 10) < binomial(0.5, 10)
    assert binomial(0.3, 10_000) == approx(0.3 * 0.7 / 10_000, rel=1e-3)


@pytest.mark.parametrize(("right", "examples"), [(42, 42), (0, 5), (700, 1000)])
def test_wilsons_interval_is_scipys(right, examples):
    """A share of 42 of 42 is not known to 1 point: the interval begins at 92 %."""
    expected = scipy.stats.binomtest(right, examples).proportion_ci(method="wilson")
    assert wilson(right / examples, examples) == approx((expected.low, expected.high), rel=1e-9)
