"""``drop_missing`` leaves out the rows that pandas' ``dropna`` would, and counts them; else they
are named.
"""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
from internals import sources
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.data.encoders.conversations import CONVERSATIONS
from fedjax_peft.data.formats import objects
from fedjax_peft.data.missing import without_missing
from fedjax_peft.data.table import is_missing

TEXTS = ["w1 w2", None, "w3", "w4 w5", "", "w6", "w7", "w8", "  ", "w9"]
LABELS = ["a", "b", None, "a", "b", "b", "", "a", None, "b"]
KEPT = [0, 3, 5, 7, 9]


@pytest.fixture
def load(stand_in_tokenizer):
    """``load_dataset`` with the tiny tokenizer, all rows in one order."""

    def call(table, **options):
        options = {"test_share": 0.4, **options}
        return fp.load_dataset(table, tokenizer=stand_in_tokenizer, max_length=6, **options)

    return call


def forms(tmp_path):
    """Returns the table as a file and as an object of each kind."""
    frame = pd.DataFrame({"text": TEXTS, "label": LABELS})
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    frame.to_csv(tmp_path / "x.csv", index=False)
    frame.to_parquet(tmp_path / "x.parquet")
    typed = frame.astype({"text": "string", "label": "string"})
    floats = frame.assign(label=frame["label"].map({"a": 0.0, "b": 1.0}))
    files = [str(tmp_path / f"x.{ending}") for ending in ("jsonl", "csv", "parquet")]
    return [*files, frame, typed, floats, rows]


def count(data):
    return sum(map(len, data.values()))


def test_rows_without_a_label_or_a_text_are_left_out_and_counted(load, tmp_path):
    frame = pd.DataFrame({"text": TEXTS, "label": LABELS})
    kept = frame.replace(r"^\s*$", np.nan, regex=True).dropna()
    assert kept.index.tolist() == KEPT
    whole = load(kept.to_dict("records"))
    for form in forms(tmp_path):
        with pytest.warns(UserWarning, match=r"5 of 10 rows of .* are left out \(drop_missing\)"):
            data = load(form, drop_missing=True)
        for split, expected in whole.items():
            for name, column in expected.columns.items():
                np.testing.assert_array_equal(data[split].columns[name], column)
            (note,) = data[split].notes
            assert "3 without 'text', 3 without 'label'. The first is row 2." in note


def test_without_it_a_missing_label_or_text_is_an_error_that_names_the_option(load, tmp_path):
    for form in forms(tmp_path):
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(fp.InputError, match=r"Row .* label .*set drop_missing = true"),
        ):
            load(form)
    with pytest.raises(
        fp.InputError, match=r"Row 2 .* None in place of a text.*drop_missing = true"
    ):
        load([{"text": "w1", "label": "a"}, {"text": None, "label": "a"}])


def test_blank_texts_are_counted_in_a_warning(load):
    """They were trained on as empty texts without a word."""
    rows = [{"text": text or "", "label": "ab"[i % 2]} for i, text in enumerate(TEXTS)]
    expected = "3 of 10 rows of the table have a blank 'text', the first is row 2.*drop_missing = "
    with pytest.warns(UserWarning, match=f"{expected}true"):
        assert count(load(rows)) == 10


def test_a_table_without_missing_values_says_nothing(load):
    rows = [{"text": f"w{i}", "label": "ab"[i % 2]} for i in range(10)]
    one, other = load(rows, drop_missing=True), load(rows)
    assert one["train"].notes == ()
    np.testing.assert_array_equal(one["train"].labels, other["train"].labels)


@pytest.mark.parametrize(
    ("row", "task"),
    [
        ({"text": "w1", "text_pair": "w2", "label": "a"}, None),
        ({"text": "w1"}, "next_token"),
        ({"tokens": ["w1"], "tags": ["O"]}, None),
        ({"context": "w1 w2", "question": "w3", "answer": "w1", "answer_start": 0}, None),
    ],
)
def test_each_task_knows_what_a_row_needs(load, row, task):
    for name in row.keys() - {"answer", "answer_start"}:
        for missing in (None, np.nan, [] if isinstance(row[name], list) else " "):
            rows = [row] * 6 + [row | {name: missing}] + [row] * 3
            with pytest.warns(UserWarning, match=rf"1 of 10 rows .* 1 without '{name}'"):
                data = load(rows, drop_missing=True, task=task)
            assert count(data) == 9


@pytest.mark.parametrize(
    ("row", "needed"),
    [
        ({"instruction": "w1", "input": "", "output": "w2"}, ["instruction", "output"]),
        ({"prompt": "w1", "completion": "w2", "system": None}, ["prompt", "completion"]),
        ({"messages": [{"role": "user", "content": "w1"}], "output": ""}, ["messages"]),
        ({"message_id": "1", "parent_id": None, "role": "prompter", "text": "w1"}, []),
    ],
)
def test_a_conversation_needs_the_columns_of_its_form(row, needed):
    """A further column may be empty, and so is the parent of a tree's first message."""
    table = objects.as_table([row, row], "the table")
    assert without_missing(table, CONVERSATIONS, True).columns == table.columns
    assert [*CONVERSATIONS.needed(row.keys())] == needed
    for name in needed:
        some = objects.as_table([row, row | {name: None}], "the table")
        with pytest.warns(UserWarning, match=f"1 without '{name}'. The first is row 2"):
            assert len(without_missing(some, CONVERSATIONS, True)) == 1


def test_a_first_row_without_a_label_does_not_hide_the_task(load, tmp_path):
    """What is checked before the rows are read is the task that they have."""
    rows = [{"text": "w1"}, *({"text": f"w{i}", "label": "ab"[i % 2]} for i in range(9))]
    (tmp_path / "x.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    with pytest.warns(UserWarning, match="1 of 10 rows .* 1 without 'label'"):
        data = load(str(tmp_path / "x.jsonl"), drop_missing=True)
    assert sources.check_header(str(tmp_path / "x.jsonl")) == data["train"].task


def test_no_row_left_is_an_error(load):
    with pytest.raises(fp.InputError, match="No row of the table has all of text, label"):
        load([{"text": "", "label": "a"}, {"text": "w1", "label": None}], drop_missing=True)


def test_data_sets_of_clients_have_the_option_too(stand_in_tokenizer):
    frame = pd.DataFrame({"text": TEXTS, "label": LABELS})
    how = {"tokenizer": stand_in_tokenizer, "max_length": 6}
    with pytest.warns(UserWarning, match="5 of 10 rows of the data set of client '[xy]'"):
        clients = fp.load_clients({"x": frame, "y": frame}, drop_missing=True, **how)
    assert clients.sizes.tolist() == [5, 5]
    refused("drop_missing = true", fp.load_clients, {"x": frame.iloc[:4]}, **how)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_the_option_is_true_or_false(load, value):
    with pytest.raises(fp.InputError, match=r"drop_missing = .* must be true or false"):
        load([{"text": "w1", "label": "a"}] * 5, drop_missing=value)


def test_named_data_sets_have_it_and_collections_do_not(stand_in_tokenizer):
    how = {"tokenizer": stand_in_tokenizer, "source": "tiny", "drop_missing": True}
    assert fp.load_dataset("sst2", **how)["train"].notes == ()
    refused("drop_missing = True means nothing", fp.load_dataset, "glue_silo", **how)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((x, True) for x in (None, "", " \n", float("nan"), np.float32("nan"), pd.NA, pd.NaT, [])),
        *((x, False) for x in ("NA", "nan", "null", 0, 0.0, False, ["a"], np.zeros(2))),
    ],
)
def test_what_is_missing(value, expected):
    assert is_missing(value) is expected
