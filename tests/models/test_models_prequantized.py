"""Checkpoints that bitsandbytes has quantised are read as they are, and equal what it computes.

``tests/golden/prequantized_golden.py`` wrote them: a Llama of one layer. Its width is one block of
64 weights; the blocks of ``down_proj``, with 96 inputs, go over two outputs.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import EXACT, assert_close
from internals import export
from parity import forward
from refusals import refused
from safetensors.numpy import load_file
from torch_reference import logits_of, padded_batch, tensors
from transformers import LlamaConfig, LlamaForCausalLM

import fedjax_peft as fp
from fedjax_peft.models.modules import submodules
from fedjax_peft.models.quantized import Int8Kernel, NF4Kernel, QuantizedLinear, quantize_kernel

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "bitsandbytes"
KINDS = {"nf4": NF4Kernel, "int8": Int8Kernel}


def dequantised(stored):
    """Returns the weights of every quantised layer [out, in], one weight after the other."""
    found = {}
    for name in (n.removesuffix(".SCB") for n in stored if n.endswith(".SCB")):
        codes, scales = stored[f"{name}.weight"], stored[f"{name}.SCB"]
        rows = zip(codes.tolist(), scales.tolist(), strict=True)
        found[f"{name}.weight"] = np.array([[c * s / 127 for c in row] for row, s in rows])
    for key in (n for n in stored if ".quant_state." in n):
        name, state = key.partition(".quant_state.")[0], json.loads(stored[key].tobytes())
        values, scales = stored[f"{name}.quant_map"], stored[f"{name}.absmax"]
        flat = []
        for i in range(int(np.prod(state["shape"]))):
            byte, block = int(stored[name].reshape(-1)[i // 2]), i // state["blocksize"]
            scale = scales[block]
            if "nested_blocksize" in state:
                size = stored[f"{name}.nested_absmax"][block // state["nested_blocksize"]]
                scale = stored[f"{name}.nested_quant_map"][scale] * size + state["nested_offset"]
            flat.append(values[byte % 16 if i % 2 else byte // 16] * scale)
        found[name] = np.reshape(flat, state["shape"])
    return found


@pytest.mark.parametrize("name", ["nf4", "fp4", "int8"])
@pytest.mark.sample("nf4", "int8")
def test_weights_and_logits_are_those_of_bitsandbytes(name, tmp_path):
    stored, golden = (load_file(GOLDEN / name / f"{f}.safetensors") for f in ("model", "values"))
    weights = dequantised(stored)
    assert len(weights) == 7
    for key, value in golden.items():  # float32 sums of a scale's parts
        assert_close(weights[key], value, rtol=1e-6, atol=1e-7)
    model = fp.load_model(GOLDEN / name)
    kernels = {path: layer.kernel for path, layer in submodules(model.module(), QuantizedLinear)}
    assert len(kernels) == {"nf4": 6, "fp4": 0, "int8": 7}[name]
    assert all(type(kernel) is KINDS[name] for kernel in kernels.values())
    for path, kernel in kernels.items():
        assert_close(np.asarray(kernel[...]).T, weights[f"{path}.weight"], rtol=1e-6, atol=1e-7)

    plain = {n: x for n, x in stored.items() if n.rpartition(".")[0] not in {*kernels}}
    plain = {n: x for n, x in plain.items() if n.endswith(("norm.weight", "embed_tokens.weight"))}
    plain |= {n: x for n, x in stored.items() if n == "lm_head.weight"}
    fields = json.loads((GOLDEN / name / "config.json").read_text())
    del fields["quantization_config"]
    reference = LlamaForCausalLM(LlamaConfig(**fields)).float().eval()
    state = {n: torch.tensor(np.asarray(x, np.float32)) for n, x in (plain | weights).items()}
    reference.load_state_dict(state, strict=True)
    batch = padded_batch(LlamaConfig(**fields | {"pad_token_id": 3}), (7, 5))
    real = batch["attention_mask"].astype(bool)
    with torch.no_grad():
        expected = logits_of(reference(**tensors(batch))).numpy()[real]
    assert_close(np.asarray(forward(model, batch).logits)[real], expected, **EXACT)

    export(model, model.trainable, tmp_path, format="merged")
    again = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert_close(logits_of(again(**tensors(batch))).numpy()[real], expected, **EXACT)


def test_lora_is_attached_to_the_stored_codes():
    model = fp.attach(fp.load_model(GOLDEN / "nf4"), fp.lora(rank=2))
    (codes,) = (x for n, x in model.frozen.items() if "q_proj" in n and n.endswith(".codes"))
    stored = load_file(GOLDEN / "nf4" / "model.safetensors")
    packed = stored["model.layers.0.self_attn.q_proj.weight"].reshape(64, 32)
    np.testing.assert_array_equal(np.asarray(codes).T, packed)


@pytest.mark.parametrize(("stored", "asked"), [("int8", "nf4"), ("nf4", "int8")])
def test_another_form_is_quantised_again(stored, asked):
    kept, model = (fp.load_model(GOLDEN / stored, quantize=how) for how in (None, asked))
    layers = dict(submodules(kept.module(), QuantizedLinear))
    again = dict(submodules(model.module(), QuantizedLinear))
    assert {layer.kind for layer in again.values()} == {asked}
    for path in layers:
        expected = quantize_kernel(layers[path].kernel[...], asked)[...]
        assert_close(again[path].kernel[...], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "awq"}])
def test_other_methods_are_refused_by_name(how, tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "nf4", tmp_path / "model"))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": how}))
    refused(f"quant_method = '{how['quant_method']}'.*bitsandbytes", fp.load_model, folder)
