"""Llama and its descendants equal ``transformers``' torch models, for all forms of configs."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from closeness import EXACT, assert_close
from internals import default_targets, export, pool
from parity import assert_equal, flipped, forward
from peft import LoraConfig, get_peft_model
from peft.utils import constants
from refusals import refusals, refused
from safetensors.torch import load_file
from torch_reference import DECODER, GEMMA, padded_batch, saved, tensors, tiny_model
from transformers import AutoModel

import fedjax_peft as fp
from fedjax_peft.models.registry import parse_config

DECODERS = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text")
TINY = {"model_type": "llama", **DECODER, "initializer_range": 0.2}

pytestmark = pytest.mark.slow


# ---------------------------------------------------------------------------------------- configs


def scaled(kind, limit=40, **fields):
    return {
        "max_position_embeddings": limit,
        "rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **fields},
    }


LOCAL_AND_GLOBAL = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
}
LONGROPE = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
VARIANTS = {
    "one-group": (
        "llama",
        {
            "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True,
            "attention_bias": True, "mlp_bias": True,
        },
    ),
    "no-groups": ("llama", {"num_key_value_heads": None, **scaled("dynamic", 10, factor=4.0)}),
    "longrope": (
        "llama",
        scaled("longrope", original_max_position_embeddings=10, factor=4.0, **LONGROPE),
    ),
    "no-window": ("mistral", {"sliding_window": None}),
    "untied": ("qwen2", {"tie_word_embeddings": False, "use_sliding_window": False}),
    "layer-types": (
        "qwen3",
        {
            "attention_bias": True, "use_sliding_window": True, "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "no-positions": (
        "smollm3",
        {
            "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 4,
            "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
        },
    ),
    "no-caps": (
        "gemma2",
        {
            "final_logit_softcapping": None, "attn_logit_softcapping": None,
            "attention_bias": True, "tie_word_embeddings": False,
        },
    ),
    "gelu": ("gemma2", {"hidden_activation": "gelu", "attn_logit_softcapping": 5.0}),
    "two-ropes": (
        "gemma3_text",
        {"rope_parameters": LOCAL_AND_GLOBAL, "final_logit_softcapping": 3.0},
    ),
}  # fmt: skip
"""The other rotations are compared by their frequencies, below."""


@pytest.mark.parametrize("name", VARIANTS)
def test_config_variants_with_padding_on_either_side(name, tmp_path):
    family, config = VARIANTS[name]
    reference = tiny_model(family, kind="causal_lm", **config)
    model = fp.load_model(saved(reference, tmp_path))
    batch = padded_batch(reference.config)
    assert_equal(model, reference, batch)
    assert_equal(model, reference, flipped(batch))


OLD = {
    "llama": {
        "rope_theta": 50.0,
        "rope_scaling": {
            "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 20,
        },
    },
    "gemma3_text": {
        "rope_theta": 1000.0, "rope_local_base_freq": 50.0, "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("family", OLD)
def test_fields_of_older_configs(family, tmp_path):
    """``rope_theta`` and ``rope_scaling``, as most checkpoints on the hub have them.

    Fields that do not matter are ignored.
    """
    reference = tiny_model(family, kind="causal_lm", **OLD[family])
    values = fp.load_model(saved(reference, tmp_path)).frozen
    shape = DECODER if family == "llama" else GEMMA
    config = {"model_type": family, **shape, **OLD[family], "rope_interleaved": False}
    model = fp.random_model(config, head=fp.heads.causal_lm()).replace(frozen=values)
    assert_equal(model, reference, padded_batch(reference.config))


ROPES = {
    "linear": (8, 40, {"factor": 4.0}),
    "yarn": (8, 40, {"factor": 4.0, "original_max_position_embeddings": 10}),
    "yarn, all options": (
        8,
        40,
        {
            "factor": 4.0, "original_max_position_embeddings": 10, "beta_fast": 4.0,
            "beta_slow": 0.5, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.2,
        },
    ),
    "yarn of Qwen2.5": (
        128,
        32768,
        {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "llama3": (
        64,
        131072,
        {
            "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    ),
    "longrope": (
        8,
        40,
        {"factor": 2.0, "original_max_position_embeddings": 20, **LONGROPE},
    ),
}  # fmt: skip
"""(width of a head, positions, fields); that of llama3 is Llama 3.2's."""


@pytest.mark.parametrize("at_the_top", [False, True])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_of_rotations(name, at_the_top):
    """The original length stands in the table, or, as Phi has it, beside it with precedence."""
    width, limit, fields = ROPES[name]
    kind = name.partition(",")[0].partition(" ")[0]
    parameters = {"rope_type": kind, "rope_theta": 100.0, **fields}
    top = {}
    if at_the_top and kind != "linear":
        top["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
        parameters["original_max_position_embeddings"] = limit // 2 + 1
    options = {"head_dim": width, "max_position_embeddings": limit, **top}
    theirs = transformers.LlamaConfig(**options, rope_parameters=dict(parameters))
    frequencies, scale = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](theirs)
    _, config = parse_config({"model_type": "llama", **options, "rope_parameters": parameters})
    cos, sin = config.rope().tables(jnp.array([[0, 1]]))
    assert_close(cos[0, 0], scale, rtol=1e-6)
    # Position 1: the angle is the frequency; at most 1, so its tangent is unique.
    assert_close(np.arctan2(sin, cos)[0, 1, 0], frequencies, rtol=2e-6)


def test_every_sixth_layer_of_gemma_3_sees_all():
    fields = {**GEMMA, "sliding_window_pattern": 6, "num_hidden_layers": 7}
    _, config = parse_config({"model_type": "gemma3_text", **fields})
    assert list(config.layers) == transformers.Gemma3TextConfig(**fields).layer_types


test_config_that_is_not_implemented = refusals(
    lambda changes: fp.random_model(TINY | changes, head=fp.heads.causal_lm()),
    ({"num_attention_heads": 3}, "hidden_size = 32 is not a multiple of num_attention_heads"),
    ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value"),
    ({"head_dim": 5}, "an even width from 4, not 5"),
    ({"hidden_act": "slu"}, "Did you mean 'silu'"),
    ({"rope_scaling": {"type": "lama3"}}, "Did you mean 'llama3'"),
    ({"rope_scaling": {"type": "linear"}}, "factor = None; for linear it must be a positive"),
    ({"rope_parameters": {"rope_theta": -1}}, "rope_theta = -1"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1]}}, "short_factor = .* 4 pos"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_theta": 1}, "rope_theta = 1 of the model config must be above 1"),
    ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "factor = 0.5 .* at least 1"),
    ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
    ({"model_type": "gemma3_text", "rope_parameters": {"full_attention": 3}}, "no table"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"is_causal": False}, "is_causal = False"),
    ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "1 entries for 2 layers"),
    (
        {"model_type": "qwen2", "layer_types": ["local", "full_attention"]},
        "no kind of layers 'local'",
    ),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "has no window"),
    ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers has 1 entries for 2 layers"),
    ({"model_type": "smollm3", "layer_types": ["sliding_attention"] * 2}, "has no window"),
    ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ({"model_type": "gemma2", "sliding_window": None}, "no sliding_window"),
    ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional"),
    ({"model_type": "gemma3_text", "attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
)


SIZES = {
    "mistral": ({}, 7_241_732_096),
    "smollm3": ({}, 3_075_098_624),
    "gemma2": ({}, 2_614_341_888),
    "llama": (
        {
            "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
            "num_hidden_layers": 16, "num_key_value_heads": 8, "head_dim": 64,
            "tie_word_embeddings": True,
        },
        1_235_814_400,
    ),
    "gemma3_text": (
        {
            "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
            "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        },
        999_885_952,
    ),
}  # fmt: skip
"""The parameters of Mistral 7B, Gemma 2 2B, Llama 3.2 1B and Gemma 3 1B."""


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.sample("llama", "gemma3_text")
def test_parameters_of_real_shapes(family):
    config, parameters = SIZES[family]
    counts = fp.count({"model_type": family, **config}, head=fp.heads.causal_lm())
    assert counts["frozen"] == parameters


# ------------------------------------------------------------------------------------- checkpoints


def test_embeddings_are_those_of_the_bare_model(tmp_path):
    bare = tiny_model("llama").model
    model = fp.load_model(saved(bare, tmp_path), head=fp.heads.classification(2))  # any head
    batch = flipped(padded_batch(bare.config))
    with torch.no_grad():
        expected = AutoModel.from_pretrained(tmp_path)(**tensors(batch)).last_hidden_state.numpy()
    outputs, real = forward(model, batch), batch["attention_mask"].astype(bool)
    assert np.abs(expected[real]).max() > 0.5
    assert_close(np.asarray(outputs.hidden)[real], expected[real], **EXACT)
    rows = [states[mask] for states, mask in zip(expected, real, strict=True)]
    means, last = np.stack([x.mean(0) for x in rows]), np.stack([x[-1] for x in rows])
    assert_close(pool(outputs, batch, "mean"), means, **EXACT)
    assert_close(pool(outputs, batch, "cls"), last, **EXACT)


def test_tokenizer_with_a_special_token_beyond_the_vocabulary(tmp_path):
    """Gemma 3 has one for images; a padding token there would be looked up."""
    directory = fp.testing.write_tiny_checkpoint(tmp_path)
    tokenizer = fp.load_tokenizer(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(directory)
    assert fp.load_tokenizer(directory).convert_tokens_to_ids("<image>") == 64
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(directory)
    refused("ids up to 65, but the model's vocabulary has 64", fp.load_tokenizer, directory)


# ------------------------------------------------------------------------------ packed rows, PEFT


def test_packed_rows_are_those_of_torch(tmp_path):
    """Without a mask, transformers finds the texts of a row where positions begin anew."""
    reference = tiny_model("gemma3_text", kind="causal_lm")
    model = fp.load_model(saved(reference, tmp_path))
    lengths = (6, 1, 7)
    ids = np.random.default_rng(0).integers(5, 100, (1, 14)).astype(np.int32)
    places = np.concatenate([np.arange(n) for n in lengths])[None].astype(np.int32)
    packed = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "segment_ids": np.repeat([1, 2, 3], lengths)[None].astype(np.int32),
        "position_ids": places,
    }
    given = tensors({"input_ids": ids, "position_ids": places})
    with torch.no_grad():
        expected = reference(**given, use_cache=False).logits.numpy()
        alone = reference(input_ids=given["input_ids"]).logits.numpy()
    assert np.abs(expected - alone).max() > 0.01
    assert_close(forward(model, packed).logits, expected, **EXACT)


def test_a_prompt_from_the_vocabulary_is_scaled_as_tokens_are():
    model = fp.random_model(
        TINY | {"model_type": "gemma2", "head_dim": 8}, head=fp.heads.causal_lm()
    )
    prompt = fp.attach(model, fp.peft.prompt_tuning(3, init="vocabulary")).trainable[
        "model.embed_tokens.prompt"
    ]
    table = model.frozen["model.embed_tokens.embedding"] * jnp.sqrt(32.0)
    distances = jnp.abs(table[None] - prompt[:, None]).max(axis=2).min(axis=1)
    assert_close(distances, 0, atol=1e-6)


@pytest.mark.parametrize("family", DECODERS)
def test_default_targets_are_those_of_peft(family):
    found = default_targets({"model_type": family})
    tables = {
        "lora": constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING,
        "ia3": constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
        "ia3_feed_forward": constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING,
    }
    for method, table in tables.items():
        assert list(found[method]) == table["llama" if family == "smollm3" else family]


def test_all_linear_layers_are_those_of_peft():
    reference = tiny_model("llama", kind="causal_lm")
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(reference, config).get_base_model()
    expected = {n.partition(".lora_A")[0] for n, _ in adapted.named_parameters() if "lora_A" in n}
    model = fp.random_model(TINY | {"tie_word_embeddings": False}, head=fp.heads.causal_lm())
    kinds = fp.attach(model, fp.lora(rank=2, targets="all-linear")).kinds
    assert {n.removesuffix(".lora_a") for n in kinds if n.endswith(".lora_a")} == expected
    assert len(expected) == 2 * 7


def test_adapterhub_files_of_a_decoder(tmp_path):
    """The names are those in the source of ``adapters``, which needs an older transformers."""
    model = fp.attach(fp.random_model(TINY, head=fp.heads.causal_lm()), fp.peft.houlsby(size=4))
    moved = {name: x + 0.1 for name, x in model.trainable.items()}
    out = export(model, moved, tmp_path / "out", format="adapterhub")
    names = load_file(out / "adapter.safetensors")
    assert {re.split(r"\.adapters\.", re.sub(r"\d+", "N", n, count=1))[0] for n in names} == {
        "model.layers.N.attention_adapters",
        "model.layers.N.output_adapters",
    }
    again = fp.attach(fp.random_model(TINY, head=fp.heads.causal_lm()), fp.peft.pretrained(out))
    for name, x in moved.items():
        np.testing.assert_array_equal(again.trainable[name], x)
    qwen = fp.attach(
        fp.random_model(TINY | {"model_type": "qwen2"}, head=fp.heads.causal_lm()),
        fp.peft.houlsby(4),
    )
    with pytest.raises(fp.InputError, match="family is not among them"):
        export(qwen, qwen.trainable, tmp_path / "none", format="adapterhub")
