"""The description of a model family: its modules, its config, and its checkpoints' names."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from flax import nnx

from fedjax_peft.contracts import Splits
from fedjax_peft.models.heads import Head, SpanClassifier, TokenClassifier
from fedjax_peft.support.errors import InputError

Build: TypeAlias = Callable[[Any, Head, Any], nnx.Module]
"""(config, head, compute dtype) -> module."""


class Kind(NamedTuple):
    """One head of a family."""

    build: Build
    head: tuple[str, ...]
    """Modules that are trained whole, the one with the classes last. If a checkpoint lacks them,
    they are initialised."""
    architecture: str
    """The end of Hugging Face's class name in ``config.json``."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Substitutions that turn the family's usual names of tensors into those of this head."""


def class_kinds(
    build: Build, head: tuple[str, ...], architecture: str = "ForSequenceClassification"
) -> dict[str, Kind]:
    """Returns the kinds of a family's classifier, alone and with a second one for FedMCP."""
    *before, last = head
    return {
        "classification": Kind(build, head, architecture),
        "two_classifiers": Kind(build, (*before, "second_classifier", last), architecture),
    }


def text_kinds(
    name: str,
    backbone: Callable[[Any, Any], nnx.Module],
    classifier: Build,
    head: tuple[str, ...],
    *,
    width: str = "hidden_size",
    token_dropout: str = "head_dropout",
    span_dropout: str | None = None,
) -> dict[str, Kind]:
    """Returns the kinds of a family that predicts classes of texts and of tokens, and spans.

    Args:
      backbone: (config, compute dtype) -> module.
      classifier: (config, head, compute dtype) -> the model for classes of texts.
      token_dropout: the field with the dropout rate before the classifier of tokens.
      span_dropout: the field with that before the logits of spans; None: no dropout.
    """

    def tokens(c: Any, head: Head, dtype: Any) -> nnx.Module:
        rate, size = getattr(c, token_dropout), getattr(c, width)
        return TokenClassifier(name, backbone(c, dtype), size, head.classes, rate)

    def spans(c: Any, head: Head, dtype: Any) -> nnx.Module:
        rate = 0.0 if span_dropout is None else getattr(c, span_dropout)
        return SpanClassifier(name, backbone(c, dtype), getattr(c, width), rate)

    return {
        **class_kinds(classifier, head),
        "token_classification": Kind(tokens, ("classifier",), "ForTokenClassification"),
        "span_classification": Kind(spans, ("qa_outputs",), "ForQuestionAnswering"),
    }


class Family(NamedTuple):
    """A model family, by ``model_type`` of ``config.json``."""

    name: str
    """The beginning of Hugging Face's class names."""
    config: type
    """A dataclass of the fields that shape the model, under their Hugging Face names."""
    kinds: Mapping[str, Kind]
    """The heads of the family, by ``Head.kind``."""
    weights: tuple[tuple[str, str, bool], ...]
    """(checkpoint name, leaf name, transposed); the first full match counts. Transposed means that
    torch has ``[out, in]``, or ``[out, in, height, width]`` for a convolution."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Substitutions that turn the names in other checkpoint formats into the usual names."""
    tied: tuple[str, str] = ("", "")
    """Names of a language model's output layer and of the table of token embeddings. Both are one
    tensor in a tied model."""
    ignored: tuple[str, ...] = ()
    """Names of tensors that are not used."""
    targets: Mapping[str, tuple[str, ...]] = {}
    """PEFT method -> the submodules that it adapts by default."""
    other_names: Mapping[str, str] = {}
    """General name of a config field -> the family's own; transformers reads both."""
    refused: Mapping[str, Any] = {}
    """Config fields that change the maths: name -> the only value that is implemented."""
    splits: Splits = ()
    """The axes on which several devices share the leaves; made by
    :func:`fedjax_peft.models.splits.splits_of`."""
    saved: tuple[tuple[str, str], ...] = ()
    """Substitutions that turn the usual names into the names in written checkpoints."""
    strict: bool = False
    """Whether an unknown config field is an error; otherwise it is ignored."""
    unused: Callable[[Any], int] = lambda config: 0
    """config -> bytes of the torch checkpoint of the bare model that the model here does not use: a
    pooler, or causal masks."""


def check_heads(config: Any, width: str, heads: str) -> None:
    """Raises InputError unless the number of attention heads divides the width (field names)."""
    if getattr(config, width) % getattr(config, heads):
        raise InputError(
            f"{width} = {getattr(config, width)} is not a multiple of"
            f" {heads} = {getattr(config, heads)}."
        )


def first_rate(*rates: float | None) -> float:
    """Returns the first dropout rate that is given, 0.1 if none is."""
    return next((rate for rate in rates if rate is not None), 0.1)
