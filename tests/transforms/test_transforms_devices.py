"""Upload transforms on several devices: the same numbers as on one."""

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
import json
import jax, numpy as np, optax
import toy
from toy_transforms import feedback
from fedjax_peft import Placement, simulate
from fedjax_peft.algorithms import fedavg
from fedjax_peft.transforms import clip_norm

def run(devices):
    return simulate(
        toy.model(), fedavg(optax.sgd(0.1)), toy.clients([7, 4, 12, 1, 9]), rounds=3,
        placement=Placement(lanes=4, devices=devices), batch_size=4,
        transforms=[clip_norm(0.2), feedback()],
    )

one, four = run(1), run(4)
far = [np.abs(np.asarray(four.params[n]) - np.asarray(x)).max() for n, x in one.params.items()]
names = ("clip_share", "clip_median_norm", "feedback_length")
far += [abs(a[n] - b[n]) for a, b in zip(one.metrics[1:], four.metrics[1:]) for n in names]
spread = {len(x.sharding.device_set) for x in four.server.values()}
print(json.dumps({"farthest": float(max(far)), "devices": sorted(spread)}))
"""


@pytest.mark.long("a process with four devices")
def test_four_devices_give_what_one_gives():
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["devices"] == [4]
    assert_small(report["farthest"], 1e-5)
