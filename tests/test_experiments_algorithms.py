"""``experiments/algorithms``: its config has every algorithm, and its script compares them."""

import runpy
import tomllib
from pathlib import Path

import pytest
from internals import config, plan
from made_runs import begin_sweep, read_table, write_run
from shallow import no_drawings  # noqa: F401

from fedjax_peft import algorithms

pytestmark = pytest.mark.usefixtures("no_drawings")

FOLDER = Path(__file__).parents[1] / "experiments" / "algorithms"
SCRIPT = runpy.run_path(str(FOLDER / "grid.py"))


def test_the_config_has_every_algorithm_with_as_many_choices():
    sweep = plan(config.load(FOLDER / "20news.toml"))
    names = {point.config["algorithm"]["name"] for point in sweep.points}
    assert names == {*algorithms.__all__}
    shown = [point.method for point in sweep.points]
    assert set(shown) == {name for family in SCRIPT["FAMILIES"].values() for name in family}
    assert {shown.count(name) for name in shown} == {2}, "two learning rates each"
    assert {point.config["seed"] for point in sweep.points} == {0}


SCORES = {
    # method -> rate -> (global validation, clients' validation, global test, clients' own)
    "fedavg": {0.003: (0.3, 0.3, 0.30, 0.35), 0.01: (0.4, 0.2, 0.40, 0.45)},
    "fra": {0.003: (0.3, 0.3, 0.31, 0.36), 0.01: (0.4, 0.2, 0.42, 0.46)},
    "ditto": {0.003: (0.2, 0.7, 0.20, 0.80), 0.01: (0.3, 0.6, 0.10, 0.60)},
}
"""The rate 0.01 is best for one model, 0.003 for personal models."""


def write(root, name, rate, seed):
    validation, own_validation, test, own = SCORES[name][rate]
    row = {"round": 8, "bytes_up": 2e6, "bytes_down": 3e6}
    row |= {"validation_accuracy": validation, "test_accuracy": test + 0.01 * seed}
    row |= {"client_validation_accuracy_mean": own_validation}
    row |= {"client_accuracy_mean": own + 0.01 * seed, "client_accuracy_worst": own / 2}
    if name == "ditto":
        row |= {"global_test_accuracy": 0.33, "global_validation_accuracy": validation}
    if name == "fra" and seed:  # so that the differences have a deviation
        row["test_accuracy"] += 0.01 * seed
    settings = {"name": name, "seed": seed, "optimizer.learning_rate": rate}
    start = {"round": 0, "roles": {"shared": 5}}
    write_run(root / name / f"seed={seed},learning_rate={rate}", settings, [start, row])


@pytest.fixture
def runs(tmp_path):
    """Made-up runs: both rates with seed 0, the chosen one with seeds 1 and 2."""
    keys = ["seed", "optimizer.learning_rate"]
    for folder, seeds in (("choice", (0,)), ("seeds", (1, 2))):
        root = begin_sweep(tmp_path / folder, keys=keys)
        for name, scores in SCORES.items():
            chosen = 0.003 if name == "ditto" else 0.01
            for rate in scores if folder == "choice" else [chosen]:
                for seed in seeds:
                    write(root, name, rate, seed)
    return tmp_path


def test_each_kind_of_method_is_chosen_and_compared_by_its_own_outcome(runs, tmp_path):
    out = tmp_path / "results"
    SCRIPT["main"](["--tables", "--out", str(runs), "--results", str(out)])
    rows = {row["algorithm"]: row for row in read_table(out / "algorithms.csv")}
    assert list(rows) == ["fedavg", "fra", "ditto"]
    assert [row["rate"] for row in rows.values()] == ["0.01", "0.01", "0.003"]
    assert {row["seeds"] for row in rows.values()} == {"3"}
    assert rows["fedavg"]["test %"] == "41.0 ± 1.0"
    assert rows["fedavg"]["outcome − fedavg"] == "-"
    # Test 42, 44 and 46 against 40, 41 and 42: +2, +3 and +4, and 4.303 / sqrt(3) around the mean.
    assert rows["fra"]["outcome − fedavg"].startswith("+3.0 [+0.5, +5.5], p = ")
    # The clients' own 80, 81 and 82 against 45, 46 and 47: equal differences have no interval.
    assert rows["ditto"]["outcome − fedavg"] == "+35.0"
    assert rows["ditto"]["test %"] == "33.0 ± 0.0", "of the global model, not of personal ones"
    assert rows["ditto"]["worst client %"] == "40.0 ± 0.0"
    assert (rows["fra"]["MB up"], rows["fra"]["MB down"]) == ("2.0", "3.0")
    each = read_table(out / "runs.csv")
    assert len(each) == 3 * (2 + 2)
    assert sum(row["chosen"] == "True" for row in each) == 3 * 3
    for form in ("png", "svg", "pdf", "csv"):
        assert (out / f"differences.{form}").stat().st_size > 0


def test_more_seeds_are_run_at_the_chosen_rates(runs, tmp_path):
    chosen = SCRIPT["chosen_rates"](SCRIPT["read_study"](runs / "choice"))
    path = tmp_path / "seeds.toml"
    SCRIPT["write_config"](chosen, path)
    sweep = plan(tomllib.loads(path.read_text()), only=["fra", "ditto"])
    points = [
        (point.method, point.config["seed"], point.config["optimizer"]["learning_rate"])
        for point in sweep.points
    ]
    assert points == [("fra", 1, 0.01), ("fra", 2, 0.01), ("ditto", 1, 0.003), ("ditto", 2, 0.003)]
