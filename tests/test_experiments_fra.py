"""``experiments/fra``: its configs resolve, and its script makes the paper's tables."""

import json
import math
import runpy
from pathlib import Path

import pytest
from closeness import approx
from made_runs import begin_sweep, read_table, write_run
from shallow import simple_encoder  # noqa: F401

from fedjax_peft import testing
from fedjax_peft.config import config

FOLDER = Path(__file__).parents[1] / "experiments" / "fra"
SCRIPT = runpy.run_path(str(FOLDER / "tables.py"))
PRIVATE = runpy.run_path(str(FOLDER / "private.py"))
EXACT = runpy.run_path(str(FOLDER / "exact.py"))
CHOSEN = runpy.run_path(str(FOLDER.parent / "chosen.py"))
SPLITS = ("sst2_iid", "mnli_iid", "sst2_skew", "mnli_skew")


def methods(path, overrides=()):
    """Returns method -> (its resolved config, its table ``[sweep]``)."""
    raw = config.load(path)
    sweep = raw.pop("sweep")
    found = config.methods(raw, overrides)
    return {name: (config.resolve(one), sweep["grid"]) for name, one in found.items()}


@pytest.mark.parametrize("size", ["paper", "small"])
@pytest.mark.parametrize("split", SPLITS)
def test_configs_have_the_papers_methods_and_splits(size, split):
    found = methods(FOLDER / size / f"{split}.toml")
    data, kind = split.split("_")
    expected = ["fedavg", "ffa", "fra"]
    assert list(found) == (["centralised", *expected] if kind == "iid" else expected)
    shares = SCRIPT["SHARES"][data].values()
    for name, (one, grid) in found.items():
        assert one["data"]["name"] == data
        assert len(grid["seed"]) == 3
        assert (one["peft"]["name"], one["peft"]["rank"]) == ("lora", 16)
        assert (one["optimizer"]["name"], one["optimizer"]["weight_decay"]) == ("adamw", 0.005)
        if size == "paper":
            assert (one["rounds"], one["optimizer"]["learning_rate"]) == (30, 1e-4)
            assert one["model"]["dropout"] == 0.2
            assert one["evaluation"]["diagnostics"] == ([] if name == "centralised" else ["local"])
            assert not one["preset_changes"], "the preset's numbers"
        else:
            assert len(grid["optimizer.learning_rate"]) == 3
            assert one["data"]["validation_share"] == 0.1
            assert one["rounds"] >= SCRIPT["FIRST"]
        partition = dict(one["partition"])
        if name == "centralised":
            assert partition["name"] == "pooled"
            local = found["fedavg"][0]["local_steps"]
            assert local is None or one["local_steps"] == 2 * local
        elif kind == "iid":
            assert (partition["name"], partition["clients"]) == ("iid", 2)
        else:
            assert partition["name"] == "label_share"
            assert [[round(100 * x) for x in row] for row in partition["shares"]] == [
                list(row) for row in shares
            ]
    assert found["fra"][0]["aggregator"]["name"] == "fra"
    assert found["ffa"][0]["algorithm"]["name"] == "ffa"


@pytest.mark.parametrize(("number", "split"), list(enumerate(SPLITS, start=3)))
def test_figures_3_to_6_have_local_models_of_the_tables_settings(number, split):
    figure = methods(FOLDER / "small" / f"figure{number}.toml")
    table = methods(FOLDER / "small" / f"{split}.toml")
    assert list(figure) == ["fedavg", "ffa", "fra"]
    for name, (one, _) in figure.items():
        assert one["evaluation"]["diagnostics"] == ["local"]
        assert one["evaluation"]["every"] == 1
        for key in ("partition", "model", "peft", "algorithm", "aggregator", "batch_size"):
            assert one[key] == table[name][0][key]


# -------------------------------------------------------------------------------------- the script


def write_sweep(root, scores, *, data, split, rates=(0.1, 0.2), local=False, examples=500):
    """Writes made-up runs: ``scores`` is method -> final accuracy of seed 0 at the second rate.

    On validation examples, the second rate is the best; on test examples, it is the first. The best
    round is one point above the final one.
    """
    keys = ["seed", "optimizer.learning_rate"]
    begin_sweep(root, keys=keys, baseline="fedavg", choose_by="validation_accuracy")
    for method, top in scores.items():
        for rate in rates:
            for seed in (0, 1, 2):
                final = top + 0.01 * seed + (0.3 if rate != rates[-1] else 0.0)
                rows = []
                for i, score in enumerate((0.1, final + 0.01, *[final] * 7)):
                    rows.append({"round": i, "test_accuracy": score, "headline": "accuracy"})
                    rows[-1] |= {"validation_accuracy": rate, "headline_better": "higher"}
                    error = 0.1 * i if method == "fedavg" else 0.01 * i
                    rows[-1] |= {"aggregation_error": error, "aggregation_error_relative": error}
                    if local and i:
                        each = [0.1 * i, 0.5]
                        rows[-1] |= {"local_accuracy": each, "clients": [0, 1]}
                        rows[-1]["local_accuracy_mean"] = sum(each) / 2
                partition = {"name": {"iid": "iid", "skew": "label_share"}[split]}
                if method == "centralised":
                    partition = {"name": "pooled"}
                settings = {
                    "name": method,
                    "seed": seed,
                    "rounds": 8,
                    "model": {"name": "google/tiny"},
                    "data": {"name": data, "test_examples": examples},
                    "partition": partition,
                    "optimizer": {"name": "adamw", "learning_rate": rate},
                }
                write_run(root / method / f"learning_rate={rate},seed={seed}", settings, rows)
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of the script's files for made-up runs, in one folder of sweeps."""
    root = tmp_path_factory.mktemp("fra")
    three = {"fedavg": 0.50, "ffa": 0.45, "fra": 0.52}
    four = {"centralised": 0.6, **three}
    for data, more in (("sst2", 0.1), ("mnli", 0.0)):
        for split, scores in (("iid", four), ("skew", three)):
            own = {name: score + more for name, score in scores.items()}
            write_sweep(root / "runs" / f"{data}-{split}", own, data=data, split=split)
    rate = {"rates": (0.1,), "local": True, "examples": 200}
    wrong = dict.fromkeys(four, 0.9)  # the runs of a figure are not those of the tables
    write_sweep(root / "runs" / "local", wrong, data="mnli", split="skew", **rate)
    SCRIPT["main"]([str(root / "runs"), "--out", str(root / "out")])
    return root / "out"


def test_tables_1_and_3_have_best_and_final_accuracies(made):
    first = {row["method"]: row for row in read_table(made / "table1.csv")}
    fra = first["FRA-LoRA"]
    assert (fra["SST-2: best"], fra["MNLI: best"]) == ("64.0 ± 1.0", "54.0 ± 1.0")
    printed = {
        name: [row[f"{data}: paper: best"] for data in ("SST-2", "MNLI")]
        for name, row in first.items()
    }
    assert printed["FRA-LoRA"] == ["94.95", "85.38"]
    assert printed["centralised"] == ["94.72", "86.03"]
    assert fra["SST-2: final"] == "63.0 ± 1.0"
    assert fra["MNLI: minus FedAvg"] == "+2.0"
    assert fra["SST-2: learning rate"] == "0.2", "chosen on validation examples"
    third = {row["method"]: row for row in read_table(made / "table3.csv")}
    fedavg = list(third["FedAvg-LoRA"].values())
    assert fedavg[1:4] == ["62.0 ± 1.0", "93.12", "61.0 ± 1.0"]
    assert third["centralised"]["SST-2: best"] == "72.0 ± 1.0", "of the IID sweep"
    assert third["centralised"]["MNLI: best"] == "62.0 ± 1.0", "not of the runs of a figure"
    assert "optimistic" in (made / "table3.md").read_text()


def test_tables_2_and_4_have_the_shares_of_labels(made):
    two, four = (read_table(made / f"table{n}.csv") for n in (2, 4))
    assert [list(row.values())[:3] for row in two] == [
        ["negative", "90", "10"],
        ["positive", "10", "90"],
    ]
    assert [row["paper: client 1 %"] for row in four] == ["70", "20", "20"]
    assert "could not be read" in (made / "table4.md").read_text(), "made-up runs have no data"


def test_figures_have_their_data_beside_them(made):
    local = read_table(made / "figure6.csv")
    fra = [r for r in local if (r["name"], r["client"], r["seed"]) == ("FRA-LoRA", "1", "0")]
    expected = [10, 15, 20, 25, 30, 35, 40, 50]  # rolling mean of at most 7 of 10, 20, ..., 80
    assert [float(row["value"]) for row in fra] == approx(expected)
    errors = read_table(made / "figure7.csv")
    assert {row["name"] for row in errors} == {"FedAvg-LoRA", "FRA-LoRA"}
    assert [float(r["value"]) for r in errors[:8]] == approx([0.1 * i for i in range(1, 9)])
    assert not (made / "figure3.csv").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("simple_encoder")
def test_the_script_reads_real_runs_of_the_small_config(tmp_path):
    testing.write_tiny_checkpoint(tmp_path / "model")
    overrides = [
        "rounds=2",
        "evaluation.every=1",
        "local_steps=1",
        "batch_size=4",
        "data.source=tiny",
    ]
    overrides += [
        f"model.name={tmp_path / 'model'}",
        "data.max_length=8",
        "peft.rank=2",
        "data.test_examples=40",
    ]
    found = methods(FOLDER / "small" / "figure6.toml", overrides)
    sweep = tmp_path / "sweep"
    for name in ("fedavg", "fra"):
        config.run(found[name][0], out=sweep / name / "seed=0")
    (sweep / "sweep.toml").write_text('keys = ["seed"]\nbaseline = "fedavg"\n')
    SCRIPT["main"]([str(sweep), "--out", str(tmp_path / "out")])
    assert len(read_table(tmp_path / "out" / "figure6.csv")) == 2 * 2 * 2
    assert len(read_table(tmp_path / "out" / "figure7.csv")) == 2 * 2 * 2
    counts = read_table(tmp_path / "out" / "table4.csv")
    ours = [[int(row[f"ours: client {k}"]) for k in (1, 2)] for row in counts]
    assert [round(a / (a + b), 1) for a, b in ours] == [0.7, 0.2, 0.2]
    rows = json.loads((sweep / "fra" / "seed=0" / "metrics.jsonl").read_text().split("\n")[2])
    table = {row["method"]: row for row in read_table(tmp_path / "out" / "table3.csv")}
    assert table["FRA-LoRA"]["MNLI: final"] == f"{100 * rows['test_accuracy']:.1f}"


# ------------------------------------------------------------------------------ privacy


@pytest.mark.parametrize("unit", ["clients", "examples"])
def test_private_configs_have_the_papers_methods_and_all_epsilon(unit):
    found = methods(FOLDER / "small" / f"private_{unit}.toml")
    assert list(found) == ["fedavg", "ffa", "fra"]
    for one, grid in found.values():
        assert (one["data"]["name"], one["peft"]["rank"]) == ("sst2", 4)
        assert grid["privacy.epsilon"] == [1.0, 3.0, 6.0, 10.0, math.inf]
        assert grid["seed"] == [0, 1, 2]
        # Clients, or the examples of a step, are drawn as the accountant assumes.
        assert one["sampling" if unit == "clients" else "batch_sampling"] == "poisson"
        assert one["privacy"]["delta"] < 1 / one["partition"]["clients"]


def write_private(root, scores):
    """Writes made-up runs: ``scores`` is (method, ε) -> accuracy of seed 0 at the second clip norm.

    On validation examples the second norm is the best; on test examples the first is.
    """
    begin_sweep(root, keys=["seed", "privacy.epsilon", "privacy.clip"], baseline="fedavg")
    for (method, epsilon), score in scores.items():
        for clip in (0.1, 0.3):
            for seed in (0, 1, 2):
                row = {"round": 1, "headline": "accuracy", "headline_better": "higher"}
                row["test_accuracy"] = score + 0.01 * seed + (0.2 if clip == 0.1 else 0)
                row |= {"validation_accuracy": clip} | ({"snr": 0.5} if method == "fra" else {})
                privacy = {"name": "central", "epsilon": epsilon, "clip": clip, "delta": 1e-4}
                settings = {"name": method, "seed": seed, "rounds": 1, "privacy": privacy}
                start = {"round": 0, "headline": "accuracy", "headline_better": "higher"}
                folder = root / method / f"clip={clip},epsilon={epsilon},seed={seed}"
                write_run(folder, settings, [start, row])
    return root


def test_private_tables_choose_for_each_epsilon_and_compare_with_no_noise(tmp_path):
    scores = {("fedavg", 1.0): 0.5, ("fedavg", math.inf): 0.7}
    scores |= {("fra", 1.0): 0.45, ("fra", math.inf): 0.72}
    sweep = write_private(tmp_path / "private_clients", scores)
    PRIVATE["main"]([str(sweep), "--out", str(tmp_path / "out")])
    rows = {(r["method"], r["ε"]): r for r in read_table(tmp_path / "out" / "private_clients.csv")}
    one = rows["FRA-LoRA", "1"]
    assert one["accuracy"] == "46.0 ± 1.0"
    assert one["minus FedAvg"] == "-5.0"
    assert one["minus own ε = ∞"] == "-27.0"
    assert (one["setting"], one["snr"]) == ("clip=0.3", "0.5")
    assert rows["FRA-LoRA", "∞"]["minus own ε = ∞"] == "-"
    drawn = read_table(tmp_path / "out" / "private.csv")
    assert {row["epsilon"] for row in drawn} == {"1", "inf"}
    assert len(drawn) == 2 * 2 * 3


# --------------------------------------------------------- exact aggregation by rate and rank


def test_the_config_of_exact_aggregation_has_equal_settings():
    found = methods(FOLDER / "small" / "exact.toml")
    assert list(found) == list(dict.fromkeys([*found, *EXACT["METHODS"]]))
    assert found.keys() == EXACT["METHODS"].keys()
    for one, grid in found.values():
        assert (one["sampling"], one["partition"]["clients"]) == ("all", 10)
        assert len(grid["optimizer.learning_rate"]) == 4, "as many rates for every method"
        assert grid["seed"] == [0, 1, 2]
        assert one["rounds"] // one["evaluation"]["every"] == 10
    assert found["fra"][0]["aggregator"]["name"] == "fra"
    assert found["lora_fair"][0]["aggregator"]["name"] == "lora_fair"


def write_exact(root, gaps, seeds, rates=(0.1, 0.2)):
    """Writes made-up runs: ``gaps`` is method -> what it has over .5 + seed / 100, in the end.

    The first evaluation after the start is .2 below the last. The rate .2 is the best on
    validation, and .1 higher on test.
    """
    begin_sweep(root, keys=["seed", "optimizer.learning_rate"], baseline="fedavg")
    for method, gap in gaps.items():
        for rate in rates:
            for seed in seeds:
                end = 0.5 + seed / 100 + gap * (1 + seed) + rate
                rows = []
                for i, score in enumerate((0.1, end - 0.2, end)):
                    row = {"round": i, "test_accuracy": score, "validation_accuracy": rate}
                    row |= {"headline": "accuracy", "headline_better": "higher"}
                    rows.append(row | ({"aggregation_error_relative": rate / i} if i else {}))
                settings = {"name": method, "seed": seed, "rounds": 2, "model": {"name": "tiny"}}
                settings |= {"data": {"name": "20newsgroups", "test_examples": 100}}
                settings["optimizer"] = {"name": "adamw", "learning_rate": rate}
                write_run(root / method / f"learning_rate={rate},seed={seed}", settings, rows)


def test_exact_aggregation_is_compared_at_each_rate_and_at_the_chosen_one(tmp_path):
    gaps = {"fedavg": 0.0, "fra": 0.01}
    write_exact(tmp_path / "runs" / "rank4", gaps, (0, 1, 2))
    write_exact(tmp_path / "runs" / "fresh_rank4", gaps, (3, 4), rates=(0.2,))
    EXACT["main"]([str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    rows = {(r["method"], r["rate"]): r for r in read_table(tmp_path / "out" / "exact_rank4.csv")}
    fra = rows["FRA-LoRA", "0.1"]
    # Differences of seeds 0 to 2: 1, 2 and 3 points; the mean of two evaluations has the same.
    assert fra["last round − FedAvg at this rate"].startswith("+2.0 [-0.5, +4.5], p = ")
    assert fra["mean of evaluations − FedAvg at this rate"].startswith("+2.0 [")
    assert (fra["last round"], fra["mean of evaluations"]) == ("63.0 ± 2.0", "53.0 ± 2.0")
    assert (fra["error, round 1"], fra["error, last round"]) == ("0.100", "0.050")
    p = float(fra["last round − FedAvg at this rate"].partition("p = ")[2])
    assert p == approx(4 * 0.0742, abs=0.001), "four differences in the table"
    chosen = {r["method"]: r for r in read_table(tmp_path / "out" / "exact_chosen_rank4.csv")}
    fra = chosen["FRA-LoRA"]
    assert (fra["chosen rate"], fra["n"]) == ("0.2", "5")
    assert fra["last round − FedAvg, all seeds"].startswith("+3.0 [+1.0, +5.0], p = ")
    assert fra["last round − FedAvg, fresh seeds"].startswith("+4.5 [")
    assert len(read_table(tmp_path / "out" / "exact_runs.csv")) == 2 * 2 * 3 + 2 * 2
    drawn = read_table(tmp_path / "out" / "exact.csv")
    assert {row["quantity"] for row in drawn} == {
        "FRA - FedAvg, last round",
        "FRA - FedAvg, mean of evaluations",
        "error, round 1",
        "error, last round",
    }


def test_methods_are_compared_at_their_chosen_settings_with_fresh_seeds(tmp_path):
    gaps = {"fedavg": 0.0, "fra": 0.01}
    write_exact(tmp_path / "all", gaps, (0, 1, 2))
    write_exact(tmp_path / "fresh", gaps, (3, 4), rates=(0.1, 0.2))
    words = [str(tmp_path / "all"), "--fresh", str(tmp_path / "fresh")]
    CHOSEN["main"]([*words, "--out", str(tmp_path / "table")])
    fedavg, fra = read_table(tmp_path / "table.csv")
    assert (fedavg["method"], fedavg["last round − fedavg"]) == ("fedavg", "-")
    assert (fra["learning rate"], fra["seeds"]) == ("0.2", "5")
    # Gaps of 1 to 5 points; means of two evaluations have the same gaps.
    assert fra["last round − fedavg"].startswith("+3.0 [+1.0, +5.0], p = ")
    assert fra["mean of evaluations − fedavg"].startswith("+3.0 [+1.0, +5.0], p = ")
    assert (fra["last round"], fra["mean of evaluations"]) == ("75.0 ± 3.2", "65.0 ± 3.2")
