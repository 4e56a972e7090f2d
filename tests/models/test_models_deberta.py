"""DeBERTa-v2 and v3 equal transformers: every variant of disentangled attention, and training.

The generic tests of heads, hidden states and gradients are in ``test_models_parity.py``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_small
from parity import assert_equal
from refusals import refused
from safetensors.torch import load_file, save_file
from torch_reference import DEBERTA, padded_batch, saved, tensors, tiny_model
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

import fedjax_peft as fp
from fedjax_peft.models.deberta import log_buckets, skew
from fedjax_peft.models.names import source_name
from fedjax_peft.models.registry import FAMILIES

pytestmark = pytest.mark.slow
LENGTHS = (21, 7, 1, 16)
VARIANTS = {
    "v3": {},
    "own_projections": {"share_att_key": False},
    "c2p": {"pos_att_type": ["c2p"]},
    "p2c": {"pos_att_type": "p2c", "share_att_key": False},
    "no_position_terms": {"pos_att_type": None},
    "many_buckets": {"position_buckets": 16},
    "no_buckets": {"position_buckets": -1},
    "no_buckets_and_long_text": {"position_buckets": 0, "max_relative_positions": 6},
    "no_relative_attention": {"relative_attention": False, "position_biased_input": True},
    "no_layer_norm_of_positions": {"norm_rel_ebd": "none"},
    "absolute_positions_and_types": {"position_biased_input": True, "type_vocab_size": 2},
    "pooler": {"pooler_hidden_act": "tanh", "layer_norm_eps": 1e-3},
}


def one_layer(**config):
    """Returns a random model in torch; the generic parity tests have two layers."""
    return tiny_model("deberta-v2", num_hidden_layers=1, **config)


@pytest.mark.parametrize(("buckets", "farthest"), [(256, 512), (2, 9), (5, 12), (16, 10)])
def test_buckets_are_those_of_transformers(buckets, farthest):
    difference = np.arange(-3 * farthest, 3 * farthest + 1)
    expected = make_log_bucket_position(torch.tensor(difference), buckets, farthest).long()
    np.testing.assert_array_equal(log_buckets(difference, buckets, farthest), expected)


@pytest.mark.parametrize(("n", "m"), [(5, 5), (1, 4), (4, 1), (3, 7)])
def test_skew_is_its_formula(n, m):
    x = np.random.default_rng(0).normal(size=(2, n, n + m - 1))
    expected = [[x[:, i, j - i + n - 1] for j in range(m)] for i in range(n)]
    np.testing.assert_array_equal(skew(jnp.asarray(x), m), np.moveaxis(expected, -1, 0).astype("f"))


def test_no_gather_or_scatter_of_the_scores_size():
    """Only token embeddings and one row per distance are looked up, forward and backward."""
    model = fp.random_model(
        {"model_type": "deberta-v2", **DEBERTA}, head=fp.heads.classification(3)
    )
    model = fp.attach(model, fp.lora(2))
    batch, length, heads = 3, 19, 4
    columns = {
        "input_ids": jnp.zeros((batch, length), int),
        "attention_mask": jnp.ones((batch, length), int),
    }

    def loss(trainable):
        return model.apply(model.frozen, trainable, columns, None, False).logits.sum()

    sizes = [
        variable.aval.size
        for equation in jax.make_jaxpr(jax.grad(loss))(model.trainable).eqns
        if "gather" in equation.primitive.name or "scatter" in equation.primitive.name
        for variable in equation.outvars
    ]
    assert sizes
    assert max(sizes) < batch * heads * length * length


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sample("p2c", "many_buckets", "no_buckets_and*", "no_relative*", "absolute*", "pooler")
def test_logits_and_hidden_states_are_those_of_torch(variant, tmp_path):
    reference = one_layer(**VARIANTS[variant])
    model = fp.load_model(saved(reference, tmp_path))
    batch = padded_batch(reference.config, LENGTHS)
    assert_equal(model, reference, batch, everywhere=True)


def test_gradients_of_all_weights_are_those_of_torch(tmp_path):
    reference = one_layer(share_att_key=False)
    model = fp.load_model(saved(reference, tmp_path))
    batch = padded_batch(reference.config, LENGTHS)
    weights = np.random.default_rng(1).normal(size=(4, 21, 32)).astype(np.float32)
    theirs = reference(**tensors(batch), output_hidden_states=True)
    hidden = theirs.hidden_states[-1] * torch.tensor(weights)
    (theirs.logits.square().sum() + hidden.sum()).backward()
    expected = {name: p.grad.numpy() for name, p in reference.named_parameters()}

    @jax.jit
    @jax.grad
    def gradient(values):
        outputs = model.apply(values, {}, batch, None, False)
        return (outputs.logits**2).sum() + (outputs.hidden * weights).sum()

    got = gradient({**model.frozen, **model.trainable})
    assert len(got) == len(expected)
    for leaf, x in got.items():
        name, transposed = source_name(leaf, FAMILIES["deberta-v2"])
        x = x.T if transposed else x
        # A key's bias moves all scores of a query alike: its gradient is zero but for rounding.
        error = np.linalg.norm(x - expected[name])
        assert_small(error, 1e-4 * np.linalg.norm(expected[name]) + 1e-5, name)


def test_tensors_that_are_no_plain_numbers(tmp_path):
    file = saved(one_layer(), tmp_path) / "model.safetensors"
    name = "deberta.encoder.LayerNorm.bias"
    save_file(load_file(file) | {name: torch.zeros(32, dtype=torch.float8_e4m3fn)}, file)
    refused(f"{name} as F8_E4M3", fp.load_model, tmp_path)
