"""Low-rank changes by one step of power iteration (PowerSGD, Vogels et al. 2019, Algorithm 1).

    P = orthogonalise(M Q)        Q ← Mᵀ P        sent: P and Q        the server reads  P Qᵀ

M is the change of a matrix, ``[m, n]``; Q, ``[n, r]``, starts random and is kept by the client from
round to round (warm start). Here every client encodes its own change; the paper averages P before
it orthogonalises. Error feedback is part of the paper's algorithm.

Decisions: vectors, and matrices whose factors are not smaller, are sent whole. A column of Q that
becomes zero keeps its former value, since a zero would stay for ever. Gram-Schmidt runs twice, so
that P is orthonormal in float32 also where M has a lower rank than r.
Checked against a NumPy transcription.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Key, PyTree, Transform, Wire
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.lowrank import matmul
from fedjax_peft.numerics.random import stream
from fedjax_peft.transforms.compressing import compressor


@part
def power_sgd(rank: Count = 1, *, error_feedback: bool = True) -> Transform:
    """Sends each matrix as two factors of a lower rank (PowerSGD).

    On the wire: ``r (m + n)`` float32 numbers for a matrix ``[m, n]``. It must be the last
    compressor of a chain.

    Args:
      rank: the rank of the factors.
      error_feedback: whether clients add what was lost to their next change.

    Raises:
      InputError: ``rank`` is not a positive integer.
    """

    def factored(x: Array) -> bool:
        rows, columns = _shape(x)
        return x.ndim > 1 and rank * (rows + columns) < rows * columns

    def leaf(x: Array, q: Array) -> tuple[Array, Array]:
        matrix = x.astype(jnp.float32).reshape(_shape(x))
        largest = jnp.max(jnp.abs(matrix))
        matrix = matrix / jnp.where(largest > 0, largest, 1.0)
        p = _orthonormal(matmul(matrix, q))
        new = matmul(matrix.T, p)
        kept = jnp.where(jnp.any(new != 0, axis=0, keepdims=True), new, q)
        return (matmul(p, new.T) * largest).reshape(x.shape), kept

    def encode(update: PyTree, memory: PyTree, key: Key) -> tuple[PyTree, PyTree]:
        memory = dict(memory)

        def one(path: tuple, x: Array) -> Array:
            name = jax.tree_util.keystr(path)
            if name in memory:
                x, memory[name] = leaf(x, memory[name])
            return x

        return jax.tree_util.tree_map_with_path(one, update), memory

    def memory(template: PyTree) -> dict[str, Array]:
        leaves = jax.tree_util.tree_leaves_with_path(template)
        named = {jax.tree_util.keystr(path): x for path, x in leaves if factored(x)}
        key = stream(jax.random.key(0), "power_sgd")
        return {
            name: jax.random.normal(stream(key, name), (_shape(x)[1], rank))
            for name, x in named.items()
        }

    def wire(template: PyTree, wires: PyTree) -> PyTree:
        def size(x: Array, w: Wire) -> Wire:
            return Wire(rank * sum(_shape(x)), 32) if factored(x) else w

        return jax.tree.map(size, template, wires)

    return compressor("power_sgd", encode, wire, memory=memory, final=True, feedback=error_feedback)


def _shape(x: Array) -> tuple[int, int]:
    """Returns the shape as a matrix: all axes but the first are its columns."""
    rows = x.shape[0] if x.ndim else 1
    return rows, math.prod(x.shape[1:])


def _orthonormal(p: Array) -> Array:
    """Returns orthonormal columns that span those of ``p``; zeros for columns that add nothing.

    LAPACK is avoided: several of its calls in one program can block each other on a CPU.
    """
    columns: list[Array] = []
    for i in range(p.shape[1]):
        column = p[:, i]
        before = jnp.sqrt(jnp.sum(column**2))
        for _ in range(2):
            for other in columns:
                column = column - jnp.sum(other * column) * other
        length = jnp.sqrt(jnp.sum(column**2))
        new = length > 1e-5 * before
        columns.append(jnp.where(new, column / jnp.where(new, length, 1.0), 0.0))
    return jnp.stack(columns, axis=1)
