"""Writers of the formats that models are read from, beside safetensors: GGUF and ONNX."""

import json

import numpy as np
import tiny_tokenizers
from gguf import GGMLQuantizationType, GGUFWriter, quants
from internals import _LAYER, _NAMES, onnx
from safetensors.numpy import load_file

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 400}
TO_GGUF = {ours: theirs for theirs, ours in (_LAYER | _NAMES).items()}


def pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of queries or keys in llama.cpp's order: neighbouring pairs of each head."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, kind="F32", **fields):
    """Writes a torch model as a GGUF file, its matrices in the given type."""
    c, family = model.config, model.config.model_type
    writer = GGUFWriter(path, family)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_vocab_size(c.vocab_size)
    if family == "qwen3":
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
    for name, value in fields.items():
        writer.add_string(name.replace("_dot_", "."), value)
    tokenizer = tiny_tokenizers.gpt2().backend_tokenizer
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    vocabulary += [f"<unused{i}>" for i in range(c.vocab_size - len(vocabulary))]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] + [1] * (len(vocabulary) - 1))
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in merges])
    writer.add_eos_token_id(0)
    for name, value in model.state_dict().items():
        stem, _, end = name.rpartition(".")
        if stem == "lm_head" and c.tie_word_embeddings:
            continue
        array = value.numpy()
        layer = stem.removeprefix("model.layers.").partition(".")
        theirs = TO_GGUF.get(stem) or f"blk.{layer[0]}.{TO_GGUF[layer[2]]}"
        if family == "llama" and stem.endswith((".q_proj", ".k_proj")):
            q = stem.endswith("q_proj")
            array = pairs(array, c.num_attention_heads if q else c.num_key_value_heads)
        raw = GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        writer.add_tensor(f"{theirs}.{end}", quants.quantize(array, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_onnx(directory, path):
    """Writes a BERT checkpoint as PyTorch's exporter does: matrices transposed and numbered."""
    message = onnx._messages()["Model"]()
    graph = message.graph
    for i, (name, array) in enumerate(load_file(directory / "model.safetensors").items()):
        linear = name.endswith(".weight") and array.ndim == 2 and "embeddings" not in name
        stored = f"onnx::MatMul_{i}" if linear else f"model.0.auto_model.{name}"
        value = array.T if linear else array
        graph.initializer.add(
            name=stored, dims=value.shape, data_type=1, raw_data=value.astype("<f4").tobytes()
        )
        if linear:
            bias = f"model.0.auto_model.{name.removesuffix('weight')}bias"
            graph.node.add(op_type="MatMul", input=["x", stored], output=[f"y{i}"])
            graph.node.add(op_type="Add", input=[bias, f"y{i}"], output=[f"z{i}"])
    path.write_bytes(message.SerializeToString())
    return message
