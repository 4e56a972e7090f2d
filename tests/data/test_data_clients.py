"""Clients of data sets that others divided: a dict of them, and partitions of flwr-datasets."""

import datasets
import numpy as np
import pytest
import tiny_tokenizers
from refusals import refusals, refused

import fedjax_peft as fp
from fedjax_peft.data.partition import from_flwr

CLASSES = datasets.ClassLabel(names=["low", "high"])
TOKENIZER = tiny_tokenizers.bert()


def reviews(n, stars=(0, 1), **more):
    rows = {"review": [f"w{i} w{i % 3}" for i in range(n)], "stars": [*stars] * (n // len(stars))}
    return datasets.Dataset.from_dict({**rows, **more})


def load(data, **options):
    columns = {"text": "review", "label": "stars"}
    return fp.load_clients(data, tokenizer=TOKENIZER, max_length=6, columns=columns, **options)


def test_every_data_set_is_a_client():
    """In the order of the dict, with its name; further columns stay keys to partition by."""
    clients = load({"b": reviews(2, age=[30, 40]), "a": reviews(4, age=[1, 2, 3, 4])})
    assert clients.names == ("b", "a")
    assert [rows.tolist() for rows in clients.indices] == [[0, 1], [2, 3, 4, 5]]
    assert clients.data.columns["input_ids"].shape == (6, 6)
    assert clients.data.labels.tolist() == [0, 1] * 3
    assert clients.data.label_names == ("0", "1")
    assert clients.data.meta["client"].tolist() == ["b"] * 2 + ["a"] * 4
    assert clients.data.meta["age"].tolist() == [30, 40, 1, 2, 3, 4]


def test_classes_are_those_of_all_clients():
    """A client without a class, and a test set without one, have the numbers of the others."""
    train = load({"a": reviews(2, ["bad"]), "b": reviews(2, ["good"])})
    assert train.data.label_names == ("bad", "good")
    assert train.data.labels.tolist() == [0, 0, 1, 1]
    test = load({"a": reviews(2, ["good"])}, label_names=train.data.label_names)
    assert test.data.labels.tolist() == [1, 1]
    named = reviews(2).cast_column("stars", CLASSES).rename_column("stars", "label")
    both = fp.load_clients(
        {"a": named, "b": named}, tokenizer=TOKENIZER, columns={"text": "review"}
    )
    assert both.data.label_names == ("low", "high")


def test_tables_in_memory_are_clients():
    """A data frame and a list of rows are the data set of the same content."""
    pairs = {"a": reviews(2), "b": reviews(4, ["x", "1.0"]), "c": reviews(2)}
    found = load({"a": pairs["a"].to_pandas(), "b": pairs["b"].to_list(), "c": pairs["c"]})
    same = load(pairs)
    assert found.data.label_names == same.data.label_names == ("0", "1", "x")
    for name, column in same.data.columns.items():
        np.testing.assert_array_equal(found.data.columns[name], column)
    refused(r"client '0' needs .* not a dict", load, pairs["a"].to_list())


def upper(rows):
    """A transform over two columns, as in Flower's recipes."""
    return {"review": [text.upper() for text in rows["review"]], "stars": rows["stars"]}


def same(rows):
    return rows


@pytest.mark.parametrize(
    "form",
    [
        lambda data: data.to_iterable_dataset(),
        lambda data: data.to_iterable_dataset().with_format("numpy"),
        lambda data: data.to_iterable_dataset(num_shards=2).map(same, features=data.features),
        lambda data: data.with_transform(same),
        lambda data: data.with_transform(lambda rows: {k: np.array(x) for k, x in rows.items()}),
        lambda data: data.with_transform(same, columns=["stars"], output_all_columns=True),
        lambda data: data.with_format("numpy"),
        lambda data: data.with_format("torch", columns=["stars"]),
    ],
)
def test_data_sets_in_any_form_have_the_rows_of_plain_ones(form):
    plain = reviews(4).cast_column("stars", CLASSES)
    expected, found = load({"a": plain, "b": plain}), load({"a": form(plain), "b": plain})
    assert found.data.label_names == expected.data.label_names == ("low", "high")
    for name, column in expected.data.columns.items():
        np.testing.assert_array_equal(found.data.columns[name], column)


def test_a_transform_is_used_and_a_list_has_numbered_clients():
    transformed = reviews(2).with_transform(upper)
    found = load([transformed, reviews(2)])
    assert found.names == ("0", "1")
    expected = load({"0": reviews(2).map(upper, batched=True), "1": reviews(2)})
    for name, column in expected.data.columns.items():
        np.testing.assert_array_equal(found.data.columns[name], column)


def short(rows):
    return {"review": rows["review"], "stars": rows["stars"][:1]}


def test_conversations_of_clients_whose_roles_do_not_alternate():
    ask, say = ({"role": role, "content": "w1"} for role in ("user", "assistant"))
    tokenizer = tiny_tokenizers.gpt2()
    rows = {"a": [[ask, say], [ask, ask, say]], "b": [[ask, say]]}
    data = {k: datasets.Dataset.from_dict({"messages": x}) for k, x in rows.items()}
    refused("Row 2 of the data set of client 'a'", fp.load_clients, data, tokenizer=tokenizer)
    for turns, sizes in (("skip", [1, 1]), ("join", [2, 1])):
        with pytest.warns(UserWarning, match="1 of 2 conversations of the data set of client 'a'"):
            clients = fp.load_clients(data, tokenizer=tokenizer, turns=turns)
        assert clients.sizes.tolist() == sizes
        assert len(clients.data.notes) == 1


test_bad_data_sets_are_named = refusals(
    load,
    (reviews(2), "must be a dict, client name -> data set, or a list .*, not a Dataset"),
    ([reviews(2), 3], "'1' needs a DataFrame.*not a int"),
    (
        {"a": reviews(2).with_transform(lambda rows: 1 / 0)},
        "client 'a' .*ZeroDivisionError.*map",
    ),
    ({"a": reviews(2).with_transform(lambda rows: None)}, "client 'a' could not be made"),
    ({"a": reviews(2).with_transform(short)}, "client 'a' .* differ in length"),
    ({"a": reviews(2).to_iterable_dataset().take(0)}, "client 'a' has no rows"),
    ({}, "no data sets"),
    ({"train": reviews(2), "test": reviews(2)}, "splits, not clients"),
    (
        {"a": {"review": ["x"]}},
        "'a' needs a DataFrame, .*Dataset, not a dict",
    ),
    ({"a": fp.testing.tiny_dataset(4)}, "'a' needs a DataFrame.*fp.combine"),
    ({"a": reviews(2), "b": reviews(0)}, "client 'b' has no rows"),
    ({"a": reviews(2), "b": reviews(2, age=[1, 2])}, "client 'a' and .*'b' differ: age"),
    ({"a": reviews(2), "b": reviews(2).remove_columns("stars")}, "client 'b' has no column"),
    ({"a": reviews(2), "b": reviews(2, [None])}, "Row 1 of the data set of client 'b'"),
)


class Partitioner:
    """The public interface of a partitioner of flwr-datasets: data set once, rows in parts."""

    def __init__(self, parts):
        self.parts = parts
        self.num_partitions = len(parts)
        self._dataset = None

    @property
    def dataset(self):
        return self._dataset

    @dataset.setter
    def dataset(self, value):
        if self._dataset is not None:
            raise ValueError("The dataset should be assigned only once to the partitioner.")
        self._dataset = value

    def load_partition(self, partition_id):
        return self.dataset.select(self.parts[partition_id])


def data_with_units():
    units = np.array([0, 0, 1, 2, 2, 3])
    columns = {"labels": np.array([0, 0, 1, 1, 1, 0], np.int32)}
    offsets = np.zeros((6, 2), np.int32)
    meta = {"unit": units, "client": np.array([*"aabbbc"]), "offsets": offsets}
    return fp.Dataset(columns, ("no", "yes"), "x", meta=meta)


def test_rows_of_a_partition_become_a_client():
    """Units stay together, and rows of no partition belong to nobody."""
    partitioner = Partitioner([[2, 0], [3]])
    clients = from_flwr(data_with_units(), partitioner)
    assert [rows.tolist() for rows in clients.indices] == [[0, 1, 3, 4], [5]]
    columns = partitioner.dataset.to_dict()
    assert columns["label"] == [0, 1, 1, 0]
    assert columns["client"] == [*"abbc"]
    assert "offsets" not in columns
    labels = from_flwr(np.array([1, 0, 1]), Partitioner([[1], [], [0, 2]]))
    assert labels.sizes.tolist() == [1, 0, 2]


def test_other_divisions_are_refused():
    data, used, columns = fp.testing.tiny_dataset(4), Partitioner([[0]]), Partitioner([[0]])
    from_flwr(data, used)
    columns.load_partition = lambda partition_id: columns.dataset.select_columns(["label"])
    for partitioner, message in (
        (Partitioner([[0, 1], [1]]), r"gives an example twice.*client 1"),
        (used, "Partitioner has data already"),
        (columns, "divides columns"),
    ):
        refused(message, from_flwr, data, partitioner)
