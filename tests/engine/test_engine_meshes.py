"""Meshes of lanes x model on eight virtual devices: the results of one device, in parts."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from closeness import approx, assert_small
from internals import Layout, frozen_axis
from refusals import refusals

from fedjax_peft.engine.devices.layout import layout_over
from fedjax_peft.engine.devices.sharding import lane_axis

TESTS = Path(__file__).parents[1]
RULES = ((r".+\.query\.kernel", 1), (r".+\.query\.lora_b", 1), (r".+\.query\.bias", 0))
KERNELS = {
    **{"ditto-8-4-tensor": [5, 2], "fra-8-8-gather": [5, 1], "ditto-8-1-tensor": [5, 8]},
    **{"ditto-8-2-tensor": [5, 4], "ditto-8-8-tensor": [5, 1], "ditto-8-2-gather": [5, 4]},
    **{"fra-8-4-tensor": [5, 2]},
}
"""Name of the run (algorithm, devices, model_parallel, model_sharding) -> the part of the frozen
kernel ``[5, 8]`` that a device has."""
MORE = [*list(KERNELS)[1:], "decoder-tensor", "decoder-gather"]
"""Further runs of the product of all settings."""


def runs(names):
    return [pytest.param(x, marks=[pytest.mark.exhaustive] * (x in MORE)) for x in names]


TRANSFORMERS = ["bert-tensor", "bert-gather", "decoder-tensor", "decoder-gather"]


@pytest.fixture(scope="module")
def report():
    """Returns a function that returns what a process with eight devices finds in a run."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([str(TESTS / "helpers"), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-W", "error", str(TESTS / "engine" / "mesh_script.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, **pipes) as process:

        @functools.cache
        def found(run):
            print(run, file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield found
        process.kill()  # concurrent decompositions may be in a deadlock


@pytest.mark.slow
@pytest.mark.parametrize("run", runs(KERNELS))
def test_every_mesh_gives_the_results_of_one_device(report, run):
    found = report(run)
    assert found["moved"] > 0.01
    assert_small(found["far"], 1e-5)
    # Lanes are divided among the devices. With "tensor", those that share the kernel compute the
    # same lanes.
    assert (found["partitions"], found["spread"]) == (8, 8)
    assert found["all_reduce"]
    apart = 8 if run.endswith("gather") else KERNELS[run][1]
    assert found["batches"] == [str(found["lanes"] // apart)]
    # 17 clients are padded to 24 rows, of which each device has 3. The program of a device has none
    # of these arrays whole, not even for a moment.
    assert set(found["rows"]) == {3}
    assert found["whole"] == []
    assert found["kernel"] == KERNELS[run], "the frozen kernel is split over the model axis"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["stored", "resumed", "ranks"])
def test_other_parts_give_the_results_of_one_device(report, part):
    """Clients in host memory, other meshes on a resume, directions that no client has."""
    assert_small(report(part)["far"], 1e-5)
    if part == "resumed":
        assert report(part)["rounds"] == [0, 1, 2, 3]


@pytest.mark.slow
def test_lanes_and_devices_that_do_not_fit_are_refused(report):
    assert report("refused")["lanes"] == "lanes = 6 is not a multiple of 8 devices."
    assert report("refused")["devices"] == "devices = 9, but there are 8."


@pytest.mark.slow
def test_a_device_needs_memory_for_its_own_clients_only(report):
    found = report("memory")
    # Seven of eight parts of the clients' state, and a part of the kernel.
    assert 7 / 8 * found["clients"] <= found["saved"] < found["clients"]


@pytest.mark.slow
def test_large_data_are_split_by_example(report):
    examples, on_a_device = report("columns")["rows"]
    assert on_a_device == -(-examples // 8)
    assert_small(report("columns")["far"], 1e-6)  # the same rows; only the program differs


@pytest.mark.slow
def test_directions_that_no_client_has_are_the_same_for_all_lanes_and_devices(report):
    """An SVD's own vectors there are chosen by rounding."""
    found = report("ranks")
    assert found["a"] == approx([1.0] * 4, abs=1e-5)
    assert [length > 0 for length in found["b"]] == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("run", runs(TRANSFORMERS))
def test_a_transformer_gives_the_results_of_one_device(report, run):
    found = report(run)
    assert found["moved"] > 0.01
    assert_small(found["far"], 1e-5)
    assert found["frozen"] < 0.35 * found["all_frozen"]  # a quarter, and the vectors
    # Of stacked layers, each turn of the scan gathers its own rows.
    assert bool(found["codes"]) == (run == "decoder-gather")
    assert all(len(shape.split(",")) == 2 for shape in found["codes"])


@pytest.mark.slow
def test_tensor_sums_activations_and_gather_moves_weights(report):
    tensor, gather = report("bert-tensor"), report("bert-gather")
    # A full layer sums once after attention and once after the feed-forward matrices, forwards and
    # backwards. The last layer computes one token.
    assert tensor["summed"] >= 2
    assert tensor["always"] == ["66,32"], "the table of tokens, which cannot be split by rows"
    # Two feed-forward matrices in each of two layers, gathered forwards and again backwards.
    assert gather["summed"] == 0
    assert gather["gathered"] >= 8


def test_rules_name_the_axis_if_it_divides_evenly():
    name = "bert.layer.0.query.kernel"
    assert frozen_axis(name, (6, 8), RULES, 4) == 1
    assert frozen_axis(name, (8, 6), RULES, 4) == 0  # the only axis that divides evenly
    assert frozen_axis(name, (6, 6), RULES, 4) is None
    assert frozen_axis(name, (6, 8), RULES, 1) is None
    assert frozen_axis("bert.layer.0.query.bias", (8,), RULES, 4) == 0
    assert frozen_axis("bert.positions.embedding", (64, 8), RULES, 4) is None


def test_a_model_without_rules_is_split_on_its_largest_axis():
    assert frozen_axis("a.kernel", (8, 12), (), 4) == 1
    assert frozen_axis("a.kernel", (3, 3, 8, 6), (), 4) == 2
    assert frozen_axis("a.bias", (8,), (), 4) is None


def test_adapters_follow_their_kernels():
    assert lane_axis("bert.layer.0.query.lora_b", (2, 8), RULES, 4) == 1
    assert lane_axis("bert.layer.0.query.lora_a", (8, 2), RULES, 4) is None
    assert lane_axis("bert.layer.0.query.lora_b", (), RULES, 4) is None  # a scalar of that name


test_a_mesh_that_does_not_fit_is_refused = refusals(
    lambda options: layout_over(1, **options),
    ({"model_parallel": 2}, "model_parallel = 2 does not divide devices = 1"),
    ({"model_parallel": 0}, "model_parallel = 0 does not divide"),
    ({"model_sharding": "tensors"}, "Did you mean 'tensor'"),
)


def test_one_device_has_no_mesh():
    assert layout_over(1) == layout_over(1, 1, "tensor") == Layout()
