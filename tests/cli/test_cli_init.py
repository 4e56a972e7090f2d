"""``fedjax-peft init`` writes a config that runs without changes."""

import csv
import io
import json
import re
import warnings

import pytest
from internals import Reading, cli, config, load_tables, read_metrics

from fedjax_peft import testing
from fedjax_peft.cli import faults
from fedjax_peft.models.stored_head import HeadWarning


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with a tiny checkpoint, which replaces MiniLM."""
    testing.write_tiny_checkpoint(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_table(path, rows, header=("id", "who", "review body", "stars")):
    """Writes a table of reviews."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def refused(capsys, *words):
    """Returns the error message of an ``init`` that must fail."""
    assert cli.main(["init", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_the_sample_runs_without_changes(place, capsys):
    """Config and sample are written, and the printed command works."""
    assert cli.main(["init", "mine"]) == 0
    printed = capsys.readouterr().out
    assert "Text column: 'review'. Label column: 'mood'." in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("Next: fedjax-peft ")]
    words = line.removeprefix("Next: fedjax-peft ").split()
    less = ["rounds=1", "clients_per_round=2", "local_steps=1", "peft=head_only"]
    assert cli.main([*words, "model=model", *less]) == 0
    assert [row["round"] for row in read_metrics(place / "runs/mine/metrics.jsonl")] == [0, 1]
    resolved = config.resolve(config.load(place / "mine/config.toml"))
    assert resolved["data"]["name"] == str(place / "mine/sample.csv")
    text = (place / "mine/config.toml").read_text()
    assert "fedjax-peft run mine/config.toml --out runs/mine" in text
    assert "#~" not in text


def test_a_users_table(place, capsys):
    """Its columns are guessed, printed and written; its path is relative to the config."""
    rows = [(i, f"user {i % 7}", f"word {i} and some more", i % 5) for i in range(3000)]
    write_table(place / "r.csv", rows)
    assert cli.main(["init", "deep/mine", "--data", "r.csv"]) == 0
    assert "Text column: 'review body'. Label column: 'stars'." in capsys.readouterr().out
    text = (place / "deep/mine/config.toml").read_text()
    assert 'name = "../../r.csv"' in text
    assert "'natural', by = \"who\"" in text
    raw = config.load(place / "deep/mine/config.toml")
    resolved = config.resolve(config.override(raw, "model=model"))
    assert resolved["data"]["test_examples"] == 500, "limited, so that an evaluation takes seconds"
    data, clients = config.federation(resolved)
    assert {part: len(rows) for part, rows in data.items()} == {
        "train": 2160,
        "validation": 240,
        "test": 500,
    }
    assert len(clients) == 20
    assert data["train"].label_names == tuple("01234")


def test_the_sample_is_balanced_and_has_no_row_twice(place, capsys):
    assert cli.main(["init", "mine"]) == 0
    with (place / "mine/sample.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["review"] for row in rows}) == len(rows) == 240
    assert 100 < sum(row["mood"] == "good" for row in rows) < 140


def test_given_columns(place, capsys):
    """Given names are used instead of guesses; for a misspelt name, nothing is written."""
    write_table(place / "r.csv", [(i, i % 2, "a longer text", i % 3) for i in range(40)])
    assert "Did you mean 'stars'" in refused(capsys, "x", "--data", "r.csv", "--label", "star")
    assert not (place / "x").exists()
    words = ["--data", "r.csv", "--text", "review body", "--label", "who"]
    assert cli.main(["init", "x", *words]) == 0
    assert "Label column: 'who'" in capsys.readouterr().out


ROWS = [(f"review number {i}, a nice one", "good" if i % 3 else "bad") for i in range(40)]


@pytest.mark.parametrize(
    ("rows", "words", "complaint"),
    [
        (ROWS, [], "looks like data.*'review number 0, a nice one'.*--no-header.*--text"),
        ([("0", "1"), *ROWS], [], "looks like data.*'0'.*--no-header"),
        ([("text", "label"), *((t, "good") for t, _ in ROWS)], [], "only one value, 'good'"),
        ([("text", "label"), *((t, i / 7) for i, (t, _) in enumerate(ROWS))], [], "such as '0.0'"),
        ([("text", "label"), ("a", "b"), ("a", "")], [], "'label' .*no value in row 2"),
        ([("text;label",), ("a;b",)], [], "separated by ';'.*--sep"),
        ([("a;b",), ("c;d",)], ["--no-header"], "separated by ';'.*--sep"),
        ([("only",), ("a",), ("b",)], [], "a column of texts and one of labels.* 'only'"),
        ([("text", "label"), *ROWS], ["--sep", ";;"], "sep = ';;' must be one character"),
        ([("text", "label"), *ROWS], ["--encoding", "latinn"], "encoding = 'latinn' is unknown"),
    ],
)
def test_tables_that_cannot_be_meant(place, capsys, rows, words, complaint):
    """A missing header, one class and missing labels are named, and nothing is written."""
    write_table(place / "r.csv", rows[1:], rows[0])
    error = refused(capsys, "x", "--data", "r.csv", *words)
    assert re.search(complaint, " ".join(error.split()))
    assert not (place / "x").exists()


def test_fractions_of_json_are_no_classes(place, capsys):
    lines = (json.dumps({"text": text, "label": i % 2 + 0.0}) for i, (text, _) in enumerate(ROWS))
    (place / "r.jsonl").write_text("\n".join(lines))
    assert "a class can be 1, not 1.0" in refused(capsys, "x", "--data", "r.jsonl")
    assert "csv files" in refused(capsys, "x", "--data", "r.jsonl", "--sep", ";")


def test_how_a_csv_file_is_written(place, capsys):
    """``run`` reads a file with semicolons, in Latin-1 and without a header as ``init`` does."""
    lines = [f"{text} caf\xe9;{label}" for text, label in ROWS]
    (place / "r.csv").write_bytes("\n".join(lines).encode("latin-1"))
    assert "is not UTF-8. Name its encoding" in refused(capsys, "x", "--data", "r.csv")
    latin = ["--encoding", "latin-1"]
    assert cli.main(["init", "x", "--data", "r.csv", "--no-header", "--sep", ";", *latin]) == 0
    resolved = config.resolve(config.override(config.load(place / "x/config.toml"), "model=model"))
    assert resolved["data"]["csv"] == {"sep": ";", "encoding": "latin-1", "header": False}
    chosen = {key: resolved["data"][key] for key in ("columns", "csv", "test_share")}
    _, tables = load_tables(resolved["data"]["name"], Reading(**chosen))
    rows = [
        (text, label)
        for table in tables.values()
        for text, label in zip(table.columns["text"], table.columns["label"], strict=True)
    ]
    assert sorted(rows) == sorted((f"{text} caf\xe9", label) for text, label in ROWS)


HEADERS = [
    # The fewest values decided: channel. Names decide first.
    ("ticket_id created channel message category", "message", "category"),
    ("id text channel Label", "text", "Label"),
    ("channel reviewText userClass", "reviewText", "userClass"),
    ("LABELS kind body", "body", "LABELS"),
    ("product_category tweets other", "tweets", "product_category"),
    ("a sentiment b", "b", "sentiment"),
]


def table_of(header, rows=60):
    """Returns rows whose last columns have few values, and a text under its name."""
    texts = ("message", "text", "reviewText", "body", "tweets")
    names = header.split()
    place = next((i for i, n in enumerate(names) if n in texts), len(names) - 1)
    return [
        [
            f"a long text with number {i}" if k == place else f"v{i % (2 + k)}"
            for k in range(len(names))
        ]
        for i in range(rows)
    ]


@pytest.mark.parametrize(("header", "text", "label"), HEADERS)
def test_names_of_columns_decide(place, capsys, header, text, label):
    write_table(place / "r.csv", table_of(header), header.split())
    assert cli.main(["init", "x", "--data", "r.csv"]) == 0
    printed = capsys.readouterr().out
    assert f"Text column: {text!r}. Label column: {label!r}." in printed


DOUBTS = [
    ("message channel kind", [], "the labels: 'channel' (3 values), 'kind' (4 values).", "--label"),
    ("body class topic", [], "the labels: 'class' (3 values), 'topic' (4 values).", "--label"),
    ("a message body", ["--label", "a"], "the texts: 'message'", "--text"),
]


@pytest.mark.parametrize(("header", "words", "message", "option"), DOUBTS)
def test_a_doubt_is_said_with_the_flag_or_asked(
    place, capsys, monkeypatch, header, words, message, option
):
    rows = table_of(header)
    if option == "--text":
        rows = [(row[0], f"a text {i}", f"another {i}") for i, row in enumerate(rows)]
    write_table(place / "r.csv", rows, header.split())
    words = ["init", "x", "--data", "r.csv", *words]
    assert cli.main(words) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error
    assert f"{option} " in error
    assert not (place / "x").exists()
    monkeypatch.setattr("sys.stdin", Terminal("9\nno\n2\n"))
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    assert cli.main(words) == 0
    chosen = header.split()[2]
    assert f" column: {chosen!r}." in terminal.getvalue()
    assert f"2. {chosen} (" in terminal.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_named_column_with_a_fault_is_not_passed_over(place, capsys):
    rows = [(f"a text {i}", "" if i == 9 else f"c{i % 5}", "ab"[i % 2]) for i in range(40)]
    write_table(place / "r.csv", rows, ("message", "category", "channel"))
    error = refused(capsys, "x", "--data", "r.csv")
    assert "The column 'category' of r.csv cannot be the labels: it has no value in row 10" in error


@pytest.mark.parametrize(
    ("lines", "words", "csv_table"),
    [
        (['"one" is {}\t{}'], ["--sep", "\\t", "--quote", "none"], {"sep": "\t", "quote": ""}),
        (['"a \\"{}\\", b",{}'], ["--escape", "\\"], {"escape": "\\"}),
        (['"a, {}\nb",{}'], ["--quote", '"'], {"quote": '"'}),
    ],
)
def test_quotation_marks_of_a_csv_file(place, capsys, lines, words, csv_table):
    """A doubt is refused with the flag; the config has what settles it, and reads the rows."""
    sep = "\t" if "--sep" in words else ","
    rows = [lines[0].format(f"text {i}", f"c{i % 2}") for i in range(40)]
    (place / "r.csv").write_text("\n".join([f"text{sep}label", *rows]))
    option = words[-2]
    assert option in refused(capsys, "x", "--data", "r.csv", *words[:-2])
    assert cli.main(["init", "x", "--data", "r.csv", *words]) == 0
    data = config.resolve(config.load(place / "x/config.toml"))["data"]
    assert data["csv"] == csv_table
    _, tables = load_tables(data["name"], Reading(csv=data["csv"], test_share=0.2))
    assert sum(map(len, tables.values())) == 40


def test_a_warning_is_one_paragraph():
    usual = warnings.formatwarning
    with faults.plain_warnings():
        shown = warnings.formatwarning(UserWarning("Bad\x1b row."), UserWarning, "main.py", 3)
        assert shown == "fedjax-peft: Bad\\x1b row.\n"
        own = warnings.formatwarning(HeadWarning("New."), HeadWarning, "main.py", 3)
        assert own == "fedjax-peft: New.\n"
        other = warnings.formatwarning("Old.", FutureWarning, "main.py", 3)
        assert other == usual("Old.", FutureWarning, "main.py", 3)
    assert warnings.formatwarning is usual


def test_a_few_rows_are_not_held_out_for_validation(place):
    """A tenth of them would be less than one, and the run would fail."""
    for count in (5, 10):
        write_table(
            place / "r.csv", [(f"w{i}", "ab"[i % 2]) for i in range(count)], ("text", "label")
        )
        assert cli.main(["init", f"{count}", "--data", "r.csv"]) == 0
        data = config.load(f"{count}/config.toml")["data"]
        chosen = {key: data.get(key) for key in ("test_share", "validation_share")}
        _, tables = load_tables(data["name"], Reading(**chosen))
        assert ("validation" in tables) == (count == 10)


def test_errors(place, capsys):
    """Existing files are not replaced, and a column of names is not used as labels."""
    write_table(place / "r.csv", [(i, f"u{i}", f"t{i}") for i in range(40)], ("id", "who", "text"))
    assert "too many for classes" in refused(capsys, "x", "--data", "r.csv")
    assert "no file 'y.csv'" in refused(capsys, "x", "--data", "y.csv")
    assert "--data FILE" in refused(capsys, "x", "--text", "who")
    (place / "x").mkdir()
    (place / "x" / "sample.csv").write_text("precious")
    assert "--data" in refused(capsys, "x")
    (place / "x" / "config.toml").write_text("precious")
    assert "exists already" in refused(capsys, "x")
    assert (place / "x" / "config.toml").read_text() == "precious"
    assert (place / "x" / "sample.csv").read_text() == "precious"
