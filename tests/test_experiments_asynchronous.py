"""``experiments/asynchronous``: its config resolves, and its script makes its figure and table."""

import itertools
import runpy
from pathlib import Path

import pytest
from internals import config, plan
from made_runs import columns, read_table, write_sweep
from shallow import no_drawings  # noqa: F401

from fedjax_peft import asynchronous

pytestmark = pytest.mark.usefixtures("no_drawings")

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


@pytest.fixture
def sweep(tmp_path):
    """Made-up runs of two methods: FedBuff is faster, and one learning rate is better."""
    runs = []
    methods = (("fedavg", 50.0, None), ("fedbuff", 25.0, 2.0))
    for (name, step, stale), rate, seed in itertools.product(methods, (0.003, 0.01), range(3)):
        n = int(250 / step)
        better = 1 if rate == 0.01 else 0.5
        scores = [0.05, *(min(0.08 * i, 0.5) * better + 0.01 * seed for i in range(1, n + 1))]
        rows = columns(
            test_accuracy=scores,
            validation_accuracy=scores,
            simulated_seconds=[0.0, *[step] * n],
            clients=[None, *[[1, 2, 3]] * n],
            staleness_mean=[None, *[stale] * n],
        )
        runs.append(({"name": name, "seed": seed, "optimizer.learning_rate": rate}, rows))
    keys = ["seed", "optimizer.learning_rate"]
    return write_sweep(tmp_path / "20news", runs, keys=keys, baseline="fedavg")


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
