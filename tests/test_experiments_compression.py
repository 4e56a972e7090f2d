"""``experiments/compression``: its config resolves, and its script makes its figure and table."""

import itertools
import runpy
from pathlib import Path

import pytest
from internals import config, plan
from made_runs import columns, read_table, write_sweep
from shallow import no_drawings  # noqa: F401

from fedjax_peft import transforms

pytestmark = pytest.mark.usefixtures("no_drawings")

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
    runs = []
    names = enumerate(("none", "quantize8", "sign"))
    for way, (i, name), seed in itertools.product(("lora", "ffa"), names, range(3)):
        rows = columns(
            bytes_up=(None, *[4_000_000 // 4**i] * 2),
            bytes_down=(None, *[4_000_000] * 2),
            compression_error=(None, None, 0.25 * i or None),
            test_accuracy=(0.1, None, 0.6 - 0.1 * i + 0.01 * seed),
        )
        runs.append(({"name": f"{way}-{name}", "seed": seed}, rows))
    return write_sweep(tmp_path / "20news", runs, keys=["seed"], baseline="lora-none")


def test_the_script_writes_the_figure_and_the_table(sweep, tmp_path, capsys):
    SCRIPT["main"]([str(sweep), "--out", str(tmp_path / "out")])
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {
        *(f"accuracy_by_bytes.{form}" for form in ("png", "svg", "pdf", "csv")),
        *(f"compressors.{form}" for form in ("md", "csv", "tex")),
    }
    rows = [list(row.values()) for row in read_table(tmp_path / "out" / "compressors.csv")]
    assert rows[0] == [
        "FedAvg-LoRA",
        "none (float32)",
        "8.00",
        "1.0",
        "8.00",
        "-",
        "61.0 ± 1.0",
        "-",
    ]
    assert rows[1][:2] == ["FedAvg-LoRA", "QSGD, 8 bits"]
    assert rows[2][2:] == ["0.50", "16.0", "8.00", "0.500", "41.0 ± 1.0", "-20.0"]
    points = read_table(tmp_path / "out" / "accuracy_by_bytes.csv")
    assert len(points) == 18
    assert list(points[0].values()) == ["lora", "none", "0", "8", "0.6"]
    assert "left out, no runs: lora-quantize4" in capsys.readouterr().out
