"""FeDeRA's federations from the data alone: counts, classes, examples of classes, distances.

Nothing is tokenised and no model is loaded, so Tables 1, 6 and 7 and Figure 7 take seconds.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_peft import InputError, heterogeneity, partition
from fedjax_peft.data.cluster import kmeans
from fedjax_peft.data.encode import encoder_of
from fedjax_peft.data.encoders.tags import tag_set, type_set
from fedjax_peft.data.iob import sentences
from fedjax_peft.data.reading import Reading
from fedjax_peft.tasks.sources import load_tables

__all__ = ["Corpus", "TaggedSentence", "distances", "read", "tagged_sentences"]

CLUSTERS = 30
"""Groups of SQuAD's questions (Table 1)."""


class Corpus(NamedTuple):
    """A data set, as far as partitions need it."""

    train: int
    """Number of training examples."""
    test: int
    classes: np.ndarray
    """The class of each training example, int ``[examples]``."""
    names: tuple[str, ...]
    """The classes of the training examples."""
    all_names: tuple[str, ...]
    """The classes of training and test examples."""


class TaggedSentence(NamedTuple):
    """A sentence and its class in two forms."""

    text: str
    tags: str
    """The tags other than O, in the order of the words."""
    paper_class: str
    """The paper's form (Tables 6 and 7): tags in the order of the sentence."""
    class_here: str
    """The form of ``by = "type_set"``: sorted entity types."""
    examples: int
    """Training sentences of the second form."""


def source_of(name: str, data: str | None) -> str:
    """Returns where a data set is read from: a folder with its name in ``data``, or ``auto``.

    Raises:
      InputError: ``data`` has no such folder. 20 Newsgroups needs none.
    """
    if data in (None, "tiny"):
        return data or "auto"
    folder = Path(data) / name
    if folder.is_dir():
        return str(folder)
    if name == "20newsgroups":
        return "auto"
    raise InputError(f"{name} is not at hand: --data has no folder {name!r}.")


def read(name: str, data: str | None = None) -> Corpus:
    """Returns the corpus of a data set.

    Raises:
      InputError: the data set is not at hand.
    """
    entry, tables = load_tables(name, Reading(source=source_of(name, data)))
    by = (entry.settings.partition or {}).get("by")
    if by == "cluster":
        texts = encoder_of(entry.task).texts(tables["train"])
        clusters = kmeans(texts, min(CLUSTERS, len(texts)))
        found = {"train": [str(cluster) for cluster in clusters], "test": []}
    else:
        found = {split: _classes(tables[split], by) for split in ("train", "test")}
    names = tuple(sorted(set(found["train"])))
    number = {name: i for i, name in enumerate(names)}
    ids = np.array([number[one] for one in found["train"]])
    everywhere = tuple(sorted({*names, *found["test"]}))
    return Corpus(len(tables["train"]), len(tables["test"]), ids, names, everywhere)


def _classes(table, by: str | None) -> list[str]:
    """Returns the class of each row: its label, its source, or its set of entity types."""
    if by is None:
        return [str(label) for label in table.columns["label"]]
    if by == "source":
        return [str(source) for source in table.columns["source"]]
    sets = [type_set(tags) for tags in sentences(table)[1]]
    if by == "type_set":
        return sets
    return [f"{source}-{own}" for source, own in zip(table.columns["source"], sets, strict=True)]


def distances(corpus: Corpus, clients: int, alpha: float, seed: int = 0) -> np.ndarray:
    """Returns the Jensen-Shannon divergence (base 2) of all pairs of clients, as in Figure 7.

    The partition is the paper's (``mode = "client_prior"``).

    Args:
      corpus: the data set.
      clients: number of clients; at most the number of examples is used.
      alpha: of the Dirichlet distribution.
      seed: of the partition.

    Returns:
      float ``[clients, clients]``; the client with the largest total distance comes first.
    """
    clients = min(clients, corpus.train)
    parts = partition.dirichlet(corpus.classes, clients, alpha, mode="client_prior", seed=seed)
    table = heterogeneity.js_divergence(heterogeneity.histograms(parts)[0])
    order = heterogeneity.sorted_order(table)
    return table[order][:, order]


def tagged_sentences(name: str, data: str | None = None, most: int = 8) -> list[TaggedSentence]:
    """Returns one training sentence for each of the most frequent classes.

    Raises:
      InputError: the data set is not at hand.
    """
    _, tables = load_tables(name, Reading(source=source_of(name, data)))
    table = tables["train"]
    words, tags = sentences(table)
    sources = table.columns.get("source", [""] * len(words))
    counts: dict[str, int] = {}
    first: dict[str, int] = {}
    for i, (source, row) in enumerate(zip(sources, tags, strict=True)):
        own = "-".join(filter(None, [str(source), type_set(row)]))
        counts[own] = counts.get(own, 0) + 1
        first.setdefault(own, i)
    found = []
    for own in sorted(counts, key=counts.__getitem__, reverse=True)[:most]:
        i = first[own]
        ordered = tag_set(tags[i], "first_seen")
        paper_class = "-".join(filter(None, [str(sources[i]), ordered]))
        shown = " ".join(tag for tag in tags[i] if tag != "O") or "O"
        found.append(TaggedSentence(" ".join(words[i]), shown, paper_class, own, counts[own]))
    return found
