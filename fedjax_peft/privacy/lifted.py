"""Algebra of lifted uploads for privacy mechanisms: differences, norms, and noise on sums.

An aggregator sums uploads in a vector space of its own (``Aggregator.lift``): leaves for the mean,
products A·B for FRA. Clipping and noise act in that space. A product is never formed for a single
client: with the received factors A and B,

    A_k B_k - A B  =  (A_k - A) B_k + A (B_k - B)  =  [A_k - A, A] [B_k; B_k - B]
    ‖L R‖²         =  Σ_ij (LᵀL)_ij (R Rᵀ)_ij

All terms are small where the change is small, so a small change keeps its digits. Where large
changes of A and B nearly cancel in the product, the sum over i and j is a small difference of large
terms and its rounding error is not small. :func:`product_norm` therefore adds a bound of that
error: a norm may be overestimated a little, but no client contributes more than it is allowed to.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Factors, Key, Product, PyTree, Segmented, Stacked, Weighted
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.lowrank import matmul
from fedjax_peft.numerics.random import stream
from fedjax_peft.support.errors import InputError

_ROUNDING = 2e-6
"""A bound of the relative rounding error of a float32 inner product of some thousand terms, twice.
"""


def _is_entry(x: Any) -> bool:
    return isinstance(x, Product | Factors | Weighted | Stacked | Segmented)


def streamed(lifted: PyTree, name: str) -> PyTree:
    """Returns a lifted upload of arrays and :class:`Product` only, whose sum is dense."""

    def one(x: Any) -> Any:
        match x:
            case Weighted():
                raise InputError(
                    f"The aggregator {name!r} weights a client by what it sends, so noise on its"
                    " sum would say nothing about how much one client can change. Use an"
                    " aggregator with equal weights: 'mean', 'fra' or 'flexlora'."
                )
            case Stacked():
                raise InputError(
                    f"The aggregator {name!r} looks at the uploads one by one, and noise is added"
                    " to a sum. Use an aggregator that sums: 'mean', 'fra' or 'flexlora'."
                )
            case Segmented():
                raise InputError(
                    f"The aggregator {name!r} sums the uploads of several groups of clients, each"
                    " by the weights of its own group, and noise is added to one sum over all."
                    " Use an aggregator of one sum: 'mean', 'fra' or 'flexlora'."
                )
            case Factors(a, b):
                return Product(a, b)
        return x

    return jax.tree.map(one, lifted, is_leaf=_is_entry)


def difference(lifted: PyTree, start: PyTree, name: str) -> PyTree:
    """Returns ``lifted - start``: arrays and :class:`Product` only.

    Raises:
      InputError: a part of the upload is not summed with the client's weight.
    """

    def one(x: Any, y: Any) -> Any:
        if isinstance(x, Product):
            left = jnp.concatenate([x.a - y.a, y.a], axis=1)
            return Product(left, jnp.concatenate([x.b, x.b - y.b], axis=0))
        return x.astype(jnp.float32) - y.astype(jnp.float32)

    entries = (streamed(lifted, name), streamed(start, name))
    return jax.tree.map(one, *entries, is_leaf=_is_entry)


def is_product(lifted: PyTree) -> PyTree:
    """Returns which entries of a lifted upload are products, in the structure of the dense sum."""
    return jax.tree.map(lambda x: isinstance(x, Product), lifted, is_leaf=_is_entry)


def norm(change: PyTree) -> Array:
    """Returns the joint Euclidean norm of arrays and products, a float32 scalar.

    It is not less than the true norm, except for rounding; see :func:`product_norm`. It is infinite
    or NaN if an entry is, or if a product overflows.

    Args:
      change: from :func:`difference`.
    """
    entries = jax.tree.leaves(change, is_leaf=_is_entry)
    products = [product_norm(x.a, x.b) for x in entries if isinstance(x, Product)]
    return tree.norm([*(x for x in entries if not isinstance(x, Product)), *products])


def product_norm(a: Array, b: Array) -> Array:
    """Returns an upper bound of the Frobenius norm of ``a @ b``, from the factors' Gram matrices.

    The bound exceeds the norm by a share of about ``1e-6 r`` if the terms of the product do not
    cancel, and by at most ``1.5e-3 Σ_i ‖a_i‖ ‖b_i‖`` if they do.

    Args:
      a: ``[in, r]``.
      b: ``[r, out]``.
    """
    # Factors are divided by about their largest entries, so that no square overflows or vanishes.
    by_a, by_b = (jnp.clip(jnp.max(jnp.abs(x), initial=0.0), 1e-30, 1e30) for x in (a, b))
    a, b = a.astype(jnp.float32) / by_a, b.astype(jnp.float32) / by_b
    grams, others = matmul(a.T, a), matmul(b, b.T)
    terms = jnp.sqrt(jnp.diagonal(grams) * jnp.diagonal(others))
    square = jnp.maximum(jnp.sum(grams * others), 0.0) + _ROUNDING * jnp.sum(terms) ** 2
    return by_a * by_b * jnp.sqrt(square)


def scaled(change: PyTree, factor: Array, usable: Array) -> PyTree:
    """Returns a change times a factor; zeros where it is not usable, whatever its entries are.

    Args:
      change: from :func:`difference`.
      factor: a float32 scalar.
      usable: a bool scalar.
    """

    def one(x: Any) -> Any:
        if isinstance(x, Product):
            return Product(one(x.a), jnp.where(usable, x.b, 0))
        return jnp.where(usable, x, 0) * factor

    return jax.tree.map(one, change, is_leaf=_is_entry)


def dense(lifted: PyTree) -> PyTree:
    """Returns a lifted upload with every product as a dense matrix, float32."""

    def one(x: Any) -> Array:
        return matmul(x.a, x.b) if _is_entry(x) else x.astype(jnp.float32)

    return jax.tree.map(one, lifted, is_leaf=_is_entry)


def changeable(
    lift: Callable[[PyTree], PyTree], template: PyTree, sendable: PyTree, name: str
) -> PyTree:
    """Returns which entries of the dense sum some client can change, bool.

    It is read off the lift itself: entries of the upload that can be sent get arbitrary other
    values, and an entry of the sum that depends on one of them changes.

    Args:
      lift: upload -> lifted upload.
      sendable: ``RoundContext.sendable``.
    """
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(template)) + 1))

    def moved(x: Array, sent: Array) -> Array:
        step = (1 + jnp.abs(x)) * jax.random.uniform(next(keys), x.shape, minval=1.0, maxval=2.0)
        return jnp.where(sent, x + step, x)

    def one(x: Any) -> Array:
        if isinstance(x, Product):  # without signs no terms can cancel
            return matmul(jnp.abs(x.a), jnp.abs(x.b)) > 0
        return x != 0

    there = lift(jax.tree.map(moved, template, sendable))
    change = difference(there, lift(template), name)
    return jax.tree.map(one, change, is_leaf=_is_entry)


def with_noise(total: PyTree, draw: Callable[[Key, tuple[int, ...]], Array], key: Key) -> PyTree:
    """Returns a dense sum plus independent noise; each entry has a key by its name.

    Args:
      draw: (key, shape) -> noise.
    """

    def one(path: Any, x: Array) -> Array:
        return x + draw(stream(key, jax.tree_util.keystr(path)), x.shape)

    return jax.tree_util.tree_map_with_path(one, total)
