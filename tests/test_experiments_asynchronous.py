"""``experiments/asynchronous``: its config resolves, and its script makes its figure and table."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from closeness import assert_close
from made_runs import begin_sweep, read_table, write_run

from fedjax_peft import asynchronous
from fedjax_peft.config import config
from fedjax_peft.config.sweeps import plan

FOLDER = Path(__file__).parents[1] / "experiments" / "asynchronous"
SCRIPT = runpy.run_path(str(FOLDER / "figures.py"))


def test_the_config_has_every_server_with_the_same_choices():
    sweep = plan(config.load(FOLDER / "20news.toml"))
    assert {point.method for point in sweep.points} == set(SCRIPT["METHODS"])
    assert len(sweep.points) == 5 * 3 * 6
    servers = {
        point.config["asynchronous"].get("name"): config.build(point.config, "asynchronous")
        for point in sweep.points
    }
    assert set(servers) == {None, *asynchronous.__all__}
    assert servers["fedbuff"].buffer_size == 5
    assert len({point.config["clients_per_round"] for point in sweep.points}) == 1


def test_the_interval_is_that_of_student():
    """Three values with deviation 1: 4.303 / sqrt(3), from a table of t (2 degrees of freedom)."""
    margin = SCRIPT["margin"](np.array([[0.0, 5.0], [1.0, 5.0], [2.0, 5.0]]))
    assert_close(margin, [4.303 / np.sqrt(3), 0], atol=1e-3)


@pytest.fixture
def sweep(tmp_path):
    """Made-up runs of two methods: FedBuff is faster, and one learning rate is better."""
    keys = ["seed", "optimizer.learning_rate"]
    root = begin_sweep(tmp_path / "20news", keys=keys, baseline="fedavg")
    for name, step in (("fedavg", 50.0), ("fedbuff", 25.0)):
        for rate in (0.003, 0.01):
            for seed in (0, 1, 2):
                rows = [{"round": 0, "test_accuracy": 0.05, "validation_accuracy": 0.05}]
                rows[0] |= {"headline": "accuracy", "simulated_seconds": 0.0}
                for n in range(1, int(250 / step) + 1):
                    score = min(0.08 * n, 0.5) * (1 if rate == 0.01 else 0.5) + 0.01 * seed
                    row = {"round": n, "clients": [1, 2, 3], "simulated_seconds": step}
                    row |= {"test_accuracy": score, "validation_accuracy": score}
                    row |= {"staleness_mean": 2.0} if name == "fedbuff" else {}
                    rows.append(row)
                settings = {"name": name, "seed": seed, "rounds": len(rows) - 1}
                settings["optimizer"] = {"learning_rate": rate}
                write_run(root / name / f"learning_rate={rate},seed={seed}", settings, rows)
    return root


def test_the_script_makes_its_files(sweep, tmp_path, capsys):
    out = tmp_path / "results"
    SCRIPT["main"]([str(sweep), "--out", str(out)])
    rows = read_table(out / "time_to_target.csv")
    assert [row["method"] for row in rows] == ["FedAvg, waits for all", "FedBuff, K = 5"]
    assert {row["learning rate"] for row in rows} == {"0.01"}
    # After 200 s: FedAvg has made 4 steps of 0.08, FedBuff 8, at most 0.5; the seeds add 0 to 0.02.
    assert [row["accuracy % at 200 s"] for row in rows] == ["33.0 ± 1.0", "51.0 ± 1.0"]
    assert rows[1]["minus FedAvg, points"] == "+18.0"
    assert rows[0]["s to 20 %"] == "150"
    assert rows[1]["s to 20 %"] == "75"
    assert rows[0]["s to 40 %"] == "-"
    assert [row["uploads"] for row in rows] == ["12", "24"]
    assert [row["staleness"] for row in rows] == ["0.0", "2.0"]
    for form in ("png", "svg", "pdf", "csv"):
        assert (out / f"accuracy_by_time.{form}").stat().st_size > 0
    assert "left out, no runs: partial, semi_synchronous, fedasync" in capsys.readouterr().out
