"""FedDPA's pair of LoRAs: formula, start, weights of each example, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import approx, assert_close
from flax import nnx
from internals import REFERENCE, embedding, with_weight
from refusals import refused
from tiny import BATCH, logits, tiny

import fedjax_peft as fp
from fedjax_peft.peft.dual_lora import DualLoRALinear

pytestmark = pytest.mark.slow

GPT2 = {
    **{"model_type": "gpt2", "vocab_size": 64, "n_positions": 16, "n_embd": 32},
    **{"n_layer": 1, "n_head": 2, "pad_token_id": 0},
}


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def changed(model, seed=1):
    """Returns leaves with four different factors in every pair."""
    rng = np.random.default_rng(seed)
    return {
        n: x + normal(rng, *x.shape) * 0.3 if ".lora_a" in n or ".lora_b" in n else x
        for n, x in model.trainable.items()
    }


def short():
    """Returns the classifier with one layer, which compiles in half of the time."""
    return fp.testing.tiny_model(3, num_hidden_layers=1)


@pytest.mark.parametrize("weight", [0.3, [0.0, 1.0, 0.25]])
def test_output_is_the_formula_for_one_weight_and_for_one_of_each_example(weight):
    rng, base = np.random.default_rng(0), nnx.Linear(8, 6, rngs=nnx.Rngs(0))
    layer = DualLoRALinear(base, normal(rng, 8, 2), normal(rng, 2, 6), 1.5, 0.0)
    for own in (layer.global_adapter, layer.private_adapter):
        own.lora_b.set_value(normal(rng, 2, 6))
    layer.adapter_weight.set_value(jnp.float32(weight))
    x = rng.normal(size=(3, 5, 8)).astype(np.float32)
    shared, own = (np.asarray(p.product()) for p in (layer.global_adapter, layer.private_adapter))
    for i, w in enumerate(np.broadcast_to(weight, 3)):
        kernel = np.asarray(base.kernel[...]) + (1 - w) * shared + w * own
        assert_close(layer(x)[i], x[i] @ kernel, rtol=1e-5, atol=1e-5)


def test_either_adapter_alone_is_a_lora():
    model = fp.attach(tiny(), fp.peft.dual_lora(2))
    params, plain = changed(model), fp.attach(tiny(), fp.lora(2))
    assert model.counts()["adapter"] == 2 * plain.counts()["adapter"] + 32
    for weight, own in ((0.0, "global"), (1.0, "private")):
        part = f".{own}_adapter"
        alone = {n: params[n.replace(".lora_", f"{part}.lora_")] for n in plain.trainable}
        expected = logits(plain, alone)
        got = logits(model, with_weight(params, weight))
        assert_close(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_reference_gives_every_example_a_weight_of_its_own(family):
    model = short() if family == "bert" else fp.random_model(GPT2, head=fp.heads.classification(3))
    model = fp.attach(model, fp.peft.dual_lora(2))
    params = changed(model)
    batch = {n: jnp.asarray(x) for n, x in BATCH.items()}

    @jax.jit
    def run(leaves, batch):
        return model.apply(model.frozen, leaves, batch, None, False)

    alone = embedding(run(with_weight({**params, REFERENCE: jnp.zeros(0)}, 1.0), batch))
    assert np.linalg.norm(alone, axis=1) == approx(1, rel=1e-5)
    target = 0.6 * (alone[0] - 0.5 * alone[1])
    weights = np.clip(np.asarray(alone) @ np.asarray(target), 0, 1)
    assert weights.std() > 0.01
    got = run({**params, REFERENCE: target}, batch).logits
    for i, weight in enumerate(weights):
        fixed = with_weight({**params, REFERENCE: jnp.zeros(0)}, float(weight))
        assert_close(got[i], run(fixed, batch).logits[i], rtol=0, atol=1e-5)


def test_in_training_the_constant_weight_is_used():
    model = fp.attach(short(), fp.peft.dual_lora(2))
    params, apply = changed(model), jax.jit(model.apply, static_argnums=4)
    # A layer norm's outputs have the mean 0, so the similarity to a constant vector would be 0 too.
    target = {**params, REFERENCE: normal(np.random.default_rng(2), 32)}
    with_target, plain = (
        apply(model.frozen, leaves, BATCH, jax.random.key(0), True).logits
        for leaves in (target, params)
    )
    assert_close(with_target, plain, rtol=0, atol=1e-6)


class Own(nnx.Module):
    """A user's module."""

    def __init__(self, hidden):
        self.body = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
        self.classifier = nnx.Linear(6, 2, rngs=nnx.Rngs(1))
        self.hidden = hidden

    def __call__(self, batch):
        hidden = self.body(batch["x"])
        return fp.contracts.Outputs(
            self.classifier(hidden), hidden[:, None] if self.hidden else None
        )


def test_a_model_of_ones_own_needs_a_width_and_hidden_states():
    model, batch = fp.bind(Own(True), head=("classifier",)), {"x": jnp.ones((3, 4))}
    refused(r"dual_lora\(width=768\)", fp.attach, model, fp.peft.dual_lora(2, targets=["body"]))
    attached = fp.attach(model, fp.peft.dual_lora(2, targets=["body"], width=6))
    assert attached.apply(attached.frozen, attached.trainable, batch, None, False).logits.shape
    silent = fp.attach(fp.bind(Own(False)), fp.peft.dual_lora(2, targets=["body"], width=6))
    refused("returns none", silent.apply, silent.frozen, silent.trainable, batch, None, False)
    refused("DualLoRALinear cannot be merged", fp.merge, attached)
