"""GPT-2: what is not seen, the tied head, and LoRA on its fused projection."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close
from parity import EXACT, assert_equal, forward
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch_reference import padded_batch, saved, tiny_model

from fedjax_peft.models import heads
from fedjax_peft.models.hub import load_model
from fedjax_peft.models.registry import parse_config, random_model
from fedjax_peft.peft import lora
from fedjax_peft.peft.base import attach
from fedjax_peft.support.errors import InputError

TINY = {
    "model_type": "gpt2",
    "vocab_size": 100,
    "n_positions": 12,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "initializer_range": 0.3,
}

# peft 0.21 asks transformers 5 for an attribute that it has renamed.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


# ---------------------------------------------------------------------------------------- config


def test_untied_head_does_not_matter_to_a_classifier():
    head = heads.classification(2)
    assert random_model(TINY | {"tie_word_embeddings": False}, head=head).head == ("score",)


def test_dropout_rates():
    config = TINY | {"resid_pdrop": 0.2, "embd_pdrop": 0.3, "attn_pdrop": 0.4}

    def rates(dropout, **more):
        head = heads.token_classification(2)
        m = random_model(config | more, head=head, dropout=dropout).module()
        h = m.transformer.h[0]
        drops = (m.transformer.drop, h.attn.attn_dropout, h.attn.resid_dropout, h.mlp.dropout)
        return [d.rate for d in (*drops, m.dropout)]

    assert rates(None) == [0.3, 0.4, 0.2, 0.2, 0.1]
    assert rates(None, hidden_dropout=0.5)[-1] == 0.5
    assert rates(0.0) == [0.0] * 5


# --------------------------------------------------------------------------------------- padding


def test_token_types_are_looked_up_in_the_table_of_tokens(tmp_path):
    reference = tiny_model("gpt2", kind="causal_lm")
    model = load_model(saved(reference, tmp_path))
    batch = padded_batch(reference.config)
    types = batch | {"token_type_ids": batch["input_ids"] % 2}
    assert_equal(model, reference, types)


def test_neither_later_tokens_nor_padding_are_seen():
    model = random_model(TINY, head=heads.causal_lm())
    ids = np.random.default_rng(0).integers(0, 100, (2, 10)).astype(np.int32)
    mask = np.ones((2, 10), np.int32)
    mask[1, :4] = 0
    changed = ids.copy()
    changed[0, 6:] = 7
    changed[1, :4] = 7
    a, b = (forward(model, {"input_ids": x, "attention_mask": mask}).logits for x in (ids, changed))
    np.testing.assert_array_equal(a[0, :6], b[0, :6])
    np.testing.assert_array_equal(a[1, 4:], b[1, 4:])
    assert np.abs(a[0, 6:] - b[0, 6:]).max() > 0.1


def test_a_sequence_that_is_too_long_is_refused():
    model = random_model(TINY, head=heads.causal_lm())

    def shapes(length):
        ids = jax.ShapeDtypeStruct((2, length), jnp.int32)
        batch = {"input_ids": ids, "attention_mask": ids}
        return jax.eval_shape(lambda b: model.apply(model.frozen, {}, b, None, False), batch)

    assert shapes(12).logits.shape == (2, 12, 100)
    with pytest.raises(InputError, match=r"13 positions, and the model has 12 \(n_positions"):
        shapes(13)


# ----------------------------------------------------------------------------------------- heads


def test_tied_head_is_frozen_and_has_no_leaf_of_its_own(tmp_path):
    model = load_model(saved(tiny_model("gpt2", kind="causal_lm"), tmp_path))
    assert model.head == ()
    assert model.labels == ()
    assert not model.trainable
    assert not any("lm_head" in name for name in model.frozen)
    adapted = attach(model, lora(2))
    assert set(adapted.kinds.values()) == {"adapter", "fixed"}


def test_config_without_architectures_and_head_is_a_language_model(tmp_path):
    path = saved(tiny_model("gpt2", kind="causal_lm"), tmp_path) / "config.json"
    config = json.loads(path.read_text())
    del config["architectures"]
    path.write_text(json.dumps(config))
    assert load_model(tmp_path).head == ()


# ------------------------------------------------------------------------------------------ LoRA


def to_torch(leaf):
    """Returns peft's name of a trained leaf."""
    stem, _, kind = leaf.rpartition(".")
    named = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "kernel": "weight"}
    return f"base_model.model.{stem}.{named[kind]}"


def peft_reference(base, alpha, task, **options):
    """Returns the model with peft's LoRA on c_attn, every B random: a zero B hides every bug."""
    config = LoraConfig(
        r=4,
        lora_alpha=alpha,
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        task_type=task,
        **options,
    )
    reference = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return reference


def from_peft(reference, model):
    """Returns peft's trained tensors as our leaves (those that never change are the model's)."""
    state = get_peft_model_state_dict(reference)
    names = [name for name, kind in model.kinds.items() if kind != "fixed"]
    assert state.keys() == {to_torch(name) for name in names}
    return model.trainable | {
        name: jnp.asarray(state[to_torch(name)].detach().numpy().T.copy()) for name in names
    }


def test_lora_is_that_of_peft(tmp_path):
    base = tiny_model("gpt2", kind="causal_lm")
    model = attach(load_model(saved(base, tmp_path)), lora(4, alpha=6.0))
    batch = padded_batch(base.config)
    before = forward(model, batch).logits
    reference = peft_reference(base, 6.0, "CAUSAL_LM").eval()
    trained = from_peft(reference, model)
    assert_equal(model, reference.get_base_model(), batch, trained)
    assert np.abs(forward(model, batch, trained).logits - before).max() > 0.1


def test_lora_on_parts_is_a_dense_merge(tmp_path):
    plain = load_model(saved(tiny_model("gpt2"), tmp_path))
    model = attach(plain, lora(4, alpha=6.0, parts=("q", "v")))
    key = jax.random.key(0)
    trained = {
        name: 0.2 * jax.random.normal(jax.random.fold_in(key, i), x.shape)
        if name.endswith("lora_b")
        else x
        for i, (name, x) in enumerate(model.trainable.items())
    }
    merged = dict(plain.frozen)
    for i in range(2):
        path = f"transformer.h.{i}.attn.c_attn"
        q, v = (6 / 4 * trained[f"{path}.{p}.lora_a"] @ trained[f"{path}.{p}.lora_b"] for p in "qv")
        merged[f"{path}.kernel"] += jnp.concatenate([q, jnp.zeros_like(q), v], axis=1)
    batch = padded_batch(parse_config(plain.config)[1])
    expected = forward(plain.replace(frozen=merged), batch).logits
    assert_close(forward(model, batch, trained).logits, expected, **EXACT)
    assert np.abs(expected - forward(plain, batch).logits).max() > 0.1
