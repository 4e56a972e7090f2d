"""The rows of a split to arrays: as they are or as instructions, with words or with clusters."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encode import Kind, encode, encoder_of, with_options
from fedjax_peft.data.encoders.base import Encoded
from fedjax_peft.data.instructions import as_instructions, encode_instructions
from fedjax_peft.data.table import Table
from fedjax_peft.data.vocabulary import count_words
from fedjax_peft.support.errors import InputError


class Encoding(NamedTuple):
    """How the rows of a data set become arrays."""

    tokenizer: Any
    max_length: int
    seed: int
    requests: Encoded | None
    """The task for which rows become instructions; None: they do not."""


def take_rows(
    name: str,
    task: Encoded,
    tables: Mapping[str, Table],
    names: Sequence[str],
    rows: Mapping[str, Sequence[int]],
    how: Encoding,
) -> dict[str, Table]:
    """Returns the given rows of each split; as instructions, if ``how`` asks for them."""
    if how.requests is None:
        return {part: table.take(rows[part]) for part, table in tables.items()}
    if task.name == how.requests.name:
        raise InputError(f"{name!r} has instructions already: leave instructions out.")
    return {
        part: as_instructions(name, table, names, part=part, seed=how.seed, rows=rows[part])
        for part, table in tables.items()
    }


def split_options(name: str, task: Kind, given: Mapping[str, Any]) -> tuple[Kind, dict[str, Any]]:
    """Returns the task, and the options that its encoder gets in every call.

    The template becomes part of the task: generation reads prompts by the same one.
    """
    known = inspect.signature(encoder_of(task).encode).parameters
    refuse(name, **{option: x for option, x in given.items() if option not in known})
    options = {option: x for option, x in given.items() if x is not None}
    if "template" in options:
        task = with_options(task, template=options.pop("template"))
    return task, options


def make_vocabulary(
    name: str, task: Encoded, rows: Table, size: int, tokenizer: Any
) -> tuple[str, ...]:
    """Returns the vocabulary of the training texts."""
    encoder = encoder_of(task)
    if tokenizer is not None:
        raise InputError(f"vocabulary = {size} makes a tokenizer: give only one of them.")
    texts = encoder.words or encoder.texts
    if not encoder.needs_tokenizer or texts is None:
        raise InputError(f"vocabulary = {size} means nothing to the data set {name!r}.")
    return count_words(texts(rows), size)


def encode_rows(
    name: str,
    task: Encoded,
    table: Table,
    names: Sequence[str],
    how: Encoding,
    options: Mapping[str, Any],
) -> tuple[Table, Dataset]:
    """Returns a split as it is read, and as arrays."""
    tokenizer = how.tokenizer
    options = {"max_length": how.max_length, "name": name, **options}
    if how.requests is None:
        data = encode(task, table, names, tokenizer, **options)
    else:
        table, data = encode_instructions(task, table, tokenizer, **options)
    return table, replace(data, tokenizer=tokenizer if encoder_of(task).needs_tokenizer else None)


def add_clusters(data: Dataset, table: Table, task: Encoded, clusters: int, seed: int) -> Dataset:
    """Returns a data set with the key ``cluster``."""
    from fedjax_peft.data.cluster import kmeans

    texts = encoder_of(task).texts
    if texts is None:
        raise InputError(f"The data set {data.name!r} has no texts to make clusters of.")
    groups = kmeans(texts(table), clusters, seed=seed)
    unit = data.meta.get("unit", np.arange(len(data)))
    return replace(data, meta={**data.meta, "cluster": groups[unit]})


def refuse(name: str, **options: Any) -> None:
    """Raises InputError for a given option that the data set does not have."""
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} = {value!r} means nothing to the data set {name!r}.")
