"""Data files with any content are read or raise InputError."""

import json
import shutil

import numpy as np
import pytest
from fuzzing import VALUES, damaged, damaged_json, dumped, fuzz, refused_or_fine
from hypothesis import given
from hypothesis import strategies as st
from internals import partition as partition_report
from internals import text as texts

import fedjax_peft as fp

pytestmark = pytest.mark.slow

ROWS = [{"text": f"w{i} w{i + 1}", "label": "ab"[i % 2], "client": f"c{i % 3}"} for i in range(12)]
TAGGED = [{"tokens": ["w1", f"w{i}"], "tags": ["O", "B-x"]} for i in range(12)]
ASKED = [
    {
        "id": str(i),
        "question": "w1 ?",
        "context": "w2 w3",
        "answers": {"text": ["w3"], "answer_start": [3]},
    }
    for i in range(12)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = "text,label,client\n" + "".join(f"{r['text']},{r['label']},{r['client']}\n" for r in ROWS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return fp.load_tokenizer(fp.testing.write_tiny_checkpoint(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def read(tokenizer, place, name, content):
    """Reads a data set whose training split has this content, and shows its partition."""
    folder = place / "set"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    stem, _, suffix = name.partition(".")
    whole = {"jsonl": LINES, "json": json.dumps(ROWS), "csv": CSV}[suffix]
    (folder / f"test.{suffix}").write_text(whole)
    (folder / f"{stem}.{suffix}").write_bytes(content)
    with refused_or_fine():
        data = fp.load_dataset(folder, tokenizer=tokenizer, max_length=8)["train"]
        for by in ("label", "client"):
            clients = fp.partition.dirichlet(data, 2, alpha=1.0) if by == "label" else None
            if by in data.meta:
                clients = fp.partition.natural(data, by=by, min_size=0)
            if clients is not None:
                report = partition_report.inspect(clients)
                partition_report.size_table(report)
                partition_report.class_table(report)
                json.dumps(partition_report.summary(report)).encode()


@fuzz(15)
@given(content=damaged(LINES.encode()))
def test_damaged_lines_of_json(tokenizer, place, content):
    read(tokenizer, place, "train.jsonl", content)


@fuzz(10)
@given(content=damaged(CSV.encode()))
def test_damaged_csv(tokenizer, place, content):
    read(tokenizer, place, "train.csv", content)


@fuzz(25)
@given(data=st.data(), rows=st.sampled_from([ROWS, TAGGED, ASKED]))
def test_hostile_rows(tokenizer, place, data, rows):
    rows = data.draw(damaged_json(rows))
    lines = rows if isinstance(rows, list) else [rows]
    read(tokenizer, place, "train.jsonl", b"".join(dumped(row) + b"\n" for row in lines))


@fuzz(40)
@given(data=st.data())
def test_a_damaged_token_cache_is_made_again(tokenizer, place, data, monkeypatch):
    monkeypatch.setenv("FEDJAX_PEFT_CACHE", str(place / "cache"))
    right = texts.tokenize(tokenizer, ["w1 w2", "w3"], max_length=6)
    (path,) = (place / "cache" / "tokens").iterdir()
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    again = texts.tokenize(tokenizer, ["w1 w2", "w3"], max_length=6)
    assert again.keys() == right.keys()
    for name in right:
        np.testing.assert_array_equal(again[name], right[name])
    path.unlink(missing_ok=True)


@fuzz(10)
@given(value=st.sampled_from(VALUES))
def test_any_array_in_place_of_the_token_cache(tokenizer, place, value, monkeypatch):
    monkeypatch.setenv("FEDJAX_PEFT_CACHE", str(place / "cache"))
    right = texts.tokenize(tokenizer, ["w1"], max_length=6)
    path = next((place / "cache" / "tokens").iterdir())
    with path.open("wb") as file:
        np.save(file, np.array(repr(value)))
    again = texts.tokenize(tokenizer, ["w1"], max_length=6)
    np.testing.assert_array_equal(again["input_ids"], right["input_ids"])
    path.unlink()
