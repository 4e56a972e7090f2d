"""The configs and scripts of ``experiments/federa``."""

import importlib
import itertools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from closeness import approx
from internals import config as configs
from internals import sweeps as plans
from made_runs import columns, read_table, resolved, write_run, write_sweep
from shallow import no_drawings  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_drawings")

FOLDER = Path(__file__).parents[1] / "experiments" / "federa"
CONFIGS = sorted(FOLDER.rglob("*.toml"))
NAMES = ("printed", "federations", "stages", "tables", "figures")


@pytest.fixture(scope="module")
def scripts():
    """Yields the modules of the folder; other folders of experiments have equal names."""
    before = {name: sys.modules.pop(name, None) for name in NAMES}
    sys.path.insert(0, str(FOLDER))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    sys.path.remove(str(FOLDER))
    for name, module in before.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module


# ---------------------------------------------------------------------------------------- configs


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_configs_say_how_they_are_swept(path):
    found = configs.load(path)
    methods = resolved(path)
    swept = found["sweep"]
    if path.parent != FOLDER:
        assert "seed" in swept["grid"]
        assert f"experiments/federa/{path.parent.name}/{path.name}" in path.read_text()
    if "choose_by" in swept:
        assert swept["choose_by"].startswith("validation_")
        own = found["data"]["name"] == "wnut17"  # with a validation split of its own
        assert own or found["data"]["validation_share"] == 0.1
    if "baseline" in swept:
        assert swept["baseline"] in methods
    for one in methods.values():
        assert one["partition"]["mode"] == "client_prior"
        # The paper's beta = r.
        assert one["peft"].get("alpha") in (None, one["peft"].get("rank"))


@pytest.mark.slow  # every point of one seed is resolved
@pytest.mark.parametrize("folder", ["paper", "small"])
@pytest.mark.sample("small")
def test_configs_say_how_many_points_they_have(folder):
    for path in (FOLDER / folder).glob("*.toml"):
        raw = configs.load(path)
        seeds = raw["sweep"]["grid"]["seed"]
        assert len({*seeds}) == len(seeds)
        said = int(re.search(r"^# (\d+) points", path.read_text(), re.MULTILINE).group(1))
        raw["sweep"]["grid"]["seed"] = seeds[:1]
        assert len(plans.plan(raw).points) * len(seeds) == said, path.name


def test_the_first_sweep_has_its_points():
    """The command in the head of 20news.toml."""
    path = FOLDER / "20news.toml"
    command = re.search(r"fedjax-peft sweep (.*) --out runs/lr", path.read_text()).group(1)
    _, *overrides = command.split()
    found = plans.plan(configs.load(path), overrides)
    assert len(found.points) == 15
    assert found.keys == ["seed", "optimizer.learning_rate"]
    assert found.choose_by == "validation_accuracy"


def test_small_configs_have_three_rates_and_three_seeds():
    tables = ("20news", "semeval", "wnut17", "ploner", "squad", "mrqa")
    for name in tables:
        found = configs.load(FOLDER / "small" / f"{name}.toml")
        assert len(found["methods"]) == 5
        assert found["sweep"]["grid"]["seed"] == [0, 1, 2]
        for method in found["methods"].values():
            rates = method["sweep"]["grid"]["optimizer.learning_rate"]
            assert len(rates) == 3
            assert rates == sorted(rates)
        for one in resolved(FOLDER / "small" / f"{name}.toml").values():
            assert one["rounds"] * one["clients_per_round"] * one["local_steps"] <= 500


def test_paper_configs_have_the_rows_of_table_1(scripts):
    for data, row in scripts.printed.FEDERATIONS.items():
        for method, one in resolved(FOLDER / "paper" / f"{row.sweep}.toml").items():
            part = one["partition"]
            found = (part["clients"], one["clients_per_round"], part["alpha"])
            assert found == (row.clients, row.clients_per_round, row.alpha), (data, method)
            assert (one["data"]["max_length"], one["rounds"]) == (row.length, row.rounds[-1])
            assert (one["batch_size"], one["epochs"], one["local_steps"]) == (16, 1, None)
            assert one["preset"] in scripts.printed.METHODS
            every = one["evaluation"]["every"]
            assert all(r % every == 0 for r in row.rounds), "a column is a test"


# ------------------------------------------------------------- tables from data and the cost model


def cells(table, *wanted):
    """Returns the row of a table that starts with these cells, as heading -> cells."""
    rows = [row for row in table.rows if tuple(row[: len(wanted)]) == wanted]
    assert len(rows) == 1, [row[:2] for row in table.rows]
    return rows[0]


@pytest.mark.slow
def test_table_8_has_the_cells_of_the_paper(scripts):
    table = scripts.stages.table8()
    assert len(table.rows) == 2 * 3 * 4, "two models, three data sets, four columns of the paper"
    assert cells(table, "RoBERTa", "WNUT", "FedFT")[3:] == ["4.62", "8", "0.578", *["109.67"] * 2]
    assert cells(table, "DeBERTaV3", "SQuAD", "FedBF")[3:6] == ["29.51", "19", "1.553"]
    for row in table.rows:
        assert row[-1] == row[-2], row


def test_configs_have_the_seconds_of_table_8(scripts):
    """WNUT's and SQuAD's are in their configs, 20 Newsgroups' in the presets."""
    for data, name in (("WNUT", "wnut17"), ("SQuAD", "squad")):
        for one in configs.methods(configs.load(FOLDER / "paper" / f"{name}.toml")).values():
            label = scripts.printed.STAGES[scripts.printed.METHODS[one["preset"]]]
            printed = scripts.printed.PAPER.value("8", f"RoBERTa {data}", f"{label} training")
            steps = scripts.printed.STEPS[data]
            assert steps * one["time"]["seconds_per_step"] == approx(printed, abs=1e-3)


@pytest.mark.slow
def test_table_9_has_the_budgets(scripts):
    table = scripts.stages.table9()
    counted = {(row[1], row[2]): row[3] for row in table.rows}
    assert counted["FedLR & FeDeRA", "rank 3"] == "110,592"
    assert counted["FedLR & FeDeRA", "rank 128"] == "4,718,592"
    assert cells(table, "4.8", "FedLR & FeDeRA")[4::2] == ["4.04", "4.55"]
    assert cells(table, "0.1", "FedBF")[4:] == ["3.15", "0.96", "0.96"]
    assert counted["FedAP", "width 128"] == "4,740,096"
    for row in table.rows:
        if row[1] == "FedLR & FeDeRA":  # whole ranks miss the budgets a little
            assert float(row[-2]) == approx(float(row[-1]), abs=0.035)


@pytest.mark.slow
def test_table_1_on_stand_ins(scripts):
    table = scripts.tables.table1(scripts.tables.Source(data="tiny"))
    assert [row[0] for row in table.rows] == [
        *("20News", "SemEval", "WNUT", "PLONER", "SQuAD", "MRQA")
    ]
    assert all(float(row[-1]) > 0 for row in table.rows)
    assert cells(table, "SemEval")[2:5] == ["8k / 2.7k", "19", "19"]
    assert cells(table, "SQuAD")[5:] == ["300", "15", "0.1", "384", "50, 100", table.rows[4][-1]]


def test_data_that_are_not_at_hand_are_named(scripts, tmp_path):
    source = scripts.tables.Source(data=str(tmp_path))
    for table in (scripts.tables.TABLES["T6"](source), scripts.tables.TABLES["T7"](source)):
        assert not table.rows
        assert "is not at hand" in table.notes[-1]


def test_classes_of_sentences_by_hand(scripts, tmp_path):
    (tmp_path / "wnut17").mkdir()
    tags = [["B-person", "I-person", "O", "B-location"], ["B-location", "B-person", "O", "O"]]
    tags += [["O"] * 4]
    lines = [json.dumps({"tokens": list("abcd"), "tags": one}) for one in tags]
    for split in ("train", "validation", "test"):
        (tmp_path / "wnut17" / f"{split}.jsonl").write_text("\n".join(lines))
    table = scripts.tables.TABLES["T6"](scripts.tables.Source(data=str(tmp_path)))
    tags, joined = "B-person I-person B-location", "B-person-I-person-B-location"
    assert table.rows[0] == [tags, joined, "location-person", "2"]
    assert table.rows[1] == ["O", "O", "O", "1"]
    shown = scripts.tables.TABLES["T6"](scripts.tables.Source(data=str(tmp_path), sentences=True))
    assert shown.rows[1][-1] == "a b c d"


def test_distances_are_those_of_the_partition(scripts):
    corpus = scripts.federations.Corpus(40, 0, np.repeat([0, 1], 20), ("a", "b"), ("a", "b"))
    far = scripts.federations.distances(corpus, 4, 1e-3)
    near = scripts.federations.distances(corpus, 4, 1e6)
    assert far.max() == approx(1.0), "one class each"
    assert near.max() < 0.01, "the same shares"
    mixed = corpus._replace(classes=np.repeat([0, 1, 2], [30, 8, 2]), names=("a", "b", "c"))
    totals = scripts.federations.distances(mixed, 8, 1.0).sum(axis=1)
    assert totals[0] > totals[-1]
    assert (np.diff(totals) <= 1e-12).all(), "the most distant client first"


# -------------------------------------------------------------------------------- tables of sweeps

SYSTEMS = {**{f"fed{x}": f"federa/fed{x}" for x in ("ft", "bf", "ap", "lr")}, "federa": "federa"}


def made(method, seed, scores, settings, sent=1024, **fields):
    """Returns the config and the rows of a run that was evaluated after the rounds 0, 4 and 8.

    Args:
      method: a key of ``SYSTEMS``, perhaps with a size after it.
      seed: of the run.
      scores: metric -> its three values.
      settings: dotted key -> value.
      sent: the parameters of the adapter.
      **fields: further fields and their three values.
    """
    config = {
        "name": method,
        "preset": SYSTEMS[method.partition("_")[0]],
        "seed": seed,
        "evaluation.every": 4,
        "clients_per_round": 5,
        "data.name": "20newsgroups",
        "partition.clients": 10,
        "optimizer.learning_rate": 0.1,
        **settings,
    }
    rows = columns(
        round=(0, 4, 8),
        **scores,
        **fields,
        simulated_seconds=(0.0, 900.0, 1800.0),
        bytes_up=(0.0, 1e6, 2e6),
    )
    rows[0]["parameters"] = {"adapter": sent, "head": 10, "frozen": 100}
    return config, rows


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    """Returns the folder of the sweeps ``20news`` and ``alpha``.

    In ``20news``, the rate 0.2 is best on validation and 0.1 on test.
    """
    runs = tmp_path_factory.mktemp("runs")
    swept: dict[str, list] = {"optimizer.learning_rate": [], "partition.alpha": []}
    for m, method in enumerate(SYSTEMS):
        for rate, (validation, test) in {0.1: (0.5, 0.9), 0.2: (0.6, 0.701)}.items():
            for seed in range(3):
                final = test + m / 100 + seed / 50
                scores = {"test_accuracy": (0.05, final - 0.1, final)}
                scores["validation_accuracy"] = (0.0, 0.0, validation)
                one = made(method, seed, scores, {"optimizer.learning_rate": rate})
                swept["optimizer.learning_rate"].append(one)
        for alpha, seed in itertools.product((0.1, 1.0, 10.0), range(2)):
            scores = {"test_accuracy": (0.05, 0.3 + seed / 10, 0.5 + seed / 10)}
            swept["partition.alpha"].append(made(method, seed, scores, {"partition.alpha": alpha}))
    for name, (key, found) in zip(("20news", "alpha"), swept.items(), strict=True):
        head = {"choose_by": "validation_accuracy", "baseline": "fedlr", "keys": ["seed", key]}
        write_sweep(runs / name, found, **head)
    return runs


def test_table_2_by_hand(scripts, sweeps):
    """Methods differ by .01, seeds by .02; the rate of the best validation score counts."""
    table = scripts.tables.table2(scripts.tables.Source(sweeps))
    assert table.header[3:] == [
        *("20News, round 0", "20News, round 4", "20News, round 8")[1:],
        "20News − FedLR [95 %]",
        "RoBERTa: 20News, rounds 200 / 500 / 1000",
        "RoBERTa: 20News − FedLR",
    ]
    # Scores .701, .721, .741 of FedFT, with a standard deviation of .02.
    assert cells(table, "FedFT") == [
        *("FedFT", "1,024", "125M", "62.1 ± 2.0", "72.1 ± 2.0"),
        "-3.0",
        *("79.56 ± 0.6 / 82.71 ± 0.2 / 83.67 ± 0.3", "+3.42"),
    ]
    assert cells(table, "FedLR")[5::2] == ["-"] * 2
    assert cells(table, "FeDeRA")[5::2] == ["+1.0", "+1.96"]
    notes = " ".join(table.notes)
    assert "SemEval: no sweep 'semeval' was found." in notes
    assert "FedFT 0.2, FedBF 0.2" in notes
    assert "chosen by the mean of validation_accuracy" in notes


def test_a_choice_on_test_is_named(scripts, sweeps):
    study = scripts.tables.read_study(sweeps / "20news")
    for metric, warned in (("test_accuracy", True), ("validation_accuracy", False)):
        notes = " ".join(scripts.tables.chosen_by("20News", study.choice(metric)))
        assert notes.count("20News: The settings were chosen") == 1
        assert metric in notes
        assert ("optimistic" in notes) == warned, notes


def test_table_5_by_hand(scripts, sweeps):
    """The paper's target is .8. Two of FedFT's runs reach 90 % of it, and all of FeDeRA's do."""
    table = scripts.tables.table5(scripts.tables.Source(sweeps))
    # Finals of FedFT: .701, .721, .741; 90 % of .8 is .72.
    assert cells(table, "20News", "90", "FedFT")[3:] == ["2 of 3", *"----", "5.60", "13.27"]
    # Finals of FeDeRA: .741, .761, .781 in round 8 after 900 + 1800 s and 3 MB.
    row = cells(table, "20News", "90", "FeDeRA")
    assert row[3:7] == ["3 of 3", "8 ± 0", "3.0 ± 0.0", "0.750 ± 0.000"]
    assert float(row[7]) == approx((8 * 4.95 + 8.62) / 3600, abs=0.006)
    assert row[8] == "0.17"
    assert cells(table, "20News", "99", "FeDeRA")[3] == "0 of 3"
    assert any("no sweep 'squad'" in note for note in table.notes)


def test_a_target_out_of_reach_is_replaced(scripts, sweeps):
    study = scripts.tables.read_study(sweeps / "alpha")
    # Full fine-tuning does not set the target, however good it is.
    cells_of = {"FedLR": study.cells[0], "FedFT": study.cells[-1]}
    target = scripts.printed.TARGETS[0]
    value, note = scripts.tables.target_value(target, cells_of)
    assert value == approx(0.55)
    assert "no PEFT method came near the paper's target of 80 %" in note


def test_tables_are_written_in_three_forms(scripts, sweeps, tmp_path, capsys):
    scripts.tables.main(["T2", "T5", "--runs", str(sweeps), "--out", str(tmp_path)])
    names = {f"table_{n}.{end}" for n in "25" for end in ("md", "csv", "tex")}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "Table 2" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        scripts.tables.main(["T10"])


# -------------------------------------------------------------------------------- figures of sweeps


@pytest.mark.slow
def test_scores_against_alpha(scripts, sweeps, tmp_path, capsys):
    scripts.figures.main(["F1", "F5", "clients", "--runs", str(sweeps), "--out", str(tmp_path)])
    assert "clients: not drawn, no sweep 'clients'" in capsys.readouterr().out
    first, fifth = (read_table(tmp_path / f"figure_{n}.csv") for n in "15")
    assert {row["name"] for row in first} == {"FedFT", "FedBF", "FedAP", "FedLR"}
    assert {row["name"] for row in fifth} == {"FedFT", "FedBF", "FedAP", "FedLR", "FeDeRA"}
    found = {
        (row["round"], row["partition.alpha"], row["seed"]): float(row["value"])
        for row in fifth
        if row["name"] == "FeDeRA"
    }
    assert found["8", "0.1", "1"] == approx(60)
    assert found["4", "10", "0"] == approx(30)
    assert (tmp_path / "figure_5.pdf").exists()


def write_budgets(root, finals):
    """Writes the sweep ``budget``: (method, rank) -> the seeds' accuracies in the last round."""
    runs = [
        made(method, seed, {"test_accuracy": (0.1, 0.3, final)}, {"peft.rank": rank}, 1024 * rank)
        for (method, rank), values in finals.items()
        for seed, final in enumerate(values)
    ]
    write_sweep(root / "budget", runs)


@pytest.mark.slow
def test_budgets_and_the_time_to_targets(scripts, tmp_path):
    methods = (("fedlr_2", 2), ("fedlr_8", 8), ("federa_2", 2), ("fedft", 32))
    write_budgets(tmp_path / "runs", {one: (0.5 + one[1] / 100,) * 2 for one in methods})
    scripts.figures.main(["F6", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)])
    rows = read_table(tmp_path / "figure_6.csv")
    found = {(row["quantity"], row["name"], row["parameters"]): row["value"] for row in rows}
    assert float(found["accuracy", "FedLR", "8192"]) == approx(58)
    assert float(found["accuracy", "FeDeRA", "2048"]) == approx(52)
    # The best final is .82: the targets are the paper's .76 and .80, which only FedFT reaches.
    hours = [row for row in rows if row["quantity"] == "hours to 0.760"]
    assert {row["name"] for row in hours} == {"FedFT"}
    assert float(hours[0]["value"]) == approx(0.75)


@pytest.mark.slow
def test_times_are_drawn_where_all_seeds_reach_the_target(scripts, tmp_path):
    write_budgets(tmp_path, {("fedlr_2", 2): (0.9, 0.5), ("fedlr_8", 8): (0.9, 0.9)})
    fig, rows, _ = scripts.figures.figure6(scripts.tables.Source(tmp_path, None))
    assert [line.get_xdata().tolist() for line in fig.axes[1].lines] == [[8192.0]]
    assert sum(row["quantity"] == "hours to 0.760" for row in rows) == 3


@pytest.mark.slow
def test_variation_by_layer(scripts, tmp_path, capsys):
    paths = [
        f"bert.encoder.layer.{i}.attention.self.{m}" for i in (0, 1, 2) for m in ("query", "value")
    ]
    layers = [
        {
            f"variation_{measure}_{factor}": {
                path: 10 * r + i + (factor == "b") / 2 + (measure == "direction") / 4
                for i, path in enumerate(paths)
            }
            for measure in ("magnitude", "direction")
            for factor in "ab"
        }
        for r in (0, 4, 8)
    ]

    def times(share):
        return [{n: {p: share * x for p, x in v.items()} for n, v in row.items()} for row in layers]

    for method, shares in {"fedlr": (1.0, 1.0), "federa": (0.5, 0.75)}.items():
        for seed, share in enumerate(shares):
            scores = {"test_accuracy": (0, 0, 0)}
            one = made(method, seed, scores, {}, layers=times(share))
            write_run(tmp_path / "runs" / "variation" / f"{method}{seed}", *one)
    scripts.figures.main(["F3", "F9", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)])
    ends = read_table(tmp_path / "figure_3.csv")
    between = read_table(tmp_path / "figure_9.csv")
    assert {row["module"].split(",")[0] for row in ends} == {"layer 0", "layer 2"}
    assert {row["module"].split(",")[0] for row in between} == {"layer 1"}
    assert len({row["module"] for row in ends}) == 8, "panels a to h"
    value = {
        (row["module"], row["round"]): float(row["value"])
        for row in between
        if row["name"] == "FedLR"
    }
    assert value["layer 1, v, lora_B", "2"] == approx(10 * 8 + 3 + 0.5 + 0.25)
    source = scripts.figures.Source(tmp_path / "runs")
    for number, like in {4: ends, 8: between}.items():
        _, rows, caption = scripts.figures.FIGURES[f"F{number}"](source)
        assert {row["module"] for row in rows} == {row["module"] for row in like}
        assert caption.startswith(f"Figure {number}: change of")
        # The interval of .5 and .75: t with one degree of freedom is 12.706.
        assert caption.endswith("A 0.625 [-0.963, 2.213], B 0.625 [-0.963, 2.213].")


@pytest.mark.slow
def test_heat_maps_on_a_stand_in(scripts, tmp_path, capsys):
    scripts.figures.main(["F7_semeval2010_task8", "--data", "tiny", "--out", str(tmp_path)])
    rows = read_table(tmp_path / "figure_7_semeval2010_task8.csv")
    skewed, even = (
        np.mean([float(row["mean_distance"]) for row in rows if row["alpha"] == alpha])
        for alpha in ("0.1", "100")
    )
    assert skewed > even
    assert "sorted by their mean distance" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- README


def test_index_names_every_table_and_figure(scripts):
    text = (FOLDER.parent / "README.md").read_text()
    index = text[text.index("### FeDeRA") : text.index("### FedAdapters")]
    named = set(re.findall(r"\b[TF]\d\b", index))
    assert named == {f"T{i}" for i in range(1, 10)} | {f"F{i}" for i in range(1, 10)}
    drawn = {name.partition("_")[0] for name in scripts.figures.FIGURES} - {"clients"}
    assert {*scripts.tables.TABLES} | drawn | {"F2"} == named
