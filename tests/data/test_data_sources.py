"""Data sets by name, and from directories."""

import copy
import gzip
import json
import os
from collections import Counter

import datasets
import numpy as np
import pytest
from internals import assets, load_tables
from refusals import refused
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import fedjax_peft as fp

ROWS = [("one", "y"), ("two", "x"), ("three", "y"), ("NA", "z")]


@pytest.fixture(scope="module")
def tokenizer():
    words = ["[PAD]", "[UNK]", "one", "two", "three", "NA"]
    vocab = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")


def jsonl(rows, text="text"):
    return "".join(json.dumps({text: t, "label": y}) + "\n" for t, y in rows).encode()


def as_csv(rows):
    return "".join(f"{t},{y}\n" for t, y in [("text", "label"), *rows]).encode()


def write(folder, **files):
    """Writes files; in a name, ``__`` stands for the dot."""
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return str(folder)


def load(folder, tokenizer, **options):
    return fp.load_dataset(folder, **{"tokenizer": tokenizer, "max_length": 3, **options})


def assert_is_rows(data, rows=ROWS):
    ids = {"one": 2, "two": 3, "three": 4, "NA": 5}
    assert data.columns["input_ids"].tolist() == [[ids[text], 0, 0] for text, _ in rows]
    assert data.label_names == ("x", "y", "z")
    assert [data.label_names[label] for label in data.labels] == [label for _, label in rows]
    assert data.labels.dtype == np.int32


@pytest.mark.parametrize("ending", ["jsonl", "json", "jsonl.gz", "csv", "csv.gz", "parquet"])
def test_directories(tmp_path, tokenizer, ending):
    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        path = tmp_path / f"{split}.{ending}"
        if ending == "parquet":
            columns = {"text": [t for t, _ in rows], "label": [y for _, y in rows]}
            datasets.Dataset.from_dict(columns).to_parquet(path)
        elif ending == "json":
            path.write_text(json.dumps([{"text": t, "label": y} for t, y in rows]))
        else:
            content = as_csv(rows) if ending.startswith("csv") else jsonl(rows)
            path.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    data = load(tmp_path, tokenizer)
    assert data.keys() == {"train", "test"}
    assert_is_rows(data["train"])
    assert_is_rows(data["test"], ROWS[:2])
    assert {p.name for p in assets.cache_dir().iterdir()} <= {"datasets", "tokens"}


def test_formats_mix_and_the_first_of_two_names_counts(tmp_path, tokenizer):
    two = json.dumps({"sentence": "two", "text": "one", "label": "x"}).encode()
    write(tmp_path, train__csv=as_csv(ROWS), validation__jsonl=jsonl(ROWS, "sentence"))
    write(tmp_path, README__md=b"not data", other__jsonl=b"not read")
    assert_is_rows(load(tmp_path, tokenizer)["test"])
    write(tmp_path, validation__jsonl=two)
    assert load(tmp_path, tokenizer)["test"].columns["input_ids"].tolist() == [[2, 0, 0]]


def test_test_comes_before_validation(tmp_path, tokenizer):
    splits = {"train__csv": ROWS, "test__csv": ROWS[1:], "validation__csv": ROWS[:2]}
    write(tmp_path, **{name: as_csv(rows) for name, rows in splits.items()})
    data = load(tmp_path, tokenizer)
    assert list(data) == ["train", "validation", "test"]
    assert_is_rows(data["test"], ROWS[1:])
    assert_is_rows(data["validation"], ROWS[:2])


def test_a_changed_file_is_read_again(tmp_path, tokenizer):
    folder = tmp_path / "data[1]*"  # which is no pattern
    folder.mkdir()
    write(folder, train__csv=as_csv(ROWS), test__csv=as_csv(ROWS))
    assert_is_rows(load(folder, tokenizer)["train"])
    old = (folder / "test.csv").stat()
    write(folder, test__csv=as_csv(ROWS[2:]))
    os.utime(folder / "test.csv", ns=(old.st_atime_ns, old.st_mtime_ns))  # as an archive's are
    assert_is_rows(load(folder, tokenizer)["test"], ROWS[2:])


def test_text_pairs(tmp_path, tokenizer):
    row = json.dumps({"text": "one", "text_pair": "two three", "label": 0}).encode()
    write(tmp_path, train__jsonl=row, test__jsonl=row)
    data = load(tmp_path, tokenizer, max_length=4)["train"]
    assert data.columns["input_ids"].tolist() == [[2, 3, 4, 0]]


def rows(*records):
    return "\n".join(map(json.dumps, records)).encode()


def test_further_columns_are_keys(tmp_path, tokenizer):
    one = {"text": "one", "label": "x", "client": 7, "year": 1999, "note": None, "url": "u" * 300}
    two = {"text": "two", "label": "y", "client": 8, "year": 2001, "note": "n", "url": "u"}
    write(tmp_path, train__jsonl=rows(one, two), test__jsonl=rows(one))
    meta = load(tmp_path, tokenizer)["train"].meta
    assert {key: values.tolist() for key, values in meta.items()} == {
        "client": ["7", "8"],
        "year": [1999, 2001],
    }
    write(tmp_path, train__jsonl=rows(one, two | {"client": None}))
    refused(r"Row 2 of .*train\.jsonl has None .* column 'client'", load, tmp_path, tokenizer)


@pytest.mark.parametrize("hour", ["", "T08:30:00"])
def test_dates_are_texts(tmp_path, tokenizer, hour):
    """The reader of json makes dates of such texts, which would be no keys."""
    days = [f"2020-01-0{i % 3 + 1}{hour}" for i in range(9)]
    records = [{"text": "one", "label": "x", "day": day, "client": day} for day in days]
    path = write(tmp_path, rows__jsonl=rows(*records)) + "/rows.jsonl"
    meta = load(path, tokenizer, test_share=0.4)["train"].meta
    assert set(meta["day"]) == set(meta["client"]) == set(days)


@pytest.mark.parametrize("encoding", ["utf-8", "utf_8", "UTF8"])
def test_utf8_has_several_names(tmp_path, tokenizer, encoding):
    content = b"\xef\xbb\xbf" + as_csv(ROWS)
    folder = write(tmp_path, train__csv=content, test__csv=content)
    assert_is_rows(load(folder, tokenizer, csv={"encoding": encoding})["train"])


SPAN = {"context": "one two three", "question": "two", "answer": "three", "answer_start": 8}


@pytest.mark.parametrize(
    ("row", "task", "column"),
    [
        ({"text": "one two", "label": 1}, "classification", "labels"),
        ({"tokens": ["one"], "tags": ["O"]}, "tagging", "labels"),
        ({"tokens": ["one"], "ner_tags": ["B-x"]}, "tagging", "labels"),
        (SPAN, "question_answering", "start_positions"),
        ({"client": "a", "text": "one two"}, "next_token", "input_ids"),
    ],
)
def test_the_task_follows_from_the_columns(tmp_path, tokenizer, row, task, column):
    write(tmp_path, train__jsonl=rows(row, row), test__jsonl=rows(row))
    tokenizer = copy.copy(tokenizer)
    tokenizer.eos_token = "[UNK]"
    data = load(tmp_path, tokenizer, max_length=6)
    assert {part.task.name for part in data.values()} == {task}
    assert column in data["train"].columns
    assert len(data["train"]) >= 2


def test_keys_of_windows_are_those_of_their_rows(tmp_path, tokenizer):
    long = SPAN | {"context": "one two three one two one two", "source": "s"}
    write(tmp_path, train__jsonl=rows(SPAN | {"source": "t"}, long), test__jsonl=rows(long))
    train = load(tmp_path, tokenizer, max_length=5, doc_stride=2)["train"]
    units, sources = train.meta["unit"].tolist(), train.meta["source"].tolist()
    assert len(units) > 2
    assert [{0: "t", 1: "s"}[unit] for unit in units] == sources
    fewer = load(tmp_path, tokenizer, max_length=5, doc_stride=0)["train"]
    assert len(fewer) < len(train)


def test_clusters_of_texts(tmp_path, tokenizer):
    texts = ["one one", "one", "two two", "two"]
    content = jsonl([(text, "x") for text in texts])
    write(tmp_path, train__jsonl=content, test__jsonl=content)
    groups = load(tmp_path, tokenizer, clusters=2)["train"].meta["cluster"].tolist()
    assert groups[0] == groups[1] != groups[2] == groups[3]


@pytest.mark.parametrize("place", ["FEDJAX_PEFT_DATA", "FEDJAX_PEFT_CACHE"])
def test_a_folder_with_the_name_takes_precedence(tmp_path, tokenizer, monkeypatch, place):
    folder = tmp_path / "data" / "mrpc"
    folder.mkdir(parents=True)
    row = rows({"sentence1": "one", "sentence2": "two", "label": 1})
    write(folder, train__jsonl=row, validation__jsonl=row)
    monkeypatch.setenv("FEDJAX_PEFT_DATA", str(tmp_path / "elsewhere"))
    monkeypatch.setenv(place, str(folder.parent if place.endswith("DATA") else tmp_path))
    data = fp.load_dataset("mrpc", tokenizer=tokenizer)["test"]
    assert data.columns["input_ids"].shape == (1, 128)
    assert data.label_names == ("not_equivalent", "equivalent")
    assert data.labels.tolist() == [1]


def test_whole_number_labels_sort_by_number(tmp_path, tokenizer):
    write(tmp_path, train__csv=as_csv([("one", 10), ("two", 9)]), test__csv=as_csv([("one", 9)]))
    data = load(tmp_path, tokenizer)
    assert data["train"].label_names == data["test"].label_names == ("9", "10")
    assert data["train"].labels.tolist() == [1, 0]
    assert data["test"].labels.tolist() == [0]
    write(tmp_path, train__csv=as_csv([("one", "9" * 5000), ("two", "9")]))  # a name
    assert load(tmp_path, tokenizer)["test"].labels.tolist() == [0]


def test_a_rare_class_is_known_wherever_its_row_is(tmp_path, tokenizer):
    rows = [*[("one", "y"), ("two", "x")] * 10, ("three", "rare")]
    path = write(tmp_path, all__csv=as_csv(rows)) + "/all.csv"
    held = set()
    for seed in range(10):
        data = load(path, tokenizer, seed=seed, test_share=0.4)
        assert {part.label_names for part in data.values()} == {("rare", "x", "y")}
        held.add(0 in data["test"].labels)
    assert held == {True, False}


def test_class_labels_keep_their_order(tmp_path, tokenizer):
    for split, names in (("train", ["z", "a"]), ("test", ["a", "z"])):
        features = datasets.Features(
            {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
        )
        table = datasets.Dataset.from_dict({"text": ["one"], "label": [0]}, features=features)
        table.to_parquet(tmp_path / f"{split}.parquet")
    data = load(tmp_path, tokenizer)
    assert data["train"].label_names == ("z", "a")
    assert data["train"].labels.tolist() == [0]
    assert data["test"].labels.tolist() == [1]


def test_subsets_are_seeded_and_nested(tmp_path, tokenizer):
    rows = [(["one", "two", "three"][i % 3], f"label{i:02d}") for i in range(40)]
    write(tmp_path, train__jsonl=jsonl(rows), test__jsonl=jsonl(rows))

    def labels(seed, size):
        data = load(tmp_path, tokenizer, seed=seed, train_examples=size, test_examples=5)
        assert len(data["test"]) == 5
        assert len(data["train"].label_names) == 40  # of all rows, not of the subset
        return data["train"].labels.tolist()

    first = labels(0, 10)
    assert len(set(first)) == 10
    assert first == sorted(first) == labels(0, 10)
    assert first != labels(1, 10)
    assert set(first) < set(labels(0, 20))
    assert labels(0, 40) == list(range(40))
    refused(r"train_examples is 41, .* has 40 examples", labels, 0, 41)


GOOD = jsonl([("one", "x")])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train__csv", b"", r"train\.csv could not be read"),
        ("train__csv", b"text,label\n", r"train\.csv could not be read: it has no rows"),
        ("train__csv", b"text,label\na,x\na,b,c\n", r"Line 3 of .*train\.csv has 3 fields"),
        ("train__csv", b"text,label\na,x\nb\n", r"Row 2 of .*train\.csv has the label None"),
        ("train__csv", b"text,lable\na,x\n", r"no column 'label', only: text, lable"),
        ("train__csv", b"body,label\na,x\n", r"no column 'text', only: body, label"),
        ("train__jsonl", GOOD + b"{broken\n", r"Line 2 of .*train\.jsonl is not JSON"),
        ("train__jsonl", GOOD + jsonl([(None, "x")]), r"Row 2 of .*train\.jsonl has None in"),
        ("train__jsonl", GOOD + jsonl([("one", None)]), r"Row 2 of .*train\.jsonl .*label None"),
        ("train__jsonl", jsonl([("one", 1.5)]), r"Row 1 of .*label 1\.5: neither"),
        (
            "train__jsonl__gz",
            gzip.compress(GOOD, mtime=0)[:-9],
            r"train\.jsonl\.gz could not be read",
        ),
        ("train__parquet", b"junk", r"train\.parquet could not be read"),
        ("test__jsonl", jsonl([("a", "x"), ("b", "new")]), r"Row 2 of .*test\.jsonl .*'new'"),
        ("test__csv", GOOD, r"several files for one split: test\.csv, test\.jsonl"),
    ],
)
def test_bad_files_are_named(tmp_path, tokenizer, name, content, message):
    write(tmp_path, test__jsonl=GOOD)
    if not name.startswith("train"):
        write(tmp_path, train__jsonl=GOOD)
    write(tmp_path, **{name: content})
    refused(message, load, tmp_path, tokenizer)


SIXTY = [{"text": None if i == 49 else "one", "label": "x"} for i in range(60)]
TAGGED = [{"tokens": ["one"], "tags": ["O"] * (2 if i == 49 else 1)} for i in range(60)]
FOUR_EACH = [{"text": "one", "label": "x", "client": n // 4} for n in range(40)]
SPANS = {"id": "1", "question": "one", "context": "one two", "answers": ["one"]}
ROW_50 = r"Row 50 of .*train\.jsonl has None"
WHOLE = "must be a whole number"


def mood(label):
    return rows({"sentence": "one", "label": label})


@pytest.mark.parametrize(
    ("name", "files", "options", "message"),
    [
        ("sst2", [mood(2), mood(1)], {}, r"Row 1 of .*train\.jsonl has the label '2'"),
        ("sst2", [mood(1), mood(-1)], {}, r"Row 1 of .*validation\.jsonl has the label '-1'"),
        # The number of a row is that in the file, for every subset.
        *(("", [rows(*SIXTY)], {"train_examples": n}, ROW_50) for n in (3, 55, None)),
        ("", rows(*TAGGED), {}, r"Row 50 of .*all\.jsonl has 1 words but 2 tags"),
        ("", jsonl(ROWS), {}, r"all\.jsonl has 4 rows and no test split: a fifth .* less than one"),
        ("", rows(*FOUR_EACH), {}, "a fifth of each client's rows"),
        ("mrqa", rows(SPANS | {"answer_starts": [0]}), {}, r"all\.jsonl has no column 'source'"),
        ("", [jsonl(ROWS)], {"train_examples": 2.0}, WHOLE),
        ("", [jsonl(ROWS)], {"test_examples": "2"}, WHOLE),
        ("", [jsonl(ROWS)], {"clusters": 2.5}, WHOLE),
        ("", [GOOD], {"tokenizer": None}, "need a tokenizer"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path, tokenizer, name, files, options, message):
    """``files``: the training split (and the other one, else a good one), or the whole."""
    if isinstance(files, bytes):
        write(tmp_path, all__jsonl=files)
    else:
        train, test = [*files, GOOD][:2]
        write(tmp_path, train__jsonl=train, **{f"{'validation' if name else 'test'}__jsonl": test})
    place = {"source": tmp_path} if name else {}
    refused(message, load, name or tmp_path, **{"tokenizer": tokenizer, **place, **options})


@pytest.mark.parametrize(
    ("name", "files", "header"),
    [
        ("wnut17", ("train.conll", "test.conll"), b"\n"),
        ("sst2", ("train.tsv", "dev.tsv"), b"sentence\tlabel\n"),
    ],
)
def test_files_without_rows_are_named(tmp_path, tokenizer, name, files, header):
    for file in files:
        (tmp_path / file).write_bytes(header)
    refused(r"train\.(conll|tsv).* no ", load, name, tokenizer, source=tmp_path)


def test_missing_splits_and_unknown_names(tmp_path, tokenizer):
    for place, options, message in (
        (tmp_path, {}, "split 'train'.*none of these.*train/CLASS/1.png"),
        ("20newsgroup", {}, "Did you mean '20newsgroups'"),
        ("20newsgroups", {"source": "net"}, "no source 'net'"),
        (tmp_path, {"source": "hub"}, "is a directory"),
        ("x" * 5000, {}, "is neither a named data set nor a file or directory"),
        ("glue_silo", {"source": "tiny", "test_examples": 0}, "test_examples is 0: take at least"),
    ):
        refused(message, load, place, tokenizer, **options)
    write(tmp_path, train__jsonl=GOOD)
    refused("split 'test', only for: train", load, tmp_path, tokenizer)


TAB = b"Category\tText\nd\tstring\nclass\t\n\n"


def test_tab_asset(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(assets, "fetch", lambda name: tmp_path)
    shorter = TAB[:-1]  # without the empty line
    rows = {"train": TAB + b'b\tone "two\na\tthree\n', "test": shorter + b"a\tone\n"}
    for split, content in rows.items():
        (tmp_path / f"20newsgroups-{split}.tab").write_bytes(content)
    data = load("20newsgroups", tokenizer)
    assert data["train"].label_names == ("a", "b")
    assert data["train"].labels.tolist() == [1, 0]
    assert data["train"].columns["input_ids"].tolist() == [[2, 1, 3], [4, 0, 0]]
    assert data["test"].labels.tolist() == [0]
    long = TAB + b"a\tone\nb\ttwo\tthree\n"
    for content, message in ((long, "Line 6 of .* has 3 fields"), (b"Text\n", "does not start")):
        (tmp_path / "20newsgroups-test.tab").write_bytes(content)
        refused(message, load, "20newsgroups", tokenizer)


@pytest.mark.assets
def test_20newsgroups(tokenizer):
    """All rows are counted as they are read, and few of them are encoded."""
    _, tables = load_tables("20newsgroups")
    assert (len(tables["train"]), len(tables["test"])) == (11_293, 7_528)
    counts = Counter(tables["train"].columns["label"])
    assert (min(counts.values()), max(counts.values())) == (377, 600)
    assert {*tables["test"].columns["label"]} == {*counts}
    data = load("20newsgroups", tokenizer, train_examples=100, test_examples=50)
    assert (len(data["train"]), len(data["test"])) == (100, 50)
    names = data["train"].label_names
    assert len(names) == 20
    assert list(names) == sorted(counts)
    assert (names[0], names[-1]) == ("alt.atheism", "talk.religion.misc")


PAIR = {"sentence1": "one", "sentence2": "two", "label": 1}
MISSPELT = {"sentence1": "one", "sentence_2": "two", "label": 1}


@pytest.mark.parametrize(
    ("train", "test"), [(MISSPELT, MISSPELT), (PAIR, MISSPELT), (MISSPELT, PAIR)]
)
def test_a_pair_is_never_read_as_one_text(tmp_path, tokenizer, train, test):
    write(tmp_path, train__jsonl=rows(train), validation__jsonl=rows(test))
    wrong = "validation" if train is PAIR else "train"
    message = rf"{wrong}\.jsonl has no column 'sentence2', .* Did you mean 'sentence_2'\?"
    refused(message, load, "mrpc", tokenizer, source=tmp_path)


@pytest.mark.parametrize(
    ("train", "test", "wrong"), [("text_pair", "other", "test"), ("textpair", "textpair", "train")]
)
def test_a_directory_s_pairs_are_pairs_in_every_split(tmp_path, tokenizer, train, test, wrong):
    one = {"text": "one", "label": "x"}
    write(tmp_path, train__jsonl=rows({**one, train: "two"}))
    write(tmp_path, test__jsonl=rows({**one, test: "two"}))
    refused(rf"{wrong}\.jsonl has no column 'text_pair'", load, tmp_path, tokenizer)


def test_tags_of_a_table_may_be_iob1_as_those_of_columns(tmp_path, tokenizer):
    tags = ["I-PER", "I-PER", "B-PER", "I-LOC"]
    write(tmp_path, train__jsonl=rows({"tokens": ["one", "two", "three", "NA"], "tags": tags}))
    write(tmp_path, test__jsonl=rows({"tokens": ["one"], "tags": ["B-LOC"]}))
    data = load(tmp_path, tokenizer, max_length=6)["train"]
    assert data.references == (("B-PER", "I-PER", "B-PER", "B-LOC"),)
