"""``experiments/fra``: its configs resolve, and its scripts make the paper's tables."""

import itertools
import math
import runpy
from pathlib import Path

import pytest
from closeness import approx
from made_runs import columns, grids, read_table, resolved, write_run, write_sweep
from shallow import no_drawings  # noqa: F401

from fedjax_peft import testing

pytestmark = pytest.mark.usefixtures("no_drawings")

FOLDER = Path(__file__).parents[1] / "experiments" / "fra"
SCRIPT = runpy.run_path(str(FOLDER / "tables.py"))
PRIVATE = runpy.run_path(str(FOLDER / "private.py"))
EXACT = runpy.run_path(str(FOLDER / "exact.py"))
CHOSEN = runpy.run_path(str(FOLDER.parent / "chosen.py"))
SPLITS = ("sst2_iid", "mnli_iid", "sst2_skew", "mnli_skew")


@pytest.mark.parametrize("size", ["paper", "small"])
@pytest.mark.parametrize("split", SPLITS)
def test_configs_have_the_papers_methods_and_splits(size, split):
    path = FOLDER / size / f"{split}.toml"
    found = resolved(path)
    data, kind = split.split("_")
    expected = ["fedavg", "ffa", "fra"]
    assert list(found) == (["centralised", *expected] if kind == "iid" else expected)
    shares = SCRIPT["SHARES"][data].values()
    for name, one in found.items():
        grid = grids(path)[name]
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
            local = found["fedavg"]["local_steps"]
            assert local is None or one["local_steps"] == 2 * local
        elif kind == "iid":
            assert (partition["name"], partition["clients"]) == ("iid", 2)
        else:
            assert partition["name"] == "label_share"
            percents = [[round(100 * x) for x in row] for row in partition["shares"]]
            assert percents == [list(row) for row in shares]
    assert found["fra"]["aggregator"]["name"] == "fra"
    assert found["ffa"]["algorithm"]["name"] == "ffa"


@pytest.mark.parametrize(("number", "split"), list(enumerate(SPLITS, start=3)))
def test_figures_3_to_6_have_local_models_of_the_tables_settings(number, split):
    figure = resolved(FOLDER / "small" / f"figure{number}.toml")
    table = resolved(FOLDER / "small" / f"{split}.toml")
    assert list(figure) == ["fedavg", "ffa", "fra"]
    for name, one in figure.items():
        assert one["evaluation"]["diagnostics"] == ["local"]
        assert one["evaluation"]["every"] == 1
        for key in ("partition", "model", "peft", "algorithm", "aggregator", "batch_size"):
            assert one[key] == table[name][key]


# -------------------------------------------------------------------------------------- the script


def runs_of(scores, *, data, split, rates=(0.1, 0.2), local=False, examples=500):
    """Yields made-up runs: ``scores`` is method -> final accuracy of seed 0 at the second rate.

    On validation examples, the second rate is the best; on test examples, it is the first. The best
    round is one point above the final one.
    """
    for method, rate, seed in itertools.product(scores, rates, range(3)):
        final = scores[method] + 0.01 * seed + (0.3 if rate != rates[-1] else 0.0)
        error = [(0.1 if method == "fedavg" else 0.01) * i for i in range(9)]
        rows = columns(
            test_accuracy=(0.1, final + 0.01, *[final] * 7),
            validation_accuracy=[rate] * 9,
            aggregation_error=error,
            aggregation_error_relative=error,
        )
        for i, row in enumerate(rows[1:] if local else [], start=1):
            row |= {"local_accuracy": [0.1 * i, 0.5], "clients": [0, 1]}
            row["local_accuracy_mean"] = 0.05 * i + 0.25
        partition = {"iid": "iid", "skew": "label_share"}[split]
        yield (
            {
                "name": method,
                "seed": seed,
                "model.name": "google/tiny",
                "data": {"name": data, "test_examples": examples},
                "partition.name": "pooled" if method == "centralised" else partition,
                "optimizer": {"name": "adamw", "learning_rate": rate},
            },
            rows,
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of the script's files for made-up runs, in one folder of sweeps."""
    root = tmp_path_factory.mktemp("fra")
    sweep = {"keys": ["seed", "optimizer.learning_rate"], "baseline": "fedavg"}
    sweep["choose_by"] = "validation_accuracy"
    three = {"fedavg": 0.50, "ffa": 0.45, "fra": 0.52}
    four = {"centralised": 0.6, **three}
    for data, more in (("sst2", 0.1), ("mnli", 0.0)):
        for split, scores in (("iid", four), ("skew", three)):
            own = {name: score + more for name, score in scores.items()}
            runs = runs_of(own, data=data, split=split)
            write_sweep(root / "runs" / f"{data}-{split}", runs, **sweep)
    rate = {"rates": (0.1,), "local": True, "examples": 200}
    wrong = dict.fromkeys(four, 0.9)  # the runs of a figure are not those of the tables
    local = runs_of(wrong, data="mnli", split="skew", **rate)
    write_sweep(root / "runs" / "local", local, **sweep)
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


def test_tables_2_and_4_have_the_shares_of_labels(made, tmp_path):
    two, four = (read_table(made / f"table{n}.csv") for n in (2, 4))
    assert [list(row.values())[:3] for row in two] == [
        ["negative", "90", "10"],
        ["positive", "10", "90"],
    ]
    assert [row["paper: client 1 %"] for row in four] == ["70", "20", "20"]
    assert "could not be read" in (made / "table4.md").read_text(), "made-up runs have no data"
    testing.write_tiny_checkpoint(tmp_path / "model")
    here = ["data.source=tiny", "data.test_examples=40", "data.max_length=8"]
    here += [f"model.name={tmp_path / 'model'}"]
    config = resolved(FOLDER / "small" / "figure6.toml", *here)["fra"]
    write_run(tmp_path / "run", config, columns(test_accuracy=[0.1] * (config["rounds"] + 1)))
    SCRIPT["main"]([str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    counts = read_table(tmp_path / "out" / "table4.csv")
    ours = [[int(row[f"ours: client {k}"]) for k in (1, 2)] for row in counts]
    assert [round(a / (a + b), 1) for a, b in ours] == [0.7, 0.2, 0.2]


def test_figures_have_their_data_beside_them(made):
    local = read_table(made / "figure6.csv")
    fra = [r for r in local if (r["name"], r["client"], r["seed"]) == ("FRA-LoRA", "1", "0")]
    expected = [10, 15, 20, 25, 30, 35, 40, 50]  # rolling mean of at most 7 of 10, 20, ..., 80
    assert [float(row["value"]) for row in fra] == approx(expected)
    errors = read_table(made / "figure7.csv")
    assert {row["name"] for row in errors} == {"FedAvg-LoRA", "FRA-LoRA"}
    assert [float(r["value"]) for r in errors[:8]] == approx([0.1 * i for i in range(1, 9)])
    assert not (made / "figure3.csv").exists()


def test_a_figure_can_be_written_alone(made, tmp_path, capsys):
    SCRIPT["main"]([str(made.parent / "runs"), "--only", "figure7", "--out", str(tmp_path)])
    assert {path.stem for path in tmp_path.iterdir()} == {"figure7"}
    SCRIPT["main"]([str(made.parent / "runs"), "--only", "figure3", "--out", str(tmp_path)])
    assert capsys.readouterr().out.endswith("left out, no runs: figure3\n")


# ------------------------------------------------------------------------------ privacy


@pytest.mark.parametrize("unit", ["clients", "examples"])
def test_private_configs_have_the_papers_methods_and_all_epsilon(unit):
    path = FOLDER / "small" / f"private_{unit}.toml"
    found = resolved(path)
    assert list(found) == ["fedavg", "ffa", "fra"]
    for name, one in found.items():
        assert (one["data"]["name"], one["peft"]["rank"]) == ("sst2", 4)
        assert grids(path)[name]["privacy.epsilon"] == [1.0, 3.0, 6.0, 10.0, math.inf]
        assert grids(path)[name]["seed"] == [0, 1, 2]
        # Clients, or the examples of a step, are drawn as the accountant assumes.
        assert one["sampling" if unit == "clients" else "batch_sampling"] == "poisson"
        assert one["privacy"]["delta"] < 1 / one["partition"]["clients"]


def test_private_tables_choose_for_each_epsilon_and_compare_with_no_noise(tmp_path):
    """On validation examples the second norm is the best; on test examples the first is."""
    scores = {("fedavg", 1.0): 0.5, ("fedavg", math.inf): 0.7}
    scores |= {("fra", 1.0): 0.45, ("fra", math.inf): 0.72}
    runs = []
    for (method, epsilon), clip, seed in itertools.product(scores, (0.1, 0.3), range(3)):
        end = scores[method, epsilon] + 0.01 * seed + (0.2 if clip == 0.1 else 0)
        rows = columns(test_accuracy=(None, end), validation_accuracy=(None, clip))
        rows[1] |= {"snr": 0.5} if method == "fra" else {}
        privacy = {"name": "central", "epsilon": epsilon, "clip": clip, "delta": 1e-4}
        runs.append(({"name": method, "seed": seed, "privacy": privacy}, rows))
    keys = ["seed", "privacy.epsilon", "privacy.clip"]
    sweep = write_sweep(tmp_path / "private_clients", runs, keys=keys, baseline="fedavg")
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
    path = FOLDER / "small" / "exact.toml"
    found = resolved(path)
    assert list(found) == list(dict.fromkeys([*found, *EXACT["METHODS"]]))
    assert found.keys() == EXACT["METHODS"].keys()
    for name, one in found.items():
        assert (one["sampling"], one["partition"]["clients"]) == ("all", 10)
        rates = grids(path)[name]["optimizer.learning_rate"]
        assert len(rates) == 4, "as many rates for every method"
        assert grids(path)[name]["seed"] == [0, 1, 2]
        assert one["rounds"] // one["evaluation"]["every"] == 10
    assert found["fra"]["aggregator"]["name"] == "fra"
    assert found["lora_fair"]["aggregator"]["name"] == "lora_fair"


def write_exact(root, seeds, rates=(0.1, 0.2)):
    """Writes made-up runs: FRA has 1 point over FedAvg in the end, and 1 more for each seed.

    The first evaluation after the start is .2 below the last. The rate .2 is the best on
    validation, and .1 higher on test.
    """
    runs = []
    for (method, gap), rate, seed in itertools.product(
        [("fedavg", 0.0), ("fra", 0.01)], rates, seeds
    ):
        end = 0.5 + seed / 100 + gap * (1 + seed) + rate
        rows = columns(
            test_accuracy=(0.1, end - 0.2, end),
            validation_accuracy=[rate] * 3,
            aggregation_error_relative=(None, rate, rate / 2),
            test_examples=(100,) * 3,
        )
        settings = {"name": method, "seed": seed, "optimizer.learning_rate": rate}
        runs.append((settings | {"data": {"name": "20newsgroups", "test_examples": 100}}, rows))
    keys = ["seed", "optimizer.learning_rate"]
    write_sweep(root, runs, keys=keys, baseline="fedavg", choose_by="validation_accuracy")


def test_exact_aggregation_is_compared_at_each_rate_and_at_the_chosen_one(tmp_path):
    write_exact(tmp_path / "runs" / "rank4", (0, 1, 2))
    write_exact(tmp_path / "runs" / "fresh_rank4", (3, 4), rates=(0.2,))
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
    drawn = {row["quantity"] for row in read_table(tmp_path / "out" / "exact.csv")}
    gaps = {f"FRA - FedAvg, {outcome}" for outcome in ("last round", "mean of evaluations")}
    assert drawn == {*gaps, "error, round 1", "error, last round"}


def test_methods_are_compared_at_their_chosen_settings_with_fresh_seeds(tmp_path):
    write_exact(tmp_path / "all", (0, 1, 2))
    write_exact(tmp_path / "fresh", (3, 4))
    words = [str(tmp_path / "all"), "--fresh", str(tmp_path / "fresh")]
    CHOSEN["main"]([*words, "--out", str(tmp_path / "table")])
    fedavg, fra = read_table(tmp_path / "table.csv")
    assert (fedavg["method"], fedavg["last round − fedavg"]) == ("fedavg", "-")
    assert (fra["learning rate"], fra["seeds"]) == ("0.2", "5")
    # Gaps of 1 to 5 points; means of two evaluations have the same gaps.
    assert fra["last round − fedavg"].startswith("+3.0 [+1.0, +5.0], p = ")
    assert fra["mean of evaluations − fedavg"].startswith("+3.0 [+1.0, +5.0], p = ")
    assert (fra["last round"], fra["mean of evaluations"]) == ("75.0 ± 3.2", "65.0 ± 3.2")
    shown = (tmp_path / "table.md").read_text()
    assert "An interval of three seeds or fewer" not in shown, "five seeds"
    # FedAvg's mean of seeds 0 to 4 is 72 %: sqrt(.72 * .28 / 100) is 4.5 points.
    assert "on 100 test examples has a standard error of at most 4.5 points" in shown
    CHOSEN["main"]([words[0], "--out", str(tmp_path / "three")])
    assert CHOSEN["FEW_SEEDS"] in (tmp_path / "three.md").read_text()
    CHOSEN["main"]([*words, "--baseline", "local", "--out", str(tmp_path / "alone")])
    assert "last round" in (columns := read_table(tmp_path / "alone.csv")[0])
    assert not [name for name in columns if "−" in name], "there are no runs of the baseline"
