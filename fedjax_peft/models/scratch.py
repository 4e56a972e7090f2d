"""Models that are trained from scratch: recurrent ones for the next word, a CNN for images.

They are the baselines of federated learning before pretrained models (McMahan et al. 2017). The
whole model counts as its head: everything is trained, nothing is frozen.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Batch, Outputs
from fedjax_peft.models.family import Family, Kind
from fedjax_peft.models.heads import Head
from fedjax_peft.models.images import prepare
from fedjax_peft.models.layers import UNSEEDED, Dropout, last_token, linear
from fedjax_peft.support.errors import InputError


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """The fields of ``config.json`` that shape a recurrent model."""

    vocab_size: int = 50257
    embedding_size: int = 256
    hidden_size: int = 768
    num_layers: int = 2
    dropout: float = 0.0
    """Dropout rate of the states of all layers except the last one, as in torch."""
    initializer_range: float | None = None
    """Standard deviation of the initial values; None scales it to each layer's inputs."""


class Cell(nnx.Module):
    """One layer. A step makes ``gates`` times ``hidden_size`` sums of the input and the state.

    As in torch, both products have a bias.
    """

    gates: int

    def __init__(self, n_in: int, hidden_size: int, dtype: Any):
        self.hidden_size = hidden_size
        self.input = linear(n_in, self.gates * hidden_size, dtype)
        self.hidden = linear(hidden_size, self.gates * hidden_size, dtype)

    def start(self, x: Array) -> Any:
        """Returns the initial state for the inputs ``[batch, length, gates · hidden]``."""
        return jnp.zeros((x.shape[0], self.hidden_size), x.dtype)

    def step(self, state: Any, x: Array) -> tuple[Any, Array]:
        """Returns the state after the projected input ``[batch, gates · hidden]``, and the output.

        The output is ``[batch, hidden]``.
        """
        raise NotImplementedError

    def __call__(self, x: Array) -> Array:
        """Returns the outputs ``[batch, length, hidden]`` for the inputs ``[batch, length, in]``.

        All inputs are projected in one product; the states are projected step by step.
        """
        x = self.input(x)
        _, y = jax.lax.scan(self.step, self.start(x), x.swapaxes(0, 1))
        return y.swapaxes(0, 1)


class RnnCell(Cell):
    """``h' = tanh(x W + b + h U + c)`` (Elman 1990)."""

    gates = 1

    def step(self, state: Array, x: Array) -> tuple[Array, Array]:
        h = jnp.tanh(x + self.hidden(state))
        return h, h


class LstmCell(Cell):
    """Input, forget and output gates around a memory (Hochreiter & Schmidhuber 1997).

    In torch's order i, f, g, o: ``c' = f c + i g``, ``h' = o tanh(c')``. The memory is a sum over
    time and stays in float32.
    """

    gates = 4

    def start(self, x: Array) -> tuple[Array, Array]:
        h = super().start(x)
        return h, h.astype(jnp.float32)

    def step(self, state: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = state
        i, f, g, o = jnp.split((x + self.hidden(h)).astype(jnp.float32), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = (jax.nn.sigmoid(o) * jnp.tanh(c)).astype(h.dtype)
        return (h, c), h


class NextWord(nnx.Module):
    """Embedding, recurrent layers, and a projection to the vocabulary.

    A state depends on earlier tokens only, so padding on the right needs no mask.
    """

    cell: type[Cell]

    def __init__(self, c: RecurrentConfig, head: Head, dtype: Any):
        self.embedding = nnx.Embed(c.vocab_size, c.embedding_size, dtype=dtype, rngs=UNSEEDED)
        sizes = [c.embedding_size] + [c.hidden_size] * (c.num_layers - 1)
        self.layers = nnx.List([self.cell(n_in, c.hidden_size, dtype) for n_in in sizes])
        self.dropouts = nnx.List([Dropout(c.dropout) for _ in sizes[1:]])
        self.lm_head = linear(c.hidden_size, c.vocab_size, jnp.float32)

    def __call__(self, batch: Batch) -> Outputs:
        first, *others = self.layers
        ids = jnp.asarray(batch["input_ids"])
        x = first(self.embedding(ids))
        for drop, layer in zip(self.dropouts, others, strict=True):
            x = layer(drop(x))
        real = batch.get("attention_mask", jnp.ones_like(ids)).astype(bool)
        last = last_token(ids, real)
        return Outputs(self.lm_head(x), x, last=last)


class Rnn(NextWord):
    cell = RnnCell


class Lstm(NextWord):
    cell = LstmCell


@dataclasses.dataclass(frozen=True)
class CnnConfig:
    """The fields of ``config.json`` that shape the CNN."""

    image_size: int = 32
    num_channels: int = 3
    """Channels of the image: 1 or 3."""
    channels: list | tuple = dataclasses.field(default=(32, 64, 128), hash=False)
    """Output channels of each convolution. FedAdapters (Mathematics 2023, 11, 4479) does not give
    those of its CNN; the default was chosen here."""
    hidden_size: int = 1000
    initializer_range: float | None = None
    """Standard deviation of the initial values; None scales it to each layer's inputs."""

    def __post_init__(self) -> None:
        wrong = [n for n in self.channels if type(n) is not int or n < 1]
        if wrong or not self.channels:
            raise InputError(
                f"The model config has channels = {list(self.channels)}; it must be a list of"
                " positive whole numbers, one for each convolution."
            )
        if not self.pooled:
            count = len(self.channels)
            raise InputError(
                f"image_size = {self.image_size} is too small for {count} poolings that halve it:"
                f" it must be at least {2**count}, or channels must be a shorter list."
            )

    @property
    def pooled(self) -> int:
        """The side of the image after all poolings."""
        return self.image_size // 2 ** len(self.channels)


class Convolution(nnx.Module):
    """A convolution of 5x5 that keeps the size, computed as one product of all patches.

    Each lane of clients has its own kernel, and local steps run in a loop. In such a loop XLA's
    convolution is tens of times slower on a CPU than outside of it; this product is equally fast in
    both. The kernel is ``[height, width, in, out]``, as in ``nnx.Conv``.
    """

    def __init__(self, n_in: int, n_out: int, dtype: Any):
        self.dtype = dtype
        self.kernel = nnx.Param(jnp.zeros((5, 5, n_in, n_out)))
        self.bias = nnx.Param(jnp.zeros((n_out,)))

    def __call__(self, x: Array) -> Array:
        """Returns ``[batch, height, width, out]`` of ``[batch, height, width, in]``."""
        kernel, bias = self.kernel[...].astype(self.dtype), self.bias[...].astype(self.dtype)
        high, wide, _, n_out = kernel.shape
        height, width = x.shape[1:3]
        x = jnp.pad(x.astype(self.dtype), ((0, 0), (high // 2,) * 2, (wide // 2,) * 2, (0, 0)))
        shifted = [x[:, i : i + height, j : j + width] for i in range(high) for j in range(wide)]
        return (
            jnp.concatenate(shifted, axis=-1) @ kernel.reshape(-1, n_out) + bias[None, None, None]
        )


def _halved(x: Array) -> Array:
    """Returns the maxima of 2x2 blocks of ``[batch, height, width, channels]``.

    The last row or column of an odd size is dropped.
    """
    n, height, width, channels = x.shape
    even = x[:, : height // 2 * 2, : width // 2 * 2]
    return even.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))


class ConvolutionalClassifier(nnx.Module):
    """Convolutions of 5x5, each with ReLU and a 2x2 maximum; a dense layer; a classifier.

    Features are flattened in torch's order (channels first), so that the checkpoint is that of the
    same ``torch.nn.Sequential``.
    """

    def __init__(self, c: CnnConfig, head: Head, dtype: Any):
        self.image = (c.num_channels, c.image_size, c.image_size)
        channels = itertools.pairwise((c.num_channels, *c.channels))
        self.convolutions = nnx.List([Convolution(*sizes, dtype) for sizes in channels])
        self.dense = linear(c.channels[-1] * c.pooled**2, c.hidden_size, dtype)
        self.classifier = linear(c.hidden_size, head.classes, jnp.float32)

    def __call__(self, batch: Batch) -> Outputs:
        """Returns the outputs for ``pixel_values`` ``[batch, channels, height, width]``.

        The dense layer's features are the hidden states, of length 1.
        """
        pixels = jnp.asarray(batch["pixel_values"])
        pixels = prepare(pixels, channels=self.image[0], size=self.image[1:])
        if pixels.shape[1:] != self.image:
            raise InputError(
                f"pixel_values is {list(pixels.shape)}; this model needs [batch,"
                f" {', '.join(map(str, self.image))}]."
            )
        x = pixels.transpose(0, 2, 3, 1)
        for convolution in self.convolutions:
            x = _halved(nnx.relu(convolution(x)))
        x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)
        x = nnx.relu(self.dense(x))
        return Outputs(self.classifier(x), x[:, None])


def _family(name: str, config: type, kinds: dict[str, Kind]) -> Family:
    return Family(
        name=name,
        config=config,
        kinds=kinds,
        weights=(
            (r"embedding\.weight", "embedding.embedding", False),
            (r"(.+)\.weight", r"\1.kernel", True),
        ),
        strict=True,
    )


_WORDS = ("embedding", "layers", "lm_head")
RNN = _family("Rnn", RecurrentConfig, {"causal_lm": Kind(Rnn, _WORDS, "ForCausalLM")})
LSTM = _family("Lstm", RecurrentConfig, {"causal_lm": Kind(Lstm, _WORDS, "ForCausalLM")})
CNN = _family(
    "Cnn",
    CnnConfig,
    {
        "classification": Kind(
            ConvolutionalClassifier,
            ("convolutions", "dense", "classifier"),
            "ForImageClassification",
        )
    },
)
