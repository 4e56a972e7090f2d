"""Our backbones equal Hugging Face's, for all forms of checkpoints."""

import functools

import jax
import numpy as np
import pytest
import torch
from closeness import EXACT, assert_close, assert_small
from internals import fetch
from parity import assert_equal, assert_equal_outputs, forward
from torch_reference import (
    FAMILIES,
    HEADS,
    logits_of,
    padded_batch,
    saved,
    tensors,
    tiny_model,
)
from transformers import AutoModel

import fedjax_peft as fp

pytestmark = pytest.mark.slow


OTHERS = [(family, kind) for family, kind in HEADS if kind != FAMILIES[family].kinds[0]]


@pytest.mark.parametrize(("family", "kind"), OTHERS)
@pytest.mark.sample(
    "bert-span*", "deberta-v2-token*", "modernbert-*", "distilbert-*", "gpt2-token*", "gpt2-causal*"
)
def test_every_other_head_and_every_hidden_state(family, kind, tmp_path):
    """Those of RoBERTa and Llama are compared through PEFT in ``test_peft_io_export.py``."""
    reference = tiny_model(family, kind=kind)
    model = fp.load_model(saved(reference, tmp_path))
    batch = padded_batch(reference.config)
    assert_equal(model, reference, batch)


@pytest.mark.parametrize(("family", "kind"), HEADS)
@pytest.mark.sample(
    *("bert-class*", "deberta-v2-class*", "distilbert-class*", "gpt2-class*", "vit-*"),
    *("modernbert-class*", "dinov2-*"),
    *("qwen3-*", "smollm3-*", "gemma3_text-*"),
)
def test_every_hidden_state_and_the_gradient_of_the_embeddings(family, kind, tmp_path):
    """For a model of images: the gradient of the pixels."""
    reference = tiny_model(family, kind=kind)
    model = fp.load_model(saved(reference, tmp_path))
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
    assert_equal_outputs(outputs, reference, batch)
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert_small(error, 1e-4)


def test_token_types_default_to_zero_and_padding_is_not_seen(tmp_path):
    reference = tiny_model("roberta")
    model = fp.load_model(saved(reference, tmp_path))
    batch = padded_batch(reference.config)
    del batch["token_type_ids"]
    assert_equal(model, reference, batch, everywhere=True)
    other = batch | {"input_ids": np.where(batch["attention_mask"], batch["input_ids"], 77)}
    real = batch["attention_mask"].astype(bool)
    one, two = forward(model, batch), forward(model, other)
    assert_close(one.logits, two.logits, **EXACT)
    assert_close(one.hidden[real], two.hidden[real], **EXACT)


@pytest.mark.assets(once=True)
def test_minilm_on_real_text():
    directory = fetch("minilm-l6")
    model = fp.load_model("minilm-l6", head=fp.heads.classification(5))
    texts = ["A short one.", "Federated learning keeps data where it is; weights travel.", "", "so"]
    batch = dict(model.tokenizer(texts, padding=True, return_tensors="np"))
    assert not batch["attention_mask"].all()

    # Torch in float64: on padding tokens, which nobody reads, its own float32 is off by 3e-5.
    encoder = AutoModel.from_pretrained(directory).eval().double()
    with torch.no_grad():
        tensors = {name: torch.tensor(x) for name, x in batch.items()}
        expected = encoder(**tensors).last_hidden_state.numpy()
    real = batch["attention_mask"].astype(bool)
    assert_close(forward(model, batch).hidden[real], expected[real], **EXACT)


def test_the_second_classifier_is_another_of_robertas_form(tmp_path):
    reference = tiny_model("bert")
    plain = fp.load_model(saved(reference, tmp_path))
    model = fp.load_model(tmp_path, head=fp.heads.two_classifiers(3), seed=5)
    batch = padded_batch(reference.config)
    outputs = forward(model, batch)
    assert_close(outputs.logits, forward(plain, batch).logits, **EXACT)
    dense, out = ("second_classifier.dense", "second_classifier.out_proj")
    leaf = model.trainable
    first = np.asarray(outputs.hidden[:, 0])
    x = np.tanh(first @ leaf[f"{dense}.kernel"] + leaf[f"{dense}.bias"][None])
    expected = x @ leaf[f"{out}.kernel"] + leaf[f"{out}.bias"][None]
    assert_close(outputs.second, expected, **EXACT)
    assert {model.kinds[name] for name in leaf if name.startswith("second")} == {"head"}
