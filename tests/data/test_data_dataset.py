"""Data sets and clients."""

import operator

import numpy as np
import pytest
from refusals import refusals, refused

import fedjax_peft as fp


@pytest.fixture
def data():
    columns = {
        "input_ids": np.arange(12, dtype=np.int32).reshape(6, 2),
        "labels": np.array([0, 1, 2, 0, 1, 2], np.int32),
    }
    return fp.Dataset(columns, ("x", "y", "z"), "toy")


def rows(*lists):
    return tuple(np.array(list_, np.int32) for list_ in lists)


def test_length_labels_and_take(data):
    assert len(data) == 6
    part = data.take(np.array([4, 0]))
    assert len(part) == 2
    assert part.labels.tolist() == [1, 0]
    assert part.columns["input_ids"].tolist() == [[8, 9], [0, 1]]
    assert (part.label_names, part.name) == (data.label_names, data.name)


test_data_that_do_not_fit_together_are_named = refusals(
    operator.call,
    (lambda: fp.Dataset({"a": np.zeros(3), "b": np.zeros(2)}), "'a' has 3 rows, 'b' has 2"),
    (lambda: fp.Dataset({"labels": np.array([0, 1])}), "labels and no label_names: name each"),
    (lambda: fp.Dataset({"labels": np.array([0, -1])}, ("x",)), "value -1 in row 1, .* 0 to 0"),
    (
        lambda: fp.Dataset({"labels": np.array([2, 3])}, ("x",) * 3),
        "value 3 in row 1, .* 0 to 2",
    ),
    (lambda: fp.Dataset({}), "no columns"),
    (lambda: fp.Dataset({"a": np.zeros(2)}).labels, "no column 'labels', only a"),
    (lambda: fp.Clients(np.zeros(6), rows([0], [], [1, 6])), "Client 2 owns row 6"),
    (lambda: fp.Clients(np.zeros(6), rows([-1], [1])), "Client 0 owns row -1"),
    (lambda: fp.Dataset({"a": [[1.0], [2.0]]}), "'a' of .* must be an array of numbers"),
    (lambda: fp.Dataset({"a": np.array(["b", "c"])}), "'a' of .* must be an array of numbers"),
    (
        lambda: fp.Clients(np.zeros(2), (np.array([True, False]),)),
        r"row numbers, .* bool \[2\]",
    ),
    (lambda: fp.Clients(np.zeros(2), (np.array([[0]]),)), r"row numbers, .* int64 \[1, 1\]"),
    (lambda: fp.Clients(np.zeros(6), ()), "at least one client"),
    (
        lambda: fp.Clients(np.zeros(6), rows([0], [1]), ("a",)),
        "2 clients need 2 different names",
    ),
    (lambda: fp.Clients(np.zeros(6), rows([0], [1]), ("a", "a")), "2 different names"),
    (
        lambda: fp.Clients(np.zeros(6), rows([0]), (), np.array([np.nan])),
        "weights that are num",
    ),
    (lambda: fp.Clients(np.zeros(6), rows([0])).holdout(1), "fraction = 1 of holdout"),
    (lambda: fp.Clients(np.zeros(6), rows([0])).holdout(np.nan), "fraction = nan of holdout"),
)


def test_clients_count_and_sizes(data):
    clients = fp.Clients(data, rows([0, 2, 4], [], [5]))
    assert len(clients) == 3
    assert clients.sizes.tolist() == [3, 0, 1]
    assert clients.sizes.dtype == np.int32


def test_holdout_splits_every_list():
    data = np.zeros(200, np.int32)
    clients = fp.Clients(data, rows(range(100), [100], [], [150, 140]))
    train, held = clients.holdout(0.2, seed=1)
    assert train.sizes.tolist() == [80, 1, 0, 2]
    assert held.sizes.tolist() == [20, 0, 0, 0]
    for before, a, b in zip(clients.indices, train.indices, held.indices, strict=True):
        assert sorted([*a, *b]) == sorted(before)
    assert train.data is data
    assert clients.holdout(0.99)[0].sizes.tolist() == [1, 1, 0, 1]


def test_holdout_depends_on_seed_and_client_only():
    clients = fp.Clients(np.zeros(60, np.int32), rows(range(40), range(40, 60)))
    alone = fp.Clients(clients.data, clients.indices[:1])
    held = clients.holdout(0.5, seed=3)[1].indices[0]
    np.testing.assert_array_equal(held, alone.holdout(0.5, seed=3)[1].indices[0])
    assert held.tolist() != clients.holdout(0.5, seed=4)[1].indices[0].tolist()


def test_holdout_keeps_units_and_names():
    unit = np.repeat(np.arange(20), 3)
    data = fp.Dataset({"x": np.zeros(60)}, meta={"unit": unit})
    clients = fp.Clients(data, rows(range(30), range(30, 60)), ("ann", "bob"))
    train, held = clients.holdout(0.2)
    assert train.names == held.names == ("ann", "bob")
    assert held.sizes.tolist() == [6, 6]
    for a, b in zip(train.indices, held.indices, strict=True):
        assert not set(unit[a]) & set(unit[b])


@pytest.mark.parametrize(("examples", "batch_size"), [(4, 3), (3, 3), (50, 4), (1, 9)])
def test_a_sample_is_of_all_clients_and_has_no_row_twice(data, examples, batch_size):
    clients = fp.Clients(data, rows([0, 2, 4], [], [5]))
    batches = [*clients.sample(examples, batch_size, seed=1)]
    drawn = [b["input_ids"][b["mask"], 0] // 2 for b in batches]
    count = min(examples, 4)
    assert len({b["mask"].shape for b in batches}) == 1
    assert len(np.concatenate(drawn)) == count
    assert {*np.concatenate(drawn).tolist()} <= {0, 2, 4, 5}
    assert len({*np.concatenate(drawn).tolist()}) == count
    again = [b["input_ids"] for b in clients.sample(examples, batch_size, seed=1)]
    np.testing.assert_array_equal(again, [b["input_ids"] for b in batches])


def test_samples_that_cannot_be_drawn(data):
    clients = fp.Clients(data, rows([0, 1], [2]))
    refused("examples = 0", clients.sample, 0, 4)
    refused("batch_size = 0", clients.sample, 2, 0)
    refused("labels alone", fp.Clients(np.zeros(3), rows([0])).sample, 2, 2)
    assert [*fp.Clients(data, rows([], [])).sample(2, 2)] == []


def test_reprs_are_one_short_line(data):
    """They show sizes and no arrays, because a notebook prints the last value of a cell."""
    clients = fp.Clients(data, rows([0, 1], [2, 3], [4, 5]))
    for shown in (repr(data), repr(clients)):
        assert "\n" not in shown
        assert len(shown) < 120
        assert str(len(data)) in shown
    assert "3 with" in repr(clients)
    one = fp.Clients(np.zeros(2, np.int32), (np.array([0]), np.array([1])))
    assert repr(one) == "Clients(2 with 1 example each, 2 in all)"


def test_the_examples_of_a_client_by_number_and_name(data):
    clients = fp.Clients(data, rows([5, 1], [0]), names=("ann", "bob"))
    assert clients[0].labels.tolist() == clients["ann"].labels.tolist() == [2, 1]
    assert [len(one) for one in clients] == [2, 1]
    assert fp.Clients(data.labels, rows([5, 1]))[0].tolist() == [2, 1]
    with pytest.raises(fp.InputError, match=r"no client 'bo'. Did you mean 'bob'"):
        clients["bo"]
