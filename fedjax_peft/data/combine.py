"""Several data sets as one federation, one client for each."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_peft.data.classes import in_classes, numbered
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.data.spelling import whole_number
from fedjax_peft.support.errors import InputError

_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "loss_mask")
"""Columns of texts; they are padded to the longest text."""
_PROMPTS = ("prompt_ids", "prompt_mask")
"""Columns of texts that are padded on the left."""


def combine(datasets: Mapping[str, Dataset]) -> Clients[Dataset]:
    """Returns a federation with one client for each data set, such as six GLUE tasks in FedMCP.

    If one data set has the names of all classes, all use its numbers. Otherwise each data set has
    its own classes, and they share only the numbers.

    A column ``classes`` holds, for each example, the number of classes of its data set. The data
    sets can then share a head that has as many classes as the largest of them:
    :func:`fedjax_peft.tasks.classification` masks the others. The keys ``task`` and ``source`` are
    the name of the data set of each example. References, those of tagged words and of instructions,
    are joined, and a key that all data sets have then stays, such as ``label`` of instructions,
    which have no classes. Tagged words need one list of tags.

    Args:
      datasets: client name -> its data set, in the order of the clients. All have the same columns
        with the same shapes. Token columns may differ in length, and ``token_type_ids`` may be
        missing.

    Raises:
      InputError: no data sets, or columns or names of classes that do not fit together.
    """
    if not datasets:
        raise InputError("There are no data sets to combine.")
    datasets, labels = _in_common_classes(datasets)
    typed = any("token_type_ids" in data.columns for data in datasets.values())
    parts = {name: _completed(name, data, typed) for name, data in datasets.items()}
    _check(parts)
    names = next(iter(parts.values())).keys()
    columns = {column: _joined(column, parts) for column in names}
    classes = [len(data.label_names) for data in datasets.values()]
    sizes = [len(data) for data in datasets.values()]
    if "labels" in columns:
        columns["classes"] = np.repeat(np.array(classes, np.int32), sizes)
    rows = np.split(np.arange(sum(sizes), dtype=np.int32), np.cumsum(sizes)[:-1])
    meta = {"task": np.repeat(np.array(list(datasets)), sizes)}
    references: tuple[Any, ...] = ()
    labels = labels if "labels" in columns else ()
    if not labels or all(data.references for data in datasets.values()):
        meta = _joined_meta(datasets) | meta
        references = tuple(one for data in datasets.values() for one in data.references)
    meta["source"] = meta["task"]
    first = next(iter(datasets.values()))
    task = first.task if all(data.task == first.task for data in datasets.values()) else None
    name = "+".join(datasets)
    notes = tuple(dict.fromkeys(note for one in datasets.values() for note in one.notes))
    kept = {"tokenizer": first.tokenizer, "notes": notes}
    data = Dataset(columns, labels, name, task, meta, references, **kept)
    return Clients(data, tuple(rows), tuple(datasets))


def _in_common_classes(
    datasets: Mapping[str, Dataset],
) -> tuple[Mapping[str, Dataset], tuple[str, ...]]:
    """Returns data sets in which one number is one class, and the names of the numbers.

    Where the largest list of names has all others, names decide. Otherwise the data sets have
    classes of their own, and share their numbers only.

    Raises:
      InputError: data sets with classes of their own have a name in common, at unlike numbers.
    """
    names = {name: data.label_names for name, data in datasets.items()}
    largest = max(names, key=lambda name: len(names[name]))
    known = names[largest]
    if all({*own} <= {*known} for own in names.values()):
        made = {n: in_classes(x, known, "data", repr(largest)) for n, x in datasets.items()}
        return made, known
    if any("labels" in x.columns and x.labels.ndim > 1 for x in datasets.values()):
        raise InputError(
            f"None of the data sets {', '.join(map(repr, names))} has the tags of all. Read each"
            " with one list of tags: label_names=[...]."
        )
    places: dict[str, tuple[str, int]] = {}
    for name, own in names.items():
        for i, one in enumerate(own):
            other, place = places.setdefault(one, (name, i))
            if place != i and not whole_number(one):
                raise InputError(
                    f"The class {one!r} is number {place} in {other!r} and {i} in {name!r}, and"
                    " neither of the two has all classes. If they have one list of classes, read"
                    " both with it: label_names=[...]. If not, rename one of the two classes:"
                    " dataclasses.replace(data, label_names=...)."
                )
    return datasets, numbered(max(map(len, names.values())))


def _completed(name: str, data: Dataset, typed: bool) -> dict[str, np.ndarray]:
    """Returns the columns, with ``token_type_ids`` where others have them."""
    columns = dict(data.columns)
    if "classes" in columns:
        raise InputError(f"The data set {name!r} has a column 'classes' already.")
    if "labels" not in columns and "loss_mask" not in columns:
        raise InputError(f"The data set {name!r} has no column 'labels'.")
    if typed and "input_ids" in columns:
        columns.setdefault("token_type_ids", np.zeros_like(columns["input_ids"]))
    return columns


def _check(parts: Mapping[str, dict[str, np.ndarray]]) -> None:
    """Raises InputError if names, shapes or types of columns differ."""
    first, one = next(iter(parts.items()))
    for name, columns in parts.items():
        if columns.keys() != one.keys():
            odd = sorted(columns.keys() ^ one.keys())[0]
            has, lacks = (name, first) if odd in columns else (first, name)
            raise InputError(f"The data set {has!r} has a column {odd!r} and {lacks!r} has none.")
        for column, x in columns.items():
            y, axis = one[column], 2 if column in (*_TOKENS, *_PROMPTS) else 1
            if x.shape[axis:] != y.shape[axis:] or x.dtype != y.dtype:
                raise InputError(
                    f"The column {column!r} is {x.dtype} of shape {x.shape[1:]} an example in"
                    f" {name!r}, but {y.dtype} of shape {y.shape[1:]} in {first!r}."
                )


def _joined(column: str, parts: Mapping[str, dict[str, np.ndarray]]) -> np.ndarray:
    """Returns one column of all data sets; token columns are padded to the same length."""
    arrays = [columns[column] for columns in parts.values()]
    if len({x.shape[1:] for x in arrays}) > 1:  # tokens
        length = max(x.shape[1] for x in arrays)
        fill = _padding_token(parts) if column in ("input_ids", "prompt_ids") else 0
        for i, x in enumerate(arrays):
            missing = length - x.shape[1]
            sides = (missing, 0) if column in _PROMPTS else (0, missing)
            arrays[i] = np.pad(x, ((0, 0), sides), constant_values=fill)
    return np.concatenate(arrays)


def _joined_meta(datasets: Mapping[str, Dataset]) -> dict[str, np.ndarray]:
    """Returns the keys that all data sets have, and units that stay apart."""
    several = list(datasets.values())
    first = several[0].meta
    common = [key for key in first if all(key in data.meta for data in several)]
    joined = {}
    for key in common:
        columns = [np.asarray(data.meta[key]) for data in several]
        if key == "unit":
            starts = np.cumsum([0, *(len(data.references) for data in several)])
            columns = [x + np.int32(start) for x, start in zip(columns, starts, strict=False)]
        if len({(x.dtype.kind, x.shape[1:]) for x in columns}) == 1:
            joined[key] = np.concatenate(columns)
    return joined


def _padding_token(parts: Mapping[str, dict[str, np.ndarray]]) -> int:
    """Returns the padding token, which must be exact: RoBERTa recognises padding by the token."""
    found: dict[int, str] = {}
    for name, columns in parts.items():
        if "attention_mask" in columns:
            padding = columns["input_ids"][~columns["attention_mask"].astype(bool)]
            found |= {int(token): name for token in np.unique(padding)}
    if len(found) != 1:
        tokens = " and ".join(f"{token} in {name!r}" for token, name in sorted(found.items()))
        raise InputError(
            f"The texts of {', '.join(parts)} differ in length, and are padded with the token"
            f" {tokens or '(none is)'}. Tokenize all by one tokenizer and with one max_length."
        )
    return next(iter(found))
