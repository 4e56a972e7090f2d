"""Heads: what a model predicts, and the modules that several families share."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Batch, Outputs
from fedjax_peft.contracts.part import part
from fedjax_peft.data.classes import numbered
from fedjax_peft.models.layers import Dropout, linear
from fedjax_peft.models.readout import capped, readout, tied_readout
from fedjax_peft.support.errors import InputError, check_known

__all__ = [
    "KINDS",
    "WITHOUT_CLASSES",
    "Head",
    "causal_lm",
    "classification",
    "make",
    "span_classification",
    "token_classification",
    "two_classifiers",
]


class Head(NamedTuple):
    """A head to put on a backbone, with Hugging Face's architecture for the model family."""

    kind: str
    labels: tuple[str, ...]
    fresh: bool = False
    """Start from random values even where the checkpoint holds a head."""

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.labels)


@part
def classification(classes: int | Sequence[str], *, fresh: bool = False) -> Head:
    """Returns a head with one prediction for a text, a pair of texts, or an image.

    Args:
      classes: the number of classes, or their names.
      fresh: start from random values even where the checkpoint holds a classifier.

    Raises:
      InputError: fewer than two classes, two of one name, or one text instead of a list of names.
    """
    return Head("classification", _labels(classes), fresh)


@part
def token_classification(classes: int | Sequence[str], *, fresh: bool = False) -> Head:
    """Returns a head with one prediction for every token: logits ``[batch, length, classes]``.

    The arguments are those of :func:`classification`.
    """
    return Head("token_classification", _labels(classes), fresh)


@part
def span_classification(*, fresh: bool = False) -> Head:
    """Returns a head for answer spans: logits ``[batch, length, 2]``, of start and end."""
    return Head("span_classification", ("start", "end"), fresh)


@part
def causal_lm() -> Head:
    """Returns a head for the next token: logits ``[batch, length, vocabulary]``.

    The head of a pretrained model is its embedding table (tied), or a matrix ``lm_head``. It stays
    frozen.
    """
    return Head("causal_lm", ())


@part
def two_classifiers(classes: int | Sequence[str], *, fresh: bool = False) -> Head:
    """Returns FedMCP's pair of classifiers: ``Outputs.logits`` and ``Outputs.second``.

    The first is the family's own classification head; the second, for the pass with the global
    adapter, is a separate one of RoBERTa's form (dense, tanh, projection) on the first token. The
    arguments are those of :func:`classification`.
    """
    return Head("two_classifiers", _labels(classes), fresh)


_WITH_CLASSES = {
    "classification": classification,
    "token_classification": token_classification,
    "two_classifiers": two_classifiers,
}
WITHOUT_CLASSES = {"span_classification": span_classification, "causal_lm": causal_lm}
"""The heads whose outputs are not the classes of the data set, by ``Head.kind``."""
KINDS = (*_WITH_CLASSES, *WITHOUT_CLASSES)
"""Every ``Head.kind``."""


def make(kind: str, classes: int | Sequence[str]) -> Head:
    """Returns the head of that name, such as ``classification``.

    Args:
      kind: the name of a function of this module (``Head.kind``).
      classes: the number of classes, or their names; heads that have no classes ignore it.

    Raises:
      InputError: an unknown name, fewer than two classes, or two of one name.
    """
    if kind in WITHOUT_CLASSES:
        return WITHOUT_CLASSES[kind]()
    check_known("head", kind, KINDS)
    return _WITH_CLASSES[kind](classes)


def _labels(classes: int | Sequence[str]) -> tuple[str, ...]:
    labels = tuple(classes) if isinstance(classes, Iterable) else numbered(int(classes))
    if len(labels) < 2:
        raise InputError(f"A classification head needs at least 2 classes, not {len(labels)}.")
    name, times = Counter(labels).most_common(1)[0]
    if times > 1:
        raise InputError(f"Two classes have the name {name!r}: each needs one of its own.")
    return labels


class MlpClassifier(nnx.Module):
    """RoBERTa's classification head: dropout, dense, tanh, dropout, projection."""

    def __init__(self, width: int, classes: int, dropout: float):
        self.dense = linear(width, width, jnp.float32)
        self.dropout = Dropout(dropout)
        self.dropout_out = Dropout(dropout)
        self.out_proj = linear(width, classes, jnp.float32)

    def __call__(self, x: Array) -> Array:
        x = jnp.tanh(self.dense(self.dropout(x)))
        return self.out_proj(self.dropout_out(x))


class SequenceClassifier(nnx.Module):
    """A backbone under Hugging Face's name for it, and classifiers on its first token.

    Subclasses make their family's classifier, under the name ``projection``, and define ``logits``
    if they need more than it.
    """

    projection = "classifier"

    def __init__(self, name: str, backbone: nnx.Module, head: Head, width: int, dropout: float):
        self.backbone_name = name
        setattr(self, name, backbone)
        if head.kind == "two_classifiers":
            self.second_classifier = MlpClassifier(width, head.classes, dropout)

    def logits(self, first: Array) -> Array:
        """Returns the logits ``[batch, classes]`` of the first token's hidden states."""
        logits: Array = getattr(self, self.projection)(first)
        return logits

    def __call__(self, batch: Batch) -> Outputs:
        x = getattr(self, self.backbone_name)(batch)
        second = self.second_classifier(x.first) if hasattr(self, "second_classifier") else None
        return Outputs(self.logits(x.first), x.hidden, x.states, second, x.last)


class LanguageModel(nnx.Module):
    """The next token's logits, in float32.

    They are products with the table of token embeddings (a tied head), or with ``lm_head``. Both
    stay frozen, unless a method trains them.
    """

    def __init__(
        self,
        name: str,
        backbone: nnx.Module,
        table: str,
        output: nnx.Linear | None = None,
        cap: float | None = None,
    ):
        """``table`` is the name of the token embeddings, ``cap`` a soft cap of the logits."""
        self.backbone_name, self.table, self.cap = name, table, cap
        setattr(self, name, backbone)
        if output is not None:
            output.preferred_element_type = jnp.float32  # sums of narrow products, not rounded
            self.lm_head = output

    @property
    def tied(self) -> str | None:
        """The path of the table that is the output layer too; None with a separate layer."""
        return None if hasattr(self, "lm_head") else f"{self.backbone_name}.{self.table}"

    def __call__(self, batch: Batch) -> Outputs:
        backbone = getattr(self, self.backbone_name)
        x = backbone(batch)
        has_output = hasattr(self, "lm_head")
        read = readout(self.lm_head) if has_output else tied_readout(getattr(backbone, self.table))
        if self.cap is not None:
            read = capped(read, self.cap)
        logits = read(x.hidden)
        return Outputs(logits, x.hidden, x.states, last=x.last, readout=read, cache=x.cache)


class TokenClassifier(nnx.Module):
    """Dropout and a classifier on every token."""

    projection = "classifier"
    """The name of the projection in Hugging Face's model."""

    def __init__(self, name: str, backbone: nnx.Module, width: int, classes: int, dropout: float):
        self.backbone_name = name
        setattr(self, name, backbone)
        self.dropout = Dropout(dropout)
        setattr(self, self.projection, linear(width, classes, jnp.float32))

    def read(self, hidden: Array) -> Array:
        """Returns the logits ``[batch, length, classes]`` of the last hidden states."""
        logits: Array = getattr(self, self.projection)(self.dropout(hidden))
        return logits

    def __call__(self, batch: Batch) -> Outputs:
        x = getattr(self, self.backbone_name)(batch)
        return Outputs(self.read(x.hidden), x.hidden, x.states, last=x.last)


class SpanClassifier(TokenClassifier):
    """Start and end logits of every token."""

    projection = "qa_outputs"

    def __init__(self, name: str, backbone: nnx.Module, width: int, dropout: float = 0.0):
        super().__init__(name, backbone, width, 2, dropout)
