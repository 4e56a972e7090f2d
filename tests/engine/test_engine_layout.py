"""Lanes over several devices: the same numbers, and arrays that are really divided."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from closeness import assert_small

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
SCRIPT = """
import json, re
import jax, numpy as np, optax
import toy
from fedjax_peft.aggregators import fra
from fedjax_peft.algorithms import fedavg
from fedjax_peft.errors import InputError
from fedjax_peft.engine import session
from fedjax_peft.simulation import simulate as loop

jax.config.update("jax_numpy_rank_promotion", "raise")
programs = []

def remembered(*arguments, **options):
    programs.append(Program(*arguments, **options))
    return programs[-1]

Program = session.ENGINES["compiled"]
session.ENGINES["compiled"] = remembered
federation = toy.clients([7, 4, 12, 1, 9, 16, 3, 5, 10, 2])
options = dict(rounds=3, clients_per_round=6, batch_size=4)
test = {"mean": toy.dataset(26, seed=7), "fra": None}

def run(name, **more):
    algorithm = algorithms[name]
    return loop.simulate(toy.model(), algorithm, federation, test=test[name], **options, **more)

def farthest(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)

report = {"available": len(jax.devices())}
algorithms = {
    "mean": fedavg(optax.adam(0.02), head="private"),
    "fra": fedavg(optax.sgd(0.05), aggregator=fra()),
}
for name in algorithms:
    one, four = run(name, lanes=4, devices=1), run(name, lanes=4, devices=4)
    text = programs[-1]._compiled.as_text()
    report[name] = {
        "params": farthest(one.params, four.params),
        "private": farthest(one.client_state, four.client_state) if one.client_state else 0,
        "test_loss": max(
            abs(a.get("test_loss", 0) - b.get("test_loss", 0))
            for a, b in zip(one.metrics, four.metrics, strict=True)
        ),
        "moved": farthest(one.params, toy.model().trainable),
        "partitions": int(re.search(r"num_partitions=(\\d+)", text)[1]),
        "all_reduce": "all-reduce" in text,
        # A device computes one lane: a batch of 4 examples, 5 features.
        "divided": "f32[1,4,5]" in text or "f32[4,5]" in text,
        "whole": "f32[4,4,5]" in text,
        "spread": len(four.params["layer.lora_a"].sharding.device_set),
    }
for key, bad in {"lanes": dict(lanes=6, devices=4), "devices": dict(devices=5)}.items():
    try:
        run("mean", **bad)
    except InputError as error:
        report[key] = str(error)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report():
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(TESTS),
    }
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("aggregator", ["mean", "fra"])
def test_four_devices_give_the_results_of_one(report, aggregator):
    assert report["available"] == 4
    got = report[aggregator]
    assert got["moved"] > 0.01
    assert_small(max(got["params"], got["private"], got["test_loss"]), 1e-5)


@pytest.mark.parametrize("aggregator", ["mean", "fra"])
def test_the_lanes_are_divided_among_the_devices(report, aggregator):
    got = report[aggregator]
    assert (got["partitions"], got["spread"]) == (4, 4)
    assert got["divided"]
    assert not got["whole"]


def test_a_mean_is_all_reduced(report):
    assert report["mean"]["all_reduce"]


def test_lanes_and_devices_that_do_not_fit_are_refused(report):
    assert report["lanes"] == "lanes = 6 is not a multiple of 4 devices."
    assert report["devices"] == "devices = 5, but there are 4."
