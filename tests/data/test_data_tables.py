"""Tables in files: no row lost, no rule obeyed that the file or the user did not state."""

import csv
import io
import json

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from internals import Reading, load_tables
from refusals import refusals, refused

import fedjax_peft as fp
from fedjax_peft.data.formats import tabular
from fedjax_peft.tasks.sources import check_header

ODD = [
    ('say "hi", then\nleave', "01"),
    ("two lines,\r\nwith commas", "1e5"),
    ("# no comment", "NA"),
    ("null", "null"),
    ("1,000", "2020-01-31"),
    (' "late" quotes', "None"),
    ("5\" pipe's", "true"),
    ("tab\there; and | there", "nan"),
    ("\u2028 x \x0b \x1c \x85 y", "+1"),
    ("before\0after", "0.10"),
    ("ends with \\", " pos "),
]


def read(path, **form):
    """Returns the rows of a file, each a tuple of the columns in order."""
    table = tabular.read_file(path, form=tabular.csv_form(form))
    return list(zip(*table.columns.values(), strict=True))


def put(tmp_path, content, name="x.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("how", "form"),
    [
        ({}, {}),
        ({"lineterminator": "\r\n"}, {}),
        ({"quoting": csv.QUOTE_ALL}, {}),
        ({"sep": "\t"}, {"sep": r"\t"}),
        ({"sep": ";", "quotechar": "'"}, {"sep": ";", "quote": "'"}),
        ({"encoding": "utf-8-sig"}, {}),
        ({"encoding": "utf-16"}, {"encoding": "utf-16"}),
        ({"doublequote": False, "escapechar": "\\"}, {"escape": "\\"}),
        ({"header": False}, {"header": False}),
    ],
)
def test_rows_are_those_that_pandas_wrote(tmp_path, how, form):
    path = tmp_path / "x.csv"
    pd.DataFrame(ODD, columns=["text", "label"]).to_csv(path, index=False, **how)
    assert read(path, **form) == ODD


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_rows_are_those_of_other_readers(tmp_path, ending):
    rows = [row for row in ODD if "\r" not in row[0] and "\0" not in row[0]]
    text = io.StringIO()
    csv.writer(text, lineterminator=ending).writerows([("text", "label"), *rows])
    content = text.getvalue() + ending  # a blank line at the end
    path = put(tmp_path, content)
    plain = pd.read_csv(path, dtype=str, keep_default_na=False)
    assert read(path) == rows == list(plain.itertuples(index=False, name=None))


STRAY = ['"Great" is the word\tpos', '" a start\tpos', "three\tpos", "four\tneg", 'end"\tneg']


@pytest.mark.parametrize(
    ("lines", "form", "message"),
    [
        (
            STRAY[:1],
            {"sep": "\t"},
            r"Line 2 of .*x\.csv goes on behind.*quote = \"\".*--quote none",
        ),
        (STRAY[1:4], {"sep": "\t"}, r"begins in line 2 of .* nothing closes.*quote = \"\""),
        (STRAY[1:], {"sep": "\t"}, r"Lines 2 to 5 of .* are one row .* and 4 rows .*quote = '\"'"),
        # At the end of the file, in another column, behind an odd line, before a short row.
        (["a\tb", '"x\tc'], {"sep": "\t"}, "line 3 of .* nothing closes"),
        (['a\t"b', 'c\td"'], {"sep": "\t"}, "Lines 2 to 3 of .* are one row"),
        (['"a\tb', "odd", 'd"\te'], {"sep": "\t"}, "Lines 2 to 4 of .* are one row"),
        (['a\t"b', 'c"\td', "e"], {"sep": "\t"}, "Line 2 of .* has 3 fields"),
        ([r'"he said \"hi\" then",pos'], {}, r"Line 2 of .*escape = '\\'"),
        ([r'"he said \"hi\", then",pos'], {}, r"Line 2 of .*escape = '\\'"),
        (['"one"\t"two" more'], {"sep": "\t"}, "Line 2 of .* goes on behind"),
        # pandas writes such a text without quotation marks, and reads two rows.
        (["a,b", "a lone\rreturn,c"], {}, "Line 3 of .* ends with a carriage return alone"),
        (["a,b,c"], {}, "Line 2 of .* has 3 fields, but the header has 2"),
        (["a,b", "1,c,d"], {}, "Line 3 of .* has 3 fields"),
        (['"1","a","b"'], {}, "Line 2 of .* has 3 fields"),  # R's names of rows
    ],
)
def test_rows_in_doubt_are_refused_by_line_and_option(tmp_path, lines, form, message):
    header = form.get("sep", ",").join(["text", "label"])
    path = put(tmp_path, "\n".join([header, *lines, ""]))
    refused(message, read, path, **form)


@pytest.mark.parametrize("quote", ["", "none"])
def test_a_file_without_quoting(tmp_path, quote):
    path = put(tmp_path, "text\tlabel\n" + "\n".join(STRAY) + "\n", "x.tsv")
    assert read(path, quote=quote) == [tuple(line.split("\t")) for line in STRAY]
    assert read(path, quote=quote) == list(
        pd.read_csv(path, sep="\t", quoting=csv.QUOTE_NONE).itertuples(index=False, name=None)
    )


@pytest.mark.parametrize(
    ("content", "form", "rows"),
    [
        # The same lines: the user says that quotation marks enclose fields.
        ('text,label\n"Good, I\nlike it",pos\n', {"quote": '"'}, [("Good, I\nlike it", "pos")]),
        # Or the file does: elsewhere, fields that hold separators are quoted; or its header is.
        (
            'text,label\n"Good, I\nlike it",pos\n"a, b",neg\n',
            {},
            [("Good, I\nlike it", "pos"), ("a, b", "neg")],
        ),
        ('"text","label"\n"Good, I\nlike it",pos\n', {}, [("Good, I\nlike it", "pos")]),
        ('text,label\n"one\ntwo, three",pos\n', {}, [("one\ntwo, three", "pos")]),
        ('label,text\npos,"one\ntwo"\n', {}, [("pos", "one\ntwo")]),
        ('text\n"one\ntwo"\n"a, b"\n', {}, [("one\ntwo",), ("a, b",)]),
        (
            r"text,label" "\n" r'"he said \"hi\", then",pos',
            {"escape": "\\"},
            [('he said "hi", then', "pos")],
        ),
        ("text,label\nit's, b\n'a, b',c\n", {"quote": "'"}, [("it's", " b"), ("a, b", "c")]),
        ('text,label\n"a\rb",c\n', {}, [("a\rb", "c")]),
        ("text,label\n\n \na,b\n\n", {}, [("a", "b")]),
        ('text\n""\na\n', {}, [("",), ("a",)]),
        (" text ,label \na,b\n", {}, [("a", "b")]),
        ("text,label\na,b,\nc,d,,\n", {}, [("a", "b"), ("c", "d")]),  # trailing separators
        ("text,label\na\n", {}, [("a", None)]),
        (f"text,label\n{'x' * 200_000},b\n", {}, [("x" * 200_000, "b")]),
    ],
)
def test_rows_that_are_read(tmp_path, content, form, rows):
    assert read(put(tmp_path, content), **form) == rows


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        (pd.DataFrame({"text": ["a"], "label": ["b"]}).to_csv(), "1"),
        ("text,label,\na,b,\n", "3"),
        ("text,label,\na,b\n", "3"),
        (",text,,label\n0,a,x,b\n", "1 and 3"),
    ],
)
def test_columns_without_a_name_are_left_out_with_a_word(tmp_path, content, columns):
    path = put(tmp_path, content)
    with pytest.warns(UserWarning, match=f"column {columns} has no name and is left out") as said:
        assert read(path) == [("a", "b")]
    assert len(said) == 1
    assert check_header(str(path)).name == "classification"  # without another word


test_how_a_file_cannot_be_written = refusals(
    tabular.csv_form,
    ({"quote": "''"}, "quote = \"''\" must be one character"),
    ({"escape": 1}, "escape = 1 must be one character"),
    ({"sep": ""}, "sep = '' must be one character"),
    ({"sep": '"'}, "must be different characters"),
    ({"escape": ";", "sep": ";"}, "must be different characters"),
    ({"quotes": '"'}, "csv has no key 'quotes'. Did you mean 'quote'"),
)


TABLE = pd.DataFrame(
    [("good one", "pos"), ("bad", "neg"), ("fine", "pos")], columns=["text", "label"]
)
RECORDS = TABLE.to_dict("records")
ROWS = list(TABLE.itertuples(index=False, name=None))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.tsv", lambda p: TABLE.to_csv(p, sep="\t", index=False)),
        ("x.TSV.gz", lambda p: TABLE.to_csv(p, sep="\t", index=False, compression="gzip")),
        ("x.CSV", lambda p: TABLE.to_csv(p, index=False)),
        ("x.csv.GZ", lambda p: TABLE.to_csv(p, index=False, compression="gzip")),
        ("x.JSONL", lambda p: TABLE.to_json(p, orient="records", lines=True)),
        ("x.ndjson", lambda p: TABLE.to_json(p, orient="records", lines=True)),
        ("x.parquet.gzip", lambda p: TABLE.to_parquet(p, compression="gzip")),
        ("x.snappy.parquet", lambda p: TABLE.to_parquet(p, compression="snappy")),
        ("x.Parquet", lambda p: TABLE.to_parquet(p)),
        *(
            (f"{orient}.json", lambda p, orient=orient: TABLE.to_json(p, orient=orient))
            for orient in ("records", "columns", "index", "split", "table")
        ),
        ("x.json", lambda p: p.write_text(json.dumps(TABLE.to_dict("list")))),
        ("x.json", lambda p: p.write_text(json.dumps({"n": 3, "data": RECORDS}, indent=1))),
        ("x.json", lambda p: TABLE.to_json(p, orient="records", lines=True)),
        ("x.jsonl", lambda p: TABLE.to_json(p, orient="records", indent=2)),
    ],
)  # fmt: skip
def test_endings_and_forms(tmp_path, name, write):
    path = tmp_path / name
    write(path)
    table = tabular.read_file(path)
    assert list(zip(table.columns["text"], table.columns["label"], strict=True)) == ROWS
    _, tables = load_tables(str(path), Reading(test_share=0.4))
    assert sum(map(len, tables.values())) == len(ROWS)


def test_json_is_read_as_it_is_written(tmp_path):
    """No guess at dates, no common type, no keys that other rows have."""
    rows = [
        {"text": "a \ud83d b \ud83d\ude00", "n": 1, "at": "2020-01-01 00:00:00", "m": [{"x": 1}]},
        {"text": "b", "n": "1", "at": "2020-01-02", "m": [{"y": None}], "late": "z"},
    ]
    path = put(tmp_path, "\n\n".join(map(json.dumps, rows)), "x.jsonl")
    rows[0] |= {"text": "a \ufffd b \U0001f600", "late": None}
    assert read(path) == [tuple(row.values()) for row in rows]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n[1]\n', r"Row 2 of .* is \[1\], and not an object"),
        ("[1, 2]", "Row 1 of .* is 1, and not an object"),
        ('[{"text": "a"},\n {"text" "b"}]', r"x\.jsonl is not JSON: Expecting ':'.* line 2"),
        ('{"text": "a"}\n\n{"text": }\n', "Line 3 of .* is not JSON: Expecting value"),
        ("3", "Row 1 of .* is 3"),
        ("[]", "has no rows"),
    ],
)
def test_json_that_is_no_table(tmp_path, content, message):
    refused(message, read, put(tmp_path, content, "x.jsonl"))


def test_a_column_that_nobody_reads_decides_nothing(tmp_path):
    odd = {"id": pa.array([b"0" * 16] * 3, pa.uuid()), "f": pa.array([None, 0.5, 1.0])}
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({**TABLE.to_dict("list"), **odd}), path)
    table = tabular.read_file(path)
    assert [*table.columns] == ["text", "label", "f"]
    with pytest.raises(
        fp.InputError, match=r"The column 'id' of .*x\.parquet could not be read: .*uuid"
    ):
        load_tables(str(path), Reading(columns={"label": "id"}))
    lines = [{"text": "t", "label": "a", "note": None}] * 3000 + [
        {"text": "t", "label": "b", "note": "n"}
    ]
    path = put(tmp_path, "\n".join(map(json.dumps, lines)), "x.jsonl")
    assert len(read(path)) == 3001


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        fp.testing.write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["u", None, None, "u"], "by 'user'. Row [23] of .*x.jsonl has None there"),
        ([1, 1.5, 0.5, 1], "Row [23] of .*x.jsonl has 0.5 there"),
        ([True, False, True, True], "Row [12] of .*x.jsonl has (True|False) there"),
        (["u" * 300, "u" * 300, "v", "v"], "Row [12] of .*x.jsonl has 'uuu"),
    ],
)
def test_a_column_that_is_no_key_says_why(tmp_path, tokenizer, values, message):
    lines = [json.dumps({"text": "w1", "label": i % 2, "user": x}) for i, x in enumerate(values)]
    path = put(tmp_path, "\n".join(lines), "x.jsonl")
    data = fp.load_dataset(str(path), tokenizer=tokenizer, max_length=8, test_share=0.3)["train"]
    refused(message, fp.partition.natural, data, by="user")


@pytest.mark.parametrize("values", [["1", 2, "2", 1], [2**70, 1, 2**70, 1], [2**63, -1, -1, 2**63]])
def test_keys_that_no_integer_holds_are_texts(tmp_path, tokenizer, values):
    lines = [json.dumps({"text": "w1", "label": i % 2, "user": x}) for i, x in enumerate(values)]
    path = put(tmp_path, "\n".join(lines), "x.jsonl")
    data = fp.load_dataset(str(path), tokenizer=tokenizer, max_length=8, test_share=0.3)
    found = np.concatenate([part.meta["user"] for part in data.values()])
    assert set(found) == set(map(str, values))


@pytest.mark.parametrize("form", ["categories", "class_labels"])
@pytest.mark.parametrize("column", ["label", "grade"])
def test_classes_keep_the_order_of_their_source(tmp_path, form, column):
    path, names = tmp_path / "x.parquet", ["low", "mid", "high", "none"]
    found = ["mid", "high", "low", "mid"]
    if form == "categories":
        order = pd.Categorical(found, categories=names, ordered=True)
        pd.DataFrame({"text": list("abcd"), column: order}).to_parquet(path)
    else:
        features = datasets.Features(
            {"text": datasets.Value("string"), column: datasets.ClassLabel(names=names)}
        )
        rows = {"text": list("abcd"), column: found}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    entry, tables = load_tables(str(path), Reading(columns={"label": column}, test_share=0.3))
    assert entry.label_names == tuple(names)
    assert {*tables["train"].columns["label"]} <= {*names}
    free = pd.DataFrame({"text": list("abcd"), "label": pd.Categorical(found, categories=names)})
    free.to_parquet(path)  # an order that means nothing
    assert load_tables(str(path), Reading(test_share=0.3))[0].label_names == ("high", "low", "mid")


def test_numbers_of_tags_get_their_names(tmp_path, tokenizer):
    rows = [{"tokens": ["w1", "w2"], "tags": [i % 2, 2 * (i % 2)]} for i in range(4)]
    path = put(tmp_path, "\n".join(map(json.dumps, rows)), "x.jsonl")
    how = {"tokenizer": tokenizer, "max_length": 8, "test_share": 0.5}
    names = ["O", "B-X", "I-X"]
    data = fp.load_dataset(str(path), label_names=names, **how)
    found = {tags for part in data.values() for tags in part.references}
    assert found == {("O", "O"), ("B-X", "I-X")}
    refused(r"tag 0 at .* label_names = \[", fp.load_dataset, str(path), **how)


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\xd0\xcf\x11\xe0"])
def test_a_workbook_says_how_to_save_it(tmp_path, tokenizer, start):
    """Under its own name, in a folder, and with the ending of another form."""
    content = start + bytes(range(256))
    (tmp_path / "folder").mkdir()
    for name in ("a.xlsx", "a.XLS", "a.ods", "folder/train.xlsx", "a.csv"):
        path = tmp_path / name
        path.write_bytes(content)
        given = path.parent if "folder" in name else path
        with pytest.raises(fp.InputError, match="save the sheet as CSV UTF-8") as caught:
            fp.load_dataset(str(given), tokenizer=tokenizer)
        assert "\n" not in str(caught.value)
        path.unlink()
    (tmp_path / "a.txt").write_bytes(b"a")
    with pytest.raises(fp.InputError, match=r"it must end in [^A-Z]*$"):
        fp.load_dataset(str(tmp_path / "a.txt"), tokenizer=tokenizer)


@pytest.mark.parametrize("text", ["=1+2", "+1", "-1", "@a", "'=1"])
def test_a_cell_that_begins_like_a_formula_is_text(tmp_path, text):
    path = tmp_path / "x.csv"
    path.write_text(f"a,b\n{text},{text}\nb,c\n")
    assert read(path) == [(text, text), ("b", "c")]
