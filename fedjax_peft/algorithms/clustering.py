"""Clusters of clients from the subspaces of their adapters, inside a compiled program.

    d_ij = 1 - ‖U_iᵀ U_j‖_F² / r            U_i: an orthonormal basis of client i's subspace
    S_ij = exp(-d_ij² / 2σ²)                σ: the median of d_ij over all pairs
    L    = I - D^{-1/2} S D^{-1/2}          D: the sums of S's rows
    K    = argmax_k (λ_{k+1} - λ_k)         λ: the eigenvalues of L, ascending

The clusters are those of k-means on the rows of L's first K eigenvectors, each scaled to length 1
(Ng, Jordan and Weiss 2002). No random numbers are used: k-means starts from the client with the
largest sum in D, then adds the farthest point K - 1 times, and takes a fixed number of steps.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.numerics.linalg import dead_directions, eigh, svd

_STEPS = 20
"""Steps of k-means."""


def subspace_distances(rows: Array) -> Array:
    """Returns d_ij for the spaces that rows span, ``[clients, clients]``.

    A direction that is zero belongs to no subspace, so r counts it as different from all others.

    Args:
      rows: ``[clients, r, n]``; those of a client span its subspace.
    """

    def basis(matrix: Array) -> Array:
        _, sigma, vt = svd(matrix, full_matrices=False)
        return jnp.where(dead_directions(sigma, matrix.shape)[:, None], 0.0, vt)

    # One matrix at a time, because concurrent batched LAPACK calls deadlock small CPU thread pools.
    bases = jax.lax.map(basis, rows)

    def shared(one: Array) -> Array:
        cosines = jnp.einsum("rn,csn->crs", one, bases, precision="highest")
        return jnp.sum(cosines**2, axis=(1, 2))

    return 1 - jax.lax.map(shared, bases) / rows.shape[1]


def spectral_clusters(
    distances: Array, present: Array, fewest: int, most: int
) -> tuple[Array, Array]:
    """Returns the cluster of each client, int32 ``[clients]``, and the number of clusters K.

    K is at most the number of clients that are present, and less if it is to be chosen by a gap:
    there is none after the last eigenvalue.

    Args:
      distances: d_ij, ``[clients, clients]``.
      present: bool ``[clients]``; the clusters of other clients mean nothing.
    """
    clients = len(present)
    pairs = present[:, None] & present[None] & ~jnp.eye(clients, dtype=bool)
    sigma = jnp.nanmedian(jnp.where(pairs, distances, jnp.nan))
    sigma = jnp.where(sigma > 0, sigma, 1.0)  # clients that are alike, or fewer than two clients
    near = jnp.exp(-((distances / sigma) ** 2) / 2)
    near = jnp.where(pairs, near, 0.0) + jnp.diag(present.astype(jnp.float32))
    degree = jnp.sum(near, axis=1)
    root = jnp.where(present, 1 / jnp.sqrt(jnp.where(present, degree, 1.0)), 0.0)
    laplacian = jnp.eye(clients) - root[:, None] * near * root[None]
    # Eigenvalues are at most 2: those of absent clients come last.
    values, vectors = eigh(laplacian + jnp.diag(jnp.where(present, 0.0, 3.0)))
    k = _by_gap(values, jnp.sum(present), fewest, most)
    points = jnp.where(jnp.arange(most)[None] < k, vectors[:, :most], 0.0)
    length = jnp.sqrt(jnp.sum(points**2, axis=1, keepdims=True))
    points = points / jnp.where(length > 0, length, 1.0)
    first = jnp.argmax(jnp.where(present, degree, -1.0))
    return _k_means(points, present, first, k, most), k


def _by_gap(values: Array, present: Array, fewest: int, most: int) -> Array:
    """Returns the K from ``fewest`` to ``most`` before the largest gap of the eigenvalues."""
    k = jnp.arange(fewest, most + 1)
    last = len(values) - 1
    gaps = values[jnp.minimum(k, last)] - values[k - 1]
    gaps = jnp.where(k < present, gaps, -jnp.inf)
    best = k[jnp.argmax(gaps)]
    return jnp.where(jnp.any(k < present), best, jnp.clip(present, 1, fewest)).astype(jnp.int32)


def _k_means(points: Array, present: Array, first: Array, k: Array, most: int) -> Array:
    """Returns the cluster of each point, int32 ``[points]``.

    Args:
      points: ``[points, n]``.
      present: bool ``[points]``.
    """
    used = jnp.arange(most) < k

    def apart(centres: Array) -> Array:
        """Returns squared distances, ``[points, most]``; infinite for a centre that is not used."""
        square = jnp.sum((points[:, None] - centres[None]) ** 2, axis=-1)
        return jnp.where(used[None], square, jnp.inf)

    def add(i: int, centres: Array) -> Array:
        known = jnp.where(jnp.arange(most)[None] < i, apart(centres), jnp.inf)
        farthest = jnp.argmax(jnp.where(present, jnp.min(known, axis=1), -1.0))
        return centres.at[i].set(points[farthest])

    def step(_: int, centres: Array) -> Array:
        own = jnp.argmin(apart(centres), axis=1)
        member = (own[:, None] == jnp.arange(most)[None]) & present[:, None]
        count = jnp.sum(member, axis=0)[:, None]
        total = jnp.einsum("pk,pn->kn", member.astype(points.dtype), points, precision="highest")
        return jnp.where(count > 0, total / jnp.maximum(count, 1), centres)

    start = jnp.zeros((most, points.shape[1])).at[0].set(points[first])
    centres = jax.lax.fori_loop(1, most, add, start)
    centres = jax.lax.fori_loop(0, _STEPS, step, centres)
    return jnp.argmin(apart(centres), axis=1).astype(jnp.int32)
