"""DistilBERT: config names, checkpoint forms, padding, prompts, and LoRA equal to peft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close
from flax import nnx
from safetensors.torch import load_file, save_file
from torch_reference import padded_batch, saved, tensors, tiny_model, torch_states
from transformers import AutoModelForSequenceClassification

from fedjax_peft.models import heads
from fedjax_peft.models.checkpoint import save_checkpoint
from fedjax_peft.models.hub import load_model
from fedjax_peft.models.registry import random_model
from fedjax_peft.support.errors import InputError

EXACT = {"rtol": 0, "atol": 1e-5}
TINY = {
    "model_type": "distilbert",
    "vocab_size": 100,
    "max_position_embeddings": 12,
    "dim": 16,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 24,
    "initializer_range": 0.3,
}

# peft 0.21 asks transformers 5 for an attribute that it has renamed.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


def forward(model, batch, trainable=None, key=None):
    values = model.trainable if trainable is None else trainable
    apply = jax.jit(model.apply, static_argnums=4)
    return apply(model.frozen, values, batch, key, key is not None)


def assert_equal(model, reference, batch, trainable=None):
    """Checks logits and hidden states, on real tokens."""
    outputs = forward(model, batch, trainable)
    logits, states = torch_states(reference, batch)
    real = batch["attention_mask"].astype(bool)
    assert_close(outputs.logits, logits, **EXACT)
    assert_close(np.asarray(outputs.hidden)[real], states[-1][real], **EXACT)


# ---------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    "config",
    [{"activation": "relu", "n_layers": 1, "n_heads": 2}, {"sinusoidal_pos_embds": True}],
    ids=["relu", "sinusoidal"],
)
def test_config_variants(config, tmp_path):
    reference = tiny_model("distilbert", **config)
    model = load_model(saved(reference, tmp_path))
    assert_equal(model, reference, padded_batch(reference.config))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_heads": 3}, "dim = 16 is not a multiple of n_heads = 3"),
        ({"n_layers": 0}, "n_layers = 0; it must be at least 1"),
        ({"activation": "gelu_nwe"}, "'gelu_new'"),
        ({"dropout": "0.1"}, "dropout = '0.1'; it must be of type float"),
    ],
)
def test_config_that_is_not_implemented(changes, named):
    with pytest.raises(InputError, match=named):
        random_model(TINY | changes, head=heads.classification(2))


def test_distilbert_has_no_language_model_head():
    with pytest.raises(InputError, match="no causal_lm head for distilbert"):
        random_model(TINY, head=heads.causal_lm())


def test_dropout_rates():
    rates = {
        "dropout": 0.1,
        "attention_dropout": 0.2,
        "qa_dropout": 0.3,
        "seq_classif_dropout": 0.4,
    }

    def of(head, dropout=None):
        m = random_model(TINY | rates, head=head, dropout=dropout).module()
        layer = m.distilbert.transformer.layer[0]
        drops = (m.distilbert.embeddings.dropout, layer.attention.dropout, layer.ffn.dropout)
        return [d.rate for d in (*drops, m.dropout)]

    assert of(heads.classification(2)) == [0.1, 0.2, 0.1, 0.4]
    assert of(heads.token_classification(2)) == [0.1, 0.2, 0.1, 0.1]
    assert of(heads.span_classification()) == [0.1, 0.2, 0.1, 0.3]
    assert of(heads.span_classification(), 0.0) == [0.0] * 4


# --------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_on_either_side(side, tmp_path):
    reference = tiny_model("distilbert")
    model = load_model(saved(reference, tmp_path))
    batch = padded_batch(reference.config, lengths=(9, 1, 8, 3))
    if side == "left":
        batch = {name: np.ascontiguousarray(x[:, ::-1]) for name, x in batch.items()}
    assert_equal(model, reference, batch)


def test_a_sequence_that_is_too_long_is_refused():
    model = random_model(TINY, head=heads.classification(2))
    ids = jax.ShapeDtypeStruct((2, 13), jnp.int32)
    batch = {"input_ids": ids, "attention_mask": ids}
    with pytest.raises(InputError, match=r"13 positions, and the model has 12 \(max_position"):
        jax.eval_shape(lambda b: model.apply(model.frozen, model.trainable, b, None, False), batch)


def test_the_first_token_computed_alone_has_the_same_dropout_masks():
    config = TINY | {"dropout": 0.3, "attention_dropout": 0.3, "seq_classif_dropout": 0.0}
    model = random_model(config, head=heads.classification(3))
    ids = np.arange(2, 22, dtype=np.int32).reshape(2, 10)
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    trained = forward(model, batch, key=jax.random.key(0))
    logits = model.module().logits(trained.hidden[:, 0])
    assert_close(trained.logits, logits, **EXACT)
    other = forward(model, batch, key=jax.random.key(1))
    assert np.abs(other.logits - trained.logits).max() > 0.1


# ----------------------------------------------------------------------------------- checkpoints


def test_names_of_the_hub(tmp_path):
    """A masked language model's checkpoint, and that of the encoder alone: both get a new head."""
    reference = tiny_model("distilbert")
    file = saved(reference, tmp_path) / "model.safetensors"
    own = {n: x for n, x in load_file(file).items() if n.startswith("distilbert.")}
    masked = own | {
        "vocab_transform.weight": torch.zeros(32, 32),
        "vocab_layer_norm.weight": torch.ones(32),
        "vocab_projector.bias": torch.zeros(100),
        "distilbert.embeddings.position_ids": torch.arange(40)[None],
    }
    bare = {name.removeprefix("distilbert."): x for name, x in own.items()}
    batch = padded_batch(reference.config)
    for stored in (masked, bare):
        save_file(stored, file)
        model = load_model(tmp_path, head=heads.classification(4))
        assert model.head == ("pre_classifier", "classifier")
        assert model.kinds == {
            f"{module}.{leaf}": "head" for module in model.head for leaf in ("bias", "kernel")
        }
        hidden = torch_states(reference, batch)[1][-1]
        assert_close(forward(model, batch).hidden, hidden, **EXACT)


def test_half_precision_checkpoint_is_read_as_float32(tmp_path):
    reference = tiny_model("distilbert").half()
    model = load_model(saved(reference, tmp_path))
    assert {x.dtype for x in {**model.frozen, **model.trainable}.values()} == {jnp.dtype("float32")}
    assert_equal(model, reference.float(), padded_batch(reference.config))


def test_bfloat16_compute_is_close_to_float32(tmp_path):
    reference = tiny_model("distilbert")
    model = load_model(saved(reference, tmp_path), dtype="bfloat16")
    batch = padded_batch(reference.config)
    outputs = forward(model.replace(frozen=model.compute_frozen()), batch)
    assert outputs.hidden.dtype == jnp.bfloat16
    assert outputs.logits.dtype == jnp.float32
    expected, _ = torch_states(reference, batch)
    # bfloat16 keeps 8 bits, 0.4 % a rounding.
    error = np.linalg.norm(outputs.logits - expected) / np.linalg.norm(expected)
    assert 1e-5 < error < 0.02


def test_saved_checkpoint_is_read_by_transformers(tmp_path):
    model = load_model(saved(tiny_model("distilbert"), tmp_path / "in"))
    values = {**model.frozen, **model.trainable}
    save_checkpoint(values, model.config, tmp_path / "out", ("a", "b", "c"))
    reference = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert_equal(model, reference, padded_batch(reference.config))


# ------------------------------------------------------------------------------ heads and prompt


def test_two_classifiers_read_the_first_token():
    model = random_model(TINY, head=heads.two_classifiers(3), dropout=0.0)
    ids = np.arange(10, dtype=np.int32).reshape(2, 5)
    outputs = forward(model, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    module, first = model.module(), outputs.hidden[:, 0]
    assert_close(outputs.logits, module.logits(first), **EXACT)
    assert_close(outputs.second, module.second_classifier(first), **EXACT)
    assert {name.split(".")[0] for name in model.kinds} == set(model.head)


class Prompt(nnx.Module):
    """A table of embeddings that returns tokens before the given ones."""

    def __init__(self, base, rows):
        self.base = base
        self.rows = nnx.Param(rows)

    def __call__(self, ids):
        rows = jnp.broadcast_to(self.rows[...][None], (len(ids), *self.rows.shape))
        return jnp.concatenate([rows, self.base(ids)], axis=1)


def test_tokens_after_a_prompt(tmp_path):
    reference = tiny_model("distilbert")
    module = load_model(saved(reference, tmp_path)).module()
    rows = np.random.default_rng(5).normal(size=(3, 32)).astype(np.float32)
    embeddings = module.distilbert.embeddings
    embeddings.word_embeddings = Prompt(embeddings.word_embeddings, jnp.asarray(rows))
    batch = padded_batch(reference.config, lengths=(9, 4))
    outputs = module(batch)

    with torch.no_grad():
        words = reference.get_input_embeddings()(tensors(batch)["input_ids"])
        x = torch.cat([torch.tensor(rows).expand(2, 3, 32), words], dim=1)
        mask = torch.tensor(np.pad(batch["attention_mask"], ((0, 0), (3, 0)), constant_values=1))
        expected = reference(inputs_embeds=x, attention_mask=mask, output_hidden_states=True)
    assert_close(outputs.logits, expected.logits.numpy(), **EXACT)
    hidden = expected.hidden_states[-1][:, 3:].numpy()
    assert_close(outputs.hidden, hidden, **EXACT)
