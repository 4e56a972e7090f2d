"""The report, from run directories to the page."""

import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from fedjax_peft.errors import InputError
from fedjax_peft.run import report
from fedjax_peft.run.cli import main
from fedjax_peft.run.history import rounds_to

VOID = {"meta", "br", "img", "path", "use", "rect"}


def make_run(path, *, top=0.8, rounds=4, config="", size=1_000_000, **last):
    """Writes the directory of a run whose accuracy grows evenly from 0 to ``top``."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(f"rounds = {rounds}\n[peft]\nrank = 8\n{config}")
    (path / "environment.json").write_text('{"versions": {"jax": "0.10.2"}, "commit": "abc"}')
    rows = [{"round": 0, "test_accuracy": 0.0, "bytes_up": 0, "bytes_down": 0, "time": {}}]
    for r in range(1, rounds + 1):
        row = {
            "round": r,
            "test_accuracy": top * r / rounds,
            "bytes_up": size,
            "bytes_down": size,
            "clients": [1, 2],
            "dropped": [],
            "simulated_seconds": 30.0,
            "aggregation_error_relative": 0.25,
            "time": {"train_s": 60.0},
        }
        rows.append(row)
    rows[-1] |= last
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(*paths):
    return [report.load_run(path) for path in paths]


def page(runs, tmp_path):
    return report.write_report(runs, tmp_path / "out").read_text()


def printed(runs, width=80):
    out = io.StringIO()
    Console(width=width, file=out).print(report.table(runs))
    return out.getvalue()


class Page(HTMLParser):
    """Collects tags and cells, and checks that elements are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.rows, self.links = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def row(self, *start):
        """Returns the cells of the first row that starts like this."""
        return next(row for row in self.rows if row[: len(start)] == list(start))


def test_load_run(tmp_path):
    (run,) = load(make_run(tmp_path / "fra"))
    assert run.name == "fra"
    assert run.config == {"rounds": 4, "peft": {"rank": 8}}
    assert run.environment["commit"] == "abc"
    assert [row["round"] for row in run.rows] == [0, 1, 2, 3, 4]


def test_a_crashed_run_without_an_environment_loads(tmp_path):
    path = make_run(tmp_path / "fra")
    (path / "environment.json").unlink()
    (path / "metrics.jsonl").write_text('{"round": 0}\n{"rou')
    assert load(path)[0].rows == [{"round": 0}]


def test_what_is_no_run_gets_advice(tmp_path):
    make_run(tmp_path / "runs" / "federa")
    with pytest.raises(InputError, match=r"no config\.toml and no metrics.*Did you mean 'federa'"):
        report.load_run(tmp_path / "runs" / "fedara")
    with pytest.raises(InputError, match=r"contains runs: .*federa\."):
        report.load_run(tmp_path / "runs")
    with pytest.raises(InputError, match=r"Give the directory: .*federa\."):
        report.load_run(tmp_path / "runs" / "federa" / "metrics.jsonl")
    with pytest.raises(InputError, match="`fedjax-peft run` has made"):
        report.load_run(tmp_path / "nowhere")


@pytest.mark.parametrize("file", ["config.toml", "environment.json"])
@pytest.mark.parametrize("text", [b"{", b"\xff", b"[1]="])
def test_a_damaged_file_is_named(tmp_path, file, text):
    path = make_run(tmp_path / "fra")
    (path / file).write_bytes(text)
    with pytest.raises(InputError, match=file.replace(".", r"\.")):
        report.load_run(path)


def test_namesakes_are_told_apart_by_their_paths(tmp_path):
    paths = [make_run(tmp_path / part) for part in ("0/x/fra", "1/x/fra", "fedlr")]
    text = printed(load(*paths, paths[2]), width=120)
    names = [line.split()[0] for line in text.splitlines()[2:]]
    assert names == ["0/x/fra", "1/x/fra", "fedlr", "fedlr"]
    assert "fedlr (2)" in text


def test_the_table_fits_80_columns(tmp_path):
    long = make_run(tmp_path / "a-very-long-name-of-a-run-in-a-sweep-[bold]alpha0.1", rounds=100)
    lines = printed(load(make_run(tmp_path / "fra"), long)).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    row = next(line for line in lines if line.startswith("fra"))
    assert " ".join(row.split()) == "fra 4 80.0 80.0 (4) 4.00 / 4.00 2.00 4.00 25.0"
    assert "[bold]" in "".join(line[:20].strip() for line in lines)


def test_the_report_is_one_page_that_needs_nothing_else(tmp_path):
    runs = load(make_run(tmp_path / "fedlr", top=0.5), make_run(tmp_path / "fra"))
    path = report.write_report(runs, tmp_path / "deep" / "out")
    assert {p.name for p in path.parent.iterdir()} == {
        "report.html",
        "accuracy_vs_round.png",
        "accuracy_vs_bytes.png",
        "accuracy_vs_time.png",
    }
    text = path.read_text()
    assert text.startswith("<!doctype html>")
    parsed = Page(text)
    assert parsed.tags.count("svg") == 3
    assert not {"script", "link", "img", "iframe"} & set(parsed.tags)
    assert all(link.startswith("#") for link in parsed.links)
    assert "url(http" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert text.count('role="img" aria-label="Line chart') == 3
    assert "fra has the best final test accuracy: 80.0 % after 4 rounds, 8.00 MB" in text


def test_the_best_value_is_marked(tmp_path):
    runs = load(make_run(tmp_path / "fedlr", top=0.5), make_run(tmp_path / "fra"))
    parsed = Page(page(runs, tmp_path))
    assert parsed.row("fedlr", "4")[2:4] == ["50.0", "50.0 (4)"]
    assert parsed.row("fra", "4")[2:4] == ["80.0 (best)", "80.0 (4) (best)"]


def test_costs_of_targets(tmp_path):
    slow = make_run(tmp_path / "slow", top=0.74, rounds=8)
    fast = make_run(tmp_path / "fast", top=0.8, rounds=10)
    parsed = Page(page(load(slow, fast), tmp_path))
    assert "90 % of the best: 72.0 %" in parsed.rows[3]
    assert parsed.rows[5] == ["slow", "8 (best)", "16.0 (best)", "4.00 (best)", *"------"]
    assert parsed.rows[6][:7] == ["fast", "9", "18.0", "4.50", "10", "20.0", "5.00"]


def test_costs_of_a_given_target(tmp_path, capsys):
    slow = make_run(tmp_path / "slow", top=0.74, rounds=8)
    fast = make_run(tmp_path / "fast", top=0.8, rounds=10)
    # 72, 76 and 79.2 %: the one ends at 74 %, the other has 72 % after 9 rounds, 80 % after 10.
    expected = ["8", "16.0", "4.00", *"------"], ["9", "18.0", "4.50", *["10", "20.0", "5.00"] * 2]
    text = report.write_report(load(slow, fast), tmp_path / "out", target=0.8).read_text()
    parsed = Page(text)
    assert "90 % of the target: 72.0 %" in parsed.rows[3]
    assert "at or above a part of the target 80.0 %." in text
    bare = [[cell.removesuffix(" (best)") for cell in row] for row in parsed.rows[5:7]]
    assert bare == [["slow", *expected[0]], ["fast", *expected[1]]]
    # And in a terminal.
    arguments = ["report", str(slow), str(fast), "--out", str(tmp_path / "out"), "--target", "0.8"]
    assert main(arguments) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    head = lines.index(["To", "80.0", "%", "90", "%", "95", "%", "99", "%"])
    assert lines[head + 1 : head + 4] == [
        ["Run", *["Round", "MB", "min"] * 3],
        ["slow", *expected[0]],
        ["fast", *expected[1]],
    ]
    assert main(arguments[:-2]) == 0
    assert "To 80" not in capsys.readouterr().out


def test_a_target_that_nobody_reaches_and_one_that_cannot_be(tmp_path, capsys):
    path = make_run(tmp_path / "a", top=0.5)
    text = report.write_report(load(path), tmp_path / "out", target=0.9).read_text()
    assert Page(text).row("a", "-") == ["a", *"---------"]
    for target in ("80", "0", "nan"):
        assert main(["report", str(path), "--target", target]) == 2
        assert f"The target {target} must be a share" in capsys.readouterr().err


def test_a_target_is_reached_in_spite_of_float32():
    exact = float(np.float32(0.76))
    assert exact < 0.76
    assert rounds_to([{"round": 3, "test_accuracy": exact}], 0.76) == 3
    assert rounds_to([{"round": 3, "test_accuracy": 0.7599}], 0.76) is None


def test_configs_are_compared_by_what_differs(tmp_path):
    a = make_run(tmp_path / "a", config='targets = ["q"]\n[data]\nname = "x"\n')
    b = make_run(tmp_path / "b", config='targets = ["q", "v"]\n[data]\nname = "x"\nseed = 1\n')
    text = page(load(a, b), tmp_path)
    parsed = Page(text)
    assert ["Run", "peft.targets", "data.seed"] in parsed.rows
    assert ["a", '["q"]', "-"] in parsed.rows
    assert ["b", '["q", "v"]', "1"] in parsed.rows
    assert "<dt>data.name</dt><dd>x</dd>" in text
    assert "<dt>commit</dt><dd>abc</dd>" in text


def test_many_differences_are_rows(tmp_path):
    keys = "abcdefgh"
    a = make_run(tmp_path / "a", config="".join(f"{key} = 1\n" for key in keys))
    b = make_run(tmp_path / "b", config="".join(f"{key} = 2\n" for key in keys))
    parsed = Page(page(load(a, b), tmp_path))
    assert ["Setting", "a", "b"] in parsed.rows
    assert ["peft.h", "1", "2"] in parsed.rows


def test_warnings_say_what_to_know_before_comparing(tmp_path):
    a = make_run(tmp_path / "a", dropped=[17], train_loss=None, config='[data]\nname = "x"\nseed=1')
    b = make_run(tmp_path / "b", rounds=3, config='[data]\nname = "y"\nseed=2')
    (b / "config.toml").write_text((b / "config.toml").read_text().replace("= 3", "= 9"))
    (section,) = re.findall(
        r'<section class="warnings".*?</section>', page(load(a, b), tmp_path), re.S
    )
    for told in (
        "a: 1 upload not finite and left out, of client 17 in round 4.",
        "a: train_loss was not finite in round 4.",
        "b: unfinished or cut short, it has 3 of 9 rounds.",
        "different lengths: 3 to 4 rounds",
        "differ in their seed, so a part is chance: data.seed is 1, 2.",
        "different test sets: data.name is x, y.",
    ):
        assert told in section
    assert section.count("<li>") == 6


def test_warnings_tell_who_was_not_heard(tmp_path):
    path = make_run(tmp_path / "a", failed=[3, 5], late=[7], clients=[])
    text = page(load(path), tmp_path)
    for told in (
        "a: 2 uploads missing because their clients dropped out, of clients 3, 5 in round 4.",
        "a: 1 upload too late and left out, of client 7 in round 4.",
        "a: nobody took part in round 4.",
    ):
        assert f"<li>{told}</li>" in text


def test_a_clean_comparison_has_no_warnings(tmp_path):
    runs = load(make_run(tmp_path / "a"), make_run(tmp_path / "b"))
    assert "<section" not in page(runs, tmp_path)


def test_hostile_names_and_values_are_escaped(tmp_path):
    script = "<script>alert('x')</script>"
    path = make_run(tmp_path / "a", config=f'note = "{script}"\n')
    hostile = path.rename(tmp_path / "<script>alert(1)\n<b>&漢\udcff")
    (hostile / "environment.json").write_text(json.dumps({"<i>": "\ud800</style><script>"}))
    runs = [*load(hostile), load(hostile)[0]._replace(name=script)]
    text = page(runs, tmp_path)
    assert not {"script", "b", "i"} & set(Page(text).tags)
    assert "&lt;script&gt;alert(1) &lt;b&gt;&amp;漢" in text
    assert "<script>" in printed(runs)  # a terminal shows it as it is


@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.parametrize("rounds", [0, 2])
def test_any_number_of_runs_and_rounds(tmp_path, count, rounds):
    runs = load(*(make_run(tmp_path / f"run{i}", rounds=rounds) for i in range(count)))
    parsed = Page(page(runs, tmp_path))
    assert parsed.row("run0", str(rounds))
    assert printed(runs).count("run") == count


def test_runs_that_recorded_nothing(tmp_path):
    path = make_run(tmp_path / "a")
    (path / "metrics.jsonl").write_text("")
    text = page(load(path), tmp_path)
    assert "No test accuracy has been recorded yet." in text
    assert "Cost of reaching" not in text
    assert "a" in printed(load(path))


def test_unknown_fields_and_missing_ones_are_tolerated(tmp_path):
    path = make_run(tmp_path / "a", novelty=1.5, nested={"x": 1})
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("simulated_seconds", None)
        row.pop("aggregation_error_relative", None)
        row["aggregation_error"] = 0.0123
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parsed = Page(page(load(path), tmp_path))
    assert parsed.rows[0][-1] == "Mean aggregation error"
    assert parsed.row("a", "4")[-1] == "0.012"
    assert not any("Simulated" in cell for cell in parsed.rows[0])


def test_a_report_of_nothing_or_onto_a_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="at least one run"):
        report.write_report([], tmp_path)
    runs = load(make_run(tmp_path / "a"))
    with pytest.raises(InputError, match="cannot be written"):
        report.write_report(runs, tmp_path / "a" / "config.toml")
