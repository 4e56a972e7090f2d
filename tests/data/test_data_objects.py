"""Tables that a program holds, in the place of files."""

from datetime import datetime
from types import SimpleNamespace

import datasets
import numpy as np
import pandas as pd
import pytest
import tiny_tokenizers
from refusals import refusals, refused

import fedjax_peft as fp
from fedjax_peft.data.formats.objects import texts_of

ROWS = [
    {"text": f"w{i} w{2 * i}", "label": name, "client": f"shop {i % 2}"}
    for i, name in enumerate(["good", "bad", "good", "so-so", "bad", "good", "bad", "so-so"])
]
FRAME = pd.DataFrame(ROWS)
OBJECTS = {
    "frame": FRAME,
    "frame with an index": FRAME.set_index(pd.Index(range(5, 13))),
    "categories": FRAME.astype({"label": "category", "text": "string"}),
    "rows": ROWS,
    "tuple of rows": tuple(ROWS),
    "data set": datasets.Dataset.from_list(ROWS),
}


class Polars:
    """The part of a data frame of polars that is read."""

    columns = ("text", "label", "client")
    to_dicts = None

    def __getitem__(self, name):
        return SimpleNamespace(to_list=lambda: [row[name] for row in ROWS], dtype=str)


OBJECTS["frame of polars"] = Polars()
HOW = {"tokenizer": tiny_tokenizers.bert(), "max_length": 6}
WHOLE = {**HOW, "test_share": 0.5}


def content(data):
    names = {part.label_names for part in data.values()}
    columns = {part: {n: x.tolist() for n, x in own.columns.items()} for part, own in data.items()}
    return names, columns, {part: own.meta["client"].tolist() for part, own in data.items()}


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_table_in_memory_is_like_its_file(kind, tmp_path):
    FRAME.to_csv(tmp_path / "x.csv", index=False)
    expected = content(fp.load_dataset(str(tmp_path / "x.csv"), seed=3, **WHOLE))
    assert content(fp.load_dataset(OBJECTS[kind], seed=3, **WHOLE)) == expected
    FRAME[:5].to_csv(tmp_path / "train.csv", index=False)
    FRAME[5:].to_csv(tmp_path / "test.csv", index=False)
    (tmp_path / "x.csv").unlink()
    if kind == "frame of polars":
        return
    table = OBJECTS[kind]
    rows = (range(5), range(5, 8))
    parts = [table.select(x) if kind == "data set" else table[x[0] : x[-1] + 1] for x in rows]
    splits = dict(zip(("train", "test"), parts, strict=True))
    expected = content(fp.load_dataset(str(tmp_path), **HOW))
    assert content(fp.load_dataset(splits, **HOW)) == expected
    if kind == "data set":
        assert content(fp.load_dataset(datasets.DatasetDict(splits), **HOW)) == expected


def test_columns_labels_and_keys_of_a_frame():
    """Ordered categories keep their order, bools and floats are labels, and names are mapped."""
    frame = FRAME.rename(columns={"text": "review", "label": "mood"})
    order = ["so-so", "bad", "good"]
    frame["mood"] = pd.Categorical(frame["mood"], order, ordered=True)
    data = fp.load_dataset(frame, columns={"text": "review", "label": "mood"}, **WHOLE)
    assert data["train"].label_names == tuple(order)
    for values, names in (([1.0, 0.0] * 4, ("0", "1")), ([True, False] * 4, ("False", "True"))):
        data = fp.load_dataset(FRAME.assign(label=values), **WHOLE)
        assert data["train"].label_names == names
    typed = FRAME.assign(label=np.arange(8) % 3, client=np.arange(8, dtype=np.int16) % 2)
    data = fp.load_dataset(typed, label_names=["a", "b", "c"], **WHOLE)
    assert sorted({*data["train"].labels.tolist(), *data["test"].labels.tolist()}) == [0, 1, 2]


DATED = [row | {"when": datetime(2020, 1, 1, i) if i % 2 else None} for i, row in enumerate(ROWS)]
ALPACA = [
    {"instruction": f"w{i}", "input": "w9" if i % 2 else None, "output": "w2"} for i in range(4)
]
REPLIES = (("b", "w1", 2, False), ("c", "w2", 1, False), ("d", "w3", 0, True), ("e", "w4", 3, None))
TREES = [
    dict(zip(("message_id", "parent_id", "role", "text", "rank", "deleted"), row, strict=True))
    for i in range(4)
    for row in (
        (f"a{i}", None, "prompter", f"w{i}", None, False),
        *((f"{name}{i}", f"a{i}", "assistant", *more) for name, *more in REPLIES),
    )
]


@pytest.mark.parametrize("rows", [DATED, ALPACA, TREES], ids=["dates", "input", "trees"])
def test_a_missing_value_of_a_frame_is_that_of_its_rows(rows, tmp_path):
    """NaN and NaT are None. A csv file has texts in place of ranks and bools too."""
    frame = pd.DataFrame([{n: np.nan if x is None else x for n, x in row.items()} for row in rows])
    frame.to_csv(tmp_path / "x.csv", index=False)
    how = {"vocabulary": 30, "max_length": 24, "test_share": 0.5}
    expected = fp.load_dataset(rows, **how)
    for table in (frame, frame.to_dict("records"), str(tmp_path / "x.csv")):
        for split, data in fp.load_dataset(table, drop_missing=True, **how).items():
            for name, column in expected[split].columns.items():
                np.testing.assert_array_equal(data.columns[name], column)
    if rows is TREES:
        assert {*expected["train"].references, *expected["test"].references} == {"w2"}


test_what_is_wrong_with_a_table_is_said = refusals(
    lambda table, options: fp.load_dataset(table, **{**HOW, **options}),
    (7, {}, "A int is no data set: give a name, a file, a folder, a DataFrame, a list of dic"),
    ([], {}, "A list is no data set"),
    ({"train": FRAME, "test": 7}, {}, "A dict is no data set"),
    ({"train": FRAME}, {}, "the table has no file for the split 'test'"),
    (FRAME, {"csv": {"sep": ";"}}, "csv = .* means nothing to the data set 'the table'"),
    (FRAME, {"source": "tiny"}, "source = 'tiny' means nothing"),
    (FRAME[["text"]].assign(label=[1.0, None] * 4), {}, "Row 2 of the table has the label nan"),
    (
        FRAME.assign(text=None),
        {"test_share": 0.5},
        "Row 1 of the table has None in place of a text",
    ),
    ([{"text": "a", "label": "b"}, 7], {}, "Row 2 of the table is 7, and no dict"),
    (FRAME[["text", "label", "label"]], {}, "the table has two columns 'label'"),
    (FRAME[:0], {}, "the table has no rows"),
    (FRAME[["text"]], {"task": "classification"}, "the table has no column 'label'"),
    ([row | {"deleted": "no"} for row in TREES], {}, "Row 1 of the table has 'no' in the column"),
    ([row | {"rank": 0.5} for row in TREES], {}, "Row 2 of the table has the rank 0.5, which"),
)


def test_texts_of_a_table():
    assert texts_of(["a", "b"], ["c", "d"]) == (["a", "b"], ["c", "d"])
    assert texts_of(FRAME[:1], None) == (["w0 w0"], None)
    pairs = [{"text": "a", "text_pair": "b"}]
    assert texts_of(pairs, None) == (["a"], ["b"])
    for texts, message in (("a text", "one text, 'a text'"), ([{"txt": "a"}], "no column 'text'")):
        refused(message, texts_of, texts, None)
