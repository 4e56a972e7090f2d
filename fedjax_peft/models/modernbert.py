"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): a pre-norm encoder that rotates positions.

Every third layer attends to all tokens, the others to a window on both sides; the two kinds rotate
with different frequencies. The feed-forward layer is a GeGLU, the first layer has no norm before
its attention, and there are no token types. Module names are those of Hugging Face's torch model.

The first layer has another form than the others, so that ``scan_layers`` is refused.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Batch
from fedjax_peft.models import layers
from fedjax_peft.models.attention import Attending, attention, split_heads
from fedjax_peft.models.blocks import Blocks
from fedjax_peft.models.decoder import FULL, SLIDING, layer_kinds
from fedjax_peft.models.family import Family, Kind, check_heads, class_kinds
from fedjax_peft.models.heads import Head, SequenceClassifier, SpanClassifier, TokenClassifier
from fedjax_peft.models.rotary import Rope, rope, rotate
from fedjax_peft.models.splits import splits_of
from fedjax_peft.support.errors import InputError, check_known

_THETA = {FULL: 160_000.0, SLIDING: 10_000.0}
"""Kind of layer -> the base of its rotation, if the config has none."""


@dataclasses.dataclass(frozen=True)
class ModernBertConfig:
    """The fields of ``config.json`` that shape the model, under their Hugging Face names."""

    vocab_size: int = 50368
    hidden_size: int = 768
    intermediate_size: int = 1152
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    hidden_activation: str = "gelu"
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    norm_eps: float = 1e-5
    norm_bias: bool = False
    pad_token_id: int | None = 50283
    attention_bias: bool = False
    attention_dropout: float = 0.0
    layer_types: list | None = dataclasses.field(default=None, hash=False)
    global_attn_every_n_layers: int = 3
    """Every so many-th layer, from the first, sees all tokens, without ``layer_types``."""
    local_attention: int = 128
    """The width of the window: a token sees half of it on each side."""
    rope_parameters: dict | None = dataclasses.field(default=None, hash=False)
    """Kind of layer -> its rotation, in configs of transformers 5."""
    global_rope_theta: float = _THETA[FULL]
    local_rope_theta: float = _THETA[SLIDING]
    embedding_dropout: float = 0.0
    mlp_bias: bool = False
    mlp_dropout: float = 0.0
    classifier_pooling: str = "cls"
    """What a classifier of texts reads: ``cls``, the first token, or ``mean``, that of all."""
    classifier_dropout: float = 0.0
    classifier_bias: bool = False
    classifier_activation: str = "gelu"

    def __post_init__(self) -> None:
        check_heads(self, "hidden_size", "num_attention_heads")
        check_known("pooling", self.classifier_pooling, ("cls", "mean"), " (classifier_pooling)")
        for kind in set(self.layers):
            self.rope(kind)

    @property
    def layers(self) -> tuple[str, ...]:
        """The kind of every layer."""
        every = self.global_attn_every_n_layers
        default = (SLIDING if i % every else FULL for i in range(self.num_hidden_layers))
        return layer_kinds(self.layer_types, tuple(default))

    def rope(self, kind: str) -> Rope:
        """Returns the rotation of a kind of layers."""
        tables = dict(self.rope_parameters or {})
        if not isinstance(tables.get(kind) or {}, Mapping):
            raise InputError(
                f"The rope_parameters of the model config have no table for {kind!r}, but"
                f" {tables[kind]!r}."
            )
        return rope(
            tables.get(kind),
            theta=self.global_rope_theta if kind == FULL else self.local_rope_theta,
            width=self.hidden_size // self.num_attention_heads,
            limit=self.max_position_embeddings,
        )

    def norm(self, dtype: Any) -> nnx.LayerNorm:
        """Returns a new layer norm."""
        return layers.layer_norm(self.hidden_size, self.norm_eps, dtype, bias=self.norm_bias)


class Sight(NamedTuple):
    """What attention needs to know of a batch; the same for all layers of one kind."""

    mask: Array
    """bool ``[batch, 1, length, length]``: which tokens (last axis) a token attends to."""
    tables: tuple[Array, Array]
    """Cosines and sines, see :meth:`fedjax_peft.models.rotary.Rope.tables`."""


class Embeddings(nnx.Module):
    def __init__(self, c: ModernBertConfig, dtype: Any):
        self.tok_embeddings = layers.TokenEmbed(c.vocab_size, c.hidden_size, dtype)
        self.norm = c.norm(dtype)
        self.dropout = layers.Dropout(c.embedding_dropout)

    def __call__(self, ids: Array) -> Array:
        return self.dropout(self.norm(self.tok_embeddings(ids)))


class Attention(Attending):
    def __init__(self, c: ModernBertConfig, kind: str, dtype: Any):
        self.kind, self.heads = kind, c.num_attention_heads
        n, bias = c.hidden_size, c.attention_bias
        self.Wqkv = layers.FusedLinear(n, 3 * n, ("q", "k", "v"), dtype, bias=bias)
        self.Wo = layers.linear(n, n, dtype, bias=bias)
        self.prefix = layers.PrefixSlot(n)
        self.dropout = layers.Dropout(c.attention_dropout)
        self.output_dropout = layers.Dropout(c.attention_dropout)

    def __call__(self, x: Array, sights: Mapping[str, Sight], queries: int | None) -> Array:
        sight = sights[self.kind]
        cos, sin = sight.tables
        q, k, v = (split_heads(y, self.heads) for y in jnp.split(self.Wqkv(x), 3, axis=-1))
        q = rotate(q[:, :queries], (cos[:, :queries], sin[:, :queries]))
        k, v, mask = self.prefix(rotate(k, (cos, sin)), v, sight.mask[:, :, :queries])
        h = attention(q, k, v, mask, self.dropout, form=self.form, platform=self.platform)
        return self.output_dropout(self.Wo(h.reshape(*h.shape[:2], -1)))


class MLP(nnx.Module):
    """``Wo(act(input) * gate)``; one layer computes both (GeGLU, Shazeer 2020)."""

    def __init__(self, c: ModernBertConfig, dtype: Any):
        inner = c.intermediate_size
        self.Wi = layers.FusedLinear(
            c.hidden_size, 2 * inner, ("input", "gate"), dtype, bias=c.mlp_bias
        )
        self.Wo = layers.linear(inner, c.hidden_size, dtype, bias=c.mlp_bias)
        self.act = layers.activation(c.hidden_activation)
        self.dropout = layers.Dropout(c.mlp_dropout)

    def __call__(self, x: Array) -> Array:
        given, gate = jnp.split(self.Wi(x), 2, axis=-1)
        return self.Wo(self.dropout(self.act(given) * gate))


class Layer(nnx.Module):
    def __init__(self, c: ModernBertConfig, index: int, dtype: Any):
        self.has_norm = index > 0  # the embeddings end in a norm
        if self.has_norm:
            self.attn_norm = c.norm(dtype)
        self.attn = Attention(c, c.layers[index], dtype)
        self.attention_residual = layers.Residual("attention", c.hidden_size)
        self.mlp_norm = c.norm(dtype)
        self.mlp = MLP(c, dtype)
        self.output_residual = layers.Residual("feed_forward", c.hidden_size)

    def __call__(self, x: Array, sights: Mapping[str, Sight], queries: int | None = None) -> Array:
        h = self.attn(self.attn_norm(x) if self.has_norm else x, sights, queries)
        x = self.attention_residual(h, x[:, :queries])
        return self.output_residual(self.mlp(self.mlp_norm(x)), x)


class ModernBertModel(nnx.Module):
    """Embeddings, layers and the final norm."""

    def __init__(self, c: ModernBertConfig, dtype: Any, *, pooling: str = "cls"):
        self.limit, self.half = c.max_position_embeddings, c.local_attention // 2
        self.pooling = pooling
        # Pairs, because a module's attributes must be hashable.
        self.ropes = tuple((kind, c.rope(kind)) for kind in sorted(set(c.layers)))
        self.embeddings = Embeddings(c, dtype)
        self.layers = Blocks([Layer(c, i, dtype) for i in range(c.num_hidden_layers)])
        self.final_norm = c.norm(dtype)

    def __call__(self, batch: Batch) -> layers.Encoded:
        """Returns the hidden states, the last after the final norm.

        ``first`` is the first token, computed separately as in :class:`bert.Encoder`, or with the
        pooling ``mean`` the mean of all real tokens, those of a prompt included.
        """
        x = self.embeddings(batch["input_ids"])
        prompt, real = layers.with_prompt(batch, x)
        length = x.shape[1]
        layers.check_length(length - prompt, length, self.limit, "max_position_embeddings")
        place = jnp.arange(length)
        near = jnp.abs(place[:, None] - place[None]) <= self.half
        seen = jnp.broadcast_to(real[:, None, None], (len(real), 1, length, length))
        sights = {
            kind: Sight(seen & near[None, None] if kind == SLIDING else seen, r.tables(place[None]))
            for kind, r in self.ropes
        }
        states = self.layers.states_before_last(x, sights)
        last = self.final_norm(self.layers.last(states[-1], sights))
        if self.pooling == "mean":
            weights = real[..., None].astype(last.dtype)
            first = jnp.sum(last * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1)
        else:
            first = self.final_norm(self.layers.last(states[-1], sights, 1))[:, 0]
        return layers.Encoded(tuple(y[:, prompt:] for y in (*states, last)), first)


# -------------------------------------------------------------------------------------------- heads


class PredictionHead(nnx.Module):
    """Dense, activation, norm: before every classifier, and pretrained with masked tokens."""

    def __init__(self, c: ModernBertConfig):
        n = c.hidden_size
        self.dense = layers.linear(n, n, jnp.float32, bias=c.classifier_bias)
        self.act = layers.activation(c.classifier_activation)
        self.norm = c.norm(jnp.float32)

    def __call__(self, x: Array) -> Array:
        return self.norm(self.act(self.dense(x)))


class ModernBertForSequenceClassification(SequenceClassifier):
    """The prediction head on the first token or on the mean, dropout, classifier."""

    def __init__(self, c: ModernBertConfig, head: Head, dtype: Any):
        backbone = ModernBertModel(c, dtype, pooling=c.classifier_pooling)
        super().__init__("model", backbone, head, c.hidden_size, c.classifier_dropout)
        self.head = PredictionHead(c)
        self.dropout = layers.Dropout(c.classifier_dropout)
        self.classifier = layers.linear(c.hidden_size, head.classes, jnp.float32)

    def logits(self, first: Array) -> Array:
        return self.classifier(self.dropout(self.head(first)))


class ModernBertForTokenClassification(TokenClassifier):
    """The prediction head, dropout and a classifier on every token."""

    def __init__(self, c: ModernBertConfig, head: Head, dtype: Any):
        sizes = c.hidden_size, head.classes, c.classifier_dropout
        super().__init__("model", ModernBertModel(c, dtype), *sizes)
        self.head = PredictionHead(c)

    def read(self, hidden: Array) -> Array:
        return super().read(self.head(hidden))


class ModernBertForQuestionAnswering(SpanClassifier):
    """The prediction head, dropout, and the start and end logits of every token."""

    projection = "classifier"

    def __init__(self, c: ModernBertConfig, head: Head, dtype: Any):
        rate = c.classifier_dropout
        super().__init__("model", ModernBertModel(c, dtype), c.hidden_size, rate)
        self.head = PredictionHead(c)

    def read(self, hidden: Array) -> Array:
        return super().read(self.head(hidden))


HEAD = ("head", "classifier")
FAMILY = Family(
    name="ModernBert",
    config=ModernBertConfig,
    kinds={
        **class_kinds(ModernBertForSequenceClassification, HEAD),
        "token_classification": Kind(
            ModernBertForTokenClassification, HEAD, "ForTokenClassification"
        ),
        "span_classification": Kind(ModernBertForQuestionAnswering, HEAD, "ForQuestionAnswering"),
    },
    weights=(
        (r"(.+\.tok_embeddings)\.weight", r"\1.embedding", False),
        (r"(.*norm)\.weight", r"\1.scale", False),
        (r"(.+)\.weight", r"\1.kernel", True),
    ),
    # A bare encoder's checkpoint lacks the prefix.
    renamed=((r"^(embeddings|layers|final_norm)\.", r"model.\1."),),
    tied=("decoder.weight", "model.embeddings.tok_embeddings.weight"),
    ignored=(r"decoder\.(weight|bias)",),
    targets={
        "lora": ("Wqkv",),
        "ia3": ("Wqkv", "mlp.Wo"),
        "ia3_feed_forward": ("mlp.Wo",),
        "opendelta": ("attn.Wo", "mlp.Wo"),
    },
    # The parts of fused kernels do not begin where a device's share does, as in GPT-2.
    splits=splits_of(
        (r".+\.attn\.Wqkv(?:\.[qkv])?", "outputs"),
        (r".+\.attn\.Wo", "inputs"),
        (r".+\.mlp\.Wi(?:\.(?:input|gate))?", "outputs"),
        (r".+\.mlp\.Wo", "inputs"),
        (r".+\.tok_embeddings", "rows"),
    ),
    refused={"rope_scaling": None},
)
