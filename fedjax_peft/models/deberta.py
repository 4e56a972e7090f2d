"""DeBERTa-v2 and v3: an encoder with disentangled attention (He et al. 2021), and its heads.

A score is a sum of three products: content with content, the query's content with the key's
relative position (c2p), and the key's content with the query's relative position (p2c). Positions
depend on query - key only, so a layer needs one vector for each difference; :func:`skew` arranges
their products by query and key. No array of the size of the scores is gathered, forward or
backward.

Module names are those of Hugging Face's torch model.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Batch
from fedjax_peft.models import bert, layers
from fedjax_peft.models.bert import BertConfig
from fedjax_peft.models.blocks import Blocks
from fedjax_peft.models.family import Family, text_kinds
from fedjax_peft.models.heads import Head, SequenceClassifier
from fedjax_peft.models.splits import splits_of
from fedjax_peft.support.errors import InputError, nearest


def _at_least(least: int, default: int) -> Any:
    return dataclasses.field(default=default, metadata={"least": least})


@dataclasses.dataclass(frozen=True)
class DebertaConfig(BertConfig):
    """BERT's fields with DeBERTa's defaults, and the fields of relative attention."""

    vocab_size: int = 128100
    type_vocab_size: int = _at_least(0, 0)
    layer_norm_eps: float = 1e-7
    relative_attention: bool = False
    max_relative_positions: int = _at_least(-1, -1)
    """Below 1: ``max_position_embeddings``."""
    position_buckets: int = _at_least(-1, -1)
    """Below 1: every difference has its own vector."""
    pos_att_type: str | list | None = dataclasses.field(default=None, hash=False)
    """Any of ``c2p`` and ``p2c``, joined by ``|`` or in a list (lists have no hash)."""
    share_att_key: bool = False
    """Whether positions use the same projections as the content."""
    norm_rel_ebd: str = "none"
    position_biased_input: bool = True
    """Add absolute positions to the embeddings."""
    pooler_hidden_size: int | None = None
    pooler_hidden_act: str = "gelu"
    pooler_dropout: float = 0.0
    cls_dropout: float | None = None
    embedding_size: int | None = None
    attention_head_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        width = self.hidden_size
        fixed = {
            "pooler_hidden_size": width,
            "embedding_size": width,
            "attention_head_size": width // self.num_attention_heads,
        }
        for name, only in fixed.items():
            if getattr(self, name) not in (None, only):
                raise InputError(
                    f"The model config has {name} = {getattr(self, name)}, which is not implemented"
                    f" for deberta-v2 (only {only}, which follows from hidden_size, is)."
                )
        for name, given, known in (
            ("pos_att_type", self.terms, ("c2p", "p2c")),
            ("norm_rel_ebd", self.norms, ("layer_norm", "none")),
        ):
            for word in given:
                if word not in known:
                    raise InputError(
                        f"The model config has {name} = {getattr(self, name)!r}, of which {word!r}"
                        f" is not implemented. {nearest(str(word), known)}"
                    )
        if self.position_buckets > 0 and not 0 < self.position_buckets // 2 < self.farthest - 1:
            raise InputError(
                f"The model config has position_buckets = {self.position_buckets}; it must be at"
                " least 2, and half of it below the largest relative position,"
                f" {self.farthest} - 1."
            )

    @property
    def terms(self) -> tuple[str, ...]:
        """The position terms of the scores."""
        given = self.pos_att_type or ()
        return _words(given) if isinstance(given, str) else tuple(given)

    @property
    def norms(self) -> tuple[str, ...]:
        """The normalisations of the relative embeddings."""
        return _words(self.norm_rel_ebd)

    @property
    def farthest(self) -> int:
        """The largest relative position, plus 1."""
        given = self.max_relative_positions
        return self.max_position_embeddings if given < 1 else given

    @property
    def span(self) -> int:
        """Half the rows of the relative embeddings: row ``span`` is that of the difference 0."""
        return self.position_buckets if self.position_buckets > 0 else self.farthest

    @property
    def head_dropout(self) -> float:
        """The dropout rate before the classifier."""
        return self.hidden_dropout_prob if self.cls_dropout is None else self.cls_dropout


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.lower().split("|"))


def log_buckets(difference: np.ndarray, buckets: int, farthest: int) -> np.ndarray:
    """Returns the signed bucket of every difference.

    Up to ``buckets // 2`` the bucket is the difference itself; larger buckets have logarithmic
    steps. The bucket is computed in float32, as in torch, because rounding decides at the border of
    two buckets.
    """
    near = buckets // 2
    size = np.maximum(np.abs(difference), near).astype(np.float32)
    decades = np.log(np.float32((farthest - 1) / near))
    steps = np.ceil(np.log(size / np.float32(near)) / decades * np.float32(near - 1))
    far = np.sign(difference) * (near + steps.astype(np.int64))
    return np.where(np.abs(difference) <= near, difference, far)


def table_rows(c: DebertaConfig, length: int) -> np.ndarray:
    """Returns the row of the relative embeddings for query - key = 1 - length, ..., length - 1."""
    difference = np.arange(1 - length, length)
    if c.position_buckets > 0:
        difference = log_buckets(difference, c.position_buckets, c.farthest)
    return np.clip(difference + c.span, 0, 2 * c.span - 1)


def nearest_first(length: int) -> np.ndarray:
    """Returns the places of the differences 1 - length, ..., length - 1 in 0, 1, -1, 2, -2, ...

    A shorter text has the first places of a longer one. So dropout inside an adapted projection,
    whose mask counts rows, does not depend on the padded length.
    """
    difference = np.arange(1 - length, length)
    return 2 * np.abs(difference) - (difference > 0)


def skew(x: Array, m: int) -> Array:
    """Returns ``y[..., i, j] = x[..., i, j - i + n - 1]``, ``[..., n, m]``.

    ``x`` is ``[..., n, n + m - 1]``: column ``j - i + n - 1`` belongs to the difference ``j - i``.
    One column is added, and the array is read as one sequence and cut into rows of the old width.
    This shifts each row by one place against the row before it (the relative shift of
    Transformer-XL, Dai et al. 2019).
    """
    *lead, n, width = x.shape
    x = jnp.pad(x, [(0, 0)] * (len(lead) + 1) + [(0, 1)]).reshape(*lead, n * (width + 1))
    x = jax.lax.slice_in_dim(x, n - 1, n - 1 + n * width, axis=-1)
    return x.reshape(*lead, n, width)[..., :m]


class Embeddings(nnx.Module):
    def __init__(self, c: DebertaConfig, dtype: Any):
        self.word_embeddings = layers.TokenEmbed(c.vocab_size, c.hidden_size, dtype)
        if c.position_biased_input:
            self.position_embeddings = layers.table(c.max_position_embeddings, c.hidden_size, dtype)
        if c.type_vocab_size:
            self.token_type_embeddings = layers.table(c.type_vocab_size, c.hidden_size, dtype)
        self.LayerNorm = layers.layer_norm(c.hidden_size, c.layer_norm_eps, dtype)
        self.dropout = layers.Dropout(c.hidden_dropout_prob)

    def __call__(self, batch: Batch) -> tuple[Array, Array]:
        """Returns the embeddings, zero for padding, and the mask, both with a prompt's tokens."""
        ids = batch["input_ids"]
        x = self.word_embeddings(ids)
        length = x.shape[1]
        prompt, mask = layers.with_prompt(batch, x)
        if hasattr(self, "position_embeddings"):
            limit = self.position_embeddings.num_embeddings
            layers.check_length(ids.shape[1], length, limit, "max_position_embeddings")
            x = x + self.position_embeddings(jnp.arange(length))[None]
        if hasattr(self, "token_type_embeddings"):
            types = batch.get("token_type_ids", jnp.zeros_like(ids))
            x = x + self.token_type_embeddings(layers.prepend(types, prompt, 0))
        x = self.LayerNorm(x)
        return self.dropout(jnp.where(mask[..., None], x, jnp.zeros_like(x))), mask


class Sight(NamedTuple):
    """What attention needs to know of a batch; the same for all layers."""

    table: Array | None
    """The relative embeddings, see :meth:`Encoder.table`."""
    mask: Array
    """bool ``[batch, 1, length, length]``: which tokens (last axis) a token attends to."""


class SelfAttention(nnx.Module):
    """Disentangled attention.

    ``score = (Q_q · K_k + Q_q · K_rel(q - k) + K_k · Q_rel(q - k)) / sqrt(width x terms)``, the
    paper's Eq 4 without the absolute positions.
    """

    def __init__(self, c: DebertaConfig, dtype: Any):
        def projection() -> nnx.Linear:
            return layers.linear(c.hidden_size, c.hidden_size, dtype)

        self.config = c
        # As in the reference, the terms count even if relative attention is off.
        width = c.hidden_size // c.num_attention_heads
        self.scale = 1 / math.sqrt(width * (1 + len(set(c.terms))))
        self.query_proj = projection()
        self.key_proj = projection()
        self.value_proj = projection()
        self.dropout = layers.Dropout(c.attention_probs_dropout_prob)
        if c.relative_attention:
            self.pos_dropout = layers.Dropout(c.hidden_dropout_prob)
            if not c.share_att_key:
                if "c2p" in c.terms:
                    self.pos_key_proj = projection()
                if "p2c" in c.terms:
                    self.pos_query_proj = projection()

    def __call__(self, x: Array, sight: Sight, queries: int | None) -> Array:
        table, mask = sight
        asking = x[:, :queries]
        q = self._heads(self.query_proj(asking)) * self.scale
        k = self._heads(self.key_proj(x))
        scores = _product("bqhd,bkhd->bhqk", q, k)
        if table is not None:
            # The rows of the table are projected, at a cost that does not depend on the batch.
            length = k.shape[1]
            rows = table_rows(self.config, length)[np.argsort(nearest_first(length))]
            scores = self._positions(scores, q, k, self.pos_dropout(table)[rows])
        scores = jnp.where(mask[:, :, :queries], scores, jnp.finfo(jnp.float32).min)
        probabilities = self.dropout(jax.nn.softmax(scores, axis=-1).astype(x.dtype))
        v = self._heads(self.value_proj(x))
        return jnp.einsum("bhqk,bkhd->bqhd", probabilities, v).reshape(asking.shape)

    def _positions(self, scores: Array, q: Array, k: Array, relative: Array) -> Array:
        """Returns the scores with the position terms.

        ``relative``, ``[differences, width]``, is in the order of :func:`nearest_first`.

        In the products the heads come first, because this order needs no copy. The axes are swapped
        after the skew, which halves the columns.
        """
        c = self.config
        places = nearest_first(k.shape[1])[: q.shape[1] + k.shape[1] - 1]  # by query - key
        if "c2p" in c.terms:
            project = self.key_proj if c.share_att_key else self.pos_key_proj
            keys = self._heads(project(relative))[places[::-1]]
            term = skew(_product("bqhd,rhd->hbqr", q, keys), k.shape[1])
            scores = scores + term.swapaxes(0, 1)
        if "p2c" in c.terms:
            project = self.query_proj if c.share_att_key else self.pos_query_proj
            queries = self._heads(project(relative))[places] * self.scale
            if q.shape[1] == 1:  # one query: each key has one difference
                scores = scores + _product("bkhd,khd->bhk", k, queries[::-1])[:, :, None]
            else:
                term = skew(_product("bkhd,rhd->hbkr", k, queries), q.shape[1])
                scores = scores + term.transpose(1, 0, 3, 2)
        return scores

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], self.config.num_attention_heads, -1)


def _product(form: str, x: Array, y: Array) -> Array:
    return jnp.einsum(form, x, y, preferred_element_type=jnp.float32)


class Encoder(bert.Encoder):
    """BERT's encoder with disentangled attention."""

    def __init__(self, c: DebertaConfig, dtype: Any):
        count = range(c.num_hidden_layers)
        self.layer = Blocks([bert.Layer(c, dtype, SelfAttention) for _ in count])
        if c.relative_attention:
            self.rel_embeddings = nnx.Embed(2 * c.span, c.hidden_size, rngs=layers.UNSEEDED)
        if "layer_norm" in c.norms:  # even if relative attention is off, as in the reference
            self.LayerNorm = layers.layer_norm(c.hidden_size, c.layer_norm_eps, dtype)

    def __call__(self, x: Array, mask: Array, prompt: int) -> layers.Encoded:
        """Returns the hidden states of all layers."""
        table = self.table(x.dtype)
        # As in the reference, a padding token attends to all tokens equally.
        pairs = mask[:, None, :, None] & mask[:, None, None, :]
        return super().__call__(x, Sight(table, pairs), prompt)

    def table(self, dtype: Any) -> Array | None:
        """Returns the normalised relative embeddings ``[2 span, width]``, None if there are none.

        They do not depend on the batch and are the same for all layers.
        """
        if not hasattr(self, "rel_embeddings"):
            return None
        table = self.rel_embeddings.embedding[...]
        return (self.LayerNorm(table) if hasattr(self, "LayerNorm") else table).astype(dtype)


class DebertaModel(nnx.Module):
    """Embeddings and encoder."""

    def __init__(self, c: DebertaConfig, dtype: Any):
        self.embeddings = Embeddings(c, dtype)
        self.encoder = Encoder(c, dtype)

    def __call__(self, batch: Batch) -> layers.Encoded:
        x, mask = self.embeddings(batch)
        return self.encoder(x, mask, x.shape[1] - batch["input_ids"].shape[1])


class ContextPooler(nnx.Module):
    """Dropout, dense, activation."""

    def __init__(self, c: DebertaConfig):
        self.dense = layers.linear(c.hidden_size, c.hidden_size, jnp.float32)
        self.dropout = layers.Dropout(c.pooler_dropout)
        self.act = layers.activation(c.pooler_hidden_act)

    def __call__(self, x: Array) -> Array:
        return self.act(self.dense(self.dropout(x)))


class DebertaForSequenceClassification(SequenceClassifier):
    """Pooler on the first token, dropout, classifier."""

    def __init__(self, c: DebertaConfig, head: Head, dtype: Any):
        backbone = DebertaModel(c, dtype)
        super().__init__("deberta", backbone, head, c.hidden_size, c.head_dropout)
        self.pooler = ContextPooler(c)
        self.dropout = layers.Dropout(c.head_dropout)
        self.classifier = layers.linear(c.hidden_size, head.classes, jnp.float32)

    def logits(self, first: Array) -> Array:
        return self.classifier(self.dropout(self.pooler(first)))


FAMILY = Family(
    name="DebertaV2",
    config=DebertaConfig,
    kinds=text_kinds(
        "deberta",
        DebertaModel,
        DebertaForSequenceClassification,
        ("pooler", "classifier"),
        token_dropout="hidden_dropout_prob",
    ),
    weights=bert.WEIGHTS,
    renamed=(*bert.LEGACY, (r"^(embeddings|encoder)\.", r"deberta.\1.")),
    tied=("cls.predictions.decoder.weight", "deberta.embeddings.word_embeddings.weight"),
    # Absolute positions of the pretraining decoder: checkpoints hold them, but they are unused.
    ignored=(
        r"deberta\.embeddings\.position_ids",
        r"deberta\.embeddings\.position_embeddings\.weight",
    ),
    splits=splits_of(
        (r".+\.attention\.self\.(?:pos_)?(?:query|key|value)_proj", "outputs"),
        (r".+\.attention\.output\.dense", "inputs"),
        (r".+\.intermediate\.dense", "outputs"),
        (r".+\.layer\.\d+\.output\.dense", "inputs"),
        (r".+\.word_embeddings", "rows"),
    ),
    targets={
        "lora": ("query_proj", "value_proj"),
        "ia3": ("key_proj", "value_proj", "output.dense"),
        "ia3_feed_forward": ("output.dense",),
        "opendelta": ("output.dense",),
    },
    refused={"conv_kernel_size": 0},
)
