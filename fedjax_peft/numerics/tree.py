"""Algebra of stacked pytrees, and selection of leaves by name.

"Stacked" means that every leaf has a leading axis over clients, lanes or cohort slots.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft.contracts import PyTree

__all__ = [
    "add",
    "all_finite",
    "broadcast",
    "distance",
    "leaf_name",
    "nbytes",
    "norm",
    "put",
    "row",
    "select",
    "shapes",
    "size",
    "take",
    "weighted_sum",
    "where",
]

T = TypeVar("T")

# Indices here are never negative. Saying so saves three operations for each of them, and so time
# to trace and to compile.
_IN_RANGE: Any = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
_OR_DROPPED: Any = {"mode": "drop", "wrap_negative_indices": False}


def shapes(tree: PyTree) -> PyTree:
    """Returns the shapes and dtypes of the leaves, ``jax.ShapeDtypeStruct``."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def broadcast(tree: PyTree, n: int) -> PyTree:
    """Returns ``n`` stacked copies of a tree."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x))), tree)


def take(tree: PyTree, index: Array | np.ndarray | int) -> PyTree:
    """Returns rows ``index`` (int or int array) of a stacked tree; out of range is clipped."""
    return jax.tree.map(lambda x: jnp.take(x, index, axis=0, mode="clip"), tree)


def row(tree: PyTree, index: Array) -> PyTree:
    """Returns row ``index``, an int scalar in range, of a stacked tree."""
    return jax.tree.map(lambda x: x.at[index].get(**_IN_RANGE), tree)


def put(tree: PyTree, index: Array | np.ndarray | int, rows: PyTree) -> PyTree:
    """Returns a stacked tree with rows ``index`` >= 0 replaced; those beyond it are dropped."""
    return jax.tree.map(lambda x, r: x.at[index].set(r, **_OR_DROPPED), tree, rows)


def add(tree: PyTree, index: Array, rows: PyTree) -> PyTree:
    """Returns a stacked tree with ``rows`` added to rows ``index`` >= 0, if they exist."""
    return jax.tree.map(lambda x, r: x.at[index].add(r, **_OR_DROPPED), tree, rows)


def where(mask: Array, a: PyTree, b: PyTree) -> PyTree:
    """Returns ``a`` where ``mask`` is true, else ``b``; both have the same shapes and dtypes.

    ``mask`` has the leading axes of the leaves.
    """

    def pick(x: Array, y: Array) -> Array:
        return jax.lax.select(jax.lax.broadcast_in_dim(mask, x.shape, range(mask.ndim)), x, y)

    return jax.tree.map(pick, a, b)


def weighted_sum(tree: PyTree, weights: Array) -> PyTree:
    """Returns the float32 sum over the leading axis of a stacked tree, weighted by ``[n]``.

    Weights ``[rows, n]`` give as many sums, ``[rows, ...]``.
    """
    return jax.tree.map(
        lambda x: jnp.tensordot(weights, x.astype(jnp.float32), axes=1, precision="highest"), tree
    )


def all_finite(tree: PyTree, axis: int | None = None) -> Array:
    """Returns whether all numbers are finite: a bool, or bool ``[n]`` if ``axis=0`` (stacked)."""
    flags = [
        jnp.all(jnp.isfinite(x), axis=None if axis is None else tuple(range(1, x.ndim)))
        for x in jax.tree.leaves(tree)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    if not flags:
        return jnp.array(True)
    # False comes first. XLA would make a chain of n "and" from a reduction of the n flags, and
    # repeat it in every operation that uses the result: n² instructions for n leaves.
    return jnp.sort(jnp.stack(flags), axis=0)[0]


def distance(x: PyTree, y: PyTree) -> Array:
    """Returns the Euclidean length of ``x - y`` over all leaves together, a float32 scalar."""

    def square(a: Array, b: Array) -> Array:
        return jnp.sum((a.astype(jnp.float32) - b.astype(jnp.float32)) ** 2)

    squares = jax.tree.map(square, x, y)
    return jnp.sqrt(sum(jax.tree.leaves(squares), jnp.zeros(())))


def norm(tree: PyTree) -> Array:
    """Returns the Euclidean norm over all leaves together, a float32 scalar.

    Entries are divided by about the largest one before they are squared, so that no square
    overflows or vanishes.
    """
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree) if x.size]
    largest = jnp.max(jnp.stack([jnp.zeros(()), *(jnp.max(jnp.abs(x)) for x in leaves)]))
    by = jnp.clip(largest, 1e-30, 1e30)  # the reciprocals of larger numbers may be flushed to 0
    squares = [jnp.sum((x / by) ** 2) for x in leaves]
    return by * jnp.sqrt(sum(squares, jnp.zeros(())))


def size(tree: PyTree) -> int:
    """Returns the number of elements (of arrays or of their shapes)."""
    return sum(x.size for x in jax.tree.leaves(tree))


def nbytes(tree: PyTree) -> int:
    """Returns the number of bytes (of arrays or of their shapes)."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def leaf_name(path: tuple) -> str:
    """Returns the last dict key of a path in a pytree; empty without one."""
    keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    return str(keys[-1]) if keys else ""


def select(tree: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    """Returns the named leaves, in sorted order."""
    return {name: tree[name] for name in sorted(names)}
