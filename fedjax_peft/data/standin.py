"""Small stand-ins for the named data sets, made on the spot: to try things without a download.

Their texts are of the words ``w0`` to ``w58``, which the tokenizer of
:func:`fedjax_peft.testing.write_tiny_checkpoint` knows, and every one can be learned.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedjax_peft.data.catalog import Source
from fedjax_peft.data.table import Table
from fedjax_peft.random import host_rng

__all__ = ["TINY_LENGTH", "tiny_tables"]

TINY_LENGTH = 24
"""Tokens that every text of a stand-in fits into."""
_WORDS = 59
_CLASSES = tuple(f"class {i:02d}" for i in range(20))
"""For an entry that leaves the names to its source."""
_CLIENTS = tuple(f"client {i:02d}" for i in range(30))


def tiny_tables(entry: Source, seed: int) -> dict[str, Table]:
    """Returns ``train`` (120 rows or more) and ``test`` (40 or more) of a data set's own kind.

    Task, classes, keys and the size of images are the entry's; every class is in both splits.

    Args:
      entry: of the catalogue.
      seed: of the rows; what is to be learned from them is always the same.
    """
    names = entry.label_names or (_CLASSES if "classification" in entry.task else ())
    tables = {}
    for part, least in (("train", 120), ("test", 40)):
        rng = host_rng(seed, f"tiny:{part}")
        n = max(least, len(names))
        columns = _MAKERS[entry.task](rng, n, names, entry)
        for key, values in entry.keys.items():
            values = values or _CLIENTS
            columns[key] = [values[i % len(values)] for i in range(n)]
        tables[part] = Table(f"the stand-in's {part}", columns, names or None)
    return tables


def _texts(rng: np.random.Generator, words: np.ndarray) -> list[str]:
    """Returns a text of 5 words or more of each row of ``words``, int ``[n, longest]``."""
    lengths = rng.integers(5, words.shape[1] + 1, len(words))
    return [" ".join(f"w{i}" for i in row[:k]) for row, k in zip(words, lengths, strict=True)]


def _classes(rng: np.random.Generator, n: int, count: int) -> np.ndarray:
    """Returns the classes of n rows, int ``[n]``: every class, as often as the others."""
    return rng.permutation(np.arange(n) % count)


def _classification(
    rng: np.random.Generator, n: int, names: Sequence[str], entry: Source
) -> dict[str, Any]:
    """Every second word tells the class."""
    labels = _classes(rng, n, len(names))
    columns: dict[str, Any] = {}
    for column in ("text", "text_pair"):
        if column == "text" or column in entry.columns.values():
            words = rng.integers(2 * len(names), _WORDS, (n, 9))
            words[:, ::2] = 2 * labels[:, None] + rng.integers(0, 2, (n, 5))
            columns[column] = _texts(rng, words)
    return columns | {"label": [names[label] for label in labels]}


def _tagging(
    rng: np.random.Generator, n: int, names: Sequence[str], entry: Source
) -> dict[str, Any]:
    """Every tag has a word of its own; others have none."""
    del entry
    kinds = (len(names) - 1) // 2
    tokens, tags = [], []
    for kind in _classes(rng, n, kinds):
        words = rng.integers(len(names), _WORDS, 10)
        ids = np.zeros(10, int)
        first = rng.integers(0, 8)
        ids[first : first + 2] = 1 + 2 * kind, 2 + 2 * kind  # B- and I- of the type
        words = np.where(ids > 0, ids, words)
        tokens.append([f"w{word}" for word in words])
        tags.append([names[i] for i in ids])
    return {"tokens": tokens, "tags": tags}


def _question_answering(
    rng: np.random.Generator, n: int, names: Sequence[str], entry: Source
) -> dict[str, Any]:
    """The question is a word of the context, the answer the word after it."""
    del names, entry
    columns: dict[str, Any] = {"id": [f"question {i}" for i in range(n)]}
    contexts = [[f"w{i}" for i in rng.permutation(_WORDS)[:12]] for _ in range(n)]
    places = rng.integers(0, 11, n)
    columns["question"] = [words[i] for words, i in zip(contexts, places, strict=True)]
    columns["context"] = [" ".join(words) for words in contexts]
    columns["answers"] = [[words[i + 1]] for words, i in zip(contexts, places, strict=True)]
    columns["answer_starts"] = [
        [len(" ".join(words[: i + 1])) + 1] for words, i in zip(contexts, places, strict=True)
    ]
    return columns


def _next_token(
    rng: np.random.Generator, n: int, names: Sequence[str], entry: Source
) -> dict[str, Any]:
    """Every word has one that follows it."""
    del names, entry
    words = rng.integers(0, _WORDS, (n, 1)) + 7 * np.arange(12)
    return {"text": _texts(rng, words % _WORDS)}


def _images(
    rng: np.random.Generator, n: int, names: Sequence[str], entry: Source
) -> dict[str, Any]:
    """Every class has a picture of coarse squares, under noise."""
    labels = _classes(rng, n, len(names))
    height, width, *channels = entry.shape
    coarse = (len(names), height // 4, width // 4, *channels)
    pictures = host_rng(0, "tiny:pictures").integers(0, 2, coarse) * 128
    pictures = pictures.repeat(4, axis=1).repeat(4, axis=2)
    noise = rng.integers(0, 128, (n, *entry.shape))
    images = (pictures[labels] + noise).astype(np.uint8)
    return {"image": list(images), "label": [names[label] for label in labels]}


_MAKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "classification": _classification,
    "tagging": _tagging,
    "question_answering": _question_answering,
    "next_token": _next_token,
    "image_classification": _images,
}
"""Task -> its rows; each says what there is to learn in them."""
