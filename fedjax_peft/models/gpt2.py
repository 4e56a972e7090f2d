"""GPT-2 (Radford et al. 2019): the pre-layer-norm causal decoder and its heads.

Module names are those of Hugging Face's torch model. Its dense layers (``Conv1D``) store their
weights as ``[in, out]``, as flax does.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Batch
from fedjax_peft.models import layers
from fedjax_peft.models.attention import Attending, attention, split_heads
from fedjax_peft.models.blocks import Blocks
from fedjax_peft.models.cache import Exchange, continues, keep, view
from fedjax_peft.models.family import Family, Kind, check_heads, first_rate, text_kinds
from fedjax_peft.models.heads import Head, LanguageModel, SequenceClassifier
from fedjax_peft.models.splits import splits_of
from fedjax_peft.support.errors import InputError


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """The fields of ``config.json`` that shape the model, under their Hugging Face names."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    classifier_dropout: float | None = None
    hidden_dropout: float | None = None
    layer_norm_epsilon: float = 1e-5
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_heads(self, "n_embd", "n_head")

    @property
    def inner(self) -> int:
        """The width of the feed-forward layer."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def head_dropout(self) -> float:
        """The dropout rate before the token classifier."""
        return first_rate(self.classifier_dropout, self.hidden_dropout)


def at(x: Array, index: Array, axis: int) -> Array:
    """Returns ``x`` ``[batch, ...]`` at one index of an axis per row, the axis kept with size 1."""
    return jnp.take_along_axis(x, index.reshape(-1, *[1] * (x.ndim - 1)), axis=axis)


class Attention(Attending):
    def __init__(self, c: GPT2Config, layer: int, dtype: Any):
        self.heads = c.n_head
        self.scale = 1 / (layer + 1) if c.scale_attn_by_inverse_layer_idx else 1.0
        self.c_attn = layers.FusedLinear(c.n_embd, 3 * c.n_embd, ("q", "k", "v"), dtype)
        self.c_proj = layers.linear(c.n_embd, c.n_embd, dtype)
        self.prefix = layers.PrefixSlot(c.n_embd)
        self.attn_dropout = layers.Dropout(c.attn_pdrop)
        self.resid_dropout = layers.Dropout(c.resid_pdrop)

    def __call__(self, x: Array, mask: Array, token: Array | None, store: Exchange) -> Array:
        q, k, v = (split_heads(y, self.heads) for y in jnp.split(self.c_attn(x), 3, axis=-1))
        k, v = store(k, v)
        k, v, mask = self.prefix(k, v, mask)
        if token is not None:
            q, mask = at(q, token, 1), at(mask, token, 2)
        given = (q * self.scale, k, v, mask, self.attn_dropout)
        h = attention(*given, form=self.form, platform=self.platform)
        return self.resid_dropout(self.c_proj(h.reshape(*h.shape[:2], -1)))


class MLP(nnx.Module):
    def __init__(self, c: GPT2Config, dtype: Any):
        self.c_fc = layers.linear(c.n_embd, c.inner, dtype)
        self.c_proj = layers.linear(c.inner, c.n_embd, dtype)
        self.act = layers.activation(c.activation_function)
        self.dropout = layers.Dropout(c.resid_pdrop)

    def __call__(self, x: Array) -> Array:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nnx.Module):
    def __init__(self, c: GPT2Config, layer: int, dtype: Any):
        self.ln_1 = layers.layer_norm(c.n_embd, c.layer_norm_epsilon, dtype)
        self.attn = Attention(c, layer, dtype)
        self.attention_residual = layers.Residual("attention", c.n_embd)
        self.ln_2 = layers.layer_norm(c.n_embd, c.layer_norm_epsilon, dtype)
        self.mlp = MLP(c, dtype)
        self.output_residual = layers.Residual("feed_forward", c.n_embd)

    def __call__(
        self, x: Array, mask: Array, token: Array | None = None, store: Exchange = keep
    ) -> Array:
        """Returns the new hidden states, or only those of one ``token`` per row (``[batch]``).

        Args:
          x: ``[batch, length, width]``.
          mask: bool ``[batch, 1, length, length]``: which tokens (last axis) a token attends to.
          token: one token for each row; the result is then ``[batch, 1, width]``.
          store: new keys and values -> all that there are (:mod:`fedjax_peft.models.cache`).
        """
        h = self.attn(self.ln_1(x), mask, token, store)
        x = self.attention_residual(h, x if token is None else at(x, token, 1))
        return self.output_residual(self.mlp(self.ln_2(x)), x)


class GPT2Model(nnx.Module):
    """Embeddings, blocks and the final layer norm.

    Positions and masks are those of :func:`fedjax_peft.models.cache.view`. As in Hugging Face,
    ``token_type_ids`` are looked up in the table of tokens; with a prompt they are ignored, as in
    PEFT.
    """

    def __init__(self, c: GPT2Config, dtype: Any):
        self.pad = c.pad_token_id
        self.wte = layers.TokenEmbed(c.vocab_size, c.n_embd, dtype)
        self.wpe = nnx.Embed(c.n_positions, c.n_embd, dtype=dtype, rngs=layers.UNSEEDED)
        self.drop = layers.Dropout(c.embd_pdrop)
        self.h = Blocks([Block(c, i, dtype) for i in range(c.n_layer)])
        self.ln_f = layers.layer_norm(c.n_embd, c.layer_norm_epsilon, dtype)

    def __call__(self, batch: Batch) -> layers.Encoded:
        """Returns the hidden states; ``first`` is that of the last real token of every row.

        The last layer of that token is computed separately. If only that token is used, as by a
        classifier, the compiler drops the attention, its output and the feed-forward products of
        the other tokens, three quarters of a layer. The numbers are the same except for the dropout
        masks of the last layer. With a cache, the last token of every row is its last column.
        """
        ids = batch["input_ids"]
        x = self.wte.tokens(ids) if continues(batch) else self.wte(ids)
        length = x.shape[1]
        prompt = length - ids.shape[1]
        if "token_type_ids" in batch and not prompt:
            x = x + self.wte.tokens(batch["token_type_ids"])
        seen = view(batch, length)
        layers.check_length(seen.slots - prompt, seen.slots, self.wpe.num_embeddings, "n_positions")
        x = self.drop(x + self.wpe(seen.positions))

        if seen.before is None:
            states = self.h.states_before_last(x, seen.mask)
            token = layers.last_token(ids, batch["attention_mask"].astype(bool), self.pad)
            first = self.ln_f(self.h.last(states[-1], seen.mask, prompt + token))[:, 0]
            states.append(self.ln_f(self.h.last(states[-1], seen.mask)))
            return layers.Encoded(tuple(x[:, prompt:] for x in states), first, token)
        states, cache = seen.continued(self.h, x, seen.mask, None)
        states[-1] = self.ln_f(states[-1])
        token = jnp.full(len(ids), ids.shape[1] - 1, jnp.int32)
        states = [x[:, prompt:] for x in states]
        return layers.Encoded(tuple(states), states[-1][:, -1], token, cache)


class GPT2ForSequenceClassification(SequenceClassifier):
    """A projection of the last real token."""

    projection = "score"

    def __init__(self, c: GPT2Config, head: Head, dtype: Any):
        super().__init__("transformer", GPT2Model(c, dtype), head, c.n_embd, c.head_dropout)
        self.score = layers.linear(c.n_embd, head.classes, jnp.float32, bias=False)


def language_model(c: GPT2Config, head: Head, dtype: Any) -> LanguageModel:
    """Returns the decoder with its tied head."""
    if not c.tie_word_embeddings:
        raise InputError(
            "The model config has tie_word_embeddings = False, which is not implemented for"
            " gpt2: its causal_lm head is the table of token embeddings."
        )
    return LanguageModel("transformer", GPT2Model(c, dtype), "wte")


FAMILY = Family(
    name="GPT2",
    config=GPT2Config,
    kinds={
        **text_kinds(
            "transformer", GPT2Model, GPT2ForSequenceClassification, ("score",), width="n_embd"
        ),
        "causal_lm": Kind(language_model, (), "LMHeadModel"),
    },
    weights=(
        (r"(.+\.ln_\w+)\.weight", r"\1.scale", False),
        (r"(.+\.w[tp]e)\.weight", r"\1.embedding", False),
        (r"(.+\.c_\w+)\.weight", r"\1.kernel", False),
        (r"(.+)\.weight", r"\1.kernel", True),
    ),
    # The hub's checkpoints lack the prefix.
    renamed=((r"^(wte|wpe|h|ln_f)\.", r"transformer.\1."),),
    tied=("lm_head.weight", "transformer.wte.weight"),
    # The first are causal masks.
    ignored=(
        r"transformer\.h\.\d+\.attn\.(masked_)?bias",
        r"lm_head\.weight",
        r"multiple_choice_head\..+",
    ),
    # Queries, keys and values are one kernel. Its parts do not begin where a device's share does,
    # so the compiler moves activations between devices.
    splits=splits_of(
        (r".+\.attn\.c_attn(?:\.[qkv])?", "outputs"),
        (r".+\.attn\.c_proj", "inputs"),
        (r".+\.mlp\.c_fc", "outputs"),
        (r".+\.mlp\.c_proj", "inputs"),
        (r".+\.wte", "rows"),
    ),
    targets={
        "lora": ("c_attn",),
        "ia3": ("c_attn", "mlp.c_proj"),
        "ia3_feed_forward": ("mlp.c_proj",),
        "opendelta": ("c_proj",),
    },
    other_names={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    # reorder_and_upcast_attn asks for scores in float32, which is always done here.
    refused={"scale_attn_weights": True, "add_cross_attention": False, "is_causal": True},
    # A causal mask of every layer: a buffer of booleans.
    unused=lambda c: c.n_layer * c.n_positions**2,
)
