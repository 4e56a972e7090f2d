"""BERT: the post-layer-norm encoder, and its sequence classifier.

Module names are those of Hugging Face's torch model. RoBERTa (``roberta.py``) shares the encoder.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.models.layers import Dropout, activation, attention
from fedjax_peft.typing import Batch, Outputs

__all__ = ["BertConfig", "BertEncoderModel", "BertForSequenceClassification"]


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """The fields of ``config.json`` that shape the model, under their Hugging Face names."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    classifier_dropout: float | None = None
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    initializer_range: float = 0.02

    @property
    def head_dropout(self) -> float:
        """The dropout rate before the classifier."""
        if self.classifier_dropout is None:
            return self.hidden_dropout_prob
        return self.classifier_dropout


def linear(n_in: int, n_out: int, dtype: Any) -> nnx.Linear:
    """Returns a dense layer; its values come from a checkpoint or from ``hf.initialise``."""
    return nnx.Linear(n_in, n_out, dtype=dtype, rngs=nnx.Rngs(0))


def layer_norm(c: BertConfig, dtype: Any) -> nnx.LayerNorm:
    """Returns a layer norm; its statistics are in float32 whatever the compute dtype."""
    return nnx.LayerNorm(
        c.hidden_size,
        epsilon=c.layer_norm_eps,
        dtype=dtype,
        use_fast_variance=False,
        rngs=nnx.Rngs(0),
    )


class Embeddings(nnx.Module):
    def __init__(self, c: BertConfig, dtype: Any):
        def table(n: int) -> nnx.Embed:
            return nnx.Embed(n, c.hidden_size, dtype=dtype, rngs=nnx.Rngs(0))

        self.word_embeddings = table(c.vocab_size)
        self.position_embeddings = table(c.max_position_embeddings)
        self.token_type_embeddings = table(c.type_vocab_size)
        self.LayerNorm = layer_norm(c, dtype)
        self.dropout = Dropout(c.hidden_dropout_prob)

    def __call__(self, ids: Array, types: Array, positions: Array) -> Array:
        x = self.word_embeddings(ids) + self.token_type_embeddings(types)
        return self.dropout(self.LayerNorm(x + self.position_embeddings(positions)))


class SelfAttention(nnx.Module):
    def __init__(self, c: BertConfig, dtype: Any):
        self.heads = c.num_attention_heads
        self.query = linear(c.hidden_size, c.hidden_size, dtype)
        self.key = linear(c.hidden_size, c.hidden_size, dtype)
        self.value = linear(c.hidden_size, c.hidden_size, dtype)
        self.dropout = Dropout(c.attention_probs_dropout_prob)

    def __call__(self, x: Array, mask: Array, queries: int | None) -> Array:
        def split(y: Array) -> Array:
            return y.reshape(*y.shape[:-1], self.heads, -1)

        asking = x[:, :queries]
        q, k, v = split(self.query(asking)), split(self.key(x)), split(self.value(x))
        return attention(q, k, v, mask, self.dropout).reshape(asking.shape)


class Output(nnx.Module):
    """Dense, dropout, residual, layer norm: the end of both sublayers."""

    def __init__(self, c: BertConfig, n_in: int, dtype: Any):
        self.dense = linear(n_in, c.hidden_size, dtype)
        self.LayerNorm = layer_norm(c, dtype)
        self.dropout = Dropout(c.hidden_dropout_prob)

    def __call__(self, x: Array, residual: Array) -> Array:
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class Attention(nnx.Module):
    def __init__(self, c: BertConfig, dtype: Any):
        self.self = SelfAttention(c, dtype)
        self.output = Output(c, c.hidden_size, dtype)

    def __call__(self, x: Array, mask: Array, queries: int | None) -> Array:
        return self.output(self.self(x, mask, queries), x[:, :queries])


class Intermediate(nnx.Module):
    def __init__(self, c: BertConfig, dtype: Any):
        self.dense = linear(c.hidden_size, c.intermediate_size, dtype)
        self.act = activation(c.hidden_act)

    def __call__(self, x: Array) -> Array:
        return self.act(self.dense(x))


class Layer(nnx.Module):
    def __init__(self, c: BertConfig, dtype: Any):
        self.attention = Attention(c, dtype)
        self.intermediate = Intermediate(c, dtype)
        self.output = Output(c, c.intermediate_size, dtype)

    def __call__(self, x: Array, mask: Array, queries: int | None = None) -> Array:
        x = self.attention(x, mask, queries)
        return self.output(self.intermediate(x), x)


class Encoder(nnx.Module):
    def __init__(self, c: BertConfig, dtype: Any):
        self.layer = nnx.List([Layer(c, dtype) for _ in range(c.num_hidden_layers)])

    def __call__(self, x: Array, mask: Array) -> tuple[Array, Array]:
        """Returns the last hidden states of all tokens, and those of the first token.

        The first token's last layer is computed apart: where nobody reads the others (a classifier
        does not), the compiler drops their query, output and feed-forward products, ten twelfths
        of a layer. The numbers are the same (see :func:`layers.random_bytes` for the masks).
        """
        *body, last = self.layer
        for layer in body:
            x = layer(x, mask)
        return last(x, mask), last(x, mask, queries=1)[:, 0]


class Dense(nnx.Module):
    """A submodule that holds one ``dense`` (Hugging Face's pooler)."""

    def __init__(self, n_in: int, n_out: int, dtype: Any):
        self.dense = linear(n_in, n_out, dtype)

    def __call__(self, x: Array) -> Array:
        return self.dense(x)


class BertEncoderModel(nnx.Module):
    """Embeddings and encoder: batch -> hidden states of all tokens, and of the first one."""

    def __init__(self, c: BertConfig, dtype: Any, *, pooler: bool):
        self.embeddings = Embeddings(c, dtype)
        self.encoder = Encoder(c, dtype)
        if pooler:
            self.pooler = Dense(c.hidden_size, c.hidden_size, dtype)

    def positions(self, ids: Array) -> Array:
        """Returns the position index of every token."""
        return jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)

    def __call__(self, batch: Batch) -> tuple[Array, Array]:
        ids = batch["input_ids"]
        types = batch.get("token_type_ids", jnp.zeros_like(ids))
        mask = batch["attention_mask"].astype(bool)[:, None, None, :]
        return self.encoder(self.embeddings(ids, types, self.positions(ids)), mask)


class BertForSequenceClassification(nnx.Module):
    """Pooler on the first token, dropout, classifier."""

    def __init__(self, c: BertConfig, classes: int, dtype: Any = jnp.float32):
        self.bert = BertEncoderModel(c, dtype, pooler=True)
        self.dropout = Dropout(c.head_dropout)
        self.classifier = linear(c.hidden_size, classes, jnp.float32)

    def __call__(self, batch: Batch) -> Outputs:
        hidden, first = self.bert(batch)
        pooled = jnp.tanh(self.bert.pooler(first))
        return Outputs(self.classifier(self.dropout(pooled)), hidden)


PREFIX: Mapping[str, str] = {r"^(embeddings|encoder|pooler)\.": r"bert.\1."}
"""A bare encoder's checkpoint lacks the prefix."""
WEIGHTS: tuple[tuple[str, str, bool], ...] = (
    (r"(.+)\.LayerNorm\.(?:weight|gamma)", r"\1.LayerNorm.scale", False),
    (r"(.+)\.LayerNorm\.(?:bias|beta)", r"\1.LayerNorm.bias", False),
    (r"(.+_embeddings)\.weight", r"\1.embedding", False),
    (r"(.+)\.weight", r"\1.kernel", True),
    (r"(.+)\.bias", r"\1.bias", False),
)
"""(checkpoint name, leaf name, transposed), the first full match counts."""
IGNORED = (r"cls\..+", r"bert\.embeddings\.position_ids")
"""Tensors that a classifier has no use for."""
HEAD = ("bert.pooler", "classifier")
LORA_TARGETS = ("query", "value")
