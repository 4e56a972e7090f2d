"""DistilBERT (Sanh et al. 2019): BERT's encoder without token types and pooler.

Module names are those of Hugging Face's torch model.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Batch
from fedjax_peft.models import bert, layers
from fedjax_peft.models.attention import EncoderAttention
from fedjax_peft.models.blocks import Blocks
from fedjax_peft.models.family import Family, check_heads, text_kinds
from fedjax_peft.models.heads import Head, SequenceClassifier
from fedjax_peft.models.splits import splits_of

EPSILON = 1e-12
"""Epsilon of every layer norm; the config has no field for it."""


@dataclasses.dataclass(frozen=True)
class DistilBertConfig:
    """The fields of ``config.json`` that shape the model, under their Hugging Face names."""

    vocab_size: int = 30522
    max_position_embeddings: int = 512
    n_layers: int = 6
    n_heads: int = 12
    dim: int = 768
    hidden_dim: int = 3072
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation: str = "gelu"
    qa_dropout: float = 0.1
    seq_classif_dropout: float = 0.2
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_heads(self, "dim", "n_heads")


class Embeddings(nnx.Module):
    def __init__(self, c: DistilBertConfig, dtype: Any):
        positions = c.max_position_embeddings
        self.word_embeddings = layers.TokenEmbed(c.vocab_size, c.dim, dtype)
        self.position_embeddings = nnx.Embed(positions, c.dim, dtype=dtype, rngs=layers.UNSEEDED)
        self.LayerNorm = layers.layer_norm(c.dim, EPSILON, dtype)
        self.dropout = layers.Dropout(c.dropout)

    def __call__(self, ids: Array) -> Array:
        x = self.word_embeddings(ids)
        length, limit = x.shape[1], self.position_embeddings.num_embeddings
        layers.check_length(ids.shape[1], length, limit, "max_position_embeddings")
        return self.dropout(self.LayerNorm(x + self.position_embeddings(jnp.arange(length))[None]))


class Attention(EncoderAttention):
    names = ("q_lin", "k_lin", "v_lin")

    def __init__(self, c: DistilBertConfig, dtype: Any):
        super().__init__(c.dim, c.n_heads, c.attention_dropout, dtype)
        self.out_lin = layers.linear(c.dim, c.dim, dtype)

    def __call__(self, x: Array, mask: Array, queries: int | None) -> Array:
        return self.out_lin(self.attend(x, mask, queries))


class FFN(nnx.Module):
    def __init__(self, c: DistilBertConfig, dtype: Any):
        self.lin1 = layers.linear(c.dim, c.hidden_dim, dtype)
        self.lin2 = layers.linear(c.hidden_dim, c.dim, dtype)
        self.activation = layers.activation(c.activation)
        self.dropout = layers.Dropout(c.dropout)

    def __call__(self, x: Array) -> Array:
        return self.dropout(self.lin2(self.activation(self.lin1(x))))


class TransformerBlock(nnx.Module):
    def __init__(self, c: DistilBertConfig, dtype: Any):
        self.attention = Attention(c, dtype)
        self.attention_residual = layers.Residual("attention", c.dim)
        self.sa_layer_norm = layers.layer_norm(c.dim, EPSILON, dtype)
        self.ffn = FFN(c, dtype)
        self.output_residual = layers.Residual("feed_forward", c.dim)
        self.output_layer_norm = layers.layer_norm(c.dim, EPSILON, dtype)

    def __call__(self, x: Array, mask: Array, queries: int | None = None) -> Array:
        h = self.attention(x, mask, queries)
        x = self.sa_layer_norm(self.attention_residual(h, x[:, :queries], self.sa_layer_norm))
        return self.output_layer_norm(self.output_residual(self.ffn(x), x, self.output_layer_norm))


class Transformer(bert.Encoder):
    """BERT's encoder with DistilBERT's layers."""

    def __init__(self, c: DistilBertConfig, dtype: Any):
        self.layer = Blocks([TransformerBlock(c, dtype) for _ in range(c.n_layers)])


class DistilBertModel(nnx.Module):
    """Embeddings and encoder."""

    def __init__(self, c: DistilBertConfig, dtype: Any):
        self.embeddings = Embeddings(c, dtype)
        self.transformer = Transformer(c, dtype)

    def __call__(self, batch: Batch) -> layers.Encoded:
        """Returns the hidden states; token types are not used."""
        x = self.embeddings(batch["input_ids"])
        prompt, mask = layers.with_prompt(batch, x)
        return self.transformer(x, mask[:, None, None, :], prompt)


class DistilBertForSequenceClassification(SequenceClassifier):
    """Dense, relu, dropout, projection on the first token."""

    def __init__(self, c: DistilBertConfig, head: Head, dtype: Any):
        backbone = DistilBertModel(c, dtype)
        super().__init__("distilbert", backbone, head, c.dim, c.seq_classif_dropout)
        self.pre_classifier = layers.linear(c.dim, c.dim, jnp.float32)
        self.dropout = layers.Dropout(c.seq_classif_dropout)
        self.classifier = layers.linear(c.dim, head.classes, jnp.float32)

    def logits(self, first: Array) -> Array:
        return self.classifier(self.dropout(jax.nn.relu(self.pre_classifier(first))))


FAMILY = Family(
    name="DistilBert",
    config=DistilBertConfig,
    kinds=text_kinds(
        "distilbert",
        DistilBertModel,
        DistilBertForSequenceClassification,
        ("pre_classifier", "classifier"),
        width="dim",
        token_dropout="dropout",
        span_dropout="qa_dropout",
    ),
    weights=(
        (r"(.+\.(LayerNorm|\w+_layer_norm))\.weight", r"\1.scale", False),
        (r"(.+_embeddings)\.weight", r"\1.embedding", False),
        (r"(.+)\.weight", r"\1.kernel", True),
    ),
    # A bare encoder's checkpoint lacks the prefix.
    renamed=(*bert.LEGACY, (r"^(embeddings|transformer)\.", r"distilbert.\1.")),
    tied=("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),
    ignored=(r"distilbert\.embeddings\.position_ids",),
    other_names={
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    splits=splits_of(
        (r".+\.attention\.(?:q|k|v)_lin", "outputs"),
        (r".+\.attention\.out_lin", "inputs"),
        (r".+\.ffn\.lin1", "outputs"),
        (r".+\.ffn\.lin2", "inputs"),
        (r".+\.word_embeddings", "rows"),
    ),
    targets={
        "lora": ("q_lin", "v_lin"),
        "ia3": ("k_lin", "v_lin", "out_lin", "lin2"),
        "ia3_feed_forward": ("out_lin", "lin2"),
        "opendelta": ("out_lin", "lin2"),
    },
)
