"""Weights in GGUF and in ONNX, against transformers' own reading and against safetensors."""

import json
import sys
import warnings

import numpy as np
import pytest
import tiny_tokenizers
import torch
from closeness import assert_close
from formats import SHAPE, write_gguf, write_onnx
from internals import assets, onnx
from refusals import refused
from torch_reference import padded_batch, saved, tensors, tiny_model
from transformers import AutoModelForCausalLM

import fedjax_peft as fp
from fedjax_peft import testing
from fedjax_peft.models.checkpoint import Safetensors, weight_files
from fedjax_peft.models.hub import read_config


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "F32"), ("llama", "Q4_1"), ("llama", "Q8_0"), ("qwen2", "Q4_0"), ("qwen3", "F16")],
)
@pytest.mark.sample("llama-Q8_0", "qwen3-F16")
def test_a_gguf_file_is_the_model_that_transformers_reads(tmp_path, family, kind):
    # transformers takes the width of Qwen3's heads to be 128, whatever the file says.
    width = {"head_dim": 128} if family == "qwen3" else {}
    written = tiny_model(family, kind="causal_lm", **SHAPE, **width)
    path = write_gguf(tmp_path / "tiny.gguf", written, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=path.name, dtype=torch.float32
        ).eval()
    model = fp.load_model(path)
    batch = padded_batch(written.config)
    with torch.no_grad():
        expected = reference(**tensors(batch)).logits.numpy()
    got = model.apply(model.frozen, model.trainable, batch, None, False).logits
    shown = batch["attention_mask"] == 1
    # Sums of 64 terms in float32, through two layers, into logits of some tens: 64 * 6e-8 * 10.
    assert_close(np.asarray(got)[shown], expected[shown], rtol=4e-5, atol=4e-5)
    assert model.name == str(path)
    assert read_config(path)["model_type"] == family
    text = "Who built the lighthouse of Marenholm?"
    assert model.tokenizer(text).input_ids == tiny_tokenizers.gpt2()(text).input_ids
    assert fp.load_tokenizer(path).eos_token == "<|endoftext|>"


def test_a_tokenizer_needs_neither_a_config_nor_weights(tmp_path):
    folder = testing.write_tiny_checkpoint(tmp_path)
    expected = fp.load_tokenizer(folder)("w1 w2").input_ids
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    assert fp.load_tokenizer(folder)("w1 w2").input_ids == expected


def test_a_file_of_another_format_is_no_model(tmp_path):
    path = testing.write_tiny_checkpoint(tmp_path) / "model.safetensors"
    refused("no model directory", fp.load_model, path)


@pytest.fixture
def llama(tmp_path):
    return tiny_model("llama", kind="causal_lm", **SHAPE), tmp_path / "tiny.gguf"


def test_a_gguf_file_that_cannot_be_read_is_one_paragraph(llama, monkeypatch):
    model, path = llama
    whole = write_gguf(path, model).read_bytes()
    for size in (10, 3_000, len(whole) - 100):
        path.write_bytes(whole[:size])
        refused(r"tiny.gguf is not a whole GGUF file.*fetch it again", fp.load_model, path)
    for damaged in (b"GGUF" + b"\xff" * 200, b"PK" + whole[2:]):
        path.write_bytes(damaged)
        refused("not a whole GGUF file", fp.load_model, path)
    path.unlink()
    write_gguf(path, model, llama_dot_rope_dot_scaling_dot_type="yarn")
    refused("scales its rotary positions", fp.load_model, path)
    path.write_bytes(whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0bloom"))
    refused(r"architecture 'bloom'.*llama, qwen2, qwen3 are read", fp.load_model, path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(r"pip install 'gguf", fp.load_model, path)


def test_the_width_of_heads_is_the_files(tmp_path):
    written = tiny_model("qwen3", kind="causal_lm", **SHAPE, head_dim=32)
    assert read_config(write_gguf(tmp_path / "tiny.gguf", written))["head_dim"] == 32


def test_a_type_of_weights_that_is_not_read_is_named(llama):
    model, path = llama
    write_gguf(path, model, "Q5_0")
    refused(r"the type Q5_0. These are read: F32, F16", fp.load_model, path)


def test_onnx_has_the_weights_of_the_safetensors_checkpoint(tmp_path):
    directory = saved(tiny_model("bert", kind="classification").bert, tmp_path)
    write_onnx(directory, tmp_path / "model.onnx")
    expected, got = Safetensors(weight_files(directory)), onnx.Onnx(tmp_path / "model.onnx")
    names = {f"model.0.auto_model.{name}": name for name in expected.shapes}
    assert got.shapes == {own: expected.shapes[name] for own, name in names.items()}
    for own, name in names.items():
        np.testing.assert_array_equal(got.read(own, False), expected.read(name, False))
        turned = len(got.shapes[own]) == 2
        np.testing.assert_array_equal(got.read(own, turned), expected.read(name, turned))


def test_an_asset_in_onnx_is_a_model_with_the_tokenizer_of_another(tmp_path, monkeypatch):
    directory = testing.write_tiny_checkpoint(tmp_path / "whole")
    (tmp_path / "onnx").mkdir()
    write_onnx(directory, tmp_path / "onnx" / "model.onnx")
    config = json.loads((directory / "config.json").read_text())
    folders = {"tiny-onnx": tmp_path / "onnx", "whole": directory}
    monkeypatch.setattr(assets, "fetch", folders.__getitem__)
    asset = assets.ASSETS["minilm-l3"]._replace(name="tiny-onnx", config=config, tokenizer="whole")
    monkeypatch.setitem(assets.ASSETS, "tiny-onnx", asset)
    got, expected = (
        fp.load_model(x, head=fp.heads.classification(2)) for x in ("tiny-onnx", directory)
    )
    assert got.name == "tiny-onnx"
    assert got.tokenizer("a text").input_ids == expected.tokenizer("a text").input_ids
    for name, value in expected.frozen.items():
        np.testing.assert_array_equal(got.frozen[name], value)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Returns a function that makes the message of an ONNX file anew."""
    folder = tmp_path_factory.mktemp("exported")
    directory = saved(tiny_model("bert", kind="classification").bert, folder)
    content = write_onnx(directory, folder / "model.onnx").SerializeToString()
    return lambda: onnx._messages()["Model"].FromString(content)


def resized(*shape):
    def change(graph):
        graph.initializer[0].dims[:] = shape

    return change


def negated(graph):
    matrix = next(tensor for tensor in graph.initializer if len(tensor.dims) == 2)
    matrix.dims[:] = [-length for length in matrix.dims]


def nothing(graph):
    graph.initializer[0].raw_data = b""
    resized(2**40, 0, 16)(graph)


def without(field):
    return lambda graph: getattr(graph.node[0], field).pop()


def tripled(graph):
    """A layer's matrix becomes an array of three axes."""
    name = graph.node[0].input[1]
    (matrix,) = [tensor for tensor in graph.initializer if tensor.name == name]
    matrix.dims.append(1)


def doubled(graph):
    graph.initializer.add().CopyFrom(graph.initializer[0])


def named_alike(graph):
    """Two matrices are added to one bias."""
    first, second = [node for node in graph.node if node.op_type == "Add"][:2]
    second.input[0] = first.input[0]


NOT_AN_ARRAY = "is not an array of float32 numbers"
DAMAGED = {
    "integers": (lambda graph: setattr(graph.initializer[0], "data_type", 7), NOT_AN_ARRAY),
    "short": (lambda graph: setattr(graph.initializer[0], "raw_data", b"123"), NOT_AN_ARRAY),
    "empty": (lambda graph: graph.initializer.__delitem__(slice(None)), "it holds no weights"),
    "negative": (negated, NOT_AN_ARRAY),
    "one negative": (resized(-1, 32), NOT_AN_ARRAY),
    "huge": (resized(2**62, 4), NOT_AN_ARRAY),
    "overflows to zero": (resized(2**31, 2**33, 1), NOT_AN_ARRAY),
    "nothing": (nothing, NOT_AN_ARRAY),
    "no axes": (resized(), NOT_AN_ARRAY),
    "many axes": (resized(64, 32, *[1] * 90), NOT_AN_ARRAY),
    "one input": (without("input"), "a node MatMul has not two inputs and one output"),
    "no output": (without("output"), "a node MatMul has not two inputs and one output"),
    "no matrix": (tripled, "multiplies, and is no matrix"),
    "twice": (doubled, "it holds .* twice"),
    "two of one name": (named_alike, "it holds .* twice"),
}


@pytest.mark.parametrize("change", DAMAGED)
def test_an_onnx_file_that_cannot_be_read_is_one_paragraph(exported, tmp_path, change):
    message, (alter, said) = exported(), DAMAGED[change]
    alter(message.graph)
    (tmp_path / "model.onnx").write_bytes(message.SerializeToString())
    words = rf"model.onnx is not a whole ONNX file of a BERT model \(.*{said}"
    refused(words, onnx.Onnx, tmp_path / "model.onnx")


def test_a_file_that_is_no_onnx_or_is_missing_is_named(exported, tmp_path):
    content = exported().SerializeToString()
    name = exported().graph.initializer[0].name.encode()
    for data in (content[:-50], b"\xff" * 300, b"", content.replace(name, b"\xff" * len(name))):
        (tmp_path / "model.onnx").write_bytes(data)
        refused(r"model.onnx is not a whole ONNX file", onnx.Onnx, tmp_path / "model.onnx")
    for path in (tmp_path, tmp_path / "missing.onnx"):
        refused(f"{path} is not a whole ONNX file", onnx.Onnx, path)


def test_onnx_files_with_any_damage_are_refused_or_read(exported, tmp_path):
    """Seeded: 400 files, cut or with other bytes. Reading takes no more memory than the file."""
    content, rng = exported().SerializeToString(), np.random.default_rng(0)
    place = content.index(b"MatMul")  # nodes come before the arrays, whose bytes can be any
    outcomes = set()
    for index in range(400):
        data = bytearray(content[: rng.integers(len(content))] if index % 4 == 0 else content)
        for _ in range(rng.integers(1, 4)):
            limit = place + 2000 if index % 2 else len(data)
            data[rng.integers(min(limit, len(data)))] = rng.integers(256)
        (tmp_path / "model.onnx").write_bytes(data)
        outcomes.add(outcome(tmp_path / "model.onnx"))
    assert outcomes == {"read", "refused"}


def outcome(path):
    try:
        stored = onnx.Onnx(path)
        for name in stored.shapes:
            stored.read(name, False)
    except fp.InputError as error:
        return "refused" if str(path) in str(error) else str(error)
    return "read"


@pytest.mark.assets(once=True)
def test_minilm_l3_is_what_onnxruntime_computes():
    """The numbers are those of onnxruntime 1.32, for the first token's state."""
    model = fp.load_model("minilm-l3", head=fp.heads.classification(2))
    text = model.tokenizer(["The cat sat on the mat."], return_tensors="np")
    outputs = model.apply(model.frozen, model.trainable, text, None, False)
    expected = [-0.1856900, 0.2617271, 0.2934228, -0.1266311]
    assert_close(outputs.hidden[0, 0, :4], expected, rtol=2e-5, atol=2e-5)
