"""One label in every spelling: bools, floats, spaces, case, invisible characters, and numbers."""

import json

import datasets
import pandas as pd
import pytest
import tiny_tokenizers
from internals import Reading, Table, load_tables
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.data.catalog import OWN
from fedjax_peft.data.naming import prepare, rename_columns
from fedjax_peft.data.table import label_ids

TOKENIZER = tiny_tokenizers.bert()
TEXTS = [f"w{i}" for i in range(6)]


def write(path, labels):
    """Writes a table of texts and labels with the library that users write this format with."""
    rows = range(len(labels))
    frame = pd.DataFrame({"text": TEXTS[: len(labels)], "label": labels, "row": map(str, rows)})
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    elif path.suffix == ".json":
        frame.to_json(path, orient="records")
    else:
        frame.to_parquet(path)
    return str(path)


def read(path, **options):
    """Returns the names of the classes, and the name of each row."""
    data = fp.load_dataset(path, tokenizer=TOKENIZER, max_length=4, test_share=0.5, **options)
    rows = [x for part in data.values() for x in zip(part.meta["row"], part.labels, strict=True)]
    names = data["train"].label_names
    return names, [names[label] for _, label in sorted(rows)]


@pytest.mark.parametrize("ending", ["csv", "json", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([True, False, True, True], ["False", "True"]),
        ([1.0, 0.0, 10.0, 2.0], ["0", "1", "2", "10"]),
        ([3, -1, 3, -1], ["-1", "3"]),
        (["true", "FALSE", "True", "false"], ["False", "True"]),
        (["2.0", "10", "1", "2"], ["1", "2", "10"]),
        (["false", "half-true", "true", "true"], ["false", "half-true", "true"]),
        (["1.0", "1.5", "2.0", "1.5"], ["1.0", "1.5", "2.0"]),
    ],
)
@pytest.mark.filterwarnings("ignore:In .* the labels .* count as one class")
def test_a_label_is_the_same_in_all_formats(tmp_path, ending, labels, names):
    found, rows = read(write(tmp_path / f"x.{ending}", labels))
    assert list(found) == names
    plain = [str(x).casefold().removesuffix(".0") for x in labels]
    assert [row.casefold().removesuffix(".0") for row in rows] == plain


ALIKE = {
    "a space": (["pos", "pos ", " neg", "neg"], ["'pos' (1), 'pos ' (1)", "one class"], 2),
    "a tabulator": (["pos", "pos\t", "neg", "neg"], [r"'pos\t' (1)", "one class"], 2),
    "a hard space": (["pos", "pos\xa0", "neg", "neg"], [r"'pos\xa0' (1)", "one class"], 2),
    "case": (["pos", "POS", "neg", "Pos"], ["'POS' (1), 'Pos' (1), 'pos' (1)", "3 classes"], 4),
    "a zero-width space": (["pos", "p\u200bos", "neg", "neg"], [r"'p\u200bos' (1)", "2 cl"], 3),
    "a byte order mark": (["\ufeffpos", "pos", "neg", "neg"], [r"'\ufeffpos' (1)", "2 cl"], 3),
    "accents": (["\xe9t\xe9", "e\u0301te\u0301", "x", "x"], [r"'e\u0301te\u0301' (1)", "2 cl"], 3),
    "inner spaces": (["so so", "so  so", "x", "x"], ["'so  so' (1), 'so so' (1)", "2 cl"], 3),
    "wide letters": (["\uff50os", "pos", "x", "x"], [r"'\uff50os' (1)", "2 classes"], 3),
}


@pytest.mark.parametrize("case", ALIKE)
def test_labels_that_look_alike_are_named_with_their_counts(tmp_path, case):
    labels, parts, classes = ALIKE[case]
    with pytest.warns(UserWarning, match="in spaces, case or invisible characters only") as caught:
        names, _ = read(write(tmp_path / "x.jsonl", labels))
    assert all(any(part in str(one.message) for one in caught) for part in parts)
    assert len(names) == classes


@pytest.mark.filterwarnings("ignore:In .* the labels .* count as one class")
def test_answers_of_instructions_are_the_names_of_classes(tmp_path):
    path = write(tmp_path / "x.csv", ["pos", "pos ", " neg", "neg", "True", "true"])
    how = {"tokenizer": tiny_tokenizers.gpt2(), "max_length": 300, "test_share": 0.5}
    data = fp.load_dataset(path, instructions=True, **how)
    answers = {x for part in data.values() for golds in part.references for x in golds}
    assert answers == {"pos", "neg", "True"}


def test_other_labels_are_not_warned_of(tmp_path):
    labels = ["C", "C++", "C#", "not-C", "not C++", "c-like"]
    assert len(read(write(tmp_path / "x.csv", labels))[0]) == 6


def test_spellings_of_a_test_file_are_those_of_the_training_file(tmp_path):
    """Each file has one kind of values, and the classes are those of the first."""
    for labels, others, names in (
        (["yes", "no"], ["no ", "yes"], ("no", "yes")),
        (["true", "false", "half"], ["True", "FALSE"], ("false", "half", "true")),
        (["1.0", "2.5"], ["1"], ("1.0", "2.5")),
    ):
        write(tmp_path / "train.csv", labels)
        write(tmp_path / "test.csv", others)
        data = fp.load_dataset(str(tmp_path), tokenizer=TOKENIZER, max_length=4)
        assert data["train"].label_names == names
        found = [names[i].casefold() for i in data["test"].labels]
        assert found == [x.strip().casefold().replace("1", "1.0") for x in others]


def rows(labels, **features):
    made = datasets.Dataset.from_dict({"text": TEXTS[: len(labels)], "label": labels})
    return made.cast_column("label", datasets.ClassLabel(**features)) if features else made


MIXED = {
    "names and numbers": ({"north": rows([1, 0], names=["neg", "pos"]), "south": rows([1, 0])}, 0),
    "some numbers": ({"north": rows(["neg", "pos"]), "south": rows([1])}, 0),
    "numbers from 1": ({"north": rows(["neg", "pos"]), "south": rows(["1", "2"])}, 0),
    "floats": ({"north": rows(["neg", "pos"]), "south": rows([1.0, 0.0])}, 0),
    "stars and a name": ({"a": rows(["1", "5", "unknown"]), "b": rows([2])}, 4),
    "a bit and a name": ({"a": rows(["0", "1", "unknown"]), "b": rows([0])}, 3),
}


@pytest.mark.parametrize("case", MIXED)
def test_names_beside_numbers_are_refused_if_these_may_be_theirs(case):
    clients, classes = MIXED[case]
    if classes:
        found = fp.load_clients(clients, tokenizer=TOKENIZER, max_length=4)
        assert len(found.data.label_names) == classes
        return
    message = "names in some rows, such as row 1 of client 'north', and numbers in .* row 1 of .*so"
    refused(message, fp.load_clients, clients, tokenizer=TOKENIZER, max_length=4)


def test_given_names_are_those_of_the_numbers(tmp_path):
    clients, _ = MIXED["names and numbers"]
    given = {"tokenizer": TOKENIZER, "max_length": 4, "label_names": ["neg", "pos"]}
    assert fp.load_clients(clients, **given).data.labels.tolist() == [1, 0, 1, 0]
    with pytest.raises(fp.InputError, match=r"Row 3 of .* names in some|names in some rows.*row 3"):
        read(write(tmp_path / "x.csv", ["neg", "pos", "1", "0"]))
    path = write(tmp_path / "x.csv", ["neg", "pos", "1", "0.0"])
    assert read(path, label_names=["neg", "pos"]) == (("neg", "pos"), ["neg", "pos", "pos", "neg"])
    path = write(tmp_path / "y.csv", ["5", "4", "1", "5"])
    stars = [str(i + 1) for i in range(5)]
    assert read(path, label_names=stars) == (tuple(stars), ["5", "4", "1", "5"])
    for names, message in ((["a"], "Row 1 of .* has the label '5'"), ("ab", "a list of texts")):
        refused(message, read, path, label_names=names)
    (tmp_path / "z.jsonl").write_text('{"text": "a"}\n' * 5)
    with pytest.raises(fp.InputError, match=r"label_names = .* means nothing"):
        read(str(tmp_path / "z.jsonl"), label_names=["a", "b"])


@pytest.mark.parametrize("label", [None, "", " ", 1.5, [1]])
def test_what_is_no_label_is_an_error_with_its_row(tmp_path, label):
    lines = [{"text": "a", "label": x} for x in (label, label)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused(r"Row 1 of .*x.jsonl has the label", read, str(tmp_path / "x.jsonl"))


def test_tags_that_look_alike_are_named(tmp_path):
    lines = [{"tokens": ["a", "b"], "tags": [tag, "O"]} for tag in ("B-LOC", "B-loc", "B-LOC")]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.warns(UserWarning, match=r"'B-LOC' \(2\), 'B-loc' \(1\) differ.*2 classes"):
        load_tables(str(tmp_path / "x.jsonl"), Reading(test_share=0.4))


def test_ordered_categories_that_are_numbers_are_names():
    table = Table("x", {"text": ["a"] * 3, "label": [1, 3, 2]}, orders={"label": (3, 1, 2)})
    entry = OWN._replace(task=fp.tasks.classification())
    renamed = rename_columns(table, entry, None)
    assert renamed.label_names == ("3", "1", "2")
    assert label_ids(prepare(renamed, entry), renamed.label_names).tolist() == [1, 0, 2]
