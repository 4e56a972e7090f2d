"""Layers that flax lacks, or has in another form than the models need.

PEFT methods attach to four of them: :class:`Residual` (bottleneck adapters), :class:`PrefixSlot`
(prefix tuning), :class:`TokenEmbed` (prompt tuning) and :class:`FusedLinear` (LoRA on a part of the
output). Without a PEFT method these four add no computation. Every PEFT method can be attached to a
model that is built from these layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.extend.random import threefry_2x32

from fedjax_peft.contracts import Key
from fedjax_peft.support.errors import InputError, nearest

Mask = TypeVar("Mask", Array, None)
"""Which keys a query attends to; None: all."""


def gelu(x: Array) -> Array:
    """Returns ``x`` times the normal distribution function of ``x`` (Hendrycks and Gimpel 2016).

    It is computed with ``erf``, in float32 at least, and rounded once, as in torch. ``jax.nn.gelu``
    rounds narrower types after each operation, and computes ``erfc``, which takes longer.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * (0.5 + 0.5 * jax.lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


def _from_input(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Returns the function, whose gradient needs its input alone on a GPU.

    XLA would store two intermediate arrays of the forward pass there and read them again, which
    takes longer than to compute them again. Reverse mode alone differentiates the function.
    """

    def backward(x: Array, dy: Array) -> tuple[Array]:
        # Behind a barrier, XLA does not find that the forward pass has computed the same.
        again = jax.lax.platform_dependent(
            x, cuda=jax.lax.optimization_barrier, default=lambda x: x
        )
        dx: tuple[Array] = jax.vjp(function, again)[1](dy)
        return dx

    made = jax.custom_vjp(function)
    made.defvjp(lambda x: (function(x), x), backward)
    return made


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": _from_input(gelu),
    "gelu_new": _from_input(lambda x: jax.nn.gelu(x, approximate=True)),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}
"""Activation functions by their Hugging Face names (``hidden_act``)."""


def activation(name: str) -> Callable[[Array], Array]:
    """Returns the activation function with the Hugging Face name ``name``."""
    if name not in ACTIVATIONS:
        raise InputError(
            f"The activation function {name!r} is not implemented. {nearest(name, ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def random_bytes(key: Key, shape: tuple[int, ...], row: Array | int = 0) -> Array:
    """Returns uint8 random numbers of a shape ``[batch, (heads,) (length,) n]``.

    Each number depends on the key and on its coordinates, but not on the size of the array: the
    first rows of a larger array equal the smaller array. Therefore a mask does not change with
    padding, or when only some tokens are computed. One threefry block gives eight numbers
    (``jax.random.bits`` would use one block for each number).

    Args:
      row: the first coordinate of the first row: its place in the larger batch.
    """
    *lead, n = shape
    blocks = -(-n // 8)
    grid = (*lead, blocks)

    start = jnp.asarray(row, jnp.uint32)

    def at(axis: int) -> Array:
        place = jax.lax.broadcasted_iota(jnp.uint32, grid, axis)
        return place if axis else place + start

    # Two 32-bit counters; up to four coordinates of 16 bits each go into them.
    fits = max(grid) <= 1 << 16
    if len(lead) == 1 and fits:
        first, second = at(0) << 16, at(1)
    elif len(lead) == 2 and fits:
        first, second = at(0) << 16 | at(1), at(2)
    elif len(lead) == 3 and fits:
        first, second = at(0) << 16 | at(2), at(1) << 16 | at(3)
    else:  # other shapes use a running count
        rows = jnp.arange(math.prod(lead), dtype=jnp.uint32).reshape(*lead, 1)
        rows = rows + start * math.prod(lead[1:])
        first, second = jnp.broadcast_to(rows, grid), at(len(lead))
    words = threefry_2x32(
        jax.random.key_data(key), jnp.concatenate([first.reshape(-1), second.reshape(-1)])
    )
    pairs = jnp.stack(jnp.split(words, 2), axis=-1)
    octets = jax.lax.bitcast_convert_type(pairs, jnp.uint8)
    return octets.reshape(*lead, blocks * 8)[..., :n]


def dropout(x: Array, rate: float, key: Key, row: Array | int = 0) -> Array:
    """Returns ``x`` with elements zeroed at ``rate``, the others scaled to keep the mean.

    The rate is rounded to a multiple of 1/256 (0.1 becomes 26/256 = 0.1016), and the scale is exact
    for the rounded rate. A mask then needs only one random byte per element, so dropout is cheap.

    Args:
      x: ``[batch, ...]``.
      row: where ``x`` begins in a larger batch, whose mask it then gets.
    """
    threshold = min(round(rate * 256), 255)
    if threshold == 0:
        return x
    keep = random_bytes(key, x.shape, row) >= threshold
    return jnp.where(keep, x * jnp.asarray(256 / (256 - threshold), x.dtype), jnp.zeros_like(x))


class Dropout(nnx.Module):
    """Dropout whose key is set for each step (see :func:`fedjax_peft.models.base.bind`).

    Two calls in one forward pass give the same mask, so a module that drops twice needs two of
    these.
    """

    def __init__(self, rate: float):
        self.rate = rate
        self.deterministic = False
        self.key = nnx.RngKey(jax.random.key(0), tag="dropout")

    @property
    def drops(self) -> bool:
        """Whether a call changes anything: in training with a rate above 0."""
        return not self.deterministic and self.rate > 0

    def __call__(self, x: Array, row: Array | int = 0) -> Array:
        """Returns ``x`` with dropout, or ``x`` itself in evaluation; see :func:`dropout`."""
        return dropout(x, self.rate, self.key[...], row) if self.drops else x


class Unseeded:
    """Stands where Flax asks for random keys: modules are built under ``eval_shape`` only.

    Their values come from a checkpoint or from ``registry.initialise``. A counting ``nnx.Rngs``
    takes half of the time in which a model is built.
    """

    def params(self) -> Array:
        """Returns a key."""
        return jax.random.key(0)


UNSEEDED: Any = Unseeded()


def linear(n_in: int, n_out: int, dtype: Any, *, bias: bool = True) -> nnx.Linear:
    """Returns a dense layer; its values come from a checkpoint or from ``registry.initialise``."""
    return nnx.Linear(n_in, n_out, use_bias=bias, dtype=dtype, rngs=UNSEEDED)


def table(rows: int, width: int, dtype: Any) -> nnx.Embed:
    """Returns a table of embeddings, such as those of positions."""
    return nnx.Embed(rows, width, dtype=dtype, rngs=UNSEEDED)


def layer_norm(width: int, epsilon: float, dtype: Any, *, bias: bool = True) -> nnx.LayerNorm:
    """Returns a layer norm; its statistics are in float32 whatever the compute dtype."""
    return nnx.LayerNorm(
        width,
        epsilon=epsilon,
        dtype=dtype,
        use_bias=bias,
        use_fast_variance=False,
        rngs=UNSEEDED,
    )


class RMSNorm(nnx.Module):
    """``x / rms(x)`` times a learned factor for each feature; computed in float32.

    The factor is ``scale``, or ``1 + offset`` if ``centred`` (Gemma's form, which starts at zero).
    """

    def __init__(self, width: int, epsilon: float, *, centred: bool = False):
        self.epsilon = epsilon
        self.centred = centred
        if centred:
            self.offset = nnx.Param(jnp.zeros((width,)))
        else:
            self.scale = nnx.Param(jnp.ones((width,)))

    def __call__(self, x: Array) -> Array:
        """Returns ``x`` ``[..., width]`` with each vector normalised."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        factor = 1 + self.offset[...] if self.centred else self.scale[...]
        return (y * factor.reshape(*[1] * (y.ndim - 1), -1)).astype(x.dtype)


class FusedLinear(nnx.Linear):
    """One layer for several projections of one input, such as GPT-2's query, key and value."""

    def __init__(
        self, n_in: int, n_out: int, parts: Sequence[str], dtype: Any, *, bias: bool = True
    ):
        super().__init__(n_in, n_out, use_bias=bias, dtype=dtype, rngs=UNSEEDED)
        self.parts = tuple(parts)
        """Names of the equal slices of the output, in order."""


class TokenEmbed(nnx.Embed):
    """The table of token embeddings. Prompt tuning makes it return a prompt before the tokens."""

    def __init__(self, vocabulary: int, width: int, dtype: Any):
        super().__init__(vocabulary, width, dtype=dtype, rngs=UNSEEDED)

    def tokens(self, ids: Array) -> Array:
        """Returns the embeddings of ids alone, without a prompt: tokens that follow in a cache."""
        return nnx.Embed.__call__(self, ids)

    def attend(self, query: Array, out_sharding: Any = None) -> Array:
        """Returns the products with all tokens' embeddings (a tied head's logits), in float32."""
        table = self.embedding[...].astype(query.dtype)
        return jnp.einsum("...w,vw->...v", query, table, preferred_element_type=jnp.float32)


class PrefixSlot(nnx.Module):
    """The module of an attention layer that prefix tuning replaces, to prepend keys and values.

    ``width`` is the width of all heads together.
    """

    def __init__(self, width: int):
        self.width = width

    def __call__(self, key: Array, value: Array, mask: Mask) -> tuple[Array, Array, Mask]:
        """Returns keys and values ``[batch, length, heads, width]`` and mask ``[..., length]``.

        A mask of None stays None: everything is seen.
        """
        return key, value, mask


class Residual(nnx.Module):
    """The sum of a sublayer's output and the residual stream; bottleneck adapters attach here.

    ``place`` is ``attention`` or ``feed_forward``.
    """

    def __init__(self, place: str, width: int):
        self.place = place
        self.width = width

    def __call__(self, h: Array, x: Array, norm: Callable[[Array], Array] | None = None) -> Array:
        """Returns ``h + x``.

        Args:
          h: the sublayer's output after its dropout, ``[..., width]``.
          norm: the layer norm that follows in a post-norm model, None in a pre-norm one.
        """
        return h + x


class Encoded(NamedTuple):
    """The result of a backbone."""

    states: tuple[Array, ...]
    """Hidden states ``[batch, length, width]`` of the embeddings and of every layer."""
    first: Array
    """The last hidden state of the token that a classifier reads, ``[batch, width]``: the first one
    (a prompt's if there is one), or in a causal model the last real one."""
    last: Array | None = None
    """See :class:`fedjax_peft.contracts.Outputs`."""
    cache: Any = None
    """See :class:`fedjax_peft.contracts.Outputs`."""

    @property
    def hidden(self) -> Array:
        """The last hidden states."""
        return self.states[-1]


def check_length(text: int, length: int, limit: int, field: str) -> None:
    """Raises InputError if a text has too many positions.

    Without this check, a look-up beyond the table would give NaN.
    """
    if length > limit:
        prompt = f" and a prompt of {length - text}" if length > text else ""
        raise InputError(
            f"A text of {text} tokens{prompt} needs {length} positions, and the model has {limit}"
            f" ({field}). Cut the texts to {max(limit - length + text, 0)} tokens."
        )


def last_token(ids: Array, real: Array, pad: int | None = None) -> Array:
    """Returns the index of every row's rightmost token that is not padding, ``[batch]``.

    Padding is what the attention mask ``real`` (bool ``[batch, length]``) leaves out and, as in
    Hugging Face, every token with the id ``pad`` (``pad_token_id`` of the config). Hugging Face
    looks at the ids alone, which fails where the tokenizer pads with another token.
    """
    if pad is not None:
        real = real & (ids != pad)
    return jnp.max(jnp.where(real, jnp.arange(ids.shape[1])[None], 0), axis=1)


def prepend(mask: Array, n: int, value: Any = True) -> Array:
    """Returns ``mask`` ``[batch, length]`` after ``n`` columns of ``value`` (for a prompt)."""
    return jnp.pad(mask, ((0, 0), (n, 0)), constant_values=value) if n else mask


def with_prompt(batch: Mapping[str, Array], x: Array) -> tuple[int, Array]:
    """Returns the number of a prompt's tokens, and the attention mask of a text after them.

    Args:
      x: the embeddings ``[batch, length, width]`` of the prompt and the text.
    """
    prompt = x.shape[1] - batch["input_ids"].shape[1]
    return prompt, prepend(batch["attention_mask"].astype(bool), prompt)
