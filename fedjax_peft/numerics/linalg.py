"""Linear algebra shared by initialisation, aggregation and measures."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft.support.libraries import limit_blas_threads


def _in_one_thread(name: str) -> Callable[..., Any]:
    """Returns the function of ``jnp.linalg``, on a CPU in one thread of OpenBLAS."""

    def function(*arguments: Any, **options: Any) -> Any:
        limit_blas_threads()
        return getattr(jnp.linalg, name)(*arguments, **options)

    return function


svd, qr, eigh, pinv, solve = map(_in_one_thread, ("svd", "qr", "eigh", "pinv", "solve"))


def orthonormal_rows(rows: Array) -> Array:
    """Returns Qᵀ of the decomposition ``rowsᵀ = Q R`` in which R's diagonal is not negative.

    Its first j rows span the first j of ``rows``. Where these are dependent, the others are
    orthonormal too, in directions that the backend chooses.

    Args:
      rows: ``[r, n]``, r at most n.
    """
    q, r = qr(rows.T)
    sign = jnp.where(jnp.diagonal(r) < 0, -1.0, 1.0).astype(q.dtype)
    return (q * sign[None]).T


def canonical(u: Array, s: Array, vt: Array) -> tuple[Array, Array, Array]:
    """Returns an SVD with signs such that each left vector's largest entry is positive.

    ``u`` is ``[in, n]``, ``s`` ``[n]``, ``vt`` ``[n, out]``. Signs of singular vectors are
    arbitrary; clients, backends and rounds must agree on them.
    """
    largest = jnp.take_along_axis(u, jnp.argmax(jnp.abs(u), axis=0)[None], axis=0)[0]
    sign = jnp.where(largest < 0, -1.0, 1.0).astype(u.dtype)
    return u * sign[None], s, vt * sign[:, None]


FRESH = 1 / math.sqrt(3)
"""Length of a column of A in a Kaiming start: uniform numbers in ±1/sqrt(in)."""


def dead_directions(s: Array, shape: tuple[int, ...]) -> Array:
    """Returns which singular values count as zero, bool ``[n]``.

    They are those at most ``σ₁ max(m, n) ε``, the convention of ``numpy.linalg.matrix_rank``: the
    rounding of a decomposition of an ``[m, n]`` matrix.

    A direction whose A and B are both zero gets no gradient, so it never trains. Its B should be
    zero, which keeps the product, and its A that of :func:`revived`.

    Args:
      s: ``[n]``, in descending order.
    """
    return (s <= max(shape) * jnp.finfo(s.dtype).eps * s[0]) | (s == 0)


def revived(u: Array, dead: Array) -> Array:
    """Returns ``u`` with unit vectors in its dead columns, orthogonal to all others.

    A decomposition's own vectors there are an arbitrary basis, which rounding chooses: another one
    with other lanes and on other devices. These are fixed vectors minus their part in the span of
    the live columns.

    Args:
      u: orthonormal columns, ``[m, n]``, n at most m; the live ones come first.
      dead: bool ``[n]``.
    """
    fixed = jax.random.uniform(jax.random.key(0), u.shape, u.dtype, minval=-1.0)
    return jnp.where(dead[None], orthonormal_rows(jnp.where(dead[None], fixed, u).T).T, u)


def is_finite(array: np.ndarray) -> bool:
    """Returns whether no value is NaN or infinite; 90 MB of float32 take 40 ms on one core."""
    flat = array.reshape(-1)
    if array.dtype == jnp.bfloat16:  # numpy has no quick test: the exponent's bits are all ones
        exponents = (flat[i : i + _CHUNK].view(np.uint16) & 0x7F80 for i in _chunks(flat))
        return not any((part == 0x7F80).any() for part in exponents)
    if not np.issubdtype(array.dtype, np.floating):
        return True
    return all(np.isfinite(flat[i : i + _CHUNK]).all() for i in _chunks(flat))


_CHUNK = 1 << 16
"""Values at a time, few enough for a processor's cache."""


def _chunks(flat: np.ndarray) -> range:
    return range(0, len(flat), _CHUNK)
