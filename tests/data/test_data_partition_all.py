"""What every partition must hold: a new one is tested by being listed."""

import inspect

import numpy as np
import pytest

import fedjax_peft as fp

CLIENTS = 6
EXAMPLES = 180
FITTING = {
    "clients": CLIENTS,
    "groups": CLIENTS,
    "alpha": 0.05,
    "kind": "noise",
    "strength": 0.5,
    "shares": [[0.3, 0.2, 0.1, 0.1, 0.2, 0.1], [0.1, 0.1, 0.2, 0.3, 0.1, 0.2]] * 2,
}
"""Argument name -> a value that fits the data, for every required argument of any partition."""
OPTIONS = {
    "natural": {"clients": CLIENTS},
    "dirichlet by cluster": {"by": "cluster"},
    "dirichlet class_wise": {"by": "cluster", "mode": "class_wise"},
    "label_share by cluster": {"by": "cluster"},
    "pathological by cluster": {"by": "cluster"},
}
"""Partition, and words that tell its cases apart -> optional arguments. The partition ``natural``
then draws at random and makes ``CLIENTS`` clients."""
ONE_CLIENT = ("pooled",)
LEAVES_OUT = {"natural": 24 - CLIENTS, "grouped": 0}
"""Partition -> how many of the 24 users it leaves out. Every other one deals out all examples."""
WRONG = {
    "clients": [0, -1, EXAMPLES + 1],
    "groups": [0, -1, EXAMPLES + 1],
    "alpha": [0.0, -1.0, np.nan, np.inf],
    "exponent": [0.0, -1.0, np.nan, np.inf],
    "kind": ["nois"],
    "strength": [-1.0, np.nan],
    "shares": [[[0.5, 0.5]], [[0.5, 0.5], [1.0]], [[0.9, 0.0]] * 4],
    "by": ["no such key"],
    "min_size": [-1],
    "mode": ["client_wise"],
    "classes_per_client": [0, 5],
    "of": [1, 25],
    "names": [["nobody"], ["user 1", "user 1"]],
}
"""Argument name -> values that no partition accepts."""


def make_data(units=False):
    """Returns images with 4 labels and 24 users; with ``units``, pairs of rows are one unit."""
    rng = np.random.default_rng(7)
    rows = np.repeat(np.arange(EXAMPLES), 2) if units else np.arange(EXAMPLES)
    labels = rng.permutation(np.arange(EXAMPLES) % 4).astype(np.int32)
    users, clusters = rng.permutation(np.arange(EXAMPLES) % 24), rng.permutation(labels)
    columns = {
        "pixel_values": rng.integers(0, 255, (len(rows), 1, 2, 2)).astype(np.uint8),
        "labels": labels[rows],
    }
    meta = {"client": np.array([f"user {i}" for i in users])[rows]}
    meta["cluster"] = clusters[rows]
    meta |= {"unit": rows} if units else {}
    return fp.Dataset(columns, tuple("abcd"), "x", meta=meta)


DATA = make_data()


def function_of(name):
    return getattr(fp.partition, name.split()[0])


def call(name, data=DATA, **options):
    """Returns a partition's clients, with an argument for every parameter that has no default."""
    function = function_of(name)
    _, *parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    missing = [key for key in required if key not in FITTING]
    assert not missing, f"add a fitting value of {missing} to FITTING"
    arguments = {key: FITTING[key] for key in required} | OPTIONS.get(name, {}) | options
    return function(data, **arguments)


def takes(name, argument):
    return argument in inspect.signature(function_of(name)).parameters


def rows(clients):
    return [own.tolist() for own in clients.indices]


@pytest.fixture(params=dict.fromkeys([*fp.partition.__all__, *OPTIONS]))
def name(request):
    """Of the partition, or of a case of it."""
    return request.param


def test_every_example_has_one_owner(name):
    clients = call(name)
    assert isinstance(clients, fp.Clients)
    assert len(clients) == (1 if name in ONE_CLIENT else CLIENTS)
    assert clients.sizes.min() >= 1
    assert clients.sizes.tolist() == [len(own) for own in clients.indices]
    assert len(clients.names) in (0, len(clients))
    owned = np.concatenate(clients.indices)
    assert len(set(owned.tolist())) == len(owned), "nobody shares an example"
    assert all(own.dtype == np.int32 for own in clients.indices)
    assert all(own.tolist() == sorted(own.tolist()) for own in clients.indices)
    if name not in LEAVES_OUT:
        assert sorted(owned.tolist()) == list(range(EXAMPLES))
    else:
        users = np.array(DATA.meta["client"])
        left = set(users) - set(users[owned])
        assert len(left) == LEAVES_OUT[name]
        assert len(owned) == np.sum(~np.isin(users, list(left))), "all examples of a user or none"


def test_the_seed_decides(name):
    """And nothing else: not what was called before, nor numpy's global generator."""
    if not takes(name, "seed"):
        assert rows(call(name)) == rows(call(name))
        return
    np.random.seed(0)  # noqa: NPY002  no partition may read this generator
    first = call(name, seed=3)
    np.random.seed(1)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    others = [call(name, seed=seed) for seed in (4, 5)]
    again = call(name, seed=3)
    assert rows(again) == rows(first)
    assert all(rows(other) != rows(first) for other in others)
    for column, values in first.data.columns.items():
        np.testing.assert_array_equal(again.data.columns[column], values)
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_the_data_are_left_as_they_were(name):
    before = {key: column.copy() for key, column in DATA.columns.items()}
    clients = call(name)
    for key, column in before.items():
        np.testing.assert_array_equal(DATA.columns[key], column)
    assert clients.data.columns.keys() == DATA.columns.keys()
    assert len(clients.data) == EXAMPLES
    assert clients.data.label_names == DATA.label_names


def test_rows_of_a_unit_stay_together_and_count_once(name):
    data = make_data(units=True)
    clients, plain = call(name, data), call(name)
    for own in clients.indices:
        units = data.meta["unit"][own]
        assert np.all(np.bincount(units)[np.unique(units)] == 2)
    assert clients.sizes.tolist() == (2 * plain.sizes).tolist()
    dealt = [np.unique(data.meta["unit"][own]).tolist() for own in clients.indices]
    assert dealt == rows(plain), "units are dealt out as examples are"


def test_impossible_arguments_are_refused_in_one_sentence_or_two(name):
    """By InputError, whose message is not empty, and before any warning."""
    _, *parameters = inspect.signature(function_of(name)).parameters.values()
    unknown = {p.name for p in parameters} - WRONG.keys() - {"seed"}
    assert not unknown, f"add values of {unknown} that are refused to WRONG"
    for parameter in parameters:
        for value in WRONG.get(parameter.name, []):
            options = {"clients": None} if parameter.name == "names" else {}
            with pytest.raises(fp.InputError) as caught:
                call(name, **options, **{parameter.name: value})
            assert 20 < len(str(caught.value)) < 400, value
            assert "\n" not in str(caught.value)


def test_data_without_examples_are_refused(name):
    with pytest.raises(fp.InputError):
        call(name, DATA.take(np.array([], np.int64)))


def test_splits_and_names_are_no_data(name):
    for data in ({"train": DATA, "test": DATA}, "posts.csv", None):
        with pytest.raises(fp.InputError, match="Dataset"):
            call(name, data)
