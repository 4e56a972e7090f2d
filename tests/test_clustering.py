"""Spectral clusters of subspaces: against SciPy, by brute force, and on planted groups."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from closeness import assert_close
from internals import spectral_clusters, subspace_distances
from scipy.linalg import subspace_angles

pytestmark = pytest.mark.slow


def distances_of(rows):
    return np.asarray(jax.jit(subspace_distances)(jnp.asarray(rows, jnp.float32)))


def clusters_of(distances, present=None, fewest=2, most=4):
    """Returns the groups of the present clients, as a set of sets, and K."""
    n = len(distances)
    present = np.ones(n, bool) if present is None else present
    made = jax.jit(spectral_clusters, static_argnums=(2, 3))
    labels, k = made(jnp.asarray(distances, jnp.float32), jnp.asarray(present), fewest, most)
    assert labels.dtype == k.dtype == jnp.int32
    labels = np.asarray(labels)
    groups = {label: {i for i in range(n) if present[i] and labels[i] == label} for label in labels}
    return {frozenset(group) for group in groups.values() if group}, int(k)


def planted(rng, sizes, *, n=24, r=2, noise=0.15):
    """Returns rows ``[clients, r, n]`` near one subspace for each group, and the groups."""
    rows, groups, first = [], set(), 0
    for size in sizes:
        centre = rng.normal(size=(r, n))
        mixed = np.linalg.qr(rng.normal(size=(size, r, r)))[0] @ centre  # a basis for each client
        rows.append(mixed + noise * rng.normal(size=(size, r, n)))
        groups.add(frozenset(range(first, first + size)))
        first += size
    return np.concatenate(rows), groups


def test_distances_are_means_of_squared_sines_of_principal_angles():
    rows = np.random.default_rng(0).normal(size=(4, 3, 9))
    got = distances_of(rows)
    for i, j in itertools.product(range(4), repeat=2):
        angles = subspace_angles(rows[i].T, rows[j].T)
        assert_close(got[i, j], np.mean(np.sin(angles) ** 2), rtol=0, atol=1e-5)


def test_distances_depend_on_the_subspace_alone():
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(3, 2, 7))
    mixed = rng.normal(size=(3, 2, 2)) @ rows
    assert_close(distances_of(mixed), distances_of(rows), rtol=0, atol=1e-5)


def test_a_direction_that_is_zero_belongs_to_no_subspace():
    rows = np.random.default_rng(2).normal(size=(2, 2, 7))
    rows[0, 1] = 0
    shared = np.sum(np.cos(subspace_angles(rows[0, :1].T, rows[1].T)) ** 2)
    assert_close(distances_of(rows)[0, 1], 1 - shared / 2, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sample("0", "1", "2")
def test_planted_groups_are_found_with_their_number(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 6, size=2 + seed % 3)
    rows, groups = planted(rng, sizes)
    order = rng.permutation(len(rows))
    found, k = clusters_of(distances_of(rows[order]), most=6)
    assert {frozenset(int(order[i]) for i in group) for group in found} == groups
    assert k == len(sizes)


@pytest.mark.parametrize("seed", range(2))
def test_groups_are_the_best_ones_by_hand(seed):
    rows, _ = planted(np.random.default_rng(10 + seed), (2, 3, 2), n=8, noise=0.2)
    distances = distances_of(rows)
    labels, k = reference.best_groups(distances.astype(float), 2, 3)
    groups = {frozenset(i for i, x in enumerate(labels) if x == label) for label in labels}
    assert clusters_of(distances, most=3) == (groups, k)


@pytest.mark.parametrize("seed", [4, 6, 8, 19])
def test_the_width_of_the_kernel_is_the_median_distance(seed):
    """With the mean distance, the number of clusters would be another one for these seeds."""
    distances = np.triu(np.random.default_rng(seed).uniform(0, 1, (6, 6)) ** 3, 1)
    distances += distances.T
    assert clusters_of(distances)[1] == reference.best_groups(distances, 2, 4)[1]


def test_absent_clients_change_nothing():
    rng = np.random.default_rng(3)
    rows, groups = planted(rng, (3, 4))
    strangers = rng.normal(size=(2, *rows.shape[1:]))
    strangers[1] = 0
    present = np.array([True] * 7 + [False] * 2)
    found, k = clusters_of(distances_of(np.concatenate([rows, strangers])), present)
    assert (found, k) == (groups, 2) == clusters_of(distances_of(rows))
    assert clusters_of(distances_of(np.concatenate([rows, strangers])), present, most=9)[1] == 2


def test_the_number_of_clusters_stays_in_its_range():
    rows, groups = planted(np.random.default_rng(4), (3, 3, 3))
    distances = distances_of(rows)
    assert clusters_of(distances, fewest=2, most=9) == (groups, 3)
    assert clusters_of(distances, fewest=1, most=1)[1] == 1
    assert clusters_of(distances, fewest=2, most=2)[1] == 2
    assert clusters_of(distances, fewest=4, most=5)[1] in (4, 5)


def test_few_clients_and_clients_that_are_alike():
    rows, _ = planted(np.random.default_rng(5), (2, 2))
    distances = distances_of(rows)
    for here in (0, 1, 2):
        present = np.arange(4) < here
        found, k = clusters_of(distances, present, fewest=3, most=4)
        assert k == max(here, 1)
        assert found == {frozenset([i]) for i in range(here)}
    alike, k = clusters_of(np.zeros((4, 4)))
    assert k == 2
    assert len(alike) <= 2
