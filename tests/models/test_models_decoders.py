"""Llama and its descendants equal ``transformers``' torch models, for all forms of configs."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from closeness import assert_close
from parity import EXACT, assert_equal, flipped, forward, one_at_a_time
from peft import LoraConfig, get_peft_model
from peft.utils import constants
from safetensors.torch import load_file, save_file
from torch_reference import DECODER, FAMILIES, GEMMA, padded_batch, saved, tensors, tiny_model
from transformers import AutoModel, AutoModelForCausalLM

from fedjax_peft.measures.representation import pool
from fedjax_peft.models import heads
from fedjax_peft.models.hub import load_model, load_tokenizer
from fedjax_peft.models.registry import default_targets, parse_config, random_model
from fedjax_peft.models.rotary import rope
from fedjax_peft.peft import (
    full,
    houlsby,
    layer_norm,
    lora,
    prefix_tuning,
    pretrained,
    prompt_tuning,
)
from fedjax_peft.peft.base import attach, count
from fedjax_peft.peft.io.export import export
from fedjax_peft.support.errors import InputError
from fedjax_peft.testing import write_tiny_checkpoint

DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
TINY = {"model_type": "llama", **DECODER, "initializer_range": 0.2}

# peft 0.21 asks transformers 5 for an attribute that it has renamed.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


# ---------------------------------------------------------------------------------------- configs


def scaled(kind, limit=40, **fields):
    return {
        "max_position_embeddings": limit,
        "rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **fields},
    }


SHORT_AND_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
LOCAL_AND_GLOBAL = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
}
VARIANTS = {
    "one-group": ("llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "no-groups": ("llama", {"num_key_value_heads": None}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear": ("llama", scaled("linear", factor=4.0)),
    "dynamic": ("llama", scaled("dynamic", 10, factor=4.0)),
    "yarn": ("llama", scaled("yarn", factor=4.0, original_max_position_embeddings=10)),
    "yarn-all": (
        "llama",
        scaled(
            "yarn", factor=4.0, original_max_position_embeddings=10, beta_fast=4.0, beta_slow=0.5,
            truncate=False, mscale=0.7, mscale_all_dim=1.2,
        ),
    ),
    "llama3": (
        "llama",
        scaled(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=20,
        ),
    ),
    "longrope-short": (
        "llama",
        scaled("longrope", original_max_position_embeddings=20, factor=2.0, **SHORT_AND_LONG),
    ),
    "longrope-long": (
        "llama",
        scaled("longrope", original_max_position_embeddings=10, factor=4.0, **SHORT_AND_LONG),
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
    "pattern-of-six": ("gemma3_text", {"sliding_window_pattern": 6, "num_hidden_layers": 7}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_config_variants_with_padding_on_either_side(name, tmp_path):
    family, config = VARIANTS[name]
    reference = tiny_model(family, kind="causal_lm", **config)
    model = load_model(saved(reference, tmp_path))
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
    """``rope_theta`` and ``rope_scaling``, as most checkpoints on the hub have them."""
    reference = tiny_model(family, kind="causal_lm", **OLD[family])
    values = load_model(saved(reference, tmp_path)).frozen
    shape = DECODER if family == "llama" else GEMMA
    config = {"model_type": family, **shape, **OLD[family]}
    model = random_model(config, head=heads.causal_lm()).replace(frozen=values)
    assert_equal(model, reference, padded_batch(reference.config))


def test_config_of_smollm2(tmp_path):
    """All fields of its file on the hub; only the sizes are smaller."""
    config = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 36,
        "initializer_range": 0.041666666666666664, "intermediate_size": 96,
        "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 2,
        "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 100,
    }  # fmt: skip
    reference = tiny_model("llama", kind="causal_lm", **config)
    saved(reference, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path)
    assert not model.kinds  # a tied head is not trained
    assert not any("lm_head" in name for name in model.frozen)
    assert_equal(model, reference, padded_batch(reference.config, (9, 9)))  # no padding token


REAL = {
    "Llama-3.2-1B": (
        64,
        131072,
        {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    ),
    "Qwen2.5 with YaRN": (
        128,
        32768,
        {
            "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_frequencies_of_real_configs(name):
    width, limit, parameters = REAL[name]
    config = transformers.LlamaConfig(
        head_dim=width, max_position_embeddings=limit, rope_parameters=dict(parameters)
    )
    kind = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    frequencies, scale = kind(config)
    ours = rope(parameters, theta=None, width=width, limit=limit)
    cos, sin = ours.tables(jnp.array([[0, 1]]))
    assert_close(cos[0, 0], scale, rtol=1e-6)
    # Position 1: the angle is the frequency; at most 1, so its tangent is unique.
    assert_close(np.arctan2(sin, cos)[0, 1, 0], frequencies, rtol=2e-6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
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
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"model_type": "qwen2", "layer_types": ["local", "full_attention"]}, "has 'local'"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "has no window"),
        ({"model_type": "gemma2", "sliding_window": None}, "no sliding_window"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma3"}, "'gemma3_text'"),
    ],
)
def test_config_that_is_not_implemented(changes, named):
    with pytest.raises(InputError, match=named):
        random_model(TINY | changes, head=heads.causal_lm())


# ------------------------------------------------------------------------ parameters of real shapes

TINYLLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
}  # fmt: skip
SHAPES = {
    "TinyLlama-1.1B": (TINYLLAMA, 1_100_048_384),
    "Llama-3.2-1B": (
        {
            "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
            "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
        },
        1_235_814_400,
    ),
    "SmolLM2-135M": (
        {
            "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
            "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
            "num_key_value_heads": 3, "tie_word_embeddings": True,
        },
        134_515_008,
    ),
    "Mistral-7B": ({"model_type": "mistral"}, 7_241_732_096),
    "Qwen2.5-0.5B": (
        {
            "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896,
            "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
            "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
        494_032_768,
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
            "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "gemma-2-2b": ({"model_type": "gemma2"}, 2_614_341_888),
    "gemma-3-1b": (
        {
            "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
            "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
            "num_key_value_heads": 1,
        },
        999_885_952,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.sample("Llama-3.2-1B", "gemma-3-1b")
def test_parameters_of_real_shapes(name):
    config, parameters = SHAPES[name]
    assert count(config, head=heads.causal_lm())["frozen"] == parameters


def test_parameters_of_lora_on_tinyllama():
    """Rank 8 on queries (2048 to 2048) and values (2048 to 256) of 22 layers."""
    counts = count(TINYLLAMA, lora(rank=8), head=heads.causal_lm())
    assert counts["adapter"] == 22 * 8 * ((2048 + 2048) + (2048 + 256)) == 1_126_400


@pytest.mark.exhaustive  # roberta-base is counted in test_peft_counts.py
def test_roberta_large():
    """The embeddings, and 24 layers of attention, feed-forward and two norms; LoRA on two."""
    config = {
        "model_type": "roberta", "vocab_size": 50265, "hidden_size": 1024,
        "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "max_position_embeddings": 514, "type_vocab_size": 1,
    }  # fmt: skip
    square, wide = 1024 * 1024 + 1024, 2 * 1024 * 4096 + 4096 + 1024
    embeddings = (50265 + 514 + 1 + 2) * 1024
    counts = count(config, lora(rank=8), head=heads.classification(2))
    assert counts["frozen"] == embeddings + 24 * (4 * square + wide + 4 * 1024) == 354_310_144
    assert counts["adapter"] == 24 * 2 * 8 * (1024 + 1024) == 786_432
    assert counts["head"] == square + 2 * 1024 + 2


# ------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("side", ["right", "left"])
def test_embeddings_are_those_of_the_bare_model(side, tmp_path):
    bare = tiny_model("llama").model
    model = load_model(saved(bare, tmp_path), head=heads.classification(2))  # any head
    batch = padded_batch(bare.config)
    batch = flipped(batch) if side == "left" else batch
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
    directory = write_tiny_checkpoint(tmp_path)
    tokenizer = load_tokenizer(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(directory)
    assert load_tokenizer(directory).convert_tokens_to_ids("<image>") == 64
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(directory)
    with pytest.raises(InputError, match="ids up to 65, but the model's vocabulary has 64"):
        load_tokenizer(directory)


def test_untied_head_that_is_missing_is_reported(tmp_path):
    file = saved(tiny_model("llama", kind="causal_lm"), tmp_path) / "model.safetensors"
    rest = load_file(file)
    del rest["lm_head.weight"]
    save_file(rest, file)
    with pytest.raises(InputError, match=r"lm_head.weight \[32, 100\] is missing"):
        load_model(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_trained_from_scratch_is_exported_whole_and_loaded_again(tied, tmp_path):
    model = attach(
        random_model(TINY | {"tie_word_embeddings": tied}, head=heads.causal_lm()), full()
    )
    assert not model.frozen
    moved = {name: x + 0.01 for name, x in model.trainable.items()}
    export(model, moved, tmp_path / "out", format="merged")
    again = load_model(tmp_path / "out")
    assert again.frozen.keys() == moved.keys()
    for name, x in moved.items():
        np.testing.assert_array_equal(again.frozen[name], x)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert_equal(again, reference.eval(), padded_batch(reference.config))


# ------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize("tied", [True, False])
def test_readout_gives_the_capped_logits(tied):
    config = TINY | {"model_type": "gemma2", "tie_word_embeddings": tied, "head_dim": 8}
    config["final_logit_softcapping"] = 0.5
    model = random_model(config, head=heads.causal_lm())
    outputs = forward(model, padded_batch(parse_config(TINY)[1]))
    assert 0.4 < np.abs(outputs.logits).max() <= 0.5
    assert_close(outputs.readout(outputs.hidden), outputs.logits, **EXACT)


def test_dropout_rates():
    config = TINY | {"attention_dropout": 0.2, "classifier_dropout": 0.4}

    def rates(dropout, config=config):
        head = heads.token_classification(2)
        m = random_model(config, head=head, dropout=dropout).module()
        return [m.model.layers[0].self_attn.dropout.rate, m.dropout.rate]

    assert rates(None) == [0.2, 0.4]
    assert rates(None, TINY) == [0.0, 0.1]
    assert rates(0.0) == [0.0, 0.0]


# ------------------------------------------------------------------------------ packed rows, PEFT


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_packed_rows_are_those_of_torch(family, tmp_path):
    """Without a mask, transformers finds the texts of a row where positions begin anew."""
    reference = tiny_model(family, kind="causal_lm")
    model = load_model(saved(reference, tmp_path))
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


def random(*shape):
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("family", "method"),
    [("gemma3_text", prompt_tuning(3)), ("gemma3_text", prefix_tuning(3)), ("qwen2", lora(rank=2))],
    ids=["prompt", "prefix", "lora"],
)
def test_tokens_one_at_a_time_give_the_logits_of_the_whole_text(family, method):
    """Each row equals the text alone: with windows, two rotations, and padding after a prompt."""
    config = {"model_type": family, **FAMILIES[family].shape, "initializer_range": 0.2}
    model = attach(random_model(config, head=heads.causal_lm()), method)
    values = {name: x + 0.1 * random(*x.shape) for name, x in model.trainable.items()}
    model = model.replace(trainable=values)
    mask = np.arange(9)[None] >= 9 - np.array([9, 4])[:, None]
    ids = np.where(mask, np.random.default_rng(1).integers(5, 100, (2, 9)), 3).astype(np.int32)

    got = one_at_a_time(model, ids, mask, 6)
    for row, length in enumerate((9, 4)):
        own = {
            "input_ids": ids[row : row + 1, -length:],
            "attention_mask": np.ones((1, length), bool),
        }
        assert_close(got[row, -length:], forward(model, own).logits[0], **EXACT)


def test_a_prompt_from_the_vocabulary_is_scaled_as_tokens_are():
    model = random_model(TINY | {"model_type": "gemma2", "head_dim": 8}, head=heads.causal_lm())
    prompt = attach(model, prompt_tuning(3, init="vocabulary")).trainable[
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
        assert list(found[method]) == table[family]


def test_all_linear_layers_are_those_of_peft():
    reference = tiny_model("llama", kind="causal_lm")
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(reference, config).get_base_model()
    expected = {n.partition(".lora_A")[0] for n, _ in adapted.named_parameters() if "lora_A" in n}
    model = random_model(TINY | {"tie_word_embeddings": False}, head=heads.causal_lm())
    kinds = attach(model, lora(rank=2, targets="all-linear")).kinds
    assert {n.removesuffix(".lora_a") for n in kinds if n.endswith(".lora_a")} == expected
    assert len(expected) == 2 * 7


def test_adapterhub_files_of_a_decoder(tmp_path):
    """The names are those in the source of ``adapters``, which needs an older transformers."""
    model = attach(random_model(TINY, head=heads.causal_lm()), houlsby(size=4))
    moved = {name: x + 0.1 for name, x in model.trainable.items()}
    out = export(model, moved, tmp_path / "out", format="adapterhub")
    names = load_file(out / "adapter.safetensors")
    assert {re.split(r"\.adapters\.", re.sub(r"\d+", "N", n, count=1))[0] for n in names} == {
        "model.layers.N.attention_adapters",
        "model.layers.N.output_adapters",
    }
    again = attach(random_model(TINY, head=heads.causal_lm()), pretrained(out))
    for name, x in moved.items():
        np.testing.assert_array_equal(again.trainable[name], x)
    qwen = attach(random_model(TINY | {"model_type": "qwen2"}, head=heads.causal_lm()), houlsby(4))
    with pytest.raises(InputError, match="family is not among them"):
        export(qwen, qwen.trainable, tmp_path / "none", format="adapterhub")


@pytest.mark.parametrize("family", DECODERS)
def test_adapters_and_norms_find_their_places(family):
    shape = FAMILIES[family].shape
    model = random_model({"model_type": family, **shape}, head=heads.causal_lm())
    sites = {re.sub(r"\d+", "N", n) for n in attach(model, houlsby(size=4)).trainable}
    assert {name.split(".")[3] for name in sites} == {"attention_residual", "output_residual"}
    norms = attach(model, layer_norm())
    left = [n for n in norms.frozen if n.endswith(("scale", "offset")) or "norm" in n]
    assert not left
    assert len(norms.trainable) == {"llama": 5, "qwen3": 9, "gemma2": 9, "gemma3_text": 13}.get(
        family, 5
    )
