"""DistilBERT: config names, checkpoint forms, padding, prompts, and LoRA equal to peft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from parity import EXACT, forward

from fedjax_peft.models import heads
from fedjax_peft.models.registry import random_model
from fedjax_peft.support.errors import InputError

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


# ---------------------------------------------------------------------------------------- config


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
