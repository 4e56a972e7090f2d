"""Clusters of clients by average linkage, and how clear they are, inside a compiled program.

    start:    each client is a cluster
    repeat:   join the two clusters of the least mean distance between their members
    choose:   of the clusterings with k = 2 ... K clusters, the one of the largest silhouette

    silhouette   s_i = (b_i - a_i) / max(a_i, b_i), its mean over all clients (Rousseeuw 1987)
                 a_i: the mean distance of i to the other members of its cluster
                 b_i: the least mean distance of i to the members of another cluster
                 s_i = 0 for a client that is alone in its cluster

It is scikit-learn's ``AgglomerativeClustering(metric="precomputed", linkage="average")`` and
``silhouette_score(metric="precomputed")``. Of equal distances the pair of the first clients is
joined; of equal silhouettes the fewer clusters are taken.
"""

import jax
import jax.numpy as jnp
from jax import Array


def cosine_distances(rows: Array) -> Array:
    """Returns ``1 - cos`` of the angles between rows, ``[clients, clients]``.

    A row of zeros has the distance 1 from all others.

    Args:
      rows: ``[clients, n]``.
    """
    norms = jnp.sqrt(jnp.sum(rows**2, axis=1, keepdims=True))
    unit = rows / jnp.where(norms > 0, norms, 1.0)
    return 1 - jnp.einsum("in,jn->ij", unit, unit, precision="highest")


def linkage_clusters(distances: Array, present: Array, most: int) -> tuple[Array, Array]:
    """Returns the cluster of each client, int32 ``[clients]``, and the number of clusters.

    Clusters are numbered by their first clients. There are two at least and ``most`` at most, and
    fewer than clients that are present; with two of these or fewer, each is a cluster.

    Args:
      distances: ``[clients, clients]``, symmetric.
      present: bool ``[clients]``; the clusters of other clients mean nothing.
    """
    count = jnp.sum(present)
    distances = jnp.where(present[:, None] & present[None], distances, 0.0)
    firsts = _joined(distances, present)  # [joins, clients]: row n has count - n clusters

    def with_clusters(k: Array) -> tuple[Array, Array]:
        labels = _numbered(firsts[jnp.maximum(count - k, 0)], present)
        score = silhouette(distances, labels, present, most)
        return labels, jnp.where(k < count, score, -jnp.inf)

    numbers = jnp.arange(2, max(most, 2) + 1)
    labels, scores = jax.lax.map(with_clusters, numbers)
    best = jnp.argmax(scores)
    found = jnp.where(count > 2, numbers[best], count).astype(jnp.int32)
    return jnp.where(count > 2, labels[best], labels[0]), found


def _joined(distances: Array, present: Array) -> Array:
    """Returns the first client of each client's cluster after 0, 1, 2 ... joins.

    int32 ``[clients, clients]``. Joins beyond one cluster change nothing.
    """
    clients = len(present)
    upper = jnp.triu(jnp.ones((clients, clients), bool), k=1)

    def join(state: tuple, _: None) -> tuple:
        mean, size, first = state
        apart = jnp.where(upper & (size > 0)[:, None] & (size > 0)[None], mean, jnp.inf)
        i, j = jnp.unravel_index(jnp.argmin(apart), apart.shape)
        more = jnp.isfinite(apart[i, j])
        # The mean distance to a joined cluster is that to its parts, by their sizes.
        both = (size[i] * mean[i] + size[j] * mean[j]) / jnp.maximum(size[i] + size[j], 1)
        mean = mean.at[i].set(jnp.where(more, both, mean[i]))
        mean = mean.at[:, i].set(jnp.where(more, both, mean[:, i]))
        size = size.at[i].add(jnp.where(more, size[j], 0)).at[j].multiply(jnp.where(more, 0, 1))
        return (mean, size, jnp.where(more & (first == j), i, first)), first

    start = (distances, present.astype(jnp.float32), jnp.arange(clients))
    return jax.lax.scan(join, start, None, length=clients)[1]


def _numbered(first: Array, present: Array) -> Array:
    """Returns cluster numbers from 0, in the order of the clusters' first clients."""
    leads = present & (first == jnp.arange(len(first)))
    return (jnp.cumsum(leads) - 1)[first].astype(jnp.int32)


def silhouette(distances: Array, labels: Array, present: Array, most: int) -> Array:
    """Returns the mean silhouette of the clients that are present.

    Args:
      labels: cluster numbers below ``most``, int32 ``[clients]``.
    """
    member = ((labels[:, None] == jnp.arange(most)[None]) & present[:, None]).astype(jnp.float32)
    size = jnp.sum(member, axis=0)
    total = jnp.matmul(distances - jnp.diag(jnp.diag(distances)), member, precision="highest")
    own = jnp.arange(len(labels)), labels
    inside = total[own] / jnp.maximum(size[labels] - 1, 1)
    others = jnp.where(size[None] > 0, total / jnp.maximum(size, 1)[None], jnp.inf)
    outside = jnp.min(others.at[own].set(jnp.inf), axis=1)
    larger = jnp.maximum(inside, outside)
    score = jnp.where(larger > 0, (outside - inside) / jnp.where(larger > 0, larger, 1.0), 0.0)
    counts = present & (size[labels] > 1)
    return jnp.sum(jnp.where(counts, score, 0.0)) / jnp.maximum(jnp.sum(present), 1)
