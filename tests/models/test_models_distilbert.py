"""DistilBERT: rates of dropout, heads and lengths; the rest is in ``test_models_families.py``."""

import jax
import jax.numpy as jnp
import pytest

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


def test_a_sequence_that_is_too_long_is_refused():
    model = random_model(TINY, head=heads.classification(2))
    ids = jax.ShapeDtypeStruct((2, 13), jnp.int32)
    batch = {"input_ids": ids, "attention_mask": ids}
    with pytest.raises(InputError, match=r"13 positions, and the model has 12 \(max_position"):
        jax.eval_shape(lambda b: model.apply(model.frozen, model.trainable, b, None, False), batch)
