"""The report of a sweep: one row a method, with paired differences to a baseline."""

import csv
import json
import re

import numpy as np
import pytest
from closeness import approx
from internals import main, read_study, write_report
from made_runs import accuracy, write_rates
from refusals import refused
from shallow import draw_nothing

from fedjax_peft.report.comparison import Options, compare

NOISE = (0.0, 0.06, -0.02)
"""Effect of each seed, which all methods share."""


def scores(up, *, jitter=(0.0, 0.001, -0.001), rates=(0.1, 0.2)):
    """Validation prefers the first rate; the test set would prefer the last one."""
    return {
        rate: {
            seed: accuracy(0.8 - rate + noise, 0.5 + rate + up + noise + jitter[seed])
            for seed, noise in enumerate(NOISE)
        }
        for rate in rates
    }


@pytest.fixture(autouse=True)
def _figures(monkeypatch):
    draw_nothing(monkeypatch)


@pytest.fixture
def sweep(tmp_path):
    methods = {"fedavg": scores(0), "fedprox": scores(0.03), "moon": scores(0, jitter=NOISE)}
    return write_rates(tmp_path / "lr", methods, choose_by="validation_accuracy", baseline="fedavg")


def row(methods, name):
    i = methods.names.index(name)
    return {column.title: column.cells[i] for column in methods.columns}


def test_a_row_for_each_method_at_its_setting_chosen_on_validation(sweep):
    methods = compare(read_study(sweep))
    assert methods.names == ["fedavg", "fedprox", "moon"]
    assert row(methods, "fedprox") == {
        "Chosen setting": "learning_rate=0.1",
        "Seeds": "3",
        "Final validation accuracy (%)": "71.3 ± 4.2",
        "Final test accuracy (%)": "64.3 ± 4.3",
        "Best test accuracy (%)": "64.3 ± 4.3",
        "Difference to fedavg (points)": "+3.0",
        "95 % interval (t)": "+2.9 to +3.1",
        "Result": "separated",
    }
    assert row(methods, "fedavg")["Difference to fedavg (points)"] == "baseline"
    assert row(methods, "moon")["Result"] == "not separated"
    assert methods.lead == (
        "fedprox (+3.0 points) is separated from fedavg in final test accuracy; moon is not. The"
        " settings were chosen by the mean of validation_accuracy over seeds."
    )
    assert methods.warnings == []


def test_equal_means_have_deviations_of_their_own(tmp_path):
    same = {s: {"test_accuracy": 0.5} for s in range(3)}
    spread = {s: {"test_accuracy": x} for s, x in enumerate((0.25, 0.5, 0.75))}
    found = compare(read_study(write_rates(tmp_path / "s", {"a": {0.1: same}, "b": {0.1: spread}})))
    cells = [row(found, name)["Final test accuracy (%)"] for name in "ab"]
    assert cells == ["50.0 ± 0.0", "50.0 ± 25.0"]


def test_all_settings_are_shown_with_the_chosen_ones(sweep):
    _, names, columns = compare(read_study(sweep)).settings
    cells = list(zip(names, *(column.cells for column in columns), strict=True))
    assert [column.title for column in columns] == [
        "optimizer.learning_rate",
        "Seeds",
        "Final validation accuracy (%)",
        "Final test accuracy (%)",
        "Choice",
    ]
    assert cells[:2] == [
        ("fedavg", "0.1", "3", "71.3 ± 4.2", "61.3 ± 4.3", "chosen"),
        ("fedavg", "0.2", "3", "61.3 ± 4.2", "71.3 ± 4.3", "-"),
    ]


def test_a_choice_on_test_is_a_warning(sweep):
    methods = compare(read_study(sweep), Options(choose_by="test_accuracy"))
    assert row(methods, "fedavg")["Chosen setting"] == "learning_rate=0.2"
    assert methods.lead.endswith("The settings were chosen on test data (test_accuracy).")
    assert "so the test scores of the choice are optimistic" in methods.warnings[0]


def test_the_note_says_what_the_intervals_contain(tmp_path):
    study = read_study(write_rates(tmp_path / "s", {"a": scores(0), "b": scores(0.01)}))
    found = compare(study)
    assert "With fewer than 4 seeds, only Student’s t has an interval." in found.paired
    assert "the chance of the seeds and of the test examples" in found.paired
    for path in study.records:
        lines = (path.path / "metrics.jsonl").read_text()
        (path.path / "metrics.jsonl").write_text(lines.replace("_examples", "_count"))
    unsized = compare(read_study(tmp_path / "s"))
    assert "The intervals are about the seeds only" in unsized.paired
    assert row(unsized, "b")["Result"] == "not known: the same difference with every seed"
    assert unsized.judged.best == set()


def test_nothing_separated_is_said(tmp_path):
    methods = {"a": scores(0.001, jitter=NOISE), "b": scores(0)}
    found = compare(read_study(write_rates(tmp_path / "s", methods)))
    assert found.lead.startswith("No method is separated from a in final test accuracy")
    assert found.judged.best == set()


def test_the_best_mean_is_bold_only_if_separated_from_all_others(tmp_path):
    ahead = {"a": scores(0), "b": scores(0.05)}
    found = compare(read_study(write_rates(tmp_path / "s", ahead)))
    assert found.lead.startswith("b has the best final test accuracy, separated from every other")
    table = found.files()["table"]
    assert "**66.3 ± 4.3**" in table.markdown()
    assert table.latex().count("textbf") == 1
    near = {"a": scores(0), "b": scores(0.05), "c": scores(0.0501, jitter=(0.001, 0.0, -0.001))}
    found = compare(read_study(write_rates(tmp_path / "t", near)))
    assert "textbf" not in found.files()["table"].latex()


def test_few_seeds_and_broken_pairs_are_warned_of(tmp_path):
    rate = {0.1: scores(0)[0.1]}
    other = {0.1: {seed + 1: fields for seed, fields in scores(0.0204)[0.1].items()}}
    one = {0.1: {0: accuracy(0.5, 0.5)}}
    two = {0.1: {seed: accuracy(0.5, 0.5 + seed) for seed in range(2)}}
    methods = {"a": rate, "b": other, "c": one, "d": two}
    found = compare(read_study(write_rates(tmp_path / "s", methods)))
    text = " ".join(found.warnings)
    assert "c has one seed: no standard deviation and no interval." in text
    assert "d has 2 seeds. Use at least 3" in text
    assert "b and a do not have the same seeds: the difference leaves out seeds 0, 3." in text
    assert row(found, "c")["Final test accuracy (%)"] == "50.0"
    assert row(found, "c")["Result"] == "not known: one common seed"
    # Seeds 1 and 2 only: 0.6204 - 0.661 and 0.6814 - 0.579.
    assert row(found, "b")["Difference to a (points)"] == "+3.1"


def test_the_report_says_how_many_seeds_a_difference_needs(tmp_path):
    """Differences of .02 + (0, d, -d) have the standard deviation d."""
    jitter = {"b": 0.001, "c": 0.0125, "d": 0.5}
    methods = {"a": scores(0, jitter=(0.0, 0.0, 0.0))}
    methods |= {name: scores(0.02, jitter=(0.0, d, -d)) for name, d in jitter.items()}
    study = read_study(write_rates(tmp_path / "s", methods, choose_by="validation_accuracy"))
    found = compare(study)
    assert found.power == (
        "To find a difference of 1.0 points to a in 80 % of studies (paired t test at 5 %), d needs"
        " more than 1,000 seeds (sd 50.0 points), c needs 15 seeds (12 more; sd 1.2 points) and b"
        " needs 3 seeds (no more; sd 0.1 points). These are rough numbers: a standard deviation"
        " (sd) of 3 seeds can be 4.4 times as large in truth."
    )
    assert found.power in found.files()["table"].notes
    assert "c needs 5 seeds (2 more" in compare(study, Options(detect=0.025)).power
    refused("above 0", compare, study, Options(detect=0.0))


def test_a_small_test_set_limits_what_seeds_can_show(tmp_path):
    tested = {"validation_accuracy": 0.5, "test_examples": 100}
    rates = {
        name: {0.1: {s: {**tested, "test_accuracy": 0.5 + up + s / 100} for s in seeds}}
        for name, up, seeds in (("a", 0.0, (0, 1, 2, 3)), ("b", 0.05, (0, 1, -1, 2)))
    }
    rates["b"][0.1] = dict(enumerate(rates["b"][0.1].values()))
    power = compare(read_study(write_rates(tmp_path / "s", rates))).power
    # Twice the variance .5 (1 - .5) / 100, times 1.96.
    assert "The chance of the test examples is up to ± 13." in power
    assert "rough" not in power


def test_any_metric_baseline_and_best_value(sweep):
    study = read_study(sweep)
    found = compare(study, Options("validation_accuracy", "best", None, "moon"))
    assert "Best validation accuracy (%)" in row(found, "fedavg")
    assert row(found, "moon")["Difference to moon (points)"] == "baseline"
    refused("Did you mean 'validation_accuracy'", compare, study, Options(metric="valid_accuracy"))
    refused("Did you mean 'fedprox'", compare, study, Options(baseline="fedprx"))


def test_a_sweep_whose_baseline_has_no_finished_run_is_compared_with_its_first_method(tmp_path):
    methods = {"fedprox": scores(0), "moon": scores(0.03)}
    study = read_study(write_rates(tmp_path / "s", methods, baseline="fedavg"))
    found = compare(study)
    assert row(found, "fedprox")["Difference to fedprox (points)"] == "baseline"
    assert "fedavg, the baseline of the sweep, has no finished run." in found.warnings
    refused("'fedavg' to compare with", compare, study, Options(baseline="fedavg"))


def test_nested_metrics_where_lower_is_better(tmp_path):
    rates = {
        method: {0.1: {s: {"test_accuracy": 0.5, "time": {"train_s": t + s}} for s in range(3)}}
        for method, t in (("slow", 9.0), ("fast", 1.0))
    }
    study = read_study(write_rates(tmp_path / "s", rates))
    found = compare(study, Options(metric="time.train_s"))
    assert row(found, "fast")["Final time.train s"] == "2 ± 1"
    assert row(found, "fast")["Difference to fast"] == "baseline"
    assert found.judged.ranking.groups[0].name == "fast"


def test_clients_have_columns(tmp_path):
    """Twenty clients: the worst tenth is the mean of two."""
    tests = {"client": list(range(20)), "accuracy": [0.1, 0.3, *[0.9] * 18]}
    fields = {"client_accuracy_mean": 0.83, "client_accuracy_weighted": 0.7, "client_tests": tests}
    rates = {"ditto": {0.1: {s: {"test_accuracy": 0.5, **fields} for s in range(3)}}}
    found = compare(read_study(write_rates(tmp_path / "s", rates)))
    cells = row(found, "ditto")
    assert cells["Worst 10 % of clients (%)"] == "20.0 ± 0.0"
    assert cells["Weighted by test size (%)"] == "70.0 ± 0.0"
    page = write_report(read_study(tmp_path / "s"), tmp_path / "out").read_text()
    assert "mean over the tenth of the clients" in page
    rows = re.findall(
        r'<th role="rowheader" scope="row">(\d+)</th><td[^>]*>([^<]*)</td></tr>', page
    )
    assert rows[:2] == [("0", "10.0"), ("1", "30.0")]
    assert len(rows) == 20


def of_clients(test, scores):
    """Returns the fields of a run with ten clients, of which the worst tenth is one."""
    of = np.array(scores)
    figures = {"mean": of.mean(), "std": of.std(), "worst_tenth": of.min()}
    return accuracy(None, test) | {f"client_accuracy_{k}": float(x) for k, x in figures.items()}


def test_a_better_mean_with_worse_worst_clients_is_said(tmp_path):
    """Differences by hand, mean and worst: 4, 4, 5.2 points and −30, −30, −20 points."""
    own = {
        "fedavg": [0.7] * 10,
        "unfair": [0.4, 0.9, *[0.7625] * 8],
        "fair": [0.71] * 9 + [0.72],
        "worse": [0.52, *[0.62] * 9],
    }
    rates = {
        name: {0.1: {s: of_clients(0.5, np.array(xs) + 0.01 * s) for s in range(3)}}
        for name, xs in own.items()
    }
    rates["unfair"][0.1][2] = of_clients(0.5, [0.72 - 0.2, *[0.8] * 9])
    sweep = write_rates(tmp_path / "s", rates, baseline="fedavg")
    found = compare(read_study(sweep))
    cells = row(found, "unfair")
    # Seeds 0 and 1: .74 + .01 s and .40 + .01 s; seed 2: .772 and .52.
    assert cells["Clients’ mean (%)"] == "75.4 ± 1.6"
    assert cells["Worst 10 % of clients (%)"] == "44.3 ± 6.7"
    assert row(found, "fedavg")["Standard deviation across clients (%)"] == "0.0 ± 0.0"
    (said,) = (one for one in found.warnings if "worst of them" in one)
    assert said == (
        "unfair is better than fedavg for its clients on average, and worse for the worst of them:"
        " accuracy on the clients’ tests, their mean +4.4 points (95 % interval +2.7 to +6.1) and"
        " the worst 10 % −26.7 points (95 % interval −41.0 to −12.3), over 3 seeds, paired."
    )
    shown = "".join(str(c.header) for t in found.terminal_tables(200) for c in t.columns)
    assert "Worst 10 %\nof clients" in shown
    table = found.files()["table"]
    assert said in table.markdown()
    heads = table.csv().splitlines()
    assert any("client_accuracy_worst_tenth" in line for line in heads)
    page = write_report(read_study(sweep), tmp_path / "out").read_text()
    assert said in page
    assert "Standard deviation across clients" in page


def test_a_fall_within_chance_is_said_to_be_so(tmp_path):
    ups = ((0.1, 0.05), (0.1, -0.2), (0.1, -0.06))
    rates = {
        "a": {0.1: {s: of_clients(0.5, [0.5] * 10) for s in range(3)}},
        "b": {
            0.1: {
                s: of_clients(0.5, [0.5 + low, *[0.5 + up] * 9]) for s, (up, low) in enumerate(ups)
            }
        },
    }
    found = compare(read_study(write_rates(tmp_path / "s", rates)))
    assert any(
        one.endswith("Not separated from 0 over seeds: the worst 10 %.") for one in found.warnings
    )


@pytest.mark.slow
def test_the_command_writes_page_and_tables(sweep, capsys):
    assert main(["report", str(sweep)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "fedprox (+3.0 points) is separated from fedavg" in out
    assert "fedprox learning_rate=0.1 3 71.3 ± 4.2 64.3 ± 4.3" in out
    assert "moon 0.2 3 61.3 ± 4.2" in out
    page = (sweep / "report.html").read_text()
    assert "<h2>All settings</h2>" in page
    assert "chosen by the mean of validation_accuracy" in page
    assert {path.name for path in sweep.glob("*.*")} == {
        *("sweep.toml", "report.html", "table.md", "table.csv", "table.tex"),
        *("settings.md", "settings.csv", "settings.tex"),
    }
    with (sweep / "table.csv").open() as file:
        rows = {one["Method"]: one for one in csv.DictReader(file)}
    assert float(rows["fedprox"]["test_accuracy"]) == approx(0.5 + 0.1 + 0.03 + 0.04 / 3)
    assert float(rows["fedprox"]["difference"]) == approx(0.03)
    assert rows["fedavg"]["difference"] == ""
    assert re.search(r"fedprox & learning\\_rate=0.1 & 3", (sweep / "table.tex").read_text())
    with (sweep / "figures" / "test_accuracy_vs_round.csv").open() as file:
        assert {one["seed"] for one in csv.DictReader(file)} == {"0", "1", "2"}
    assert main(["report", str(sweep), "--metric", "tst_accuracy"]) == 2
    assert "Did you mean 'test_accuracy'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_cost_of_a_target_is_a_mean_over_seeds(tmp_path, capsys):
    """One seed of the second method never reaches 45 % (90 % of 50 %)."""
    reached = {0.1: {s: {"test_accuracy": 0.5, "bytes_up": 100 * s} for s in range(3)}}
    missed = {0.1: {s: {"test_accuracy": 0.5 - 0.1 * (s == 2)} for s in range(3)}}
    sweep = write_rates(tmp_path / "s", {"a": reached, "b": missed})
    assert main(["report", str(sweep), "--target", "0.5"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    head = lines.index(["To", "50.0", "%", "90", "%", "95", "%", "99", "%"])
    assert lines[head + 2 : head + 4] == [["a", *["3", "100", "-"] * 3], ["b", *"---------"]]
    assert "Cost of reaching a target" in (sweep / "report.html").read_text()


def test_the_choice_names_the_validation_examples(tmp_path):
    sweep = write_rates(tmp_path / "s", {"a": scores(0)})
    for path in sweep.rglob("config.toml"):
        path.write_text('validation = "20 % of train"\n' + path.read_text())
    assert compare(read_study(sweep)).lead.endswith(
        "by the mean of validation_accuracy (validation examples: 20 % of train) over seeds."
    )


def test_single_runs_of_a_sweep_are_rows_of_their_own(sweep):
    runs = [sweep / method / "rate=0.1,seed=0" for method in ("fedavg", "moon")]
    assert not compare(read_study(*runs)).over_seeds
    asked = compare(read_study(*runs), Options(baseline="moon"))
    assert row(asked, "fedavg")["Result"] == "not known: one seed"
    assert "no intervals (one seed)" in asked.lead


def test_runs_that_were_never_tested_are_rows(tmp_path):
    rates = {"a": {x: {s: {"train_loss": 0.5} for s in range(2)} for x in (0.1, 0.2)}}
    study = read_study(write_rates(tmp_path / "s", rates, baseline="a"))
    found = compare(study)
    assert found.names == ["a (learning_rate=0.1)", "a (learning_rate=0.2)"]
    assert found.lead.startswith("No final test accuracy has been recorded.")
    assert "No run has a metric to choose by." in found.lead
    missing, few = found.warnings
    assert missing == "a, the baseline of the sweep, has no chosen setting."
    assert few.partition(" have")[0] == " and ".join(found.names)
    write_report(study, tmp_path / "out")


def test_the_terminal_prints_names_as_they_are(tmp_path, capsys):
    """They are no markup of rich, in the heading of the differences either."""
    rates = {0.1: {seed: accuracy(0.5, 0.5 + seed / 100) for seed in range(3)}}
    main(["report", str(write_rates(tmp_path / "s", {"[/red]": rates, "[bold]b": rates}))])
    text = capsys.readouterr().out
    assert text.count("[/red]") > 1
    assert "[bold]b" in text


def test_hostile_settings_are_escaped(tmp_path):
    keys = ("note", "seed")
    sweep = write_rates(tmp_path / "s", {"a": scores(0)}, keys=keys)
    for path in sweep.rglob("config.toml"):
        rate = re.search(r"rate=([.\d]+)", str(path))[1]
        note = "\\u001b[31m<b>\\n" + rate + "x" * 200
        path.write_text(f'note = "{note}"\n' + path.read_text())
    found = compare(read_study(sweep))
    texts = [*row(found, "a").values(), *found.settings.columns[0].cells, found.lead]
    assert all(text.isprintable() for text in texts)
    assert len(row(found, "a")["Chosen setting"]) < 160
    assert "<b>" not in write_report(read_study(sweep), tmp_path / "out").read_text()


@pytest.mark.slow
def test_unfinished_runs_are_named_and_alone_they_are_rows(sweep, capsys):
    run = sweep / "moon" / "rate=0.1,seed=2"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(lines[0] + "\n")
    methods = compare(read_study(sweep))
    assert any(f"{run} is unfinished and left out" in one for one in methods.warnings)
    assert any("moon with learning_rate=0.1 has no" in one for one in methods.warnings)
    assert row(methods, "moon")["Chosen setting"] == "learning_rate=0.2"
    assert main(["report", str(run)]) == 0
    assert json.loads(lines[0])["round"] == 0
    assert "moon" in capsys.readouterr().out
    for option in (["--metric", "test_accuracy"], ["--baseline", "moon"], ["--detect", "0.1"]):
        assert main(["report", str(run), *option]) == 2
        assert "No run has finished" in capsys.readouterr().err
