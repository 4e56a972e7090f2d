"""A model: its outputs, its forward pass, and how tokens are drawn from it."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from jax import Array

from fedjax_peft.contracts.arguments import Count, FromZero, NotNegative, PositiveShare
from fedjax_peft.contracts.types import Batch, Key, Params, PyTree


class Outputs(NamedTuple):
    """What a model returns for a batch."""

    logits: Array
    """float32 ``[batch, classes]`` (or ``[batch, length, classes]`` for token tasks)."""
    hidden: Array | None = None
    """Last hidden states ``[batch, length, width]``, for losses that compare representations; None
    where the model does not return them."""
    states: tuple[Array, ...] = ()
    """Hidden states of the embeddings and of every layer, each ``[batch, length, width]``; ``()``
    where the model does not return them. A compiled function computes only those that are used."""
    second: Array | None = None
    """Logits of the second classifier, ``[batch, classes]`` (FedMCP's, on the global adapter); None
    for a model without one."""
    last: Array | None = None
    """int32 ``[batch]``: the position in ``hidden`` of the token that represents a text. In a
    causal model this is the last real token, the only one that depends on the whole text. None:
    the first token, as in BERT."""
    readout: Callable[[Array], Array] | None = None
    """Hidden states ``[..., width]`` -> logits float32 ``[..., vocabulary]``: the head of a
    language model. A loss that reads only some positions, or a few at a time, uses it in the place
    of ``logits``, which a compiled function then never forms. It is a ``jax.tree_util.Partial`` of
    the head's arrays, so outputs stay a pytree. None for other models."""
    cache: PyTree = None
    """The keys and values of all layers, if the batch has a ``cache``, as in generation."""


class Sampling(NamedTuple):
    """How tokens are chosen. Hashable: each choice is a compiled program."""

    max_new_tokens: Count = 64
    """The largest number of tokens in a completion, the end token included."""
    temperature: NotNegative = 0.0
    """0: the most likely token (greedy). Otherwise logits are divided by it, and drawn from."""
    top_p: PositiveShare = 1.0
    """Draw from the smallest set of most likely tokens with at least this probability (nucleus
    sampling, Holtzman et al. 2020), after ``top_k``."""
    top_k: FromZero = 0
    """Draw from this number of most likely tokens; 0: from all."""


class Platform(NamedTuple):
    """What a program is compiled for, as far as the forward pass depends on it."""

    name: str = "cpu"
    """``cpu``, ``gpu`` or ``tpu``."""
    capability: float = 0.0
    """The compute capability of a GPU of NVIDIA, such as 9.0; 0 for other devices."""
    only_planned: bool = False
    """Whether the program is only traced, to count arrays. The packages that a kernel of the
    platform needs may then be missing, and a loop that keeps as little stands for the kernel."""


def on_platform(apply: "ApplyFn", platform: Platform) -> "ApplyFn":
    """Returns a forward pass for a platform; an ``apply`` that has no method ``on`` itself."""
    place = getattr(apply, "on", None)
    return apply if place is None else place(platform)


class ApplyFn(Protocol):
    """A pure forward pass.

    A forward pass may have a method ``on(platform)``, which returns it for a
    :class:`Platform`; by itself it is right on all platforms.
    """

    def __call__(
        self, frozen: Params, trainable: Params, batch: Batch, key: Key | None, train: bool
    ) -> Outputs:
        """Returns the outputs for ``batch``; ``key`` is needed only if ``train`` (dropout)."""
