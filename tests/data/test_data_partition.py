"""Partitions: exact cover, sizes, determinism, and distributions."""

import inspect
import typing

import numpy as np
import pytest
from closeness import approx, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusals, refused

import fedjax_peft as fp
from fedjax_peft.data.keys import classes
from fedjax_peft.data.partition.dealing import apportion, draw, fill_up
from fedjax_peft.data.partition.skew import _proportional, _shards

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


def test_classes_by_a_key_of_whole_numbers_are_its_values():
    labels = np.array([0, 0, 1], np.int32)
    data = fp.Dataset({"labels": labels}, ("a", "b"), meta={"year": np.array([2019, 2021, 2019])})
    numbers, names = classes(data, "year")
    assert (numbers.tolist(), names) == ([0, 1, 0], ("2019", "2021"))
    assert classes(data, None)[1] == ("a", "b")


def assert_partition(clients, n):
    assert len(clients.data) == n
    assert sorted(np.concatenate(clients.indices)) == list(range(n))
    assert all(rows.dtype == np.int32 for rows in clients.indices)


def assert_same(a, b):
    assert [rows.tolist() for rows in a.indices] == [rows.tolist() for rows in b.indices]


@quick
@given(
    problems(),
    st.floats(1e-6, 1e6),
    st.sampled_from(["iid", "quantity", *MODES]),
    st.integers(0, 2**31),
)
def test_every_example_goes_to_one_of_so_many_clients(problem, alpha, kind, seed):
    labels, k = problem

    def make():
        if kind in MODES:
            return fp.partition.dirichlet(labels, k, alpha, mode=kind, seed=seed)
        more = {"alpha": alpha} if kind == "quantity" else {}
        return getattr(fp.partition, kind)(labels, k, **more, seed=seed)

    clients = make()
    assert len(clients) == k
    assert_partition(clients, len(labels))
    assert clients.sizes.min() >= 1
    if kind in ("iid", "client_prior"):
        assert np.ptp(clients.sizes) <= 1
    assert_same(clients, make())


@quick
@given(st.data())
def test_label_share_rounds_to_one_example(data):
    classes, k = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    labels = np.repeat(np.arange(classes), 40)
    weights = data.draw(st.lists(st.integers(1, 20), min_size=classes * k, max_size=classes * k))
    shares = np.array(weights, float).reshape(classes, k)
    shares /= shares.sum(axis=1, keepdims=True)
    clients = fp.partition.label_share(labels, shares.tolist())
    assert_partition(clients, len(labels))
    assert np.all(np.abs(table(clients).T - 40 * shares) < 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-3, 1e300])
def test_any_positive_alpha_ends(mode, alpha):
    labels = np.repeat(np.arange(20), 50)
    assert_partition(fp.partition.dirichlet(labels, 100, alpha, mode=mode), 1000)


def test_large_alpha_gives_every_client_the_prior():
    labels = np.repeat(np.arange(3), [600, 300, 100])
    counts = table(fp.partition.dirichlet(labels, 10, 1e7))
    assert np.abs(counts - [60, 30, 10]).max() <= 1
    counts = table(fp.partition.dirichlet(labels, 10, 1e9, mode="class_wise"))
    assert np.abs(counts - [60, 30, 10]).max() <= 1


def test_small_alpha_gives_a_client_one_label():
    labels = np.repeat(np.arange(20), 500)
    counts = table(fp.partition.dirichlet(labels, 200, 1e-3))
    # The first clients find what they want; late ones fill up with what is left.
    assert np.all(counts[:20].max(axis=1) >= 49)
    assert counts[-20:].max(axis=1).mean() < counts[:20].max(axis=1).mean()
    counts = table(fp.partition.dirichlet(labels, 20, 1e-3, mode="class_wise"))
    assert np.all(counts.max(axis=0) >= 480)


def test_late_clients_share_the_rest_in_proportion():
    # All want label 0 (nearly all of the prior); once it has run out, the rest goes 3 to 1.
    counts = _proportional(np.array([0, 300, 100]), 40)
    assert counts.tolist() == [0, 30, 10]
    assert _proportional(np.array([1, 1, 1]), 2).tolist() == [1, 1, 0]
    assert _proportional(np.array([0, 2, 5]), 7).tolist() == [0, 2, 5]


def test_dirichlet_draws_have_the_right_moments():
    a = np.array([0.02, 0.3, 1.68])
    draws = draw(np.tile(a, (40_000, 1)), np.random.default_rng(0))
    assert_close(draws.sum(axis=1), 1)
    mean = a / a.sum()
    assert_close(draws.mean(axis=0), mean, atol=0.005)
    assert_close(draws.var(axis=0), mean * (1 - mean) / (a.sum() + 1), atol=0.005)


@quick
@given(st.integers(1, 12), st.integers(0, 10**6), st.integers(0, 2**31))
def test_apportion_is_within_one_of_the_quota(n, total, seed):
    shares = np.random.default_rng(seed).dirichlet(np.ones(n), size=2)
    totals = np.array([total, 7])
    counts = apportion(shares, totals)
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
        fill_up(owner, clients, min_size, np.random.default_rng(0)), minlength=clients
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

    def make(least):
        return fp.partition.dirichlet(labels, 20, 1e-3, mode="class_wise", min_size=least)

    assert make(0).sizes.min() == 0
    assert_partition(make(0), 400)
    assert make(7).sizes.min() == 7
    assert make(20).sizes.tolist() == [20] * 20
    refused("400 examples are too few for 20 clients with at least", make, 21)


def test_label_share_reproduces_the_sst2_sizes():
    labels = np.repeat([0, 1], [29_780, 37_569])
    clients = fp.partition.label_share(labels, [(0.9, 0.1), (0.1, 0.9)])
    assert clients.sizes.tolist() == [30_559, 36_790]
    assert table(clients).tolist() == [[26_802, 3_757], [2_978, 33_812]]


def test_the_data_set_is_not_copied():
    labels = np.arange(40, dtype=np.int32) % 4
    data = fp.Dataset({"labels": labels, "x": np.zeros((40, 2))}, tuple("abcd"), "toy")
    assert fp.partition.iid(data, 4).data is data
    assert fp.partition.dirichlet(data, 4, 0.5).data is data
    assert_same(fp.partition.dirichlet(data, 4, 0.5), fp.partition.dirichlet(labels, 4, 0.5))


@pytest.mark.parametrize("data", [np.arange(7) % 3, fp.Dataset({"x": np.zeros((7, 2))})])
def test_pooled_is_one_client_with_everything_in_order(data):
    clients = fp.partition.pooled(data)
    assert clients.data is data
    assert [rows.tolist() for rows in clients.indices] == [list(range(7))]
    assert clients.indices[0].dtype == np.int32


test_bad_input_is_named = refusals(
    lambda call: call(np.arange(10) % 2),
    (lambda y: fp.partition.iid(y, 0), "clients = 0 of iid"),
    (lambda y: fp.partition.iid(y, 11), "10 examples are too few for 11 clients"),
    (lambda y: fp.partition.dirichlet(y, 2, 0.0), "alpha = 0.0 of dirichlet"),
    (lambda y: fp.partition.dirichlet(y, 2, 1.0, min_size=-1), "min_size"),
    (lambda y: fp.partition.dirichlet(y, 2, 1.0, mode="class"), "mode = 'class' of dirichlet"),
    (lambda y: fp.partition.dirichlet(y - 1, 2, 1.0), "labels from 0 up"),
    (lambda y: fp.partition.dirichlet(y[:0], 1, 1.0), "needs examples"),
    (lambda y: fp.partition.dirichlet(y * 1.0, 2, 1.0), "type float64"),
    (lambda y: fp.partition.dirichlet(y[:, None], 2, 1.0), r"shape \(10, 1\)"),
    (lambda y: fp.partition.label_share(y, [[1.0]]), "1 rows, but the data have 2 labels"),
    (lambda y: fp.partition.label_share(y, []), "same length"),
    (lambda y: fp.partition.label_share(y, [[0.5, 0.5], [0.5, 0.4]]), "Row 1 .* sums to 0.9"),
    (lambda y: fp.partition.label_share(y, [[1.5, -0.5], [0.5, 0.5]]), "Row 0"),
    (lambda y: fp.partition.label_share(y, [[1.0, 0], [1, 0.0]]), "client 1 without"),
    (lambda y: fp.partition.pooled(y[:0]), "0 examples are too few for 1 client"),
    (lambda y: fp.partition.natural(y * 1.0), "partition by 'client' .* type float64"),
    (lambda y: fp.partition.natural(y[:0]), "none at all"),
    (lambda y: fp.partition.natural(np.array([1, "a"] * 5, object)), "texts, not int, str"),
    (lambda y: fp.partition.natural(np.array([None] * 10)), "not NoneType"),
    (
        lambda y: fp.partition.natural(y, clients=3),
        "3 clients .* are asked for, and there are 2",
    ),
    (
        lambda y: fp.partition.natural(y, min_size=6),
        r"6 examples .* there are 0 \(of 2 in all\)",
    ),
    (lambda y: fp.partition.natural(y, names=["1", "0", "1"]), "'1' comes twice"),
    (lambda y: fp.partition.natural(y, names=["0", "12"]), "The client '12' has 0 examples"),
    (lambda y: fp.partition.natural(y, names=["0"], min_size=6), "'0' has 5 examples"),
    (lambda y: fp.partition.natural(y, clients=1, names=["0"]), "names say which"),
    (lambda y: fp.partition.grouped(y, 3), "2 clients cannot be merged into 3 groups"),
    (lambda y: fp.partition.grouped(y, 1, of=5), "5 clients .* there are 2"),
    (lambda y: fp.partition.quantity(y, 2, 1.0, min_size=6), "too few"),
    (
        lambda y: fp.partition.pathological(y, 2, 3),
        "classes_per_client = 3 is more than the 2 classes",
    ),
    (lambda y: fp.partition.pathological(np.arange(10), 3, 3), "cannot hold all 10 classes"),
)


def test_signatures_serve_a_config_layer():
    for name in fp.partition.__all__:
        function = getattr(fp.partition, name)
        parameters = inspect.signature(function).parameters
        assert next(iter(parameters)) == "data"
        if function is not fp.partition.pooled:  # where nothing is drawn
            assert parameters["seed"].default == 0
        assert set(typing.get_type_hints(function)) == {*parameters, "return"}
        assert function.__doc__


@pytest.fixture
def keyed():
    """Returns 90 examples with token labels: 30 units of 3 examples, with keys."""
    unit = np.repeat(np.arange(30), 3)
    order = np.random.default_rng(0).permutation(90)
    meta = {
        "unit": (7 * unit)[order],
        "client": np.array([f"user {u % 5}" for u in unit])[order],
        "cluster": (unit % 4)[order],
        "offsets": np.zeros((90, 8, 2), np.int32),
    }
    columns = {"labels": np.zeros((90, 8), np.int32), "x": np.arange(90)}
    return fp.Dataset(columns, ("O",), "toy", "tagging", meta)


@pytest.mark.parametrize("key", ["cluster", "client"])
def test_any_key_can_take_the_place_of_labels(keyed, key):
    meta = {name: x for name, x in keyed.meta.items() if name != "unit"}
    data = fp.Dataset(keyed.columns, keyed.label_names, "toy", meta=meta)
    _, labels = np.unique(meta[key], return_inverse=True)
    assert_same(
        fp.partition.dirichlet(data, 6, 0.5, by=key), fp.partition.dirichlet(labels, 6, 0.5)
    )
    assert_same(
        fp.partition.pathological(data, 6, 2, by=key), fp.partition.pathological(labels, 6, 2)
    )
    shares = [[1, 0], [0, 1], [1, 0], [0, 1], [1, 0]]
    two = fp.partition.label_share(data, shares, by="client")
    assert set(meta["client"][two.indices[1]]) == {"user 1", "user 3"}


def test_a_wrong_key_names_the_right_ones(keyed):
    bare = fp.Dataset({"x": np.zeros(3)}, name="bare")
    for call, message in (
        (
            lambda: fp.partition.dirichlet(keyed, 2, 1.0, by="clusters"),
            "'clusters' .* mean 'cluster'",
        ),
        (lambda: fp.partition.pathological(keyed, 2), r"\(90, 8\) .* Known: client, cluster, unit"),
        (lambda: fp.partition.natural(keyed, "offsets"), r"shape \(90, 8, 2\)"),
        (lambda: fp.partition.natural(bare), "'bare' has no 'client' .* There are none"),
    ):
        refused(message, call)


@quick
@given(st.data())
def test_pathological_clients_have_few_classes(data):
    labels, k = data.draw(problems())
    classes = len(set(labels.tolist()))
    k = max(k, data.draw(st.integers(1, 20)))
    labels = np.tile(labels, -(-k // len(labels)))
    least = -(-classes // k)
    few = data.draw(st.integers(least, classes))
    seed = data.draw(st.integers(0, 2**31))
    clients = fp.partition.pathological(labels, k, few, seed=seed)
    assert len(clients) == k
    assert_partition(clients, len(labels))
    assert clients.sizes.min() >= 1
    have = (table(clients) > 0).sum(axis=1)
    assert have.max() <= few
    # As many as asked for, unless a class has too few examples to be cut so often.
    possible = np.minimum(np.bincount(labels), k).sum()
    assert have.sum() == min(k * few, possible)
    assert np.ptp(have) <= 1
    assert_same(clients, fp.partition.pathological(labels, k, few, seed=seed))


def test_pathological_is_mcmahans_split_of_mnist():
    labels = np.arange(60_000) % 10
    counts = table(fp.partition.pathological(labels, 100, 2))
    assert set(counts.ravel().tolist()) == {0, 300}
    assert np.all((counts > 0).sum(axis=1) == 2)
    pairs = {tuple(np.flatnonzero(row)) for row in counts}
    assert len(pairs) > 30, "which two classes a client has is left to chance"


def test_the_largest_shard_is_cut():
    assert _shards(np.array([100, 50, 1]), 10, 7).tolist() == [4, 2, 1]
    assert _shards(np.array([1000, 5]), 4, 8).tolist() == [4, 4], "no client takes two of a class"
    assert _shards(np.array([1, 2]), 4, 8).tolist() == [1, 2], "no shard is empty"


def test_quantity_has_the_sizes_of_its_distribution():
    labels = np.arange(100_000) % 4
    assert np.ptp(fp.partition.quantity(labels, 10, 1e9).sizes) <= 8
    assert fp.partition.quantity(labels, 10, 1e-3).sizes.max() > 50_000
    few = labels[:5000]
    sizes = np.concatenate([fp.partition.quantity(few, 5, 2.0, seed=i).sizes for i in range(300)])
    # Each share is Beta(2, 8).
    assert np.var(sizes / 5000) == approx(0.2 * 0.8 / 11, rel=0.1)
    counts = table(fp.partition.quantity(labels, 10, 1.0))
    assert np.abs(counts / counts.sum(axis=1, keepdims=True) - 0.25).max() < 0.1


def test_zipf_has_the_sizes_of_its_law():
    """One each; of the other 19, the shares 6/11, 3/11 and 2/11 are 10.36, 5.18 and 3.45."""
    labels = np.arange(22) % 4
    assert fp.partition.zipf(labels, 3).sizes.tolist() == [11, 6, 5]
    # 22 / (1 + 1/4 + 1/9) = 16.16, a quarter of it is 4.04, a ninth 1.80
    assert fp.partition.zipf(labels, 3, 2.0, min_size=0).sizes.tolist() == [16, 4, 2]
    many = fp.partition.zipf(np.arange(100_000) % 4, 10)
    counts = table(many)
    assert np.abs(counts / counts.sum(axis=1, keepdims=True) - 0.25).max() < 0.03


@quick
@given(st.lists(st.integers(-3, 12), min_size=1), st.booleans())
def test_natural_has_a_client_for_each_key(keys, as_text):
    keys = [f"user {key}" for key in keys] if as_text else keys
    clients = fp.partition.natural(np.array(keys))
    assert_partition(clients, len(keys))
    assert clients.names == tuple(map(str, sorted(set(keys))))
    for name, rows in zip(clients.names, clients.indices, strict=True):
        assert {str(keys[row]) for row in rows} == {name}


def test_natural_draws_among_clients_of_a_size():
    keys = np.repeat(np.arange(20), np.arange(20))  # user n has n examples, user 0 none
    drawn = fp.partition.natural(keys, clients=5, min_size=10)
    assert sorted(map(int, drawn.names)) == list(map(int, drawn.names))
    assert drawn.sizes.tolist() == list(map(int, drawn.names))
    assert drawn.sizes.min() >= 10
    runs = [fp.partition.natural(keys, clients=5, seed=i).names for i in range(60)]
    assert {name for names in runs for name in names} == {str(n) for n in range(1, 20)}
    assert fp.partition.natural(keys, min_size=18).names == ("18", "19")


def test_natural_gives_a_test_split_to_the_same_clients():
    train = fp.partition.natural(np.array(list("cabbage")), clients=3, seed=4)
    test = fp.partition.natural(np.array(list("begac")), names=train.names[::-1])
    assert test.names == train.names[::-1]
    for name, rows in zip(test.names, test.indices, strict=True):
        assert rows.tolist() == ["begac".index(name)]
    absent = fp.partition.natural(np.array(["a"]), names=["b", "a"], min_size=0)
    assert absent.sizes.tolist() == [0, 1]


def test_grouped_merges_clients_equally():
    keys = np.repeat(np.arange(40), 5)
    clients = fp.partition.grouped(keys, 9, of=27, seed=2)
    members = [set(keys[rows].tolist()) for rows in clients.indices]
    assert [len(users) for users in members] == [3] * 9
    assert len(set.union(*members)) == 27
    assert clients.sizes.tolist() == [15] * 9, "with all examples of each"
    assert_partition(fp.partition.grouped(keys, 7), 200)


def test_feature_shift_splits_at_random_and_changes_the_images():
    pixels = np.full((40, 1, 4, 4), 100, np.uint8)
    data = fp.Dataset({"pixel_values": pixels}, task="image_classification")
    clients = fp.partition.feature_shift(data, 4, "brightness", 0.8, seed=3)
    assert_same(clients, fp.partition.iid(data, 4, seed=3))
    means = [clients.data.columns["pixel_values"][rows].mean() for rows in clients.indices]
    assert means == [100, 80, 60, 40]
    assert np.all(pixels == 100)


def test_classes_that_no_unit_has_do_not_count():
    """A unit's class is that of its first row: here there are two, though the rows have three."""
    labels = np.array([0, 1, 0, 2, 0, 2], np.int32)
    data = fp.Dataset({"labels": labels}, tuple("abc"), meta={"unit": np.array([0, 0, 1, 2, 3, 4])})
    clients = fp.partition.pathological(data, 2, 1)
    assert [set(labels[rows]) for rows in clients.indices] in ([{0, 1}, {2}], [{2}, {0, 1}])
    assert sorted(map(len, fp.partition.pathological(data, 2, 2).indices)) in ([2, 4], [3, 3])
