"""The decoder of Llama and of its descendants; each family has a file with its config.

Pre-norm blocks of attention and a gated feed-forward layer: RMS norms, rotary positions, and keys
and values with fewer heads than the queries. :class:`Form` lists what the families change. Module
names are those of Hugging Face's torch models.

Positions and masks are those of :func:`fedjax_peft.models.cache.view`. Only differences of
positions matter, so padding on the left changes nothing, except with the ``dynamic`` and
``longrope`` scalings, which depend on the length of a row. A sliding window of ``w`` shows a token
the last ``w`` tokens, itself included; the learned keys of a prefix are always seen.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Batch
from fedjax_peft.models import layers
from fedjax_peft.models.attention import Attending, attention
from fedjax_peft.models.blocks import Blocks
from fedjax_peft.models.cache import Exchange, continues, keep, view, window
from fedjax_peft.models.family import Family, Kind, check_heads, class_kinds, first_rate
from fedjax_peft.models.heads import (
    Head,
    LanguageModel,
    SequenceClassifier,
    SpanClassifier,
    TokenClassifier,
)
from fedjax_peft.models.rotary import Rope, rope, rotate
from fedjax_peft.models.splits import splits_of
from fedjax_peft.support.errors import InputError, check_known

FULL, SLIDING = "full_attention", "sliding_attention"
"""The kinds of layers, as in ``layer_types`` of a config."""


def unrotated(kind: str) -> str:
    """Returns the kind of a layer that sees what ``kind`` sees, and has no positions."""
    return f"{kind}, no positions"


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The fields of ``config.json`` that all families have, under their Hugging Face names."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    attention_dropout: float = 0.0
    classifier_dropout: float | None = None
    hidden_dropout: float | None = None
    tie_word_embeddings: bool = False
    pad_token_id: int | None = dataclasses.field(default=None, metadata={"least": -1})
    initializer_range: float = 0.02
    rope_parameters: dict | None = dataclasses.field(default=None, hash=False)
    rope_scaling: dict | None = dataclasses.field(default=None, hash=False)
    rope_theta: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if self.head_dim is None:
            check_heads(self, "hidden_size", "num_attention_heads")
        if self.num_key_value_heads is not None:
            check_heads(self, "num_attention_heads", "num_key_value_heads")
        self.rope()

    @property
    def width(self) -> int:
        """The width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def groups(self) -> int:
        """The number of heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_dropout(self) -> float:
        """The dropout rate before the token classifier, as in Hugging Face's generic one."""
        return first_rate(self.classifier_dropout, self.hidden_dropout)

    def rope(self) -> Rope:
        """Returns the rotation of the layers."""
        # As in transformers, the older field takes precedence where both are given, and the number
        # beside the table over that in it.
        parameters = dict(self.rope_scaling or self.rope_parameters or {})
        if self.original_max_position_embeddings is not None:
            parameters["original_max_position_embeddings"] = self.original_max_position_embeddings
        return rope(
            parameters,
            theta=self.rope_theta,
            width=self.width,
            limit=self.max_position_embeddings,
        )


class Form(NamedTuple):
    """What a family changes in Llama's decoder; made by a family from its config."""

    activation: str
    layers: tuple[str, ...]
    """The kind of every layer: ``FULL`` or ``SLIDING``, or one of them :func:`unrotated`."""
    ropes: Mapping[str, Rope | None]
    """Kind of layer -> its rotation; None: it has no positions."""
    window: int | None = None
    """How many positions a token sees in a sliding layer, its own included."""
    query_bias: bool = False
    """Biases of the projections to queries, keys and values."""
    output_bias: bool = False
    """A bias of attention's output."""
    feed_forward_bias: bool = False
    query_norm: bool = False
    """RMS norms of every head's queries and keys, before the rotation."""
    centred: bool = False
    """RMS norms scale by ``1 + offset`` (Gemma)."""
    post_norms: bool = False
    """RMS norms after both sublayers too, before the residual sum (Gemma 2)."""
    embedding_scale: float = 1.0
    score_scale: float | None = None
    """The factor of attention's scores; None: ``1 / sqrt(width of a head)``."""
    score_cap: float | None = None
    """Soft cap of attention's scores."""
    logit_cap: float | None = None
    """Soft cap of the next token's logits."""


def layer_kinds(given: list | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the kind of every layer.

    Args:
      given: ``layer_types`` of the config.
    """
    kinds = default if given is None else tuple(map(str, given))
    if len(kinds) != len(default):
        raise InputError(f"layer_types has {len(kinds)} entries for {len(default)} layers.")
    for kind in kinds:
        check_known("kind of layers", kind, (FULL, SLIDING), " (layer_types)")
    return kinds


# ------------------------------------------------------------------------------------------- blocks


class Sight(NamedTuple):
    """What attention needs to know of a batch; the same for all layers of one kind."""

    mask: Array
    """bool ``[batch, 1, length, keys]``: which tokens (last axis) a token attends to."""
    tables: tuple[Array, Array] | None
    """Cosines and sines, see :meth:`fedjax_peft.models.rotary.Rope.tables`; None: no rotation."""


class Attention(Attending):
    def __init__(self, c: DecoderConfig, form: Form, kind: str, dtype: Any):
        self.kind = kind
        self.head_width = c.width
        self.scale = form.score_scale
        self.softcap = form.score_cap
        outer, inner = c.num_attention_heads * c.width, c.groups * c.width
        self.q_proj = layers.linear(c.hidden_size, outer, dtype, bias=form.query_bias)
        self.k_proj = layers.linear(c.hidden_size, inner, dtype, bias=form.query_bias)
        self.v_proj = layers.linear(c.hidden_size, inner, dtype, bias=form.query_bias)
        self.o_proj = layers.linear(outer, c.hidden_size, dtype, bias=form.output_bias)
        self.has_norms = form.query_norm
        if form.query_norm:
            self.q_norm = layers.RMSNorm(c.width, c.rms_norm_eps, centred=form.centred)
            self.k_norm = layers.RMSNorm(c.width, c.rms_norm_eps, centred=form.centred)
        self.prefix = layers.PrefixSlot(inner)
        self.dropout = layers.Dropout(c.attention_dropout)

    def __call__(self, x: Array, sights: Mapping[str, Sight], store: Exchange) -> Array:
        def split(y: Array) -> Array:
            return y.reshape(*y.shape[:-1], -1, self.head_width)

        sight = sights[self.kind]
        q, k, v = (split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        if sight.tables is not None:
            q, k = rotate(q, sight.tables), rotate(k, sight.tables)
        k, v = store(k, v)
        k, v, mask = self.prefix(k, v, sight.mask)
        h = attention(
            *(q, k, v, mask, self.dropout),
            scale=self.scale,
            softcap=self.softcap,
            form=self.form,
            platform=self.platform,
        )
        return self.o_proj(h.reshape(*h.shape[:2], -1))


class MLP(nnx.Module):
    """``down(act(gate(x)) * up(x))`` (SwiGLU, Shazeer 2020, or another activation)."""

    def __init__(self, c: DecoderConfig, form: Form, dtype: Any):
        bias = form.feed_forward_bias
        self.gate_proj = layers.linear(c.hidden_size, c.intermediate_size, dtype, bias=bias)
        self.up_proj = layers.linear(c.hidden_size, c.intermediate_size, dtype, bias=bias)
        self.down_proj = layers.linear(c.intermediate_size, c.hidden_size, dtype, bias=bias)
        self.act = layers.activation(form.activation)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, c: DecoderConfig, form: Form, kind: str, dtype: Any):
        def norm() -> layers.RMSNorm:
            return layers.RMSNorm(c.hidden_size, c.rms_norm_eps, centred=form.centred)

        self.self_attn = Attention(c, form, kind, dtype)
        self.mlp = MLP(c, form, dtype)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.post_norms = form.post_norms
        if form.post_norms:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()
        self.attention_residual = layers.Residual("attention", c.hidden_size)
        self.output_residual = layers.Residual("feed_forward", c.hidden_size)

    def __call__(self, x: Array, sights: Mapping[str, Sight], store: Exchange = keep) -> Array:
        """Returns the new hidden states of ``x`` ``[batch, length, width]``.

        Args:
          x: ``[batch, length, width]``.
          store: new keys and values -> all that there are (:mod:`fedjax_peft.models.cache`).
        """
        h = self.self_attn(self.input_layernorm(x), sights, store)
        if self.post_norms:
            x = self.attention_residual(self.post_attention_layernorm(h), x)
            h = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        else:
            x = self.attention_residual(h, x)
            h = self.mlp(self.post_attention_layernorm(x))
        return self.output_residual(h, x)


class ScaledEmbed(layers.TokenEmbed):
    """A table of token embeddings that are multiplied by a number when they are looked up."""

    def __init__(self, vocabulary: int, width: int, scale: float, dtype: Any):
        super().__init__(vocabulary, width, dtype)
        self.scale = scale

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Returns the embeddings ``[..., width]`` of ids. The factor is rounded to their dtype."""
        return self.tokens(inputs)

    def tokens(self, ids: Array) -> Array:
        """Returns what ``__call__`` does."""
        x = super().tokens(ids)
        return x * jnp.asarray(self.scale, x.dtype)


class DecoderModel(nnx.Module):
    """Embeddings, blocks and the final norm."""

    def __init__(self, c: DecoderConfig, form: Form, dtype: Any):
        self.pad = c.pad_token_id
        self.window = form.window or 0
        # Pairs, because a module's attributes must be hashable.
        self.ropes = tuple((kind, form.ropes[kind]) for kind in sorted(set(form.layers)))
        sizes = c.vocab_size, c.hidden_size
        if form.embedding_scale == 1:
            self.embed_tokens = layers.TokenEmbed(*sizes, dtype)
        else:
            self.embed_tokens = ScaledEmbed(*sizes, form.embedding_scale, dtype)
        self.layers = Blocks([Block(c, form, kind, dtype) for kind in form.layers])
        self.norm = layers.RMSNorm(c.hidden_size, c.rms_norm_eps, centred=form.centred)

    def __call__(self, batch: Batch) -> layers.Encoded:
        """Returns the hidden states; ``first`` is that of the last real token of every row.

        With a cache, the last token of every row is its last column.
        """
        ids = batch["input_ids"]
        x = self.embed_tokens.tokens(ids) if continues(batch) else self.embed_tokens(ids)
        seen = view(batch, x.shape[1])
        sights = {
            kind: Sight(
                window(seen, self.window) if kind.startswith(SLIDING) else seen.mask,
                None if turn is None else turn.tables(seen.positions),
            )
            for kind, turn in self.ropes
        }
        if seen.before is None:
            states, cache = self.layers.states(x, sights), None
            token = layers.last_token(ids, batch["attention_mask"].astype(bool), self.pad)
        else:
            states, cache = seen.continued(self.layers, x, sights)
            token = jnp.full(len(ids), ids.shape[1] - 1, jnp.int32)
        states[-1] = self.norm(states[-1])
        states = [y[:, x.shape[1] - ids.shape[1] :] for y in states]  # without a prompt
        first = jnp.take_along_axis(states[-1], token[:, None, None], axis=1)[:, 0]
        return layers.Encoded(tuple(states), first, token, cache)


# -------------------------------------------------------------------------------------------- heads


class Classifier(SequenceClassifier):
    """A projection of the last real token."""

    projection = "score"

    def __init__(self, c: DecoderConfig, form: Form, head: Head, dtype: Any):
        backbone = DecoderModel(c, form, dtype)
        super().__init__("model", backbone, head, c.hidden_size, c.head_dropout)
        self.score = layers.linear(c.hidden_size, head.classes, jnp.float32, bias=False)


class Tagger(TokenClassifier):
    """Dropout and a projection of every token."""

    projection = "score"


# ------------------------------------------------------------------------ parts of a family's data


def family_of(
    name: str,
    config: type[DecoderConfig],
    form: Callable[[Any], Form],
    *,
    heads: Sequence[str] | None = None,
    ia3: str = "q_proj",
    prefix: str = "",
    spans: str = "model",
    centred: bool = False,
    refused: Mapping[str, Any] | None = None,
) -> Family:
    """Returns a family of this decoder.

    PEFT methods adapt the submodules that Hugging Face PEFT adapts by default.

    Args:
      form: config -> form.
      heads: the family's kinds of heads; None: all.
      prefix: of the ends of Hugging Face's class names, except that of the language model.
      centred: whether norms scale by ``1 + offset``.
      refused: further fields of the config, see :class:`fedjax_peft.models.family.Family`.
    """

    def words(c: DecoderConfig, head: Head, dtype: Any) -> nnx.Module:
        backbone, cap, output = DecoderModel(c, form(c), dtype), form(c).logit_cap, None
        if not c.tie_word_embeddings:
            output = layers.linear(c.hidden_size, c.vocab_size, dtype, bias=False)
        return LanguageModel("model", backbone, "embed_tokens", output, cap)

    def classifier(c: DecoderConfig, head: Head, dtype: Any) -> nnx.Module:
        return Classifier(c, form(c), head, dtype)

    def tagger(c: DecoderConfig, head: Head, dtype: Any) -> nnx.Module:
        backbone = DecoderModel(c, form(c), dtype)
        return Tagger("model", backbone, c.hidden_size, head.classes, c.head_dropout)

    def reader(c: DecoderConfig, head: Head, dtype: Any) -> nnx.Module:
        return SpanClassifier(spans, DecoderModel(c, form(c), dtype), c.hidden_size)

    tokens, answers = f"{prefix}ForTokenClassification", f"{prefix}ForQuestionAnswering"
    moved = ((r"^model\.", f"{spans}."),)
    kinds = {
        "causal_lm": Kind(words, (), "ForCausalLM"),
        **class_kinds(classifier, ("score",), f"{prefix}ForSequenceClassification"),
        "token_classification": Kind(tagger, ("score",), tokens),
        "span_classification": Kind(reader, ("qa_outputs",), answers, renamed=moved),
    }
    return Family(
        name=name,
        config=config,
        kinds={head: kinds[head] for head in heads or kinds},
        weights=(
            (r"(.*norm)\.weight", r"\1.offset" if centred else r"\1.scale", False),
            (r"(.+\.embed_tokens)\.weight", r"\1.embedding", False),
            (r"(.+)\.weight", r"\1.kernel", True),
        ),
        # Checkpoints of the bare model lack the prefix; Llama's class for spans has another one.
        renamed=((r"^(embed_tokens|layers|norm)\.", r"model.\1."), (r"^transformer\.", "model.")),
        tied=("lm_head.weight", "model.embed_tokens.weight"),
        ignored=(r".+\.rotary_emb\.inv_freq",),
        targets={
            "lora": ("q_proj", "v_proj"),
            "ia3": (ia3, "v_proj", "down_proj"),
            "ia3_feed_forward": ("down_proj",),
            "opendelta": ("o_proj", "down_proj"),
        },
        refused={"is_causal": True, **(refused or {})},
        splits=splits_of(
            (r".+\.self_attn\.[qkv]_proj", "outputs"),
            (r".+\.self_attn\.o_proj", "inputs"),
            (r".+\.mlp\.(?:gate|up)_proj", "outputs"),
            (r".+\.mlp\.down_proj", "inputs"),
            (r".+\.embed_tokens", "rows"),
            (r"lm_head", "outputs"),
        ),
    )
