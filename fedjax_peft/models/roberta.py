"""RoBERTa: BERT's encoder with its own position numbering and classification head."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.models import bert
from fedjax_peft.models.bert import WEIGHTS, BertConfig, BertEncoderModel, linear
from fedjax_peft.models.layers import Dropout
from fedjax_peft.typing import Batch, Outputs

__all__ = ["RobertaConfig", "RobertaForSequenceClassification"]


@dataclasses.dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """BERT's fields with RoBERTa's defaults."""

    vocab_size: int = 50265
    pad_token_id: int = 1


class RobertaModel(BertEncoderModel):
    """Positions count from ``pad_token_id + 1``; padding tokens keep ``pad_token_id``."""

    def __init__(self, c: BertConfig, dtype: Any):
        super().__init__(c, dtype, pooler=False)
        self.pad = c.pad_token_id

    def positions(self, ids: Array) -> Array:
        real = (ids != self.pad).astype(jnp.int32)
        return jnp.cumsum(real, axis=1) * real + self.pad


class ClassificationHead(nnx.Module):
    def __init__(self, c: BertConfig, classes: int):
        self.dense = linear(c.hidden_size, c.hidden_size, jnp.float32)
        self.dropout = Dropout(c.head_dropout)
        self.dropout_out = Dropout(c.head_dropout)
        self.out_proj = linear(c.hidden_size, classes, jnp.float32)

    def __call__(self, x: Array) -> Array:
        x = jnp.tanh(self.dense(self.dropout(x)))
        return self.out_proj(self.dropout_out(x))


class RobertaForSequenceClassification(nnx.Module):
    """Dense, tanh, projection on the first token."""

    def __init__(self, c: BertConfig, classes: int, dtype: Any = jnp.float32):
        self.roberta = RobertaModel(c, dtype)
        self.classifier = ClassificationHead(c, classes)

    def __call__(self, batch: Batch) -> Outputs:
        hidden, first = self.roberta(batch)
        return Outputs(self.classifier(first), hidden)


PREFIX = {r"^(embeddings|encoder|pooler)\.": r"roberta.\1."}
IGNORED = (r"lm_head\..+", r"roberta\.pooler\..+", r"roberta\.embeddings\.position_ids")
HEAD = ("classifier",)
LORA_TARGETS = bert.LORA_TARGETS
__all__ += ["WEIGHTS"]
