"""GPT-2: checkpoint forms, padding, the tied head, and LoRA on its fused projection."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close
from flax import nnx
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch_reference import padded_batch, saved, tensors, tiny_model, torch_states
from transformers import AutoModelForCausalLM, DynamicCache

from fedjax_peft.models import heads
from fedjax_peft.models.checkpoint import save_checkpoint
from fedjax_peft.models.hub import load_model
from fedjax_peft.models.registry import parse_config, random_model
from fedjax_peft.peft import lora
from fedjax_peft.peft.base import attach
from fedjax_peft.peft.prompt import PromptEmbed
from fedjax_peft.support.errors import InputError

EXACT = {"rtol": 0, "atol": 1e-5}
TINY = {
    "model_type": "gpt2",
    "vocab_size": 100,
    "n_positions": 12,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "initializer_range": 0.3,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

# peft 0.21 asks transformers 5 for an attribute that it has renamed.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


def forward(model, batch, trainable=None):
    values = model.trainable if trainable is None else trainable
    return jax.jit(model.apply, static_argnums=4)(model.frozen, values, batch, None, False)


def assert_equal(model, reference, batch, trainable=None):
    """Checks logits and hidden states, on real tokens."""
    outputs = forward(model, batch, trainable)
    logits, states = torch_states(reference, batch)
    real = batch["attention_mask"].astype(bool)
    for got, expected in [(outputs.logits, logits), (outputs.hidden, states[-1])]:
        rows = real if expected.ndim == 3 else slice(None)
        assert_close(np.asarray(got)[rows], expected[rows], **EXACT)


def flipped(batch):
    """Returns a right-padded batch as a left-padded one."""
    return {name: np.ascontiguousarray(x[:, ::-1]) for name, x in batch.items()}


# ---------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    "config",
    [
        {"activation_function": "relu", "n_inner": 24, "layer_norm_epsilon": 1e-3},
        {"activation_function": "gelu", "n_layer": 3, "n_head": 2},
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ],
    ids=["relu", "gelu", "stanford"],
)
def test_config_variants(config, tmp_path):
    reference = tiny_model("gpt2", kind="causal_lm", **config)
    model = load_model(saved(reference, tmp_path))
    assert_equal(model, reference, padded_batch(reference.config))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scale_attn_weights": False}, "scale_attn_weights = False"),
        ({"add_cross_attention": True}, "add_cross_attention = True"),
        ({"n_head": 3}, "n_embd = 16 is not a multiple of n_head = 3"),
        ({"n_inner": "64"}, "n_inner = '64'; it must be of type int or NoneType"),
        ({"n_inner": 0}, "n_inner = 0; it must be at least 1"),
        ({"activation_function": "gelu_nwe"}, "'gelu_new'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False"),
    ],
)
def test_config_that_is_not_implemented(changes, named):
    with pytest.raises(InputError, match=named):
        random_model(TINY | changes, head=heads.causal_lm())


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


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["classification", "causal_lm"])
def test_padding_on_either_side(kind, side, tmp_path):
    reference = tiny_model("gpt2", kind=kind)
    model = load_model(saved(reference, tmp_path))
    batch = padded_batch(reference.config, lengths=(9, 1, 8, 3))
    assert_equal(model, reference, batch if side == "right" else flipped(batch))


def test_token_types_are_looked_up_in_the_table_of_tokens(tmp_path):
    reference = tiny_model("gpt2", kind="causal_lm")
    model = load_model(saved(reference, tmp_path))
    batch = padded_batch(reference.config)
    types = batch | {"token_type_ids": batch["input_ids"] % 2}
    assert_equal(model, reference, types)


def test_classifier_reads_the_rightmost_token_that_is_not_the_pad_token(tmp_path):
    # Many checkpoints have the end of text as pad token: it may stand inside a text, or be all.
    reference = tiny_model("gpt2")
    model = load_model(saved(reference, tmp_path))
    batch = padded_batch(reference.config)
    batch["input_ids"][0, 5] = batch["input_ids"][1, 6] = batch["input_ids"][2, 0] = 3
    assert_equal(model, reference, batch)


def test_without_a_pad_token_the_attention_mask_gives_the_length(tmp_path):
    reference = tiny_model("gpt2", pad_token_id=None)
    model = load_model(saved(reference, tmp_path))
    lengths = (13, 7, 1, 10)
    batch = padded_batch(parse_config(TINY | {"pad_token_id": 3})[1], lengths)
    logits = forward(model, batch).logits
    for row, length in enumerate(lengths):  # Hugging Face then takes single texts only
        one = {name: x[row : row + 1, :length] for name, x in batch.items()}
        assert_close(logits[row], torch_states(reference, one)[0][0], **EXACT)


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


# ----------------------------------------------------------------------------------- checkpoints


def test_names_of_the_hub(tmp_path):
    """Without prefix, with causal masks and a stored output layer, and what another head had."""
    reference = tiny_model("gpt2", kind="causal_lm")
    file = saved(reference, tmp_path) / "model.safetensors"
    old = {name.removeprefix("transformer."): x for name, x in load_file(file).items()}
    old["lm_head.weight"] = torch.zeros(100, 32)
    old["multiple_choice_head.summary.weight"] = torch.zeros(1, 32)
    for i in range(2):
        old[f"h.{i}.attn.bias"] = torch.ones(1, 1, 40, 40).tril()
        old[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(old, file)
    batch = padded_batch(reference.config)
    model = load_model(tmp_path)
    assert_equal(model, reference, batch)
    classifier = load_model(tmp_path, head=heads.classification(3))
    assert classifier.kinds == {"score.kernel": "head"}
    hidden = torch_states(reference, batch)[1][-1]
    assert_close(forward(classifier, batch).hidden, hidden, **EXACT)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoint_is_read_as_float32(stored, tmp_path):
    reference = tiny_model("gpt2").to(stored)
    model = load_model(saved(reference, tmp_path))
    assert {x.dtype for x in {**model.frozen, **model.trainable}.values()} == {jnp.dtype("float32")}
    assert_equal(model, reference.float(), padded_batch(reference.config))


@pytest.mark.parametrize("kind", ["classification", "causal_lm"])
def test_bfloat16_compute_is_close_to_float32(kind, tmp_path):
    reference = tiny_model("gpt2", kind=kind)
    model = load_model(saved(reference, tmp_path), dtype="bfloat16")
    batch = padded_batch(reference.config)
    outputs = forward(model.replace(frozen=model.compute_frozen()), batch)
    assert outputs.hidden.dtype == jnp.bfloat16
    assert outputs.logits.dtype == jnp.float32
    expected, _ = torch_states(reference, batch)
    rows = batch["attention_mask"].astype(bool) if expected.ndim == 3 else slice(None)
    # bfloat16 keeps 8 bits, 0.4 % a rounding.
    error = np.linalg.norm(outputs.logits[rows] - expected[rows]) / np.linalg.norm(expected[rows])
    assert 1e-5 < error < 0.02


def test_saved_checkpoint_is_read_by_transformers(tmp_path):
    model = load_model(saved(tiny_model("gpt2", kind="causal_lm"), tmp_path / "in"))
    save_checkpoint(model.frozen, model.config, tmp_path / "out", ())
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    ).eval()
    assert_equal(model, reference, padded_batch(reference.config))


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


def test_two_classifiers_read_the_last_token():
    model = random_model(TINY, head=heads.two_classifiers(3), dropout=0.0)
    batch = {
        "input_ids": np.arange(1, 11, dtype=np.int32).reshape(2, 5),
        "attention_mask": np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], np.int32),
    }
    outputs = forward(model, batch)
    module = model.module()
    last = outputs.hidden[jnp.arange(2), jnp.array([4, 1])]
    assert_close(outputs.logits, module.score(last), **EXACT)
    assert_close(outputs.second, module.second_classifier(last), **EXACT)
    assert {name.split(".")[0] for name in model.kinds} == {"score", "second_classifier"}


# ----------------------------------------------------------------------------- prompt and prefix


class Prefix(nnx.Module):
    """A slot that puts keys and values before the given ones."""

    def __init__(self, key, value):
        self.key, self.value = nnx.Param(key), nnx.Param(value)

    def __call__(self, key, value, mask):
        key = jnp.concatenate([self.key[...], key], axis=1)
        value = jnp.concatenate([self.value[...], value], axis=1)
        more = ((0, 0), (0, 0), (0, 0), (self.key.shape[1], 0))
        return key, value, jnp.pad(mask, more, constant_values=True)


def random(*shape):
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("kind", ["classification", "causal_lm"])
def test_tokens_after_a_prompt(kind, tmp_path):
    reference = tiny_model("gpt2", kind=kind)
    module = load_model(saved(reference, tmp_path)).module()
    rows = random(3, 32)
    module.transformer.wte = PromptEmbed(module.transformer.wte, jnp.asarray(rows))
    batch = padded_batch(reference.config, lengths=(9, 4))
    outputs = module(batch)

    prompt = torch.tensor(rows).expand(2, 3, 32)
    with torch.no_grad():
        x = torch.cat([prompt, reference.transformer.wte(tensors(batch)["input_ids"])], dim=1)
        mask = torch.tensor(np.pad(batch["attention_mask"], ((0, 0), (3, 0)), constant_values=1))
        expected = reference.transformer(inputs_embeds=x, attention_mask=mask).last_hidden_state
        head = reference.score if kind == "classification" else reference.lm_head
        logits = head(expected)[:, 3:].numpy()
    real = batch["attention_mask"].astype(bool)
    hidden = expected[:, 3:].numpy()
    assert_close(np.asarray(outputs.hidden)[real], hidden[real], **EXACT)
    if kind == "classification":
        assert_close(outputs.logits, logits[[0, 1], [8, 3]], **EXACT)
    else:
        assert_close(np.asarray(outputs.logits)[real], logits[real], **EXACT)


def test_every_token_sees_a_prefix(tmp_path):
    reference = tiny_model("gpt2")
    module = load_model(saved(reference, tmp_path)).module()
    batch = padded_batch(reference.config, lengths=(9, 4))
    cache = DynamicCache()
    for i, block in enumerate(module.transformer.h):
        key, value = random(2, 3, 4, 8) + i, random(2, 3, 4, 8) - i
        block.attn.prefix = Prefix(jnp.asarray(key), jnp.asarray(value))
        cache.update(*(torch.tensor(x).transpose(1, 2) for x in (key, value)), i)
    mask = np.pad(batch["attention_mask"], ((0, 0), (3, 0)), constant_values=1)
    with torch.no_grad():
        # The text keeps its own positions.
        expected = reference(
            input_ids=tensors(batch)["input_ids"],
            attention_mask=torch.tensor(mask),
            position_ids=torch.arange(9)[None],
            past_key_values=cache,
        ).logits.numpy()
    assert_close(module(batch).logits, expected, **EXACT)


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
    assert_equal(model, reference, batch, trained)
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
