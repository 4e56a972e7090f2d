"""The report's scores by class and confusion matrices are those of the recorded counts."""

import csv
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from internals import MOST, RunRecord, make_study, of_entities, of_labels, page
from shallow import draw_nothing

from fedjax_peft.report.by_class import SHOWN, scores

PATH = Path("runs")
GOLD, SAID = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 0, 1])
NAMES = ("neg", "<b>pos</b>", "neu\ntral")


def rows(counts, test="test", **last):
    first = {"round": 0, "headline": "accuracy", "test_accuracy": 0.1}
    by_class = {"by_class": {test: counts.record()}}
    return [first, {"round": 1, "headline": "accuracy", "test_accuracy": 0.5, **by_class, **last}]


def run(name, *arguments, **options):
    return {name: {0: rows(of_labels(*arguments), **options)}}


def record(name, found, tmp_path):
    return RunRecord(name, tmp_path / name, {"name": name}, {}, found)


class Matrix(HTMLParser):
    """The cells of the first confusion matrix of a page."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.inside = [], False
        self.feed(text[text.index('class="wide matrix"') :])

    def handle_starttag(self, tag, attributes):
        if tag == "tr" and self.rows is not None:
            self.rows.append([])
        self.inside = tag in ("td", "th", "span")

    def handle_endtag(self, tag):
        if tag == "table" and not hasattr(self, "found"):
            self.found = [[*row] for row in self.rows]

    def handle_data(self, data):
        if self.inside and self.rows and data.strip():
            self.rows[-1].append(data.strip())


def heads(frame):
    return [column.title for column in frame.columns]


def cells(frame):
    columns = [column.cells for column in frame.columns]
    return [(name, [*row]) for name, *row in zip(frame.names, *columns, strict=True)]


def test_one_run_has_a_row_for_each_class(monkeypatch, tmp_path):
    draw_nothing(monkeypatch)
    found = scores(run("a", GOLD, SAID, NAMES))
    assert heads(found.frame) == ["Examples", "Precision (%)", "Recall (%)", "F1 (%)"]
    assert cells(found.frame) == [
        ("neg", ["3", "66.7", "66.7", "66.7"]),
        ("<b>pos</b>", ["2", "33.3", "50.0", "40.0"]),
        ("neu tral", ["1", "-", "0.0", "0.0"]),
    ]
    made = [record("a", rows(of_labels(GOLD, SAID, NAMES)), tmp_path)]
    text = page.write_report(made, tmp_path).read_text()
    assert "<b>pos" not in text
    assert "&lt;b&gt;pos&lt;/b&gt;" in text
    assert Matrix(text).found == [
        ["neg", "<b>pos</b>", "neu tral"],
        ["neg", "2", "1", "0"],
        ["<b>pos</b>", "1", "1", "0"],
        ["neu tral", "0", "1", "0"],
    ]
    assert '<td role="cell" style="--share: 0.67" class="best">2</td>' in text
    assert '<th role="rowheader" scope="row">neg</th>' in text
    with (tmp_path / "figures" / "by_class.csv").open() as file:
        assert [row["f1"][:4] for row in csv.DictReader(file)] == ["0.66", "0.4", "0"]
    with (tmp_path / "figures" / "confusion.csv").open() as file:
        assert [row["count"] for row in csv.DictReader(file)] == ["2", "1", "1", "1", "1"]


def test_long_names_are_numbered_and_read_aloud():
    names = ("talk.politics.mideast", "b", "c")
    text = page.render_report(make_study([record("a", rows(of_labels(GOLD, SAID, names)), PATH)]))
    assert '<span aria-hidden="true">1</span><span class="unseen">talk.politics.mideast' in text
    assert '<span aria-hidden="true">1&ensp;</span>talk.politics.mideast' in text


def test_several_runs_have_a_column_and_a_matrix_each(monkeypatch, tmp_path):
    draw_nothing(monkeypatch)
    other = rows(of_labels(GOLD, GOLD, NAMES), test_count=3)
    found = scores({**run("a", GOLD, SAID, NAMES), "b": {0: other, 1: other}})
    assert heads(found.frame) == ["Examples", "F1 (%): a", "F1 (%): b"]
    assert cells(found.frame)[0] == ("neg", ["3", "66.7", "100.0"])
    assert [one.run for one in found.matrices] == ["a", "b"]
    assert found.matrices[1].rows[0][0] == (6, 1.0)
    assert "counts of all seeds are added" in found.note
    assert "once for each client’s model" in found.note
    made = [record(n, rows(of_labels(GOLD, SAID, NAMES)), tmp_path) for n in ("a", "b")]
    text = page.write_report(made, tmp_path).read_text()
    assert "<details><summary>Confusion matrix: b</summary>" in text


@pytest.mark.parametrize("classes", [SHOWN + 1, MOST + 1])
def test_of_many_classes_the_commonest_confusions_are_listed(classes):
    names = tuple(f"c{i}" for i in range(classes))
    gold = np.arange(classes)
    said = np.where(gold == 3, 5, np.where(gold == 4, 5, gold))
    found = scores(run("a", np.append(gold, 4), np.append(said, 5), names))
    assert len(found.frame.names) == classes
    if classes > MOST:
        assert found.matrices == []
        assert "entity" not in found.note
        return
    (matrix,) = found.matrices
    assert matrix.heads == []
    assert cells(matrix.pairs) == [("c4", ["c5", "2"]), ("c3", ["c5", "1"])]
    text = page.render_report(make_study([record("a", rows(of_labels(gold, said, names)), PATH)]))
    assert f"commonest confusions of {classes} classes" in text


def test_types_of_entities_have_no_matrix():
    counts = of_entities([("PER", 0, 1), ("LOC", 3, 3)], [("PER", 0, 1)], ["LOC", "PER"])
    found = scores({"a": {0: rows(counts)}})
    assert found.matrices == found.counts == []
    assert cells(found.frame) == [("LOC", ["1", "-", "0.0", "0.0"]), ("PER", ["1", *["100.0"] * 3])]
    assert "type of entity" in found.note


def test_the_clients_own_tests_are_shown_if_there_is_no_test_set():
    found = scores(run("a", GOLD, SAID, NAMES, test="client"))
    assert "clients’ own tests" in found.note


def test_runs_with_other_classes_are_left_out_and_without_any_there_is_no_section():
    both = {**run("a", GOLD, SAID, NAMES), **run("b", GOLD, SAID, ("x", "y", "z"))}
    found = scores(both)
    assert heads(found.frame) == ["Examples", "F1 (%): a"]
    assert "Runs with other classes" in found.note
    plain = [{"round": 0, "test_accuracy": 0.5}]
    assert scores({"a": {0: plain}, "b": {0: []}}) is None
    damaged = [{"round": 0, "test_accuracy": 0.5, "by_class": {"test": {"classes": 3}}}]
    assert scores({"a": {0: damaged}}) is None
