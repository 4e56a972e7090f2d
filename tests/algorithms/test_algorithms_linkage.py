"""Average linkage and silhouettes equal scikit-learn's; clients that are not there do not count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import approx, assert_close
from internals import cosine_distances, linkage_clusters, silhouette
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import pairwise_distances, silhouette_score

CLIENTS, MOST = 9, 4
cluster = jax.jit(functools.partial(linkage_clusters, most=MOST))


def drawn(seed, groups=3, spread=0.8):
    """Returns distances of clients around some centres."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(groups, 3))[rng.integers(groups, size=CLIENTS)]
    return pairwise_distances(points + spread * rng.normal(size=(CLIENTS, 3)))


def by_sklearn(distances):
    """Returns the labels of the best number of clusters, as the authors choose it."""
    made = {}
    for k in range(2, min(MOST, len(distances) - 1) + 1):
        model = AgglomerativeClustering(n_clusters=k, metric="precomputed", linkage="average")
        labels = model.fit_predict(distances)
        made[k] = silhouette_score(distances, labels, metric="precomputed"), labels
    best = max(made, key=lambda k: made[k][0])
    return made[best][1], best


def groups(labels):
    return {frozenset(np.flatnonzero(np.asarray(labels) == j).tolist()) for j in set(labels)}


@pytest.mark.parametrize("seed", range(6))
def test_clusters_and_their_number_are_scikit_learns(seed):
    distances = drawn(seed)
    labels, found = cluster(jnp.float32(distances), jnp.ones(CLIENTS, bool))
    expected, k = by_sklearn(distances)
    assert found == k
    assert groups(labels.tolist()) == groups(expected.tolist())
    firsts = [labels.tolist().index(j) for j in range(k)]
    assert firsts == sorted(firsts), "clusters are numbered by their first clients"


def test_the_seeds_above_find_different_numbers_of_clusters():
    assert {by_sklearn(drawn(seed))[1] for seed in range(6)} == {2, 3, 4}


@pytest.mark.parametrize("seed", range(3))
def test_clients_that_are_not_present_change_nothing(seed):
    distances, here = drawn(seed), np.arange(CLIENTS) % 3 != 1
    expected, k = by_sklearn(distances[np.ix_(here, here)])
    for wrong in (0.0, 1e3, np.nan):
        shown = np.where(here[:, None] & here[None], distances, wrong)
        labels, found = cluster(jnp.float32(shown), jnp.asarray(here))
        assert found == k
        assert groups(labels[here].tolist()) == groups(expected.tolist())


@pytest.mark.parametrize(
    ("present", "found"), [((4,), [0]), ((2, 5), [0, 1]), ((0, 3, 8), [0, 0, 1])]
)
def test_two_clients_are_two_clusters_and_three_have_no_more(present, found):
    distances, here = drawn(1), np.isin(np.arange(CLIENTS), present)
    distances[0, 3] = distances[3, 0] = 0.01
    labels, number = cluster(jnp.float32(distances), jnp.asarray(here))
    assert labels[here].tolist() == found
    assert number == len(set(found))


def test_silhouettes_are_scikit_learns_with_a_client_that_is_alone():
    labels = np.array([0, 1, 1, 0, 2, 1, 0, 1, 1])
    got = silhouette(jnp.float32(drawn(3)), jnp.asarray(labels), jnp.ones(CLIENTS, bool), MOST)
    expected = silhouette_score(drawn(3), labels, metric="precomputed")
    assert got == approx(expected, rel=1e-5)


def test_cosine_distances_are_scikit_learns_and_zero_rows_are_far():
    rows = np.random.default_rng(0).normal(size=(5, 7))
    rows[3] = 0
    got = cosine_distances(jnp.float32(rows))
    expected = pairwise_distances(rows, metric="cosine")
    np.fill_diagonal(expected, [0, 0, 0, 1, 0])
    assert_close(got, expected, rtol=0, atol=1e-6)


def test_equal_clients_are_clustered_without_numbers_that_are_not_finite():
    labels, found = cluster(jnp.zeros((CLIENTS, CLIENTS)), jnp.ones(CLIENTS, bool))
    assert found == 2
    assert groups(labels.tolist()) == {frozenset({CLIENTS - 1}), frozenset(range(CLIENTS - 1))}
