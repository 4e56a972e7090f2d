"""``experiments/minimal/fedavg_flat.py``, FedAvg without the engine, equals ``simulate``."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from closeness import approx, assert_small

import fedjax_peft as fp

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "experiments" / "minimal" / "fedavg_flat.py"


def test_simulate_equals_the_flat_loop():
    page = runpy.run_path(str(SCRIPT))
    model, clients, test, optimizer = page["problem"]()
    run = fp.simulate(
        model,
        fp.algorithms.fedavg(optimizer),
        clients,
        test=test,
        rounds=page["ROUNDS"],
        clients_per_round=page["PER_ROUND"],
        batch_size=page["BATCH"],
        seed=page["SEED"],
        placement=fp.Placement(lanes=2),
    )
    flat = list(page["fedavg"](model, clients, test, optimizer))
    # Float32 rounding: the two sum in another order, and Adam divides by small numbers.
    for (_, loss, accuracy), row in zip(flat, run.metrics[1:], strict=True):
        assert loss == approx(row["test_loss"], abs=2e-5)
        assert accuracy == approx(row["test_accuracy"], abs=1e-6)
    params = flat[-1][0]
    assert_small(max(np.abs(params[name] - run.params[name]).max() for name in params), 2e-5)
    moved = max(np.abs(params[name] - model.trainable[name]).max() for name in params)
    assert moved > 0.01  # the comparison is of trained leaves
