"""Clusters of texts, as a key to partition by for data without labels."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_peft.numerics.random import host_rng
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.libraries import limit_blas_threads

_DIMENSIONS = 100
"""Of the default embedding: what is usual for latent semantic analysis."""


def kmeans(
    texts: Sequence[str],
    clusters: int,
    *,
    embed: Callable[[Sequence[str]], Any] | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Returns the cluster of each text, int32 ``[texts]``, as a key to partition by.

    The result is the best of 10 runs of k-means. FedNLP partitions SQuAD by 30 such clusters, from
    embeddings of question and answer. The same seed gives the same clusters on any number of cores.

    Args:
      embed: texts -> float ``[n, d]``, such as the mean of an encoder's last hidden states. None:
        latent semantic analysis: TF-IDF of the words, projected on 100 singular directions and
        scaled to length 1. It needs no model.

    Raises:
      InputError: fewer different texts than clusters, or embeddings that cannot be used.
    """
    limit_blas_threads()  # scikit-learn loads scipy
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    if not 1 <= clusters <= len(texts):
        raise InputError(f"{len(texts)} texts cannot be divided into {clusters} clusters.")
    own = None if embed is None else _checked(embed(texts), len(texts))
    state = int(host_rng(seed, "cluster").integers(2**31))
    # With more threads sums come in any order; and what scikit-learn warns of is checked here.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vectors = _analysed(texts, state) if own is None else own
        different = len(np.unique(vectors, axis=0))
        if different < clusters:
            given = f"{len(texts)} texts, of which {different} differ to the embedding,"
            raise InputError(f"{given} cannot be divided into {clusters} clusters.")
        means = KMeans(clusters, n_init=10, random_state=state).fit(vectors)
    return means.labels_.astype(np.int32)


def _analysed(texts: Sequence[str], state: int) -> np.ndarray:
    """Returns the default embedding, float64 ``[texts, 100 or fewer]``."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import normalize

    # Words of one letter too: some languages write no spaces, and short texts are short of words.
    words = TfidfVectorizer(sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    try:
        table = words.fit_transform(texts)
    except ValueError:  # an empty vocabulary
        raise InputError("There is no word in any of the texts to cluster them by.") from None
    directions = min(_DIMENSIONS, *table.shape)
    return normalize(TruncatedSVD(directions, random_state=state).fit_transform(table))


def _checked(vectors: Any, n: int) -> np.ndarray:
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or len(vectors) != n or vectors.dtype.kind != "f":
        needed = f"The embedding of {n} texts must be floats of shape ({n}, dimensions)"
        raise InputError(f"{needed}, not {vectors.dtype} of shape {vectors.shape}.")
    wrong = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(wrong):
        raise InputError(f"The embedding of text {wrong[0]} is not finite.")
    return vectors
