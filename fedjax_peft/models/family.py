"""The description of a model family: its modules, its config, and its checkpoints' names."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx

from fedjax_peft.contracts import Splits
from fedjax_peft.models.heads import Head
from fedjax_peft.support.errors import InputError

__all__ = ["Family", "Kind", "check_heads"]


class Kind(NamedTuple):
    """One head of a family."""

    build: Callable[[Any, Head, Any], nnx.Module]
    """(config, head, compute dtype) -> module."""
    head: tuple[str, ...]
    """Modules that are trained whole. If a checkpoint lacks them, they are initialised. The last
    one
    has the classes."""
    architecture: str
    """The end of Hugging Face's class name in ``config.json``."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Substitutions that turn the family's usual names of tensors into those of this head."""


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
    renamed: tuple[tuple[str, str], ...]
    """Substitutions that turn the names in other checkpoint formats into the usual names."""
    ignored: tuple[str, ...]
    """Names of tensors that are not used."""
    targets: Mapping[str, tuple[str, ...]]
    """PEFT method -> the submodules that it adapts by default."""
    refused: Mapping[str, Any]
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
