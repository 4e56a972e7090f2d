"""Representations of a batch, and the similarity of two of them.

A representation is ``[examples, width]``, one pooled vector for each example. The similarities
compare two of them over the same examples and return a float32 scalar. Examples outside of ``mask``
have no influence, whatever their values are.

Linear centred kernel alignment (Kornblith et al. 2019; FedMCP Eq 6-7), with X and Y centred over
the examples, K = X Xᵀ and L = Y Yᵀ:

    cka            ⟨K, L⟩ / (‖K‖ ‖L‖)         HSIC's factor 1/(n-1)² cancels
    cka_debiased   ⟨K̃, L̃⟩ / (‖K̃‖ ‖L̃‖)         K̃ as in the unbiased HSIC of Song et al. 2012

The Gram matrices are ``[examples, examples]``, which is small: the width is larger than the batch.
Both similarities are 1 if the representations differ only by a rotation and a factor. In a small
batch the biased one (``cka``) is near 1 for *independent* representations too (0.92 for 64 Gaussian
examples of width 768, and always 1 for two examples); the debiased one is then about 0. The result
and its gradient are 0 where there is nothing to compare: fewer than two examples (four for the
debiased one), or representations that are all the same.
"""

from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Batch, Outputs
from fedjax_peft.support.errors import InputError

Pooling = Literal["mean", "cls"]
"""``mean``: the mean of the last hidden states over a text's tokens, without padding. ``cls``: the
last hidden state of the token that represents the whole text. This is the first token, or the last
real token in a causal model (Llama, GPT-2, LSTM), where the first token does not see the text."""

Similarity = Literal["cka", "cka_debiased", "cosine"]
"""Names of :data:`SIMILARITIES`."""

_SPREAD = 1e-12
"""Threshold for squared distances from the mean over squared lengths: less is rounding error."""
_LEAST = 1e-10
"""Threshold for a sum of squares whose scale is 1: less is rounding error."""


def pool(outputs: Outputs, batch: Batch, how: Pooling) -> Array:
    """Returns one vector for each example, float32 ``[batch, width]``: its pooled hidden states.

    Args:
      batch: the model's input; without an ``attention_mask`` all positions count (images).
    """
    if outputs.hidden is None:
        raise InputError(
            "This model returns logits only, and this compares representations: let its __call__"
            " (or the forward of fp.bind) return fp.contracts.Outputs(logits, hidden), with the"
            " last hidden states [batch, length, width]."
        )
    hidden = outputs.hidden.astype(jnp.float32)
    if how == "cls":
        if outputs.last is None:
            return hidden[:, 0]
        return jnp.take_along_axis(hidden, outputs.last[:, None, None], axis=1)[:, 0]
    if "attention_mask" not in batch:
        return jnp.mean(hidden, axis=1)
    real = batch["attention_mask"].astype(jnp.float32)[..., None]
    return jnp.sum(hidden * real, axis=1) / jnp.maximum(jnp.sum(real, axis=1), 1.0)


def cka(x: Array, y: Array, mask: Array) -> Array:
    """Returns the linear CKA of ``x`` ``[n, width]`` and ``y``; ``mask`` is bool ``[n]``."""
    (k, varied), (other, varied_too) = _gram(x, mask), _gram(y, mask)
    return _alignment(k, other, varied & varied_too & (jnp.sum(mask) >= 2))


def cka_debiased(x: Array, y: Array, mask: Array) -> Array:
    """Returns the linear CKA by unbiased HSIC estimates; it can be negative. See :func:`cka`."""
    (k, varied), (other, varied_too) = _gram(x, mask), _gram(y, mask)
    k, other = _u_centred(k, mask), _u_centred(other, mask)
    return _alignment(k, other, varied & varied_too & (jnp.sum(mask) >= 4))


def cosine(x: Array, y: Array, mask: Array) -> Array:
    """Returns the mean over examples of the cosine of ``x`` and ``y``; 0 for a vector of zeros."""
    x, y = (jnp.where(mask[:, None], z, 0.0) for z in (x, y))
    return jnp.sum(cosines(x, y)) / jnp.maximum(jnp.sum(mask), 1)


def cosines(x: Array, y: Array) -> Array:
    """Returns the cosine of every pair of rows, float32 ``[n]``; 0 for a vector of zeros."""

    def unit(z: Array) -> Array:
        z = z.astype(jnp.float32)
        square = jnp.sum(z**2, axis=1, keepdims=True)
        some = square > 0
        return jnp.where(some, z / jnp.sqrt(jnp.where(some, square, 1.0)), 0.0)

    return jnp.sum(unit(x) * unit(y), axis=1)


SIMILARITIES: dict[str, Callable[[Array, Array, Array], Array]] = dict(
    zip(get_args(Similarity), (cka, cka_debiased, cosine), strict=True)
)
"""Name -> similarity function."""


def _gram(x: Array, mask: Array) -> tuple[Array, Array]:
    """Returns the Gram matrix ``[n, n]`` of the centred rows, with trace 1; whether rows vary."""
    keep = mask[:, None]
    x = jnp.where(keep, x.astype(jnp.float32), 0.0)
    mean = jnp.sum(x, axis=0, keepdims=True) / jnp.maximum(jnp.sum(mask), 1)
    centred = jnp.where(keep, x - mean, 0.0)
    size = jnp.sum(centred**2)
    some = size > _SPREAD * jnp.sum(x**2)
    # CKA is scale-invariant; normalise by a constant, because fourth powers of activations would
    # overflow float32.
    factor = jax.lax.stop_gradient(jax.lax.rsqrt(jnp.where(some, size, 1.0)))
    centred = centred * factor
    return jnp.matmul(centred, centred.T, precision="highest"), some


def _u_centred(k: Array, mask: Array) -> Array:
    """Returns the U-centred Gram matrix: its products sum to n(n-3) times the unbiased HSIC."""
    n = jnp.maximum(jnp.sum(mask), 4).astype(jnp.float32)
    pairs = mask[:, None] & mask[None, :] & ~jnp.eye(len(mask), dtype=bool)
    k = jnp.where(pairs, k, 0.0)
    rows = jnp.sum(k, axis=1) / (n - 2)
    total = jnp.sum(k) / ((n - 1) * (n - 2))
    return jnp.where(pairs, k - rows[:, None] - rows[None, :] + total, 0.0)


def _alignment(k: Array, other: Array, some: Array) -> Array:
    """Returns ``⟨k, other⟩ / (‖k‖ ‖other‖)``, or 0 with no gradient if not ``some``."""
    squares, other_squares = jnp.sum(k * k), jnp.sum(other * other)
    some = some & (squares > _LEAST) & (other_squares > _LEAST)
    # Select before the root too: the derivative of a root at 0 is infinite, and 0 * inf is NaN.
    length = jnp.sqrt(jnp.where(some, squares * other_squares, 1.0))
    return jnp.where(some, jnp.sum(k * other) / length, 0.0)
