"""Partitions: exact cover, sizes, determinism, and the distributions they stand for."""

import inspect
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_peft.data import Dataset, partition
from fedjax_peft.data.partition import _apportion, _dirichlet, _fill_up, _proportional
from fedjax_peft.errors import InputError

MODES = ("client_prior", "class_wise")
quick = settings(max_examples=40, deadline=None)


@st.composite
def problems(draw):
    """Labels (possibly with gaps between them) and a feasible number of clients."""
    classes = draw(st.integers(1, 8))
    labels = draw(st.lists(st.integers(0, classes - 1).map(lambda c: 3 * c), min_size=1))
    return np.array(labels, np.int32), draw(st.integers(1, len(labels)))


def table(clients):
    """Returns counts ``[clients, labels]``."""
    labels = clients.data
    return np.array([np.bincount(labels[r], minlength=labels.max() + 1) for r in clients.indices])


def assert_partition(clients, n):
    assert len(clients.data) == n
    assert sorted(np.concatenate(clients.indices)) == list(range(n))
    assert all(rows.dtype == np.int32 for rows in clients.indices)


def assert_same(a, b):
    assert [rows.tolist() for rows in a.indices] == [rows.tolist() for rows in b.indices]


@quick
@given(problems(), st.integers(0, 2**31))
def test_iid_covers_in_equal_sizes(problem, seed):
    labels, k = problem
    clients = partition.iid(labels, k, seed=seed)
    assert len(clients) == k
    assert_partition(clients, len(labels))
    assert np.ptp(clients.sizes) <= 1
    assert_same(clients, partition.iid(labels, k, seed=seed))


@quick
@given(
    problems(),
    st.floats(1e-6, 1e6),
    st.sampled_from(MODES),
    st.integers(0, 2**31),
)
def test_dirichlet_covers_without_empty_clients(problem, alpha, mode, seed):
    labels, k = problem
    clients = partition.dirichlet(labels, k, alpha, mode=mode, seed=seed)
    assert len(clients) == k
    assert_partition(clients, len(labels))
    assert clients.sizes.min() >= 1
    if mode == "client_prior":
        assert np.ptp(clients.sizes) <= 1
    assert_same(clients, partition.dirichlet(labels, k, alpha, mode=mode, seed=seed))


@quick
@given(problems(), st.floats(1e-3, 10))
def test_fednlp_sizes_put_the_remainder_last(problem, alpha):
    labels, k = problem
    clients = partition.dirichlet(labels, k, alpha, fednlp_exact=True)
    assert_partition(clients, len(labels))
    size = len(labels) // k
    assert clients.sizes.tolist() == [size] * (k - 1) + [size + len(labels) % k]


@quick
@given(st.data())
def test_label_share_rounds_to_one_example(draw):
    classes, k = draw.draw(st.integers(1, 5)), draw.draw(st.integers(1, 4))
    labels = np.repeat(np.arange(classes), 40)
    weights = draw.draw(st.lists(st.integers(1, 20), min_size=classes * k, max_size=classes * k))
    shares = np.array(weights, float).reshape(classes, k)
    shares /= shares.sum(axis=1, keepdims=True)
    clients = partition.label_share(labels, shares.tolist())
    assert_partition(clients, len(labels))
    assert np.all(np.abs(table(clients).T - 40 * shares) < 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-3, 1e300])
def test_any_positive_alpha_ends(mode, alpha):
    labels = np.repeat(np.arange(20), 50)
    assert_partition(partition.dirichlet(labels, 100, alpha, mode=mode), 1000)


@pytest.mark.parametrize(
    "make",
    [
        lambda y, seed: partition.iid(y, 10, seed=seed),
        lambda y, seed: partition.dirichlet(y, 10, 1.0, seed=seed),
        lambda y, seed: partition.dirichlet(y, 10, 1.0, mode="class_wise", seed=seed),
        lambda y, seed: partition.label_share(y, [[0.5, 0.5]] * 4, seed=seed),
    ],
)
def test_seeds_differ(make):
    labels = np.arange(200) % 4
    assert_same(make(labels, 1), make(labels, 1))
    with pytest.raises(AssertionError):
        assert_same(make(labels, 1), make(labels, 2))


def test_large_alpha_gives_every_client_the_prior():
    labels = np.repeat(np.arange(3), [600, 300, 100])
    counts = table(partition.dirichlet(labels, 10, 1e7))
    assert np.abs(counts - [60, 30, 10]).max() <= 1
    counts = table(partition.dirichlet(labels, 10, 1e9, mode="class_wise"))
    assert np.abs(counts - [60, 30, 10]).max() <= 1


def test_small_alpha_gives_a_client_one_label():
    labels = np.repeat(np.arange(20), 500)
    counts = table(partition.dirichlet(labels, 200, 1e-3))
    # The first clients find what they want; late ones fill up with what is left.
    assert np.all(counts[:20].max(axis=1) >= 49)
    assert counts[-20:].max(axis=1).mean() < counts[:20].max(axis=1).mean()
    counts = table(partition.dirichlet(labels, 20, 1e-3, mode="class_wise"))
    assert np.all(counts.max(axis=0) >= 480)


def test_late_clients_take_what_is_left_in_proportion():
    # All want label 0 (nearly all of the prior); once it has run out, the rest goes 3 to 1.
    taken = _proportional(np.array([0, 300, 100]), 40)
    assert taken.tolist() == [0, 30, 10]
    assert _proportional(np.array([1, 1, 1]), 2).tolist() == [1, 1, 0]
    assert _proportional(np.array([0, 2, 5]), 7).tolist() == [0, 2, 5]


def test_dirichlet_draws_have_the_right_moments():
    a = np.array([0.02, 0.3, 1.68])
    draws = _dirichlet(np.tile(a, (40_000, 1)), np.random.default_rng(0))
    np.testing.assert_allclose(draws.sum(axis=1), 1)
    mean = a / a.sum()
    np.testing.assert_allclose(draws.mean(axis=0), mean, atol=0.005)
    np.testing.assert_allclose(draws.var(axis=0), mean * (1 - mean) / (a.sum() + 1), atol=0.005)


@quick
@given(st.integers(1, 12), st.integers(0, 10**6), st.integers(0, 2**31))
def test_apportion_is_within_one_of_the_quota(n, total, seed):
    shares = np.random.default_rng(seed).dirichlet(np.ones(n), size=2)
    totals = np.array([total, 7])
    counts = _apportion(shares, totals)
    assert counts.sum(axis=1).tolist() == totals.tolist()
    assert np.all(counts >= 0)
    assert np.abs(counts - shares * totals[:, None]).max() < 1 + 1e-6


@quick
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 5))
def test_fill_up_cuts_the_largest_clients(sizes, min_size):
    clients = len(sizes)
    if sum(sizes) < max(1, min_size * clients):
        return
    owner = np.repeat(np.arange(clients), sizes)
    filled = np.bincount(
        _fill_up(owner, clients, min_size, np.random.default_rng(0)), minlength=clients
    )
    # The slow way: one example at a time, from the largest client to one that is too small.
    slow = np.array(sizes)
    while slow.min() < min_size:
        slow[slow.argmax()] -= 1
        slow[slow.argmin()] += 1
    assert sorted(filled) == sorted(slow)
    kept = np.minimum(filled, sizes)
    np.testing.assert_array_equal(filled - kept, np.maximum(min_size - np.array(sizes), 0))


def test_min_size():
    labels = np.repeat(np.arange(4), 100)
    make = lambda m: partition.dirichlet(labels, 20, 1e-3, mode="class_wise", min_size=m)  # noqa: E731
    assert make(0).sizes.min() == 0
    assert_partition(make(0), 400)
    assert make(7).sizes.min() == 7
    assert make(20).sizes.tolist() == [20] * 20
    with pytest.raises(
        InputError, match="400 examples are too few for 20 clients with at least 21"
    ):
        make(21)


def test_label_share_reproduces_the_sst2_sizes():
    labels = np.repeat([0, 1], [29_780, 37_569])
    clients = partition.label_share(labels, [(0.9, 0.1), (0.1, 0.9)])
    assert clients.sizes.tolist() == [30_559, 36_790]
    assert table(clients).tolist() == [[26_802, 3_757], [2_978, 33_812]]


def test_a_data_set_is_kept_as_given():
    labels = np.arange(40, dtype=np.int32) % 4
    data = Dataset({"labels": labels, "x": np.zeros((40, 2))}, tuple("abcd"), "toy")
    for clients in (
        partition.iid(data, 4),
        partition.dirichlet(data, 4, 0.5),
        partition.label_share(data, [[0.25] * 4] * 4),
    ):
        assert clients.data is data
    assert_same(partition.dirichlet(data, 4, 0.5), partition.dirichlet(labels, 4, 0.5))


@pytest.mark.parametrize("data", [np.arange(7) % 3, Dataset({"x": np.zeros((7, 2))})])
def test_pooled_is_one_client_with_everything_in_order(data):
    clients = partition.pooled(data)
    assert clients.data is data
    assert [rows.tolist() for rows in clients.indices] == [list(range(7))]
    assert clients.indices[0].dtype == np.int32


def test_iid_needs_no_labels():
    assert partition.iid(Dataset({"x": np.zeros((7, 2))}), 2).sizes.tolist() == [4, 3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda y: partition.iid(y, 0), "at least 1 client, not 0"),
        (lambda y: partition.iid(y, 11), "10 examples are too few for 11 clients"),
        (lambda y: partition.dirichlet(y, -1, 1.0), "at least 1 client"),
        (lambda y: partition.dirichlet(y, 11, 1.0), "too few"),
        (lambda y: partition.dirichlet(y, 2, 0.0), "alpha .* positive, not 0.0"),
        (lambda y: partition.dirichlet(y, 2, float("nan")), "alpha"),
        (lambda y: partition.dirichlet(y, 2, float("inf")), "alpha"),
        (lambda y: partition.dirichlet(y, 2, 1.0, min_size=-1), "min_size"),
        (lambda y: partition.dirichlet(y, 2, 1.0, mode="class"), "no Dirichlet mode 'class'"),
        (
            lambda y: partition.dirichlet(y, 2, 1.0, mode="class_wise", fednlp_exact=True),
            "fednlp_exact",
        ),
        (lambda y: partition.dirichlet(y - 1, 2, 1.0), "labels from 0 up"),
        (lambda y: partition.dirichlet(y[:0], 1, 1.0), "needs examples"),
        (lambda y: partition.dirichlet(y * 1.0, 2, 1.0), "type float64"),
        (lambda y: partition.dirichlet(y[:, None], 2, 1.0), r"shape \(10, 1\)"),
        (lambda y: partition.label_share(y, [[1.0]]), "1 rows, but the data have 2 labels"),
        (lambda y: partition.label_share(y, []), "same length"),
        (lambda y: partition.label_share(y, [[0.5, 0.5], [1.0]]), "same length"),
        (lambda y: partition.label_share(y, [[0.5, 0.5], [0.5, 0.4]]), "Row 1 .* sums to 0.9"),
        (lambda y: partition.label_share(y, [[1.5, -0.5], [0.5, 0.5]]), "Row 0"),
        (lambda y: partition.label_share(y, [[1.0, 0], [1, 0.0]]), "client 1 without"),
        (lambda y: partition.pooled(y[:0]), "0 examples are too few for 1 client"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call(np.arange(10) % 2)


def test_signatures_serve_a_config_layer():
    for name in partition.__all__:
        function = getattr(partition, name)
        parameters = inspect.signature(function).parameters
        assert next(iter(parameters)) == "data"
        if function is not partition.pooled:  # where nothing is drawn
            assert parameters["seed"].default == 0
        assert set(typing.get_type_hints(function)) == {*parameters, "return"}
        assert function.__doc__
    public = {
        name
        for name, value in vars(partition).items()
        if inspect.isfunction(value)
        and value.__module__ == partition.__name__
        and not name.startswith("_")
    }
    assert public == set(partition.__all__)
