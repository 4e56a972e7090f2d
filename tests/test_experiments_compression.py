"""``experiments/compression``: its config resolves, and its script makes its figure and table."""

import csv
import runpy
from pathlib import Path

import pytest
from made_runs import begin_sweep, read_table, write_run

from fedjax_peft import transforms
from fedjax_peft.config import config
from fedjax_peft.config.sweeps import plan

FOLDER = Path(__file__).parents[1] / "experiments" / "compression"
SCRIPT = runpy.run_path(str(FOLDER / "figures.py"))


def test_the_config_has_every_compressor_for_every_way_of_training():
    sweep = plan(config.load(FOLDER / "20news.toml"))
    found = {tuple(point.method.split("-")) for point in sweep.points}
    assert found == {(way, name) for way in SCRIPT["WAYS"] for name in SCRIPT["COMPRESSORS"]}
    assert len(sweep.points) == 3 * len(found)
    used = {name for point in sweep.points for name in point.config["transforms"]}
    assert used == set(transforms.__all__) - NOT_COMPARED
    for point in sweep.points:
        way, name = point.method.split("-")
        assert point.config["algorithm"]["name"] == ("ffa" if way == "ffa" else "fedavg")
        assert (point.config["aggregator"].get("name") == "fra") == (way == "fra")
        assert len(point.config["transforms"]) == (name != "none")
        assert config.build(point.config, "transforms") or name == "none"


NOT_COMPARED = {"clip_norm"}
"""Transforms that are not compressors."""


@pytest.fixture
def sweep(tmp_path):
    """Made-up runs of two ways and three compressors; the smaller, the less accurate."""
    root = begin_sweep(tmp_path / "20news", keys=["seed"], baseline="lora-none")
    for way in ("lora", "ffa"):
        for i, name in enumerate(("none", "quantize8", "sign")):
            for seed in (0, 1, 2):
                rows = [{"round": 0, "test_accuracy": 0.1, "headline": "accuracy"}]
                size = 4_000_000 // 4**i
                for n in (1, 2):
                    rows.append({"round": n, "bytes_up": size, "bytes_down": 4_000_000})
                    if i:
                        rows[-1]["compression_error"] = None if n == 1 else 0.25 * i
                rows[-1] |= {"test_accuracy": 0.6 - 0.1 * i + 0.01 * seed, "headline": "accuracy"}
                settings = {"name": f"{way}-{name}", "seed": seed, "rounds": 2}
                write_run(root / f"{way}-{name}" / f"seed={seed}", settings, rows)
    return root


def test_the_script_writes_the_figure_and_the_table(sweep, tmp_path, capsys):
    SCRIPT["main"]([str(sweep), "--out", str(tmp_path / "out")])
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {
        *(f"accuracy_by_bytes.{form}" for form in ("png", "svg", "pdf", "csv")),
        *(f"compressors.{form}" for form in ("md", "csv", "tex")),
    }
    with (tmp_path / "out" / "compressors.csv").open() as file:
        rows = list(csv.reader(file))
    assert [row[:2] for row in rows[1:3]] == [
        ["FedAvg-LoRA", "none (float32)"],
        ["FedAvg-LoRA", "QSGD, 8 bits"],
    ]
    assert rows[1][2:] == ["8.00", "1.0", "8.00", "-", "61.0 ± 1.0", "-"]
    assert rows[3][2:] == ["0.50", "16.0", "8.00", "0.500", "41.0 ± 1.0", "-20.0"]
    points = read_table(tmp_path / "out" / "accuracy_by_bytes.csv")
    assert len(points) == 18
    assert points[0] == {
        "way": "lora",
        "compressor": "none",
        "seed": "0",
        "megabytes": "8",
        "accuracy": "0.6",
    }
    assert "left out, no runs: lora-quantize4" in capsys.readouterr().out
