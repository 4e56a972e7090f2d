"""RoBERTa: BERT's encoder with its own position numbering and classification head.

XLM-RoBERTa and CamemBERT are the same model under other names.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from fedjax_peft.models import bert
from fedjax_peft.models.bert import BertConfig, BertModel
from fedjax_peft.models.family import Family, text_kinds
from fedjax_peft.models.heads import Head, MlpClassifier, SequenceClassifier


@dataclasses.dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """BERT's fields with RoBERTa's defaults."""

    vocab_size: int = 50265
    pad_token_id: int = 1


class Embeddings(bert.Embeddings):
    """Positions count from ``pad_token_id + 1``; padding tokens keep ``pad_token_id``."""

    def __init__(self, c: BertConfig, dtype: Any):
        super().__init__(c, dtype)
        self.pad = c.pad_token_id

    def positions(self, ids: Array, length: int) -> Array:
        if length > ids.shape[1]:  # with a prompt, Hugging Face counts padding too
            return super().positions(ids, length) + self.pad + 1
        real = (ids != self.pad).astype(jnp.int32)
        return jnp.cumsum(real, axis=1) * real + self.pad


def _backbone(c: RobertaConfig, dtype: Any) -> BertModel:
    model = BertModel(c, dtype)
    model.embeddings = Embeddings(c, dtype)
    return model


class RobertaForSequenceClassification(SequenceClassifier):
    """Dense, tanh, projection on the first token."""

    def __init__(self, c: RobertaConfig, head: Head, dtype: Any):
        super().__init__("roberta", _backbone(c, dtype), head, c.hidden_size, c.head_dropout)
        self.classifier = MlpClassifier(c.hidden_size, head.classes, c.head_dropout)


@dataclasses.dataclass(frozen=True)
class XLMRobertaConfig(RobertaConfig):
    """RoBERTa's fields with the defaults of XLM-RoBERTa and CamemBERT."""

    vocab_size: int = 30522


def _family(name: str, config: type) -> Family:
    return Family(
        name=name,
        config=config,
        kinds=text_kinds("roberta", _backbone, RobertaForSequenceClassification, ("classifier",)),
        weights=bert.WEIGHTS,
        renamed=(*bert.LEGACY, (r"^(embeddings|encoder|pooler)\.", r"roberta.\1.")),
        tied=("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
        ignored=(r"roberta\.pooler\..+", r"roberta\.embeddings\.position_ids"),
        targets=bert.TARGETS,
        splits=bert.SPLITS,
        refused=bert.REFUSED,
    )


FAMILY = _family("Roberta", RobertaConfig)
XLM_ROBERTA = _family("XLMRoberta", XLMRobertaConfig)
CAMEMBERT = _family("Camembert", XLMRobertaConfig)
