"""Clusters of texts find topics and are repeatable; errors name data without clusters."""

import numpy as np
import pytest
from refusals import refusals

import fedjax_peft as fp
from fedjax_peft.data.cluster import kmeans

WORDS = [
    ["river", "boat", "sail", "harbour", "tide", "anchor"],
    ["oven", "flour", "yeast", "dough", "crust", "bake"],
    ["violin", "chord", "tempo", "choir", "melody", "flute"],
]


@pytest.fixture(scope="module")
def topics():
    """Texts of three topics, and the topic of each text."""
    rng = np.random.default_rng(0)
    topic = rng.integers(0, 3, 90)
    return [" ".join(rng.choice(WORDS[t], 4)) for t in topic], topic


def test_topics_become_clusters(topics):
    texts, topic = topics
    found = kmeans(texts, 3)
    assert found.dtype == np.int32
    assert len({(a, b) for a, b in zip(found, topic, strict=True)}) == 3
    clients = fp.partition.dirichlet(found, 5, 0.1)
    assert clients.sizes.sum() == 90


def test_clusters_depend_on_the_seed_alone(topics):
    texts, _ = topics
    np.testing.assert_array_equal(kmeans(texts, 8, seed=1), kmeans(texts, 8, seed=1))
    assert kmeans(texts, 8, seed=1).tolist() != kmeans(texts, 8, seed=2).tolist()


def test_an_embedding_of_ones_own_and_equal_texts(topics):
    assert kmeans(["one two"] * 5, 1).tolist() == [0] * 5
    assert sorted(set(kmeans(["a", "b", ""], 3).tolist())) == [0, 1, 2]
    texts, _ = topics
    lengths = kmeans(texts, 2, embed=lambda ts: np.array([[len(t) > 20.0] for t in ts], np.float32))
    assert len({(c, len(t) > 20) for c, t in zip(lengths, texts, strict=True)}) == 2


test_texts_that_have_no_such_clusters = refusals(
    kmeans,
    (["one two"], 2, "1 texts cannot be divided into 2 clusters"),
    ([], 1, "0 texts cannot"),
    (["one two"], 0, "into 0 clusters"),
    (["one two", "two one", "one two", "six"], 3, "of which 2 differ"),
    (["", "!?"], 2, "no word in any"),
)


test_embeddings_that_cannot_be_used = refusals(
    lambda vectors: kmeans(["a", "b", "c"], 2, embed=lambda texts: vectors),
    (np.zeros(3), r"floats of shape \(3, dimensions\), not float64 of shape \(3,\)"),
    (np.zeros((2, 4)), r"not float64 of shape \(2, 4\)"),
    (np.zeros((3, 4), int), "not int64"),
    (np.array([[1.0], [2.0], [np.nan]]), "text 2 is not finite"),
)
