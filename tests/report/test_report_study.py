"""Studies: cells by config, the choice of settings, and statistics over seeds."""

import csv
import itertools
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import tomli_w
from closeness import approx
from internals import RunRecord, find_runs, flatten, load_run, make_study, pruned, read_study
from made_runs import accuracy, write_rates, write_run
from refusals import refused

from fedjax_peft.report import comparison
from fedjax_peft.report import study as studies
from fedjax_peft.report.figure_files import table_csv
from fedjax_peft.report.intervals import (
    largest_deviation,
    paired,
    seeds_needed,
    summarise,
)
from fedjax_peft.report.table_files import Bold, TextTable


@pytest.fixture
def sweep(tmp_path):
    """On validation the rate 0.1 is the best; on the test set it would be 0.2."""
    scores = {
        method: {
            0.1: {s: accuracy(0.80 + 0.01 * s, 0.60 + up + 0.02 * s) for s in range(3)},
            0.2: {s: accuracy(0.70 + 0.01 * s, 0.90 + up + 0.02 * s) for s in range(3)},
        }
        for method, up in (("fedavg", 0.0), ("fedprox", 0.05))
    }
    return write_rates(tmp_path / "lr", scores, choose_by="validation_accuracy", baseline="fedavg")


def test_what_the_program_derives_from_a_preset_is_no_setting(tmp_path):
    for rate in (0.1, 0.2):
        changes = {"optimizer.learning_rate": f"0.5 -> {rate}"}
        config = {"name": "fedmcp", "seed": 0, "preset_changes": changes}
        config |= {"optimizer": {"learning_rate": rate}}
        write_run(tmp_path / f"{rate}", config, [{"round": 0}, {"round": 1, **accuracy(0.5, rate)}])
    (tmp_path / "sweep.toml").write_text('keys = ["seed", "optimizer.learning_rate"]')
    cells = read_study(tmp_path).cells
    assert [cell.label for cell in cells] == ["learning_rate=0.1", "learning_rate=0.2"]


def test_cells_are_formed_by_config(sweep):
    study = read_study(sweep)
    assert [(c.name, c.settings, sorted(c.runs)) for c in study.cells] == [
        (method, {"optimizer.learning_rate": rate}, [0, 1, 2])
        for method in ("fedavg", "fedprox")
        for rate in (0.1, 0.2)
    ]
    assert study.cells[0].label == "learning_rate=0.1"
    assert (study.choose_by, study.baseline) == ("validation_accuracy", "fedavg")
    assert study.keys == ("optimizer.learning_rate", "seed")
    assert read_study(sweep / "fedavg").baseline == "fedavg", "the sweep is found from inside"
    assert len(read_study(sweep.parent).cells) == 4, "and from outside"


@pytest.mark.parametrize(
    ("seeds", "sketches", "labels"),
    [
        ((1, 2), (0, 0), [1, 2]),  # the sketch's seed is no part of a label
        ((5, 5), (0, 0), [5]),
        ((1, 2), (1, 2), [1, 2]),
        ((5, 5), (1, 5), [5, "seed=5 data.seed=5 algorithm.sketch_seed=1"]),
        ((1, 2), (3, 4), ["seed=1 algorithm.sketch_seed=3", "seed=2 algorithm.sketch_seed=4"]),
    ],
)
def test_a_method_with_a_seed_of_its_own_pairs_with_others(tmp_path, seeds, sketches, labels):
    rows = [{"round": 0}, {"round": 1, **accuracy(0.5, 0.5)}]
    for i, (seed, sketch) in enumerate(zip(seeds, sketches, strict=True)):
        shared = {"seed": seed, "data.seed": 5}
        write_run(tmp_path / f"fedavg{i}", {"name": "fedavg", **shared}, rows)
        own = {"algorithm.name": "fedask", "algorithm.sketch_seed": sketch}
        write_run(tmp_path / f"fedask{i}", {"name": "fedask", **shared, **own}, rows)
    found = {cell.name: list(cell.runs) for cell in read_study(tmp_path).cells}
    assert found == {"fedavg": list(dict.fromkeys(seeds)), "fedask": labels}


def test_settings_are_chosen_on_validation(sweep):
    study = read_study(sweep)
    choice = study.choice()
    assert {n: c.settings["optimizer.learning_rate"] for n, c in choice.cells.items()} == {
        "fedavg": 0.1,
        "fedprox": 0.1,
    }
    assert not choice.on_test
    assert choice.notes == (
        "The settings were chosen by the mean of validation_accuracy over seeds.",
    )
    on_test = study.choice("test_accuracy")
    assert on_test.on_test
    assert on_test.cells["fedavg"].settings["optimizer.learning_rate"] == 0.2
    assert "optimistic" in on_test.notes[0]
    refused("Did you mean 'validation_accuracy'", study.chosen, "validation_acuracy")


def test_without_validation_the_choice_says_that_it_was_on_test(tmp_path):
    scores = {"a": {x: {s: {"test_accuracy": x} for s in range(2)} for x in (0.1, 0.2)}}
    study = read_study(write_rates(tmp_path / "s", scores, choose_by="validation_accuracy"))
    choice = study.choice()
    assert choice.on_test
    assert choice.cells["a"].settings["optimizer.learning_rate"] == 0.2
    assert "chosen on test data" in choice.notes[0]
    assert "No run has recorded validation_accuracy" in choice.notes[1]


def test_a_loss_is_chosen_where_it_is_low(tmp_path):
    scores = {"a": {x: {0: {"validation_loss": x}} for x in (0.3, 0.1, 0.2)}}
    study = read_study(write_rates(tmp_path / "s", scores, choose_by="validation_loss"))
    assert study.chosen()["a"].settings == {"optimizer.learning_rate": 0.1}


def test_a_setting_that_lacks_a_seed_is_not_chosen(tmp_path):
    """A rate that diverges for one seed would look good by its other seeds."""
    good = {s: accuracy(0.5, 0.5) for s in range(3)}
    diverged = {0: accuracy(0.9, 0.9), 1: accuracy(0.9, 0.9), 2: accuracy(None, None)}
    study = read_study(write_rates(tmp_path / "s", {"a": {0.1: good, 0.2: diverged}}))
    choice = study.choice()
    assert choice.cells["a"].settings == {"optimizer.learning_rate": 0.1}
    assert choice.notes[-1] == (
        "a with learning_rate=0.2 has no validation_accuracy for seed 2: not chosen."
    )


@pytest.mark.parametrize(
    ("stopped", "chosen"),
    [
        (pruned(3), 0.2),
        ("validation_loss 0.9 is worse than 0.4, the median of 3 runs", 0.2),
        ("validation_accuracy reached 0.8", 0.1),  # its own rule
        (None, 0.1),
    ],
)
def test_a_run_that_was_given_up_is_not_chosen(tmp_path, stopped, chosen):
    """Its value is that of an earlier round; at one round all compete."""
    for rate, score, last in ((0.1, 0.9, 1), (0.2, 0.8, 2), (0.3, 0.7, 2)):
        rows = [{"round": r, **accuracy(score, 0.5)} for r in range(last + 1 if stopped else 3)]
        if rate == 0.1 and stopped:
            rows[-1]["stopped"] = stopped
        config = {"name": "a", "seed": 0, "optimizer": {"learning_rate": rate}, "rounds": 2}
        write_run(tmp_path / f"{rate}", config, rows)
    (tmp_path / "sweep.toml").write_text('keys = ["seed", "optimizer.learning_rate"]')
    study = read_study(tmp_path)
    assert study.chosen()["a"].settings == {"optimizer.learning_rate": chosen}
    assert study.chosen(at=1)["a"].settings == {"optimizer.learning_rate": 0.1}
    noted = [note for note in study.notes if note.startswith("1 of 3 runs were given up")]
    assert bool(noted) == (chosen == 0.2)


def test_the_settings_of_a_method_are_compared_once(monkeypatch):
    """A configuration is read a few times, and not once for each other one."""
    read = []
    monkeypatch.setattr(studies, "flatten", lambda config: read.append(config) or flatten(config))
    runs = [
        RunRecord("a", Path(f"/{i}"), {"model": {}, "rate": i, "rounds": 1}, {}, [{"round": 1}])
        for i in range(40)
    ]
    found = make_study(runs, keys=["seed"])
    assert [cell.settings for cell in found.cells] == [{"rate": i} for i in range(40)]
    assert len(read) <= 5 * len(runs)


def test_runs_are_found_in_a_project_and_beside_an_export(tmp_path):
    """Both have a ``config.toml``, but no rows and no environment."""
    folder, rows = tmp_path / "runs", [{"round": 1}]
    runs = [write_run(folder / name, {"seed": i}, rows) for i, name in enumerate("ab")]
    for other in (tmp_path, folder / "a-hub"):
        other.mkdir(exist_ok=True)
        shutil.copy(runs[0] / "config.toml", other)
    assert find_runs(tmp_path) == runs
    assert read_study(tmp_path).notes == ()


def test_unfinished_runs_are_left_out_and_named(sweep):
    run = sweep / "fedavg" / "rate=0.1,seed=0"
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("rounds = 3", "rounds = 4"))
    begun = sweep / "fedprox" / "rate=0.1,seed=1"
    (begun / "metrics.jsonl").rename(begun / "environment.json")
    study = read_study(sweep)
    cells = {(c.name, *c.settings.values()): sorted(c.runs) for c in study.cells}
    assert cells["fedavg", 0.1] == [1, 2]
    assert cells["fedprox", 0.1] == [0, 2]
    assert [re.sub(r".*/", "", note) for note in study.notes] == [
        "rate=0.1,seed=1 started no round and is left out.",
        "rate=0.1,seed=0 is unfinished and left out.",
    ]


def private_note(*runs):
    """Returns the notes of a study of private runs: (seed, ε or None, words of the statement)."""
    records = [
        RunRecord(
            f"run {i}",
            Path(str(i)),
            {"point": {"seed": seed, "i": i}},
            {},
            [
                {"round": 0, "privacy": {"name": "central", "unit": "client", "statement": words}},
                {"round": 1, "epsilon": epsilon, "delta": 1e-5},
            ],
        )
        for i, (seed, epsilon, words) in enumerate(runs)
    ]
    return make_study(records, keys=["point.i", "point.seed"]).notes


def test_a_sweep_states_the_privacy_of_all_its_runs_together():
    plain = "It compares federations in which one client sends zeros instead (zero-out). Turns."
    drawn = "It compares federations with and without one client (add or remove one). It amplifies."
    (note,) = private_note((0, 1.5, plain), (0, 2.0, plain), (1, 0.5, plain))
    assert note.startswith("The 3 private runs of each client's data together are (4, 3e-05)-diff")
    (note,) = private_note((0, 1.5, drawn), (1, 2.0, drawn))
    assert "are (3.5, 2e-05)-differentially private" in note
    (note,) = private_note((0, 1.5, drawn), (0, 2.0, drawn))
    assert "no stated ε: runs of one seed draw the same clients" in note
    (note,) = private_note((0, 1.5, plain), (0, None, plain))
    assert "no guarantee" in note
    assert private_note((0, 1.5, plain), (0, 2.0, drawn)) == (), "other neighbours"
    assert private_note((0, 1.5, plain)) == ()


def test_runs_that_stopped_early_are_finished(tmp_path):
    rows = [{"round": 2, "stopped": "patience", "test_accuracy": 0.5}]
    path = write_run(tmp_path / "a", {"rounds": 9}, rows)
    assert len(read_study(path).cells) == 1


def test_folders_of_runs_need_no_sweep(tmp_path):
    for seed, rank in itertools.product(range(2), (4, 8)):
        config = {"name": "fedavg", "peft": {"rank": rank}, "seed": seed, "data": {"seed": 0}}
        write_run(tmp_path / str(seed) / f"r{rank}", config, [{"round": 1, "test_accuracy": 0.5}])
    study = read_study(tmp_path / "0", tmp_path / "1")
    assert [(c.name, c.settings, sorted(c.runs)) for c in study.cells] == [
        ("fedavg", {"peft.rank": 4}, [0, 1]),
        ("fedavg", {"peft.rank": 8}, [0, 1]),
    ]
    twice = read_study(tmp_path / "0", tmp_path / "0")
    assert [len(c.runs) for c in twice.cells] == [1, 1]
    assert twice.notes[0].endswith("repeats a seed of fedavg and is left out.")


def test_values_and_series(tmp_path):
    rows = [
        {"round": r, "test_accuracy": x, "test_loss": 1 - x, "time": {"train_s": float(r)}}
        for r, x in enumerate([0.1, 0.6, 0.5])
    ]
    (cell,) = (study := read_study(write_run(tmp_path / "a", {"seed": 5}, rows))).cells
    assert cell.values("test_accuracy") == {5: 0.5}
    assert cell.values("test_accuracy", "best") == {5: 0.6}
    assert cell.values("test_loss", "best") == {5: 0.4}
    assert cell.values("test_accuracy", "mean") == {5: approx(0.55)}
    assert cell.values("test_accuracy", 0) == {5: 0.1}
    assert cell.values("time.train_s") == {5: 2.0}
    assert cell.values("nothing") == {}
    assert cell.series("test_accuracy") == {5: ([0.0, 1.0, 2.0], [0.1, 0.6, 0.5])}
    assert study.require("time.train_s") == "time.train_s"
    refused("Did you mean 'test_accuracy'", study.require, "test_acuracy")


def test_sweeps_made_in_python_are_told_apart_by_their_points(tmp_path):
    (tmp_path / "sweep.toml").write_text('keys = ["point.seed", "point.rate"]')
    for seed, rate in itertools.product(range(2), (0.1, 0.2)):
        run = write_run(tmp_path / f"{seed}-{rate}", {}, [{"round": 1, "test_accuracy": rate}])
        config = {"seed": 0, "values": {"rate": rate}, "point": {"seed": seed, "rate": rate}}
        (run / "config.toml").write_text(tomli_w.dumps(config))
    study = read_study(tmp_path)
    assert [(cell.settings, sorted(cell.runs)) for cell in study.cells] == [
        ({"point.rate": 0.1}, [0, 1]),
        ({"point.rate": 0.2}, [0, 1]),
    ]


def test_runs_that_differ_in_the_order_of_their_transforms_are_two(tmp_path):
    links = {"top_k": {"share": 0.1}, "own:f": {}}
    for number, order in enumerate(([*links], [*links][::-1], [*links][:1])):
        config = {"name": "fedlr", "seed": 0, "transforms": {name: links[name] for name in order}}
        write_run(tmp_path / f"{number}", config, [{"round": 1, **accuracy(0.5, 0.5)}])
    found = [load_run(path) for path in sorted(tmp_path.iterdir())]
    assert [len(cell.runs) for cell in make_study(found).cells] == [1, 1, 1]
    assert comparison._different([*found, *found]) == found


def test_runs_made_in_python_without_a_swept_key_are_cells_by_themselves(tmp_path):
    """Their configs do not say in what they differ."""
    (tmp_path / "sweep.toml").write_text('keys = ["point.rate"]')
    for seed in range(2):
        run = write_run(tmp_path / f"{seed}", {}, [{"round": 1, "test_accuracy": 0.5}])
        (run / "config.toml").write_text(tomli_w.dumps({"name": "mine", "seed": seed}))
    study = read_study(tmp_path)
    assert [sorted(cell.runs) for cell in study.cells] == [[0], [1]]


@pytest.mark.parametrize("text", ["keys = 3", "keys = [1]", "baseline = 2", "choose_by = [", "\\"])
def test_a_damaged_sweep_is_named(sweep, text):
    (sweep / "sweep.toml").write_text(text)
    refused(r"sweep\.toml cannot be read", read_study, sweep)


# Statistics.


def test_summarise_equals_scipy():
    values = [0.81, 0.79, 0.84, 0.83]
    found = summarise(dict(enumerate(values)))
    assert found == summarise(values)
    assert (found.mean, found.sd, found.n) == (
        approx(np.mean(values)),
        approx(np.std(values, ddof=1)),
        4,
    )
    expected = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == approx(tuple(expected))
    assert found.text(100) == "81.8 ± 2.2"


def test_one_seed_has_no_deviation_and_no_interval():
    assert summarise([0.5]) == (0.5, None, 1, None, None)
    assert summarise([0.5]).text(100) == "50.0"
    assert summarise([]) == (None, None, 0, None, None)
    assert paired({0: 0.5}, {0: 0.2})[:7] == (0.3, 1, None, None, None, None, False)
    assert paired({0: 0.5}, {1: 0.2})[:8] == (None, 0, None, None, None, None, False, (0, 1))


def test_a_paired_difference_by_hand():
    """The differences are 1, 2 and 3: the mean is 2 and the margin 4.3027 / sqrt(3)."""
    found = paired({0: 11.0, 1: 22.0, 2: 33.0}, {2: 30.0, 1: 20.0, 0: 10.0, 7: 1.0})
    assert (found.mean, found.n, found.unpaired) == (2.0, 3, (7,))
    assert (found.low, found.high) == approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert (found.boot_low, found.boot_high, found.separated) == (None, None, False)
    # The half-width of the test examples, 1.96 * 0.5, joins that of the seeds as a root of squares.
    wide = paired({0: 11.0, 1: 22.0, 2: 33.0}, {2: 30.0, 1: 20.0, 0: 10.0}, variance=0.25)
    assert wide.high - 2 == approx(math.hypot(2.48414, 0.98), abs=1e-4)


def test_the_bootstrap_of_four_differences_by_hand():
    """Of 256 equally likely resamples of 0, 0, 0 and 4, 81 have the mean 0 and one the mean 4."""
    found = paired(dict.fromkeys(range(3), 1.0) | {3: 5.0}, dict.fromkeys(range(4), 1.0))
    assert (found.boot_low, found.boot_high) == (0.0, 3.0)
    wide = paired(
        dict.fromkeys(range(3), 1.0) | {3: 5.0}, dict.fromkeys(range(4), 1.0), variance=0.25
    )
    assert wide.boot_high - 1 == approx(math.hypot(2.0, 0.979982))


@pytest.mark.parametrize("n", [2, 3, 6])
def test_equal_differences_alone_separate_nothing(n):
    """Their intervals would have the width 0: only the test examples give them one."""
    a, b = ({seed: 0.1 * seed + up for seed in range(n)} for up in (0.05, 0.0))
    assert paired(a, b)[2:7] == (None, None, None, None, False)
    small, large = (paired(a, b, variance=2 * 0.16 / tests) for tests in (100, 10_000))
    assert (small.separated, large.separated) == (False, True)
    assert large.high - large.mean == approx(1.959964 * math.sqrt(2 * 0.16 / 10_000))


@pytest.mark.parametrize(
    ("difference", "sd", "needed"),
    [
        (0.5, 1.0, 34),  # the tables of Cohen (1988) and G*Power 3: a paired t test, power .8
        (0.8, 1.0, 15),
        (-0.2, 1.0, 199),
        (1.0, 1.0, 10),
        (1e3, 1e-9, 2),
        (1e-6, 1.0, None),
    ],
)
def test_the_needed_seeds_are_those_of_the_tables(difference, sd, needed):
    assert seeds_needed(difference, sd) == needed
    if needed is None or needed < 3:
        return
    for n in (needed - 1, needed):
        t, shift = scipy.stats.t.ppf(0.975, n - 1), math.sqrt(n) * abs(difference) / sd
        power = scipy.stats.nct.sf(t, n - 1, shift) + scipy.stats.nct.cdf(-t, n - 1, shift)
        assert (power >= 0.8) == (n == needed)


def test_the_deviation_of_few_seeds_can_be_far_larger():
    # 5 % quantiles of chi-square with 1, 2 and 9 degrees of freedom.
    expected = [math.sqrt(1 / 0.003932), math.sqrt(2 / 0.10259), math.sqrt(9 / 3.3251)]
    assert [largest_deviation(n) for n in (2, 3, 10)] == approx(expected, rel=1e-4)


def test_a_paired_difference_equals_scipy():
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.5, 0.1, 12), rng.normal(0.4, 0.1, 12)
    found = paired(dict(enumerate(a)), dict(enumerate(b)))
    t = scipy.stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (found.low, found.high) == approx(tuple(t))
    boot = scipy.stats.bootstrap(
        (a - b,), np.mean, n_resamples=100_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    width = boot.high - boot.low
    assert found.boot_low == approx(boot.low, abs=0.03 * width)
    assert found.boot_high == approx(boot.high, abs=0.03 * width)
    assert found == paired(dict(enumerate(a)), dict(enumerate(b))), "the resamples are seeded"


# Files.

TABLE = TextTable(
    "Accuracy & cost (α=0.1)",
    ["Method", "Accuracy (%)", "Cost_up"],
    [["[a]_b|c", Bold("81.2 ± 0.4"), "$3 ~ 5%"], ["μ\\x{", "-", 'say "−1", <2>']],
    ["Mean ± sd of 3 seeds; 100 % #1 ^2."],
)


def test_a_printed_table_has_aligned_columns():
    assert str(TABLE).split("\n") == [
        "Accuracy & cost (α=0.1)",
        "Method   Accuracy (%)        Cost_up",
        "[a]_b|c    81.2 ± 0.4        $3 ~ 5%",
        'μ\\x{                -  say "−1", <2>',
        "Mean ± sd of 3 seeds; 100 % #1 ^2.",
    ]


def test_markdown():
    lines = TABLE.markdown().split("\n")
    assert lines[0] == "**Accuracy & cost (α=0.1)**"
    assert lines[2:5] == [
        "| Method | Accuracy (%) | Cost\\_up |",
        "| --- | ---: | ---: |",
        "| \\[a\\]\\_b\\|c | **81.2 ± 0.4** | \\$3 \\~ 5% |",
    ]
    assert lines[-2] == TABLE.notes[0]


def test_latex_is_balanced_and_escaped():
    text = TABLE.latex()
    body = re.sub(r"\\textbackslash|\\[{}$&%#_]", "", text)
    depth = 0
    for c in body:
        depth += {"{": 1, "}": -1}.get(c, 0)
        assert depth >= 0
    assert depth == 0
    assert body.count("$") % 2 == 0
    assert re.findall(r"\\(begin|end)\{(\w+)\}", text) == [
        *(("begin", "table"), ("begin", "tabular"), ("end", "tabular"), ("end", "table")),
    ]
    rows = [line for line in text.split("\n") if line.endswith(r"\\")]
    assert len(rows) == 3
    assert all(len(re.findall(r"(?<!\\)&", row)) == 2 for row in rows)
    assert [text.index(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == sorted(
        text.index(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")
    )
    assert rows[1].strip() == (
        r"{}[a]\_b\textbar{}c & \textbf{\boldmath 81.2 $\pm$ 0.4} & \$3 \textasciitilde{} 5\% \\"
    )
    assert r"$\mu$\textbackslash{}x\{ & - & say ''$-$1'', \textless{}2\textgreater{}" in text
    assert text.isascii()


def test_the_three_files_are_written(tmp_path):
    paths = TABLE.write(tmp_path / "deep" / "lr=0.001")
    assert [path.name for path in paths] == ["lr=0.001.md", "lr=0.001.csv", "lr=0.001.tex"]
    assert paths[2].read_text() == TABLE.latex()
    with paths[1].open(newline="") as file:
        assert list(csv.reader(file)) == [TABLE.header, *TABLE.rows]


def test_csv_holds_no_formulas():
    """A name that a spreadsheet would run is a text there; scores and numbers stay."""
    names = ["=1+2", "+a", "-2+3+cmd|' /C calc'!D2", "@sum(1)", "\t=1", "＝1", "-1 -HYPERLINK(1)"]
    kept = ["a=1", "-1", "+1.2", "-0.5 ± 0.25", "+1.2 (−0.1 to 2)", "-1e-05", "-", "−3", "a-b"]
    kept += ["+1.9 [+0.9, +3.0], p = .034", "+0.0 n.s."]
    rows = [[name, *kept] for name in names]
    header = ["=head", *kept]
    for text in (
        TextTable("", header, rows).csv(),
        table_csv(dict(zip(header, row, strict=True)) for row in rows),
    ):
        head, *read = csv.reader(text.splitlines())
        assert head == ["'=head", *kept]
        assert read == [[f"'{name}", *kept] for name in names]
    assert table_csv([{"a": -2, "b": -0.5}]) == "a,b\n-2,-0.5\n"
