"""Our backbones equal Hugging Face's, for all forms of checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close, assert_small
from safetensors.torch import load_file, save_file
from tiny import forward
from torch_reference import (
    FAMILIES,
    HEADS,
    logits_of,
    padded_batch,
    randomised,
    saved,
    tensors,
    tiny_model,
    torch_outputs,
    torch_states,
)
from transformers import AutoModel, AutoModelForSequenceClassification

from fedjax_peft.models.checkpoint import save_checkpoint
from fedjax_peft.models.heads import classification, two_classifiers
from fedjax_peft.models.hub import load_model
from fedjax_peft.support.assets import fetch

pytestmark = pytest.mark.slow

EXACT = {"rtol": 0, "atol": 1e-5}
"""Float32 against float32; logits are of order one."""


def ours(model, batch):
    outputs = forward(model, batch)
    return np.asarray(outputs.logits), np.asarray(outputs.hidden)


def assert_equal(model, reference, batch, tolerance=EXACT):
    for got, expected in zip(ours(model, batch), torch_outputs(reference, batch), strict=True):
        assert_close(got, expected, **tolerance)


def real_tokens(batch, x):
    """Returns the rows of a ``[batch, length, ...]`` array that are not padding (all of others)."""
    mask = batch.get("attention_mask")
    return x if mask is None or x.ndim < 3 else x[mask.astype(bool)]


def assert_equal_states(outputs, reference, batch):
    logits, states = torch_states(reference, batch)
    assert np.abs(logits).max() > 0.5
    _, last = torch_outputs(reference, batch)
    ours = (outputs.logits, outputs.hidden, *outputs.states)
    for got, expected in zip(ours, (logits, last, *states), strict=True):
        got = np.asarray(got)
        assert_close(real_tokens(batch, got), real_tokens(batch, expected), **EXACT)


OTHERS = [(family, kind) for family, kind in HEADS if kind != FAMILIES[family].kinds[0]]
FULL = [
    pytest.param(*head, marks=pytest.mark.exhaustive if head in OTHERS else ()) for head in HEADS
]


@pytest.mark.parametrize(("family", "kind"), OTHERS)
def test_every_other_head_and_every_hidden_state(family, kind, tmp_path):
    reference = tiny_model(family, kind=kind)
    model = load_model(saved(reference, tmp_path))
    batch = padded_batch(reference.config)
    apply = jax.jit(model.apply, static_argnums=4)
    outputs = apply(model.frozen, model.trainable, batch, None, False)
    assert_equal_states(outputs, reference, batch)


@pytest.mark.parametrize(("family", "kind"), FULL)
@pytest.mark.sample(
    "bert-*",
    "deberta-v2-*",
    "distilbert-*",
    "gpt2-*",
    "llama-*",
    "qwen3-*",
    "gemma3_text-*",
    "vit-*",
)
def test_every_hidden_state_and_the_gradient_of_the_embeddings(family, kind, tmp_path):
    """For a model of images: the gradient of the pixels."""
    reference = tiny_model(family, kind=kind)
    model = load_model(saved(reference, tmp_path))
    batch = padded_batch(reference.config)
    leaf = FAMILIES[family].embeddings
    leaf = leaf and leaf.format(reference.base_model_prefix)
    given = tensors(batch)
    source = reference.get_input_embeddings().weight if leaf else given["pixel_values"]
    source.requires_grad_()
    logits = logits_of(reference(**given))
    weights = np.random.default_rng(1).normal(size=logits.shape).astype(np.float32)
    if weights.ndim == 3:
        weights *= batch["attention_mask"][..., None]
    (logits * torch.tensor(weights)).sum().backward()
    expected = source.grad.numpy()

    @functools.partial(jax.grad, has_aux=True)
    def gradient(x):
        frozen = {**model.frozen, leaf: x} if leaf else model.frozen
        columns = batch if leaf else {"pixel_values": x}
        outputs = model.apply(frozen, model.trainable, columns, None, False)
        return (outputs.logits * weights).sum(), outputs

    got, outputs = jax.jit(gradient)(model.frozen[leaf] if leaf else batch["pixel_values"])
    assert_equal_states(outputs, reference, batch)
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert_small(error, 1e-4)


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize(
    "config",
    [
        {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
        {"hidden_act": "relu", "num_hidden_layers": 3, "num_attention_heads": 2},
        {"pad_token_id": 4, "type_vocab_size": 3, "classifier_dropout": 0.3},
    ],
    ids=["gelu_new", "relu", "pad"],
)
@pytest.mark.sample("gelu_new-bert", "relu-roberta", "pad-*")
def test_config_variants(family, config, tmp_path):
    reference = tiny_model(family, **config)
    model = load_model(saved(reference, tmp_path))
    assert_equal(model, reference, padded_batch(reference.config))


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_token_types_default_to_zero_and_padding_is_not_seen(family, tmp_path):
    reference = tiny_model(family)
    model = load_model(saved(reference, tmp_path))
    batch = padded_batch(reference.config)
    del batch["token_type_ids"]
    assert_equal(model, reference, batch)
    other = batch | {"input_ids": np.where(batch["attention_mask"], batch["input_ids"], 77)}
    real = batch["attention_mask"].astype(bool)
    for a, b in zip(ours(model, batch), ours(model, other), strict=True):
        rows = real if a.ndim == 3 else slice(None)
        assert_close(a[rows], b[rows], **EXACT)


@pytest.mark.parametrize("given", [None, 0.3])
def test_dropout_rates_are_those_of_the_config(given, tmp_path):
    reference = tiny_model(
        "bert", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.05, classifier_dropout=given
    )
    module = load_model(saved(reference, tmp_path)).module()
    layer, torch_layer = module.bert.encoder.layer[0], reference.bert.encoder.layer[0]
    assert module.dropout.rate == reference.dropout.p == (0.2 if given is None else given)
    assert module.bert.embeddings.dropout.rate == reference.bert.embeddings.dropout.p == 0.2
    assert layer.attention.self.dropout.rate == torch_layer.attention.self.dropout.p == 0.05
    assert layer.output.dropout.rate == torch_layer.output.dropout.p == 0.2
    assert load_model(tmp_path, dropout=0.0).module().dropout.rate == 0


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_legacy_layer_norm_names(family, tmp_path):
    reference = tiny_model(family)
    file = saved(reference, tmp_path) / "model.safetensors"

    def legacy(name):
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        stem = ".".join(name.split(".")[-2:])
        return name.removesuffix(stem) + old.get(stem, stem)

    tensors = {legacy(name): x for name, x in load_file(file).items()}
    assert any(name.endswith("gamma") for name in tensors)
    save_file(tensors, file)
    assert_equal(load_model(tmp_path), reference, padded_batch(reference.config))


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_sharded_checkpoint(family, tmp_path):
    reference = tiny_model(family)
    reference.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_equal(load_model(tmp_path), reference, padded_batch(reference.config))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoint_is_read_as_float32(stored, tmp_path):
    reference = tiny_model("bert").to(stored)
    model = load_model(saved(reference, tmp_path))
    assert {x.dtype for x in {**model.frozen, **model.trainable}.values()} == {jnp.dtype("float32")}
    assert_equal(model, reference.float(), padded_batch(reference.config))


def bare_encoder(family: str, directory, **options):
    """Returns the encoder alone, saved as ``AutoModel`` does: without prefix and classifier."""
    config = tiny_model(family).config
    encoder = randomised(AutoModel.from_config(config, **options).eval())
    names = load_file(saved(encoder, directory) / "model.safetensors")
    assert not any(name.startswith((family, "classifier")) for name in names)
    return encoder


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_bare_encoder_gets_a_fresh_head(family, tmp_path):
    encoder = bare_encoder(family, tmp_path, add_pooling_layer=False)
    model = load_model(tmp_path, head=classification(3))
    batch = padded_batch(encoder.config)
    tensors = {name: torch.tensor(x, dtype=torch.long) for name, x in batch.items()}
    with torch.no_grad():
        expected = encoder(**tensors).last_hidden_state.numpy()
    assert_close(ours(model, batch)[1], expected, **EXACT)
    # BERT's pooler is part of its head, as the dense layer inside RoBERTa's classifier is.
    assert model.head == (("bert.pooler",) if family == "bert" else ()) + ("classifier",)
    modules = ["bert.pooler.dense", "classifier"]
    if family == "roberta":
        modules = ["classifier.dense", "classifier.out_proj"]
    assert model.kinds == {f"{m}.{leaf}": "head" for m in modules for leaf in ("bias", "kernel")}


def test_pooler_of_the_checkpoint_is_where_training_starts(tmp_path):
    encoder = bare_encoder("bert", tmp_path)
    model = load_model(tmp_path, head=classification(3, fresh=True))
    kernel = model.trainable["bert.pooler.dense.kernel"]
    np.testing.assert_array_equal(kernel, encoder.pooler.dense.weight.detach().T)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_bfloat16_compute_is_close_to_float32(family, tmp_path):
    reference = tiny_model(family)
    model = load_model(saved(reference, tmp_path), dtype="bfloat16")
    batch = padded_batch(reference.config)
    apply = jax.jit(model.apply, static_argnums=4)
    outputs = apply(model.compute_frozen(), model.trainable, batch, None, False)
    assert outputs.hidden.dtype == jnp.bfloat16
    assert outputs.logits.dtype == jnp.float32  # the head computes in float32
    # bfloat16 keeps 8 bits, 0.4 % a rounding; a wrong formula would be off by the values' size, 1.
    expected, _ = torch_outputs(reference, batch)
    assert np.abs(expected).max() > 0.5
    assert_close(outputs.logits, expected, rtol=0, atol=0.05)


@pytest.mark.assets
def test_minilm_on_real_text(tmp_path):
    directory = fetch("minilm-l6")
    model = load_model("minilm-l6", head=classification(5))
    texts = ["A short one.", "Federated learning keeps data where it is; weights travel.", "", "so"]
    batch = dict(model.tokenizer(texts, padding=True, return_tensors="np"))
    assert not batch["attention_mask"].all()

    # Torch in float64: on padding tokens, which nobody reads, its own float32 is off by 3e-5.
    encoder = AutoModel.from_pretrained(directory).eval().double()
    with torch.no_grad():
        tensors = {name: torch.tensor(x) for name, x in batch.items()}
        expected = encoder(**tensors).last_hidden_state.numpy()
    real = batch["attention_mask"].astype(bool)
    assert_close(ours(model, batch)[1][real], expected[real], **EXACT)

    save_checkpoint({**model.frozen, **model.trainable}, model.config, tmp_path, model.labels)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert_close(ours(model, batch)[0], torch_outputs(classifier, batch)[0], **EXACT)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_the_second_classifier_is_another_of_robertas_form(family, tmp_path):
    reference = tiny_model(family)
    plain = load_model(saved(reference, tmp_path))
    model = load_model(tmp_path, head=two_classifiers(3), seed=5)
    batch = padded_batch(reference.config)
    outputs = forward(model, batch)
    assert_close(outputs.logits, ours(plain, batch)[0], **EXACT)
    dense, out = ("second_classifier.dense", "second_classifier.out_proj")
    leaf = model.trainable
    first = np.asarray(outputs.hidden[:, 0])
    x = np.tanh(first @ leaf[f"{dense}.kernel"] + leaf[f"{dense}.bias"][None])
    expected = x @ leaf[f"{out}.kernel"] + leaf[f"{out}.bias"][None]
    assert_close(outputs.second, expected, **EXACT)
    assert {model.kinds[name] for name in leaf if name.startswith("second")} == {"head"}
