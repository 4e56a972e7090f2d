"""The report: run directories, tables and the page."""

import html
import io
import json
import re
from html.parser import HTMLParser

import pytest
from internals import figure_files, main, make_study
from internals import page as report
from refusals import refused
from rich.console import Console
from shallow import draw_nothing

import fedjax_peft as fp
from fedjax_peft.report import plots, records
from fedjax_peft.report.comparison import compare
from fedjax_peft.report.tables import explanations

pytestmark = pytest.mark.slow

VOID = {"meta", "br", "wbr", "img", "input"}


@pytest.fixture
def drawn():
    """For tests that look at figures: without it there are none, as most tests read the text."""


@pytest.fixture(scope="module")
def blank():
    return plots.draw({}, "round", "test_accuracy", False, size=(1, 1))


@pytest.fixture(autouse=True)
def _figures(request, monkeypatch, blank):
    if "drawn" not in request.fixturenames:
        draw_nothing(monkeypatch)
        monkeypatch.setattr(plots, "draw", lambda *curves, **size: blank)
        monkeypatch.setattr(report, "_write_figures", lambda *figures: None)


def make_run(path, *, top=0.8, rounds=4, config="", size=1_000_000, **last):
    """Writes the directory of a run whose accuracy grows evenly from 0 to ``top``."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(f"rounds = {rounds}\n[peft]\nrank = 8\n{config}")
    (path / "environment.json").write_text('{"versions": {"jax": "0.10.2"}, "commit": "abc"}')
    rows = [{"round": 0, "test_accuracy": 0.0, "bytes_up": 0, "bytes_down": 0, "time": {}}]
    for r in range(1, rounds + 1):
        row = {"round": r, "test_accuracy": top * r / rounds, "bytes_up": size, "bytes_down": size}
        row |= {"clients": [1, 2], "dropped": [], "simulated_seconds": 30.0}
        row |= {"aggregation_error_relative": 0.25, "time": {"train_s": 60.0}}
        rows.append(row)
    rows[-1] |= last
    return write_rows(path, rows)


def write_rows(path, rows):
    """Replaces the rows of a run."""
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def load(*paths):
    return [records.load_run(path) for path in paths]


def load_new(root, **tops):
    """Returns new runs: name -> the accuracy at their end."""
    return load(*(make_run(root / name, top=top) for name, top in tops.items()))


def page(runs, tmp_path):
    return report.write_report(runs, tmp_path / "out").read_text()


def printed(runs, width=80):
    out = io.StringIO()
    Console(width=width, file=out).print(*compare(make_study(runs)).terminal_tables(width))
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

    def handle_startendtag(self, tag, attrs):
        """Reads an element of SVG that has no content."""
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def row(self, *start):
        """Returns the cells of the first row that starts like this."""
        return next(row for row in self.rows if row[: len(start)] == list(start))


def test_runs_are_loaded_and_those_that_crashed_without_an_environment_too(tmp_path):
    path = make_run(tmp_path / "fra")
    (run,) = load(path)
    assert run.name == "fra"
    assert run.config == {"rounds": 4, "peft": {"rank": 8}}
    assert run.environment["commit"] == "abc"
    assert [row["round"] for row in run.rows] == [0, 1, 2, 3, 4]
    (path / "environment.json").unlink()
    (path / "metrics.jsonl").write_text('{"round": 0}\n{"rou')
    assert load(path)[0].rows == [{"round": 0}]


def test_errors_for_paths_that_are_not_runs(tmp_path):
    make_run(tmp_path / "runs" / "federa")
    with pytest.raises(
        fp.InputError, match=r"no config\.toml and no metrics.*Did you mean 'federa'"
    ):
        records.load_run(tmp_path / "runs" / "fedara")
    refused(r"contains runs: .*federa\.", records.load_run, tmp_path / "runs")
    with pytest.raises(fp.InputError, match=r"Give the directory: .*federa\."):
        records.load_run(tmp_path / "runs" / "federa" / "metrics.jsonl")
    refused("`fedjax-peft run` has made", records.load_run, tmp_path / "nowhere")


@pytest.mark.parametrize("file", ["config.toml", "environment.json"])
@pytest.mark.parametrize("text", [b"{", b"\xff", b"[1]="])
def test_errors_name_the_damaged_file(tmp_path, file, text):
    path = make_run(tmp_path / "fra")
    (path / file).write_bytes(text)
    refused(file.replace(".", r"\."), records.load_run, path)


def test_runs_with_equal_names_show_their_paths(tmp_path):
    paths = [make_run(tmp_path / part) for part in ("0/x/fra", "1/x/fra", "fedlr")]
    text = printed(load(*paths, paths[2]), width=120)
    names = [line.split("  ")[0] for line in text.splitlines()[2:]]
    assert names == ["fra (0/x)", "fra (1/x)", "fedlr", "fedlr (2)"]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_names_are_complete_in_a_narrow_terminal(tmp_path, width):
    roots = ("experiments-of-monday", "experiments-of-tuesday")
    paths = [make_run(tmp_path / root / "federa") for root in roots]
    lines = printed(load(*paths), width=width).splitlines()
    assert max(map(len, lines)) <= width
    names = [re.split(r"\s{2,}", line)[0] for line in lines[2:] if not line.startswith(" ")]
    together = "federa(experiments-of-monday)federa(experiments-of-tuesday)"
    assert "".join(names).replace(" ", "").startswith(together)
    assert len(names[0]) > 5
    assert ("widen the terminal" in names[-1]) == (width < 80)


def test_the_table_fits_80_columns(tmp_path):
    long = make_run(tmp_path / "a-very-long-name-of-a-run-in-a-sweep-[bold]alpha0.1", rounds=100)
    lines = printed(load(make_run(tmp_path / "fra"), long)).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    row = next(line for line in lines if line.startswith("fra"))
    assert " ".join(row.split()) == "fra 4 80.0 80.0 (4) 4.00 / 4.00 2.00 4.00 25.0"
    assert "[bold]" in "".join(line[:20].strip() for line in lines)


def test_headings_that_do_not_say_it_themselves_are_explained(tmp_path):
    """Below the table on a terminal, and at the heading of the page; names of users are not."""
    runs = load(
        make_run(tmp_path / "Result", epsilon=3.0, delta=1e-5, slot_utilisation=0.5),
        make_run(tmp_path / "Margin"),
    )
    shown = compare(make_study(runs))
    texts = explanations(shown.terminal_tables(200), shown.in_terminal)
    costs = ["Up / down MB", "Sim. min", "Wall min", "Agg. err. %"]
    heads = [text.partition(": ")[0] for text in texts]
    assert heads == ["Best acc. % (round)", "Privacy ε, δ", *costs]
    of_devices = "by the time model of the clients’ devices and links, not of this machine"
    assert f"Sim. min: {of_devices}." in texts
    narrow = shown.terminal_tables(20)  # without these columns
    assert explanations(narrow, shown.in_terminal) == []
    text = page(runs, tmp_path)
    titled = dict(re.findall(r'<th role="columnheader"[^>]* title="([^"]+)">([^<]+)', text))
    assert {*titled.values()} >= {
        "Margin",
        "Result",
        "Wall time (min)",
        "Mean aggregation error (%)",
    }
    assert not re.search(r'title="[^"]*">(Run|Rounds)<', text)


def test_the_page_is_self_contained(tmp_path, drawn, monkeypatch):
    real = figure_files.render

    def render(fig, form, *resolution):
        """Leaves out what the page does not hold."""
        return real(fig, form, *resolution) if form == "svg" else b""

    monkeypatch.setattr(figure_files, "render", render)
    runs = load_new(tmp_path, fedlr=0.5, fra=0.8)
    path = report.write_report(runs, tmp_path / "deep" / "out")
    tables = {"table.md", "table.csv", "table.tex"}
    assert {p.name for p in path.parent.iterdir()} == {"report.html", "figures", *tables}
    assert {p.name for p in (path.parent / "figures").iterdir()} == {
        f"accuracy_vs_{x}.{form}"
        for x in ("round", "bytes", "time", "wall")
        for form in ("png", "svg", "pdf", "csv")
    }
    text = path.read_text()
    assert text.startswith("<!doctype html>")
    parsed = Page(text)
    assert parsed.tags.count("svg") == 4 + 2, "one of each axis, and keys"
    assert parsed.tags.count("script") == 1
    assert "<title>2.00 MB: 12.5 % (fedlr)</title>" in text, "the values need no script"
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(set(ids)) == len(ids)
    assert not {"link", "img", "iframe"} & set(parsed.tags)
    assert "default-src 'none'" in text
    assert "connect-src" not in text
    assert all(link.startswith("#") for link in parsed.links)
    assert "url(http" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert text.count('role="img" aria-label="Line chart') == 4
    one, other = (report.render_report(make_study(runs), x="round") for _ in range(2))
    assert one == other


def test_the_best_score_is_marked_if_the_test_set_separates_it(tmp_path):
    runs = load(
        make_run(tmp_path / "fedlr", top=0.5, test_examples=400),
        make_run(tmp_path / "fra", test_examples=400),
    )
    text = page(runs, tmp_path)
    lead = "fra has the best final test accuracy: 80.0 % (standard error 2.0 points) after 4 rounds"
    assert f"{lead}, 8.00 MB of communication and 2.00 min of simulated time." in text
    assert "other seeds may give another ranking" in text
    parsed = Page(text)
    assert parsed.row("fedlr", "4")[2:4] == ["50.0", "50.0 (4)"]
    # The best of several rounds is chosen on the test set, so it is not marked.
    assert parsed.row("fra", "4")[2:4] == ["80.0 (best)", "80.0 (4)"]
    row = parsed.row("fra and fedlr")
    assert row == ["fra and fedlr", "30.0 points", "± 6.3 points", "test set", "separated"]


def test_no_winner_is_named_within_the_margin_of_the_test_set(tmp_path, capsys):
    runs = [
        make_run(tmp_path / name, top=top, test_examples=400)
        for name, top in {"fedlr": 0.48, "federa": 0.485, "fra": 0.488}.items()
    ]
    text = page(load(*runs), tmp_path)
    assert "best final" not in text.replace("best final score", "").replace("best final test", "")
    assert "(best)" not in text
    sentence = "fra 48.8 %, federa 48.5 % and fedlr 48.0 % are not separated; their differences are"
    assert f"Final test accuracy: {sentence} within the margin of error." in text
    assert text.count(">not separated</td>") == 2
    once = ["--x", "round", "--smooth", "2"]
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "once"), *once]) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())


def test_no_winner_is_named_without_a_size_of_the_test_set(tmp_path):
    text = page(load_new(tmp_path, a=0.9, b=0.1), tmp_path)
    assert "are not separated; the margin of error is not known" in text
    assert "(size of the test set unknown)" in text
    assert "(best)" not in text


def seeded(root, *, scores, name, test_examples=4000):
    """Writes one run for each seed, all with the same method."""
    for seed, top in enumerate(scores):
        path = make_run(root / f"seed{seed}" / name, top=top, test_examples=test_examples)
        config = f'name = "{name}"\nseed = {seed}\nrounds = 4\nmethod = "{name}"\n[model]\n'
        (path / "config.toml").write_text(config)
        yield path


def test_seeds_are_compared_in_pairs(tmp_path):
    """Scores differ by 8 points between seeds; comparisons within each seed are not affected."""
    better = [*seeded(tmp_path, scores=[0.58, 0.50, 0.54], name="federa")]
    worse = [*seeded(tmp_path, scores=[0.52, 0.44, 0.481], name="fedlr")]
    parsed = Page(text := page(load(*worse, *better), tmp_path))
    mean = "federa has the best final test accuracy, separated from every other: 54.0 % (mean of 3"
    assert f"{mean} seeds, standard deviation 4.0 points)." in text
    assert parsed.row("federa", "3")[:3] == ["federa", "3", "54.0 ± 4.0 (best)"]
    # The differences are 6.0, 6.0 and 5.9 points. The seeds alone would give ± 0.1, and 4,000 test
    # examples give ± 2.2.
    row = parsed.row("federa", "+6.0")
    assert row[1:] == ["+6.0", "+3.8 to +8.2", "separated"]
    assert parsed.row("fedlr", "baseline")
    assert text.count("(best)") == 1


def test_a_run_given_twice_is_not_compared_with_itself(tmp_path):
    (path,) = seeded(tmp_path, scores=[0.5], name="fedlr")
    text = page(load(path, path), tmp_path)
    assert "Final test accuracy: 50.0 %" in text
    assert "What separates the runs" not in text


def test_single_runs_of_different_seeds_are_not_compared(tmp_path):
    (_, one), (other, _) = (
        [*seeded(tmp_path, scores=[top, top], name=name)] for name, top in (("a", 0.9), ("b", 0.2))
    )
    assert "the margin of error is not known (no common seed)" in page(load(one, other), tmp_path)


def test_without_a_test_set_the_score_is_the_mean_over_clients(tmp_path):
    runs = []
    for name, mean in (("ditto", 0.7), ("fedlr", 0.5)):
        path = make_run(tmp_path / name)
        row = {"client_accuracy_mean": mean, "client_accuracy_std": 0.1, "client_count": 26}
        row |= {"round": 1, "headline": "accuracy", "clients": [0]}
        runs.append(write_rows(path, [{"round": 0}, row]))
    text = page(load(*runs), tmp_path)
    assert "ditto has the best mean of the clients’ accuracy: 70.0 % (standard error 2.0" in text
    # 2.06 is Student's t of 25 degrees of freedom: 2.06 * sqrt(2 * 0.1**2 / 25).
    assert Page(text).row("ditto and fedlr")[2] == "± 5.8 points"


def test_seen_and_unseen_clients_have_columns(tmp_path):
    means = {"mean": 0.528, "std": 0.2, "weighted": 0.6, "mean_seen": 0.658, "mean_unseen": 0.286}
    counts = {"client_count": 20, "client_count_seen": 13, "client_count_unseen": 7}
    fields = {f"client_accuracy_{n}": x for n, x in means.items()} | counts
    parsed = Page(page(load(make_run(tmp_path / "ditto", **fields)), tmp_path))
    assert parsed.row("ditto", "52.8 ± 20.0") == [
        *("ditto", "52.8 ± 20.0", "60.0", "65.8 (13)", "28.6 (7)"),
    ]


def test_tuned_scores_have_columns(tmp_path):
    tuned = {
        "client_accuracy_mean": 0.5,
        "tuned_test_accuracy": 0.712,
        "tuned_client_accuracy_mean": 0.734,
        "tuned_client_accuracy_std": 0.1,
    }
    runs = load(make_run(tmp_path / "fedrep", **tuned), make_run(tmp_path / "fedavg"))
    text = page(runs, tmp_path)
    parsed = Page(text)
    heads = parsed.rows[0]
    column = heads.index("Tuned accuracy (%)")
    assert heads[column - 1] == "Final accuracy (%)"
    assert [parsed.row(name, "4")[column] for name in ("fedrep", "fedavg")] == ["71.2", "-"]
    assert parsed.row("fedrep", "50.0")[-1] == "73.4 ± 10.0"
    assert "Tuned scores are of models" in text
    assert printed(runs).split()[:4] == ["Final", "Tuned", "Best", "acc."]
    untuned = load(make_run(tmp_path / "ditto"))
    assert "Tuned" not in page(untuned, tmp_path) + printed(untuned)


def as_perplexity(path, scores):
    """Changes the headline metric of a run to perplexity."""
    rows = rows_of(path)
    for row, score in zip(rows, scores, strict=True):
        del row["test_accuracy"]
        row |= {"headline": "perplexity", "headline_better": "lower", "test_perplexity": score}
    return write_rows(path, rows)


def test_a_metric_where_lower_is_better(tmp_path, capsys):
    a = as_perplexity(make_run(tmp_path / "a"), [500.0, 90.0, 40.0, 50.0, 45.0])
    b = as_perplexity(make_run(tmp_path / "b"), [500.0, 99.0, 60.0, 55.0, 50.0])
    text = page(load(a, b), tmp_path)
    parsed = Page(text)
    assert parsed.row("a", "4")[2:4] == ["45", "40 (2)"], "the best is the lowest"
    assert "a 45 and b 50 are not separated" in text
    assert "90 % of the best: 50" in next(row for row in parsed.rows if row[0] == "" and row[1:])
    assert parsed.row("a", "2")[1] == "2"
    assert parsed.row("b", "4")[1] == "4"
    assert main(["report", str(a), "--target", "60", "--out", str(tmp_path / "out")]) == 0
    assert "To 60" in capsys.readouterr().out
    assert main(["report", str(a), "--target", "-1"]) == 2
    assert "must be above 0" in capsys.readouterr().err


def test_a_run_that_diverged_is_not_ranked_by_an_earlier_score(tmp_path):
    a = as_perplexity(make_run(tmp_path / "a"), [500.0, 90.0, 40.0, 30.0, None])
    b = as_perplexity(make_run(tmp_path / "b"), [500.0, 99.0, 60.0, 55.0, 50.0])
    shown = compare(make_study(load(a, b)))
    assert shown.finals == ["a -", "b 50"]
    assert shown.lead.startswith("Final test perplexity: 50 after 4 rounds")
    (warning,) = shown.warnings
    assert warning.startswith("Left out of the ranking")
    assert warning.endswith("not finite: a (round 4).")
    parsed = Page(page(load(a, b), tmp_path))
    assert parsed.row("a", "4")[2:4] == ["-", "30 (3)"]
    assert "90 % of the best: 55.56" in next(row for row in parsed.rows if row[0] == "" and row[1:])
    alone = compare(make_study(load(a)))
    assert alone.lead == "No finite final test perplexity has been recorded yet."


def test_a_target_that_the_untrained_model_has_reached(tmp_path):
    path = make_run(tmp_path / "a", top=0.5)
    first, *rest = rows_of(path)
    write_rows(path, [{**first, "test_accuracy": 0.46}, *rest])
    text = report.write_report(load(path), tmp_path / "out", target=0.5).read_text()
    assert Page(text).row("a", "untrained")[1:7] == ["untrained", "-", "-", "4", "8.00", "2.00"]


def test_coincident_curves_are_named(tmp_path):
    runs = load_new(tmp_path, a=0.8, b=0.8, c=0.8, d=0.1)
    assert page(runs, tmp_path).count("The curves of a, b and c coincide.") == 1


def test_every_cell_has_its_heading_for_narrow_windows(tmp_path):
    text = page(load(make_run(tmp_path / "a"), make_run(tmp_path / "b", rounds=3)), tmp_path)
    (body,) = re.findall(r"<main>(.*)</main>", text, re.S)
    cells = re.findall(r"<td[^>]*>", body)
    assert len(cells) > 30
    assert [cell for cell in cells if "data-label" not in cell] == ['<td role="cell">']
    assert "@media (max-width: 48rem)" in text


def test_costs_of_targets(tmp_path, capsys):
    slow = make_run(tmp_path / "slow", top=0.74, rounds=8)
    fast = make_run(tmp_path / "fast", top=0.8, rounds=10)
    parsed = Page(page(load(slow, fast), tmp_path))
    head = next(i for i, row in enumerate(parsed.rows) if "90 % of the best: 72.0 %" in row)
    assert parsed.rows[head + 2] == ["slow", "8", "16.0", "4.00", *"------"]
    assert parsed.rows[head + 3][:7] == ["fast", "9", "18.0", "4.50", "10", "20.0", "5.00"]
    # A target is given.
    # 72, 76 and 79.2 %: `slow` ends at 74 %; `fast` has 72 % after 9 rounds and 80 % after 10.
    expected = ["8", "16.0", "4.00", *"------"], ["9", "18.0", "4.50", *["10", "20.0", "5.00"] * 2]
    text = report.write_report(load(slow, fast), tmp_path / "out", target=0.8).read_text()
    parsed = Page(text)
    first = next(i for i, row in enumerate(parsed.rows) if "90 % of the target: 72.0 %" in row)
    assert "reached a percentage of the target 80.0 %." in text
    rows = parsed.rows[first + 2 : first + 4]
    assert rows == [["slow", *expected[0]], ["fast", *expected[1]]]
    # The same in a terminal.
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


def test_targets_that_are_not_reached_or_not_possible(tmp_path, capsys):
    path = make_run(tmp_path / "a", top=0.5)
    text = report.write_report(load(path), tmp_path / "out", target=0.9).read_text()
    assert Page(text).row("a", "-") == ["a", *"---------"]
    for target in ("80", "0", "nan"):
        assert main(["report", str(path), "--target", target]) == 2
        assert f"The target {target} must be a fraction" in capsys.readouterr().err


def test_the_smallest_upload_is_named_where_it_is_marked(tmp_path):
    small, large, same = (make_run(tmp_path / str(n), size=n // 7) for n in (70, 7000, 71))
    assert "The smallest upload is bold." in page(load(small, large), tmp_path)
    assert "The smallest upload is bold." not in page(load(small, same), tmp_path)


def test_differing_and_shared_settings(tmp_path):
    a = make_run(tmp_path / "a", config='targets = ["q"]\n[data]\nname = "x"\n')
    b = make_run(tmp_path / "b", config='targets = ["q", "v"]\n[data]\nname = "x"\nseed = 1\n')
    text = page(load(a, b), tmp_path)
    parsed = Page(text)
    assert ["Run", "peft.targets", "data.seed"] in parsed.rows
    assert ["a", '["q"]', "-"] in parsed.rows
    assert ["b", '["q", "v"]', "1"] in parsed.rows
    assert "<dt>data.<wbr>name</dt><dd>x</dd>" in text  # a narrow column breaks between words
    assert "<dt>commit</dt><dd>abc</dd>" in text


def test_more_than_six_differing_settings_are_rows(tmp_path):
    keys = "abcdefgh"
    a = make_run(tmp_path / "a", config="".join(f"{key} = 1\n" for key in keys))
    b = make_run(tmp_path / "b", config="".join(f"{key} = 2\n" for key in keys))
    parsed = Page(page(load(a, b), tmp_path))
    assert ["Setting", "a", "b"] in parsed.rows
    assert ["peft.h", "1", "2"] in parsed.rows


def test_a_small_test_set_is_said_to_be_coarse(tmp_path):
    small, large = (make_run(tmp_path / str(n), test_examples=n) for n in (250, 4000))
    text = page(load(small, large), tmp_path)
    assert "250 examples: one of them is 0.4 points of accuracy, whose standard error is" in text
    assert "up to 3.2 points." in text
    assert "The test set has" not in page(load(large), tmp_path)
    loss = as_perplexity(small, [9.0] * 5)
    assert "The test set has" not in page(load(loss), tmp_path)


def test_the_end_has_the_commands_that_repeat_the_runs(tmp_path):
    config = '[model]\nname = "bert"\n'
    paths = [make_run(tmp_path / name, config=config) for name in ("a", "b c")]
    commands = html.unescape(
        re.search("<pre.*<code>(.*)</code>", page(load(*paths), tmp_path), re.S)[1]
    )
    assert commands.splitlines() == [
        "git checkout abc",
        f"fedjax-peft run {paths[0]}/config.toml --out {paths[0]}-again",
        f"fedjax-peft run '{paths[1]}/config.toml' --out '{paths[1]}-again'",
    ]
    assert "Run the programs that made these runs again" in page(
        load(make_run(tmp_path / "python")), tmp_path
    )


def test_only_recorded_axes_are_offered(tmp_path):
    path = make_run(tmp_path / "a")
    rows = [{n: x for n, x in row.items() if n != "simulated_seconds"} for row in rows_of(path)]
    text = page(load(write_rows(path, rows)), tmp_path)
    assert re.findall('type="radio" name="axis" id="([^"]*)"', text) == [
        *("axis-round", "axis-bytes", "axis-wall_seconds"),
    ]
    once = report.write_report(load(path), tmp_path / "once", x="bytes").read_text()
    assert 'type="radio"' not in once


def test_warnings(tmp_path):
    a = make_run(tmp_path / "a", dropped=[17], train_loss=None, config='[data]\nname = "x"\nseed=1')
    b = make_run(tmp_path / "b", rounds=3, config='[data]\nname = "y"\nseed=2')
    (b / "config.toml").write_text((b / "config.toml").read_text().replace("= 3", "= 9"))
    (section,) = re.findall(
        r'<section class="warnings".*?</section>', page(load(a, b), tmp_path), re.S
    )
    for warning in (
        "a: 1 upload not finite and excluded: client 17 in round 4.",
        "a: train_loss was not finite in round 4.",
        "b: unfinished or stopped early, after 3 of 9 rounds.",
        "different lengths: 3 to 4 rounds",
        "different seeds, so differences are partly chance: data.seed is 1, 2.",
        "different test sets: data.name is x, y.",
    ):
        assert warning in section
    assert section.count("<li>") == 6


def test_warnings_name_clients_without_a_whole_aggregated_upload(tmp_path):
    path = make_run(tmp_path / "a", failed=[3, 5], late=[7], partial=[2, 4], clients=[])
    text = page(load(path), tmp_path)
    for warning in (
        "a: 2 uploads missing because clients dropped out: clients 3, 5 in round 4.",
        "a: 1 upload too late and excluded: client 7 in round 4.",
        "a: 2 uploads of partial work, because of the deadline: clients 2, 4 in round 4.",
        "a: no client took part in round 4.",
    ):
        assert f"<li>{warning}</li>" in text


def test_a_clean_comparison_has_no_warnings(tmp_path):
    assert "<section" not in page(load_new(tmp_path, a=0.8, b=0.8), tmp_path)


def test_hostile_names_and_values_are_escaped(tmp_path):
    script = "<script>alert('x')</script>"
    path = make_run(tmp_path / "a", config=f'note = "{script}"\n')
    hostile = path.rename(tmp_path / "<script>alert(1)\n<b>&漢\udcff")
    (hostile / "environment.json").write_text(json.dumps({"<i>": "\ud800</style><script>"}))
    runs = [*load(hostile), load(hostile)[0]._replace(name=script)]
    text = page(runs, tmp_path)
    tags = Page(text).tags
    assert not {"b", "i"} & set(tags)
    assert tags.count("script") == 1
    assert "&lt;script&gt;alert(1) &lt;b&gt;&amp;漢" in text
    assert "<script>" in printed(runs)  # not escaped in a terminal


@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.parametrize("rounds", [0, 2])
def test_any_number_of_runs_and_rounds(tmp_path, count, rounds):
    runs = load(*(make_run(tmp_path / f"run{i}", rounds=rounds) for i in range(count)))
    parsed = Page(page(runs, tmp_path))
    assert parsed.row("run0", str(rounds))
    assert printed(runs).count("run") == count


def test_runs_without_rows(tmp_path):
    path = make_run(tmp_path / "a")
    (path / "metrics.jsonl").write_text("")
    text = page(load(path), tmp_path)
    assert "No test accuracy has been recorded yet." in text
    assert "Cost of reaching" not in text
    assert "a" in printed(load(path))


def test_unknown_fields_and_missing_ones_are_tolerated(tmp_path):
    path = make_run(tmp_path / "a", novelty=1.5, nested={"x": 1})
    gone = ("simulated_seconds", "aggregation_error_relative")
    rows = [{n: x for n, x in row.items() if n not in gone} for row in rows_of(path)]
    write_rows(path, [{**row, "aggregation_error": 0.0123} for row in rows])
    parsed = Page(page(load(path), tmp_path))
    assert parsed.rows[0][-1] == "Mean aggregation error"
    assert parsed.row("a", "4")[-1] == "0.012"
    assert not any("Simulated" in cell for cell in parsed.rows[0])


def test_input_errors_for_no_runs_and_for_a_file_as_directory(tmp_path):
    refused("at least one run", report.write_report, [], tmp_path)
    runs = load(make_run(tmp_path / "a"))
    refused("cannot be written", report.write_report, runs, tmp_path / "a" / "config.toml")
