"""Tagged words (named entities) to token columns, with one label for each word."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from fedjax_peft.data.dataset import IGNORE, Dataset
from fedjax_peft.data.encoders.base import (
    STAND_IN_WORDS,
    Encoder,
    StandIn,
    balanced_classes,
    needing,
    recognising,
)
from fedjax_peft.data.iob import sentences, without_ends
from fedjax_peft.data.table import Table
from fedjax_peft.data.text import batches, cached, check_tokenizer, clean, fingerprint
from fedjax_peft.data.tokens import joined, model_columns, padding_token
from fedjax_peft.support.errors import check_known, nearest


def encode_tags(
    table: Table,
    names: Sequence[str],
    tokenizer: Any,
    *,
    max_length: int,
    name: str,
    order: Literal["sorted", "first_seen"] = "sorted",
) -> Dataset:
    """Returns sentences whose words are labelled at their first token.

    The tokenizer gets every word with a space before it, also the first one, so that RoBERTa's
    tokenizer treats all words alike. A word without any token (control characters) has no label.

    The columns are ``tokens`` and ``tags``, perhaps ``source``; ``names`` are all tags, such as
    :func:`tag_names` of the training split. ``order`` is that of the types in ``tag_set``, see
    :func:`tag_set`. Other arguments are those of :class:`Encode`. Tokens after ``max_length`` are
    cut off.

    Returns:
      ``input_ids`` int32, ``attention_mask`` bool, ``labels`` int32 (``IGNORE`` except at the first
      token of a word) and perhaps ``token_type_ids`` int32, each ``[n, max_length]``. Meta:
      ``unit``, ``tag_set`` and ``type_set``, with a column ``source`` also ``source_tag_set`` and
      ``source_type_set``, each ``[n]``; and ``word`` int32 ``[n, max_length]``, the number of the
      word at its first token, else -1. References: all tags of each sentence, also of words that
      are cut off.

    Raises:
      InputError: the tokenizer or the length cannot be used; or the tags of a row (counted from 1)
        are not in IOB form, are not in ``names``, or are not one for each word.
    """
    check_known("order", order, ("sorted", "first_seen"), " of tags")
    check_tokenizer(tokenizer, max_length)
    words, tags = sentences(table)
    ids = _tag_ids(table, tags, names)
    words = [[clean(word) for word in row] for row in words]
    key = ["tags", fingerprint(tokenizer), padding_token(tokenizer), max_length, *words]
    columns = cached(key, lambda: _encode(tokenizer, words, max_length))
    word = columns.pop("word")
    columns["labels"] = np.full(word.shape, IGNORE, np.int32)
    for label, at, of_words in zip(columns["labels"], word, ids, strict=True):
        label[at >= 0] = of_words[at[at >= 0]]
    meta = {"unit": np.arange(len(words), dtype=np.int32), "word": word}
    sets = {
        "tag_set": [tag_set(row, order) for row in tags],
        "type_set": [type_set(row) for row in tags],
    }
    for kind, some in sets.items():
        meta[kind] = np.array(some, np.str_)
        if "source" in table.columns:
            pairs = zip(table.columns["source"], some, strict=True)
            meta[f"source_{kind}"] = np.array([f"{source}-{own}" for source, own in pairs], np.str_)
    return Dataset(columns, tuple(names), name, meta=meta, references=tuple(map(tuple, tags)))


def tag_names(table: Table) -> tuple[str, ...]:
    """Returns the tags in the order of the source, or else O and then B- and I- of every type.

    Raises:
      InputError: the tags of a row (counted from 1) are not in IOB form.
    """
    if table.label_names is not None:
        return tuple(dict.fromkeys(map(without_ends, table.label_names)))
    _, tags = sentences(table)
    types = sorted({tag[2:] for row in tags for tag in row if tag != "O"})
    return ("O", *(f"{place}-{kind}" for kind in types for place in "BI"))


def tag_set(tags: Iterable[str], order: Literal["sorted", "first_seen"] = "sorted") -> str:
    """Returns the set of tags of a sentence, as one class to partition by: "B-LOC-I-LOC-B-PER".

    O is left out, unless it is the only tag. The types are sorted, or with ``first_seen`` in the
    order of the sentence. In Tables 6 and 7 of FeDeRA (Yan et al. 2024) the two orders of two types
    are two classes.
    """
    present = dict.fromkeys(tags)
    types: Iterable[str] = dict.fromkeys(tag[2:] for tag in present if tag != "O")
    if order == "sorted":
        types = sorted(types)
    ordered = [f"{place}-{kind}" for kind in types for place in "BI"]
    return "-".join(tag for tag in ordered if tag in present) or "O"


def type_set(tags: Iterable[str]) -> str:
    """Returns the set of entity types of a sentence, sorted, as one class: "LOC-PER", or "O".

    With it WNUT17's training and test splits have 37 classes, as in Table 1 of FeDeRA; with
    :func:`tag_set` they have more than twice as many.
    """
    return "-".join(sorted({tag[2:] for tag in tags if tag != "O"})) or "O"


def _tag_ids(table: Table, tags: list[list[str]], names: Sequence[str]) -> list[np.ndarray]:
    """Returns the tags of every sentence as indices into ``names``, int32 ``[words]`` each."""
    ids = {name: i for i, name in enumerate(names)}
    for row, some in table.numbered(tags):
        for tag in some:
            if tag not in ids:
                advice = nearest(tag, ids)
                raise table.error(row, f"has the tag {tag!r}, which is none of the tags. {advice}")
    return [np.array([ids[tag] for tag in row], np.int32) for row in tags]


def _encode(tokenizer: Any, words: list[list[str]], max_length: int) -> dict[str, np.ndarray]:
    """Returns token columns, and ``word``: the number of the word at its first token, else -1."""
    backend = tokenizer.backend_tokenizer
    parts = [_columns(tokenizer, [], max_length)]
    for rows in batches(words):
        backend.no_padding()
        backend.enable_truncation(max_length)
        spaced = [[f" {word}" for word in row] for row in words[rows]]
        encodings = backend.encode_batch(spaced, is_pretokenized=True)
        parts.append(_columns(tokenizer, encodings, max_length))
    return joined(parts)


def _columns(tokenizer: Any, encodings: Sequence[Any], max_length: int) -> dict[str, np.ndarray]:
    columns = model_columns(tokenizer, encodings, max_length)
    first = np.full((len(encodings), max_length), -1, np.int32)
    for row, encoding in enumerate(encodings):
        words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int32)
        found, at = np.unique(words, return_index=True)
        first[row, at] = found  # -1 for special tokens
    return {**columns, "word": first}


def _texts(table: Table) -> list[str]:
    return [" ".join(words) for words in table.columns["tokens"]]


def _stand_in(rng: np.random.Generator, n: int, wanted: StandIn) -> dict[str, Any]:
    """Returns sentences with one entity each. Every tag but O has its own word."""
    names = wanted.names
    tokens, tags = [], []
    for kind in balanced_classes(rng, n, (len(names) - 1) // 2):
        words = rng.integers(len(names), STAND_IN_WORDS, 10)
        ids = np.zeros(10, int)
        first = rng.integers(0, 8)
        ids[first : first + 2] = 1 + 2 * kind, 2 + 2 * kind  # B- and I- of the type
        words = np.where(ids > 0, ids, words)
        tokens.append([f"w{word}" for word in words])
        tags.append([names[i] for i in ids])
    return {"tokens": tokens, "tags": tags}


TAGS = Encoder(
    columns=("tokens", "tags"),
    encode=encode_tags,
    recognises=recognising("tokens", "tags"),
    label_column="tags",
    needed=needing("tokens", "tags"),
    class_names=tag_names,
    texts=_texts,
    stand_in=_stand_in,
)
