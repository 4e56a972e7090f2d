"""Combined data sets, with one client for each."""

from dataclasses import replace

import numpy as np
import tiny_tokenizers
from refusals import refusals, refused

import fedjax_peft as fp


def texts(lengths, width, *, classes=2, pad=1, types=False, **more):
    lengths = np.array(lengths)
    mask = np.arange(width)[None] < lengths[:, None]
    columns = {
        "input_ids": np.where(mask, 7, pad).astype(np.int32),
        "attention_mask": mask,
        "labels": np.arange(len(lengths), dtype=np.int32) % classes,
    }
    if types:
        columns["token_type_ids"] = mask.astype(np.int32)
    return fp.Dataset(columns | more, tuple("abcd"[:classes]), "texts")


def test_every_data_set_is_a_client():
    short, long = texts([2, 3], 3), texts([5, 1, 4], 5, classes=3, types=True)
    federation = fp.combine({"short": short, "long": long})
    assert [rows.tolist() for rows in federation.indices] == [[0, 1], [2, 3, 4]]
    columns = federation.data.columns
    # RoBERTa counts positions of tokens that are not the padding token, here 1.
    assert columns["input_ids"].tolist()[:2] == [[7, 7, 1, 1, 1], [7, 7, 7, 1, 1]]
    assert columns["attention_mask"].sum(axis=1).tolist() == [2, 3, 5, 1, 4]
    assert columns["token_type_ids"].sum(axis=1).tolist() == [0, 0, 5, 1, 4]
    assert columns["classes"].tolist() == [2, 2, 3, 3, 3]
    assert federation.data.meta["task"].tolist() == ["short"] * 2 + ["long"] * 3
    assert columns["labels"].tolist() == [0, 1, 0, 1, 2]
    assert federation.data.label_names == ("a", "b", "c")
    assert federation.data.name == "short+long"
    for name, column in columns.items():
        part = long.columns.get(name)
        if part is not None:
            assert column.dtype == part.dtype
            np.testing.assert_array_equal(column[2:], part)


test_refusals = refusals(
    fp.combine,
    ({}, "no data sets"),
    ({"a": texts([2], 3), "b": texts([2], 3, extra=np.ones(1))}, "'b' has a column 'extra'"),
    ({"a": texts([2], 3, extra=np.ones(1)), "b": texts([2], 3)}, "'a' has a column 'extra'"),
    (
        {"a": texts([2], 3, z=np.ones((1, 2))), "b": texts([2], 3, z=np.ones((1, 3)))},
        r"'z'.*\(3,\).*'b'.*\(2,\).*'a'",
    ),
    ({"a": texts([2], 3, z=np.ones(1)), "b": texts([2], 3, z=np.ones(1, int))}, "int64"),
    ({"a": texts([2], 3), "b": texts([2], 5, pad=0)}, "token 0 in 'b' and 1 in 'a'"),
    ({"a": texts([3], 3), "b": texts([5], 5)}, "none is.*max_length"),
    ({"a": fp.Dataset({"classes": np.ones(2)})}, "'classes' already"),
    ({"a": fp.Dataset({"x": np.ones(2)})}, "no column 'labels'"),
)


def test_common_names_columns_and_tasks_stay():
    pair = {"a": texts([2], 3), "b": texts([3], 3)}
    plain = fp.combine(pair).data
    assert plain.label_names == ("a", "b")
    assert "token_type_ids" not in plain.columns
    assert plain.task is None
    images = {
        name: replace(data, task=fp.tasks.image_classification()) for name, data in pair.items()
    }
    assert fp.combine(images).data.task.name == "image_classification"
    assert fp.combine({**images, "b": pair["b"]}).data.task is None


def tagged(*tags):
    """Returns encoded sentences with these tags."""
    rows = [{"tokens": [f"w{i}" for i in range(len(row))], "tags": row} for row in tags]
    splits = {"train": rows, "test": rows}
    return fp.load_dataset(splits, tokenizer=tiny_tokenizers.bert(), max_length=6)["train"]


def test_tagged_words_keep_what_their_score_reads():
    """The tags of whole sentences, also of words that are cut off, and whose example is which."""
    parts = {"a": tagged(["O", "B-LOC"], ["O", "B-PER"]), "b": tagged(["B-LOC"] * 5)}
    data = fp.combine(parts).data
    assert data.label_names == parts["a"].label_names
    assert data.meta["unit"].tolist() == [0, 1, 2]
    assert data.meta["word"].shape == data.labels.shape
    assert data.references == (("O", "B-LOC"), ("O", "B-PER"), ("B-LOC",) * 5)
    parts["c"] = tagged(["B-ORG"])
    refused("None of the data sets 'a', 'b', 'c' has the tags of all", fp.combine, parts)


def test_names_decide_where_one_data_set_has_all_classes():
    """A number is one class, and a class that a client lacks is one of its head too."""
    rows = texts([2, 3, 1], 3, classes=3)
    parts = {
        "some": replace(texts([2, 3], 3), label_names=("b", "c")),
        "all": rows,
        "turned": replace(rows, label_names=("c", "b", "a")),
        "first": texts([2, 3], 3),
    }
    data = fp.combine(parts).data
    assert data.label_names == ("a", "b", "c")
    assert data.labels.tolist() == [1, 2, 0, 1, 2, 2, 1, 0, 0, 1]
    # Who has the first classes keeps their number, as before.
    assert data.columns["classes"].tolist() == [3] * 8 + [2] * 2


def test_data_sets_of_several_tasks_share_numbers():
    """Names of several tasks may agree, but not at unlike numbers."""
    names = [("entailment", "neutral", "contradiction"), ("entailment", "other"), ("0", "1")]
    sizes = {f"task {i}": len(own) for i, own in enumerate(names)}
    parts = {
        task: replace(texts([2] * n, 3, classes=n), label_names=own)
        for (task, n), own in zip(sizes.items(), names, strict=True)
    }
    data = fp.combine(parts).data
    assert data.label_names == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert data.columns["classes"].tolist() == [3, 3, 3, 2, 2, 2, 2]
    parts["task 1"] = replace(parts["task 1"], label_names=("other", "entailment"))
    refused("'entailment' is number 0 in 'task 0' and 1 in 'task 1'", fp.combine, parts)
