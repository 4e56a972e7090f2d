"""Accelerators that are not there: their descriptions, the bounds, and compiled programs' texts."""

import importlib
import importlib.util
import json
import math
import os
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
import toy
from closeness import roughly
from internals import DEVICES, abstract_model, attention, find_device
from refusals import refusals

import fedjax_peft as fp
from fedjax_peft.simulation.planning.activations import activations
from fedjax_peft.simulation.planning.compiled_step import compile_step, describe_gpu, target_devices
from fedjax_peft.simulation.planning.compiled_text import step_traffic
from fedjax_peft.simulation.planning.memory_plan import example_batch, lowered_round
from fedjax_peft.simulation.planning.step_cost import _passes, count_flops

H100 = {
    **{"threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 49152},
    **{"shared_memory_per_core": 233472, "threads_per_core_limit": 2048, "core_count": 132},
    **{"fpus_per_core": 128, "memory_bandwidth": 3352320000000, "l2_cache_size": 52428800},
    **{"clock_rate_ghz": 1.98, "device_memory_size": 84978434048, "major": 9, "minor": 0},
    **{"shared_memory_per_block_optin": 232448, "registers_per_core_limit": 65536},
}
"""What OpenXLA's description of the H100 (``h100_sxm.txtpb``) says."""


def test_the_description_of_the_h100_is_that_of_openxla():
    text = describe_gpu(find_device("h100"))
    found = dict(re.findall(r"(\w+): ([\d.]+)\n", text.split("dnn_version_info")[0]))
    for name, expected in H100.items():
        assert float(found[name]) == roughly(expected, rel=0.001), name
    assert "ACCELERATED_FEATURES" in text
    assert "feature_extension: NONE" in describe_gpu(find_device("a100-80gb"))


def test_the_table_of_devices_is_whole():
    named = ["h100", "h200", "b200", "a100-80gb", "a100-40gb", "l4", "t4", "v100"]
    assert [*DEVICES] == [*named, "v5e", "v5p", "v6e"]
    for device in DEVICES.values():
        assert device.rates["bfloat16"] >= device.rates["float32"] > device.bandwidth
        assert device.memory < device.bandwidth / 10, "read in a tenth of a second"
        assert device.platform == ("gpu" if device.name in named else "tpu")


def test_operations_by_hand():
    x, w = jnp.ones((4, 8)), jnp.ones((5, 8, 8))

    def layers(x, w):
        x, _ = jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, w)
        return jax.lax.cond(x[0, 0] > 0, lambda x: (x @ w[0]) @ w[1], lambda x: x, x)

    one = 2 * 4 * 8 * 8
    assert count_flops(jax.make_jaxpr(layers)(x, w).jaxpr) == 5 * one + 2 * one
    image, kernel = jnp.ones((2, 3, 8, 8)), jnp.ones((6, 3, 2, 2))
    convolution = jax.make_jaxpr(lambda x, k: jax.lax.conv(x, k, (2, 2), "VALID"))(image, kernel)
    assert count_flops(convolution.jaxpr) == 2 * (2 * 6 * 4 * 4) * (3 * 2 * 2)


def test_rows_of_a_table_are_looked_up_also_in_a_function_within():
    """A step reads the rows that it needs of such a table, and the whole of other weights."""
    table, rows = jnp.ones((9, 4)), jnp.zeros(3, jnp.int32)
    look_up = jax.jit(lambda t, i: t.at[i].get(mode="clip"))
    found = {}
    for name, use in {"looked up": look_up, "read": jax.jit(lambda t, i: (t * 2)[i])}.items():
        made = jax.make_jaxpr(lambda t, i, use=use: use(t, i).sum())(table, rows).jaxpr
        found[name] = _passes(made.invars[0], made)
    assert found == {"looked up": 0, "read": 1}


def test_a_plan_from_python():
    algorithm = fp.algorithms.fedavg(optax.sgd(0.1))
    given = (toy.model(), algorithm, toy.clients([9, 5, 7]), "v5e")
    found = fp.devices.plan(*given, batch_size=4, local_steps=3, lanes=2, clients_per_round=3)
    assert found.fits
    assert found.steps == math.ceil(3 / 2) * 3
    assert found.flops == 2 * found.cost.flops > 0
    assert found.seconds == max(found.limits.values())
    assert found.limits["memory traffic"] == found.nbytes / found.device.bandwidth
    assert found.nbytes == found.cost.frozen + 2 * found.cost.lane
    text = str(found)
    assert text.startswith("Google TPU v5e, 2 lanes x 4 examples, float32")
    assert "a round takes at least" in text
    small = found._replace(device=found.device._replace(memory=100.0))
    assert not small.fits
    missing = f"{small.needed / 1e6:.2f} MB too much"  # the driver's tenth of 100 bytes vanishes
    assert f"does not fit into 0.00 MB of 0.00 MB: {missing}" in str(small)
    assert small.most_lanes == 0


def planned(**options):
    algorithm = fp.algorithms.fedavg(optax.sgd(0.1))
    return fp.devices.plan(toy.model(), algorithm, toy.clients([9, 5]), "v5e", **options)


test_a_plan_of_numbers_that_make_no_sense = refusals(
    lambda options: planned(**options),
    ({"lanes": 0}, "lanes = 0 must be a positive whole number"),
    ({"batch_size": 0}, "batch_size = 0 must be"),
    ({"local_steps": (2, 8)}, r"local_steps = \(2, 8\) must be"),
    ({"clients_per_round": 0}, "clients_per_round = 0 must be"),
    ({"clients_per_round": 3}, "clients_per_round = 3 is more than the 2 clients"),
)


@pytest.mark.parametrize(("device", "scores"), [("h100", False), ("t4", True), ("v5e", True)])
def test_scores_are_counted_where_no_kernel_avoids_them(device, scores, monkeypatch):
    """Without the packages that cuDNN's kernel needs, which only a real program calls."""
    monkeypatch.setattr(attention, "_AT_ONCE", 1)
    head = fp.heads.causal_lm()
    model = abstract_model(fp.testing.TINY_LLAMA, fp.lora(2), head=head, dtype="bfloat16")
    model = fp.devices.planned_on(find_device(device), model)
    batch = example_batch("causal_lm", batch_size=4, length=128)
    parts = (model, fp.algorithms.fedavg(optax.sgd(0.1)), fp.tasks.next_token(), batch)
    found = activations(*parts, platform=fp.contracts.Platform("gpu", 9.0))
    assert (found.largest == (4, 4, 128, 128)) == scores


TEXT = """HloModule jit_round_

%fused_first (q: bf16[8,8]) -> bf16[1] {
  %q = bf16[8,8]{1,0} parameter(0)
  %square = bf16[8,8]{1,0} multiply(%q, %q)
  %flat.1 = bf16[64]{0} bitcast(%square)
  ROOT %first = bf16[1]{0} slice(%flat.1), slice={[0:1]}
}

%fused_slice (p: f32[6,8,8], i: s32[]) -> f32[8,8] {
  %p = f32[6,8,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %cut = f32[1,8,8]{2,1,0} dynamic-slice(%p, %i), dynamic_slice_sizes={1,8,8}
  ROOT %flat = f32[8,8]{1,0} bitcast(%cut)
}

%layer (t: (s32[], f32[8,8], f32[6,8,8])) -> (s32[], f32[8,8], f32[6,8,8]) {
  %t = (s32[], f32[8,8]{1,0}, f32[6,8,8]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%t), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%t), index=1
  %w = f32[6,8,8]{2,1,0} get-tuple-element(%t), index=2
  %kernel = f32[8,8]{1,0} fusion(%w, %i.1), kind=kLoop, calls=%fused_slice
  %dot = (f32[8,8]{1,0}, s8[16]{0}) custom-call(%x, %kernel), custom_call_target="__cublas$gemm"
  %y = f32[8,8]{1,0} get-tuple-element(%dot), index=0
  ROOT %out = (s32[], f32[8,8]{1,0}, f32[6,8,8]{2,1,0}) tuple(%i.1, %y, %w)
}

%step (s: (s32[], f32[8,8], f32[6,8,8])) -> (s32[], f32[8,8], f32[6,8,8]) {
  %s = (s32[], f32[8,8]{1,0}, f32[6,8,8]{2,1,0}) parameter(0)
  %loop = (s32[], f32[8,8]{1,0}, f32[6,8,8]{2,1,0}) while(%s), condition=%below, body=%layer"""
TEXT += """TURNS
  %z = f32[8,8]{1,0:T(8,128)S(1)} get-tuple-element(%loop), index=1
  %half = bf16[8,8]{1,0} convert(%z)
  %one = bf16[1]{0} fusion(%half), kind=kLoop, calls=%fused_first
  ROOT %end = (s32[], f32[8,8]{1,0}, f32[6,8,8]{2,1,0}) tuple(%s)
}

%below (l: (s32[], f32[8,8], f32[6,8,8])) -> pred[] {
  %six = s32[]{:T(128)} constant(6)
  %l = (s32[], f32[8,8]{1,0}, f32[6,8,8]{2,1,0}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%l), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.2, %six), direction=LT
}

%c (u: (s32[], s32[])) -> pred[] {
  %u = (s32[], s32[]) parameter(0)
  %i.3 = s32[] get-tuple-element(%u), index=0
  %last = s32[] get-tuple-element(%u), index=1
  ROOT %lt.1 = pred[] compare(%i.3, %last), direction=LT
}

ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = (s32[], f32[8,8]{1,0}, f32[6,8,8]{2,1,0}) parameter(0)
  %steps = (s32[], f32[8,8]{1,0}, f32[6,8,8]{2,1,0}) while(%a), condition=%c, body=%step
  ROOT %r = f32[8,8]{1,0} get-tuple-element(%steps), index=1
}
"""


@pytest.mark.parametrize("turns", [', backend_config={"known_trip_count":{"n":"6"}}', ""])
def test_kernels_and_bytes_of_a_programs_text(turns):
    """Six turns of a slice and a product, a conversion of an array in scratch memory, one entry.

    A fusion whose result is one entry reads no other. The six stands in a GPU's program, or in the
    condition alone.
    """
    text = TEXT if turns == "" else TEXT.replace("constant(6)", "constant(9)")
    found = step_traffic(text.replace("TURNS", turns))
    matrix = 4 * 8 * 8
    assert found.kernels == 6 * 2 + 2
    assert found.read == 6 * ((matrix + 4) + 2 * matrix) + 2
    assert found.written == 6 * (matrix + matrix + 16) + matrix // 2 + 2
    assert found.calls == {"__cublas$gemm": 6}


def test_the_committed_table_of_the_benchmark():
    """It is made of the committed figures; what grows by more than 10 % is a fault."""
    path = Path(__file__).parents[2] / "experiments" / "benchmarks" / "accelerators.py"
    script = SimpleNamespace(**runpy.run_path(str(path)))
    found = json.loads(script.RESULTS.read_text())
    assert script.RESULTS.with_suffix(".md").read_text() == script.table(found)
    old = found["minilm | h100 | auto"]
    assert script.grown(old, {**old, "kernels": old["kernels"] + 1}) == []
    (fault,) = script.grown(old, {**old, "nbytes": 2 * old["nbytes"]})
    assert fault.startswith("nbytes: ")


def test_the_committed_table_of_measured_rounds(monkeypatch):
    """It is made of the committed figures; a row that is compiled for the device says its limit."""
    folder = Path(__file__).parents[2] / "experiments" / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    script = importlib.import_module("on_device")
    found = json.loads(script.RESULTS.read_text())
    tables = [script.table(x["cells"], device, x["best"]) for device, x in found.items()]
    assert script.RESULTS.with_suffix(".md").read_text() == "\n".join(tables)
    cell = {"step": 4e-3, "peak": 10**9, "asked to repeat": False, "same bits": True}
    best = {"jax": "0", "bfloat16": 800e12, "float32": 1e12, "bandwidth": 1e12}
    cells = {"minilm | auto | 8": cell, "minilm | auto | 16": cell}
    cells["gpt2 | auto | 4 | free"] = "no memory"
    *_, own, more, failed = script.table(cells, "NVIDIA H100", best).splitlines()
    assert own == "| minilm | auto | 8 | 4.00 | 1.75 | 10% | 32,000 | 1.00 | no | yes |"
    assert more == "| minilm | auto | 16 | 4.00 |  | 19% | 64,000 | 1.00 | no | yes |"
    assert failed.startswith("| gpt2 | auto | 4 | no memory |")


def test_a_round_is_lowered_from_shapes_alone():
    """Of a model without class names too, whose logits are counted without its weights."""
    model = abstract_model(fp.testing.TINY_BERT, fp.lora(2), head=fp.heads.classification(3))
    batch = example_batch("classification", batch_size=2, length=8)
    parts = (model, fp.algorithms.fedavg(optax.sgd(0.1)), fp.tasks.classification(), batch)
    assert "while" in lowered_round(*parts, fp.Placement(lanes=2)).as_text()


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None or os.getenv("JAX_PLATFORMS") != "cpu",
    reason="needs fedjax_peft[compile-gpu] and JAX_PLATFORMS=cpu",
)
@pytest.mark.long("compiles two rounds for a GPU")
@pytest.mark.parametrize("form", ["auto", "whole"])
def test_both_forms_of_attention_compile_for_a_gpu(form):
    shape = {**fp.testing.TINY_LLAMA, "num_hidden_layers": 1}
    options = {"dtype": "bfloat16", "attention": form}
    model = abstract_model(shape, fp.lora(2), head=fp.heads.causal_lm(), **options)
    batch = example_batch("causal_lm", batch_size=2, length=16)
    parts = (model, fp.algorithms.fedavg(optax.sgd(0.1)), fp.tasks.next_token(), batch)
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        there = target_devices(find_device("h100"))
        found = compile_step(lowered_round(*parts, fp.Placement(lanes=2), there))
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
    fused = [name for name in found.calls if "fmha" in name]
    assert bool(fused) == (form == "auto")
    assert found.kernels > 20
    assert found.memory > found.temporary > 0
