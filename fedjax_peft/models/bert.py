"""BERT: the post-layer-norm encoder and its heads.

Module names are those of Hugging Face's torch model. RoBERTa (``roberta.py``) shares the encoder.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Batch
from fedjax_peft.models import layers
from fedjax_peft.models.attention import EncoderAttention
from fedjax_peft.models.blocks import Blocks
from fedjax_peft.models.family import Family, check_heads, text_kinds
from fedjax_peft.models.heads import Head, SequenceClassifier
from fedjax_peft.models.splits import splits_of


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

    def __post_init__(self) -> None:
        check_heads(self, "hidden_size", "num_attention_heads")

    @property
    def head_dropout(self) -> float:
        """The dropout rate before the classifier."""
        if self.classifier_dropout is None:
            return self.hidden_dropout_prob
        return self.classifier_dropout


class Embeddings(nnx.Module):
    def __init__(self, c: BertConfig, dtype: Any):
        self.word_embeddings = layers.TokenEmbed(c.vocab_size, c.hidden_size, dtype)
        self.position_embeddings = layers.table(c.max_position_embeddings, c.hidden_size, dtype)
        self.token_type_embeddings = layers.table(c.type_vocab_size, c.hidden_size, dtype)
        self.LayerNorm = layers.layer_norm(c.hidden_size, c.layer_norm_eps, dtype)
        self.dropout = layers.Dropout(c.hidden_dropout_prob)
        self.pad = -1
        """Positions count from ``pad + 1``."""

    def positions(self, ids: Array, length: int) -> Array:
        """Returns the position index of every token, ``length`` with a prompt's."""
        return jnp.broadcast_to(jnp.arange(length), (ids.shape[0], length))

    def __call__(self, ids: Array, types: Array) -> Array:
        x = self.word_embeddings(ids)
        length = x.shape[1]
        # RoBERTa's positions begin after its padding index.
        limit = self.position_embeddings.num_embeddings - self.pad - 1
        layers.check_length(ids.shape[1], length, limit, "max_position_embeddings")
        x = x + self.token_type_embeddings(layers.prepend(types, length - ids.shape[1], 0))
        return self.dropout(
            self.LayerNorm(x + self.position_embeddings(self.positions(ids, length)))
        )


class SelfAttention(EncoderAttention):
    def __init__(self, c: BertConfig, dtype: Any):
        rate = c.attention_probs_dropout_prob
        super().__init__(c.hidden_size, c.num_attention_heads, rate, dtype)

    def __call__(self, x: Array, mask: Array, queries: int | None) -> Array:
        return self.attend(x, mask, queries)


class Output(nnx.Module):
    """Dense, dropout, residual, layer norm: the end of both sublayers."""

    def __init__(self, c: BertConfig, place: str, n_in: int, dtype: Any):
        self.dense = layers.linear(n_in, c.hidden_size, dtype)
        self.LayerNorm = layers.layer_norm(c.hidden_size, c.layer_norm_eps, dtype)
        self.dropout = layers.Dropout(c.hidden_dropout_prob)
        self.residual = layers.Residual(place, c.hidden_size)

    def __call__(self, h: Array, x: Array) -> Array:
        h = self.dropout(self.dense(h))
        return self.LayerNorm(self.residual(h, x, self.LayerNorm))


MakeAttention = Callable[[Any, Any], nnx.Module]
"""(config, compute dtype) -> the attention of a layer."""


class Attention(nnx.Module):
    def __init__(self, c: BertConfig, dtype: Any, attention: MakeAttention):
        self.self = attention(c, dtype)
        self.output = Output(c, "attention", c.hidden_size, dtype)

    def __call__(self, x: Array, mask: Any, queries: int | None) -> Array:
        return self.output(self.self(x, mask, queries), x[:, :queries])


class Intermediate(nnx.Module):
    def __init__(self, c: BertConfig, dtype: Any):
        self.dense = layers.linear(c.hidden_size, c.intermediate_size, dtype)
        self.act = layers.activation(c.hidden_act)

    def __call__(self, x: Array) -> Array:
        return self.act(self.dense(x))


class Layer(nnx.Module):
    """Attention and feed-forward; ``mask`` is what the module ``attention`` takes as its mask."""

    def __init__(self, c: BertConfig, dtype: Any, attention: MakeAttention = SelfAttention):
        self.attention = Attention(c, dtype, attention)
        self.intermediate = Intermediate(c, dtype)
        self.output = Output(c, "feed_forward", c.intermediate_size, dtype)

    def __call__(self, x: Array, mask: Any, queries: int | None = None) -> Array:
        x = self.attention(x, mask, queries)
        return self.output(self.intermediate(x), x)


class Encoder(nnx.Module):
    def __init__(self, c: BertConfig, dtype: Any):
        self.layer = Blocks([Layer(c, dtype) for _ in range(c.num_hidden_layers)])

    def __call__(self, x: Array, mask: Any, prompt: int) -> layers.Encoded:
        """Returns the hidden states of all layers, without those of a prompt's ``prompt`` tokens.

        The last layer of the first token is computed separately. If only that token is used, as by
        a classifier, the compiler drops the query, output and feed-forward products of the other
        tokens, ten twelfths of a layer. The numbers are the same (for the dropout masks see
        :func:`layers.random_bytes`).
        """
        states = self.layer.states_before_last(x, mask)
        first = self.layer.last(states[-1], mask, 1)[:, 0]
        states.append(self.layer.last(states[-1], mask))
        return layers.Encoded(tuple(x[:, prompt:] for x in states), first)


class Dense(nnx.Module):
    """A submodule that holds one ``dense`` (Hugging Face's pooler), in float32."""

    def __init__(self, width: int):
        self.dense = layers.linear(width, width, jnp.float32)

    def __call__(self, x: Array) -> Array:
        return self.dense(x)


class BertModel(nnx.Module):
    """Embeddings and encoder."""

    def __init__(self, c: BertConfig, dtype: Any, *, pooler: bool = False):
        self.embeddings = Embeddings(c, dtype)
        self.encoder = Encoder(c, dtype)
        if pooler:
            self.pooler = Dense(c.hidden_size)

    def __call__(self, batch: Batch) -> layers.Encoded:
        ids = batch["input_ids"]
        types = batch.get("token_type_ids", jnp.zeros_like(ids))
        x = self.embeddings(ids, types)
        prompt, mask = layers.with_prompt(batch, x)
        return self.encoder(x, mask[:, None, None, :], prompt)


class BertForSequenceClassification(SequenceClassifier):
    """Pooler on the first token, dropout, classifier."""

    bert: BertModel

    def __init__(self, c: BertConfig, head: Head, dtype: Any):
        bert = BertModel(c, dtype, pooler=True)
        super().__init__("bert", bert, head, c.hidden_size, c.head_dropout)
        self.dropout = layers.Dropout(c.head_dropout)
        self.classifier = layers.linear(c.hidden_size, head.classes, jnp.float32)

    def logits(self, first: Array) -> Array:
        return self.classifier(self.dropout(jnp.tanh(self.bert.pooler(first))))


WEIGHTS = (
    (r"(.+)\.LayerNorm\.weight", r"\1.LayerNorm.scale", False),
    (r"(.+_embeddings)\.weight", r"\1.embedding", False),
    (r"(.+)\.weight", r"\1.kernel", True),
)
LEGACY = ((r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))
TARGETS = {
    "lora": ("query", "value"),
    "ia3": ("key", "value", "output.dense"),
    "ia3_feed_forward": ("output.dense",),
    "opendelta": ("output.dense",),
}
SPLITS = splits_of(
    (r".+\.attention\.self\.(?:query|key|value)", "outputs"),
    (r".+\.attention\.output\.dense", "inputs"),
    (r".+\.intermediate\.dense", "outputs"),
    (r".+\.layer\.\d+\.output\.dense", "inputs"),
    (r".+\.word_embeddings", "rows"),
)
REFUSED = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}

FAMILY = Family(
    name="Bert",
    config=BertConfig,
    kinds=text_kinds(
        "bert", BertModel, BertForSequenceClassification, ("bert.pooler", "classifier")
    ),
    weights=WEIGHTS,
    # A bare encoder's checkpoint lacks the prefix.
    renamed=(*LEGACY, (r"^(embeddings|encoder|pooler)\.", r"bert.\1.")),
    tied=("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ignored=(r"bert\.embeddings\.position_ids",),
    targets=TARGETS,
    splits=SPLITS,
    refused=REFUSED,
)
