"""The rows that ``predict`` reads: every form that training reads, under the config's names."""

import gzip
import json

import pandas as pd
import pytest
from refusals import refused

from fedjax_peft import tasks
from fedjax_peft.tasks.inference import read_inputs

TEXTS = ["a, b", 'she said "no"', "line one\nline two", "3", "NA", "\u2028 x"]
FRAME = pd.DataFrame({"review": TEXTS, "stars": range(6), "pair": TEXTS[::-1]})
NAMES = {"columns": {"text": "review", "label": "stars"}}


def written(path, frame=FRAME, sep=","):
    """Returns a file that pandas writes."""
    kind = path.name.split(".")[1].lower()
    if kind in ("csv", "tsv"):
        frame.to_csv(path, index=False, sep="\t" if kind == "tsv" else sep)
    elif kind == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=kind == "jsonl")
    return path


def read(path, data=NAMES, task=None):
    return read_inputs(path, task or tasks.classification(), data)


@pytest.mark.parametrize(
    "name", ["x.csv", "x.csv.gz", "x.tsv", "x.CSV", "x.json", "x.jsonl", "x.jsonl.gz", "x.parquet"]
)
def test_a_table_is_read_as_for_training(name, tmp_path):
    rows, numbers = read(written(tmp_path / name))
    assert rows == [{"text": text} for text in TEXTS]
    assert numbers == [1, 2, 3, 4, 5, 6]
    names = {"columns": {**NAMES["columns"], "text_pair": "pair"}}
    pairs, _ = read(tmp_path / name, names)
    assert [row["text_pair"] for row in pairs] == TEXTS[::-1]


def test_names_of_columns_are_those_of_training(tmp_path):
    """The config's, those of a named data set, and our own."""
    for column, data in (
        ("text", NAMES),
        ("sentence", {}),
        ("sentence", {"name": "sst2"}),
        ("text", None),
    ):
        path = written(tmp_path / "x.csv", pd.DataFrame({column: TEXTS}))
        assert [row["text"] for row in read(path, data)[0]] == TEXTS
    frame = pd.DataFrame({"question": ["a"], "sentence": ["b"]})
    rows, _ = read(written(tmp_path / "x.csv", frame), {"name": "qnli"})
    assert rows == [{"text": "a", "text_pair": "b"}]


def test_the_form_of_csv_files_is_the_config_s(tmp_path):
    path = written(tmp_path / "x.csv", sep=";")
    rows, _ = read(path, {**NAMES, "csv": {"sep": ";"}})
    assert [row["text"] for row in rows] == TEXTS
    (tmp_path / "y.csv").write_bytes("caf\xe9\n".encode("latin-1"))
    form = {"header": False, "encoding": "latin-1"}
    rows, _ = read(tmp_path / "y.csv", {"csv": form, "columns": {"text": "column_1"}})
    assert rows == [{"text": "caf\xe9"}]


def test_blank_lines_keep_the_numbers_of_others(tmp_path):
    (tmp_path / "x.jsonl").write_text('\n{"text": "a"}\n \n\n{"text": "b"}\n')
    assert read(tmp_path / "x.jsonl") == ([{"text": "a"}, {"text": "b"}], [2, 5])
    (tmp_path / "rows").write_text('{"text": "a"}\n')  # any other name is one of JSON lines
    assert read(tmp_path / "rows") == ([{"text": "a"}], [1])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", "txt\na\n", 'Row 1 of .*x.csv does not have a string "review"'),
        ("x.parquet", None, r'Row 2 of .*x.parquet does not have a string "review"'),
        (
            "x.json",
            '[{"review": "a"}, {"review": 3}]',
            'Row 2 of .* not have a string "review"',
        ),
        ("x.jsonl", '{"txt": "a"}', 'x.jsonl, line 1 is not a JSON object with a string "review"'),
        ("x.jsonl.gz", "{", "x.jsonl.gz, line 1 is not JSON"),
        ("none.csv", "", "none.csv could not be read"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(name, content, message, tmp_path):
    path = tmp_path / name
    if content is None:
        pd.DataFrame({"review": ["a", None]}).to_parquet(path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(content.encode()))
    elif content:
        path.write_text(content)
    refused(message, read, path)


def test_tags_and_prompts_are_read_from_tables(tmp_path):
    words = [["a", "b"], ["c"]]
    path = written(tmp_path / "x.parquet", pd.DataFrame({"tokens": words}))
    assert read(path, {}, tasks.tagging())[0] == [{"tokens": row} for row in words]
    path = written(tmp_path / "x.csv", pd.DataFrame({"prompt": ["a", "b"]}))
    assert read(path, {}, tasks.next_token())[0] == [{"prompt": "a"}, {"prompt": "b"}]
    (tmp_path / "y.json").write_text(json.dumps([{"messages": [{"role": "user", "content": "a"}]}]))
    rows, _ = read(tmp_path / "y.json", {}, tasks.instruction_tuning())
    assert rows == [{"messages": [{"role": "user", "content": "a"}]}]
