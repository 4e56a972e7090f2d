"""The script of learned mixing weights, and committed results of benchmarks."""

import csv
import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from closeness import approx

ROOT = Path(__file__).parents[1] / "experiments"


def load(path):
    """Returns what a script defines."""
    return SimpleNamespace(**runpy.run_path(str(path)))


def test_committed_gradients_equal_finite_differences_and_are_in_the_readme():
    found = json.loads((ROOT / "gradients" / "results" / "mixing.json").read_text())
    text = (ROOT / "gradients" / "README.md").read_text().replace("−", "-")
    for gradient, slope in found["checks"].values():
        assert gradient == approx(slope, rel=0.02)
        assert f"{gradient:.6f}" in text
    for validation, test in found["fixed"].values():
        assert f"{validation:.4f}" in text
        assert f"{test:.4f}" in text
    assert found["rows"][-1]["validation"] < found["rows"][0]["validation"]


def test_a_client_predicts_with_the_mixture_of_each_layer():
    mixing = load(ROOT / "gradients" / "mixing.py")
    algorithm = mixing.mixing({"layer.0": 40.0, "layer.1": -40.0, "head": 0.0})
    names = ("bert.encoder.layer.0.query.lora_a", "bert.encoder.layer.1.query.lora_a", "classifier")
    shared, own = ({n: jnp.float32(x) for n in names} for x in (1.0, 3.0))
    assert [float(x) for x in algorithm.model(shared, own).values()] == [3.0, 1.0, 2.0]


def test_slopes_of_power_laws():
    scaling = load(ROOT / "benchmarks" / "scaling.py")
    sizes = np.array([10, 100, 1_000, 10_000])
    assert scaling.fit(sizes, 3 * sizes**0.5) == approx((0.5, 0.0), abs=1e-6)
    noisy = sizes * np.array([1.1, 0.9, 1.1, 0.9])
    slope, half = scaling.fit(sizes, noisy)
    assert abs(slope - 1) < half < 0.3


def test_points_are_within_the_limits_of_the_other_libraries():
    scaling = load(ROOT / "benchmarks" / "scaling.py")
    ours = scaling.wanted("fedavg")
    assert ("clients", 100_000, 10) in ours
    assert ("cohort", 10_000, 10_000) in ours
    assert all(clients >= cohort for _, clients, cohort in ours + scaling.wanted("flower"))
    assert max(clients for _, clients, _ in scaling.wanted("flower")) == 1_000


def test_committed_searches_are_in_the_documentation():
    pytest.importorskip("optuna", reason="the extra optuna is not installed")
    script = load(ROOT / "benchmarks" / "tune_vs_random.py")
    results = ROOT / "benchmarks" / "results"
    with (results / "tune_trials.csv").open() as file:
        found = script.table(list(csv.DictReader(file)))
    assert found.markdown() == (results / "tune.md").read_text()
    page = (ROOT.parent / "docs" / "howto" / "search.md").read_text()
    rows = [line for line in found.markdown().splitlines() if line.startswith("|")]
    assert all(row in page for row in rows[2:])
