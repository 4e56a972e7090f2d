"""Keys to partition by: the labels of the examples, or another value that each example has."""

import numpy as np

from fedjax_peft.data.dataset import Dataset
from fedjax_peft.support.errors import InputError, nearest


def classes(
    data: Dataset | np.ndarray, by: str | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns the class of each example and the names of the classes.

    Args:
      data: a data set, or the values themselves ``[examples]``.
      by: a key of ``data.meta`` whose distinct values are the classes; None: the labels.

    Returns:
      int ``[examples]``, and all names in the order of these numbers. Classes by label are all
      label names of the data set, or 0 to the largest value of an array; some may have no example.

    Raises:
      InputError: there is no such key, there are no examples, or the values are neither all whole
        numbers nor all texts.
    """
    values = _values(data, by)
    if by is not None or values.dtype.kind not in "iu":
        return _distinct(values, by)
    if isinstance(data, Dataset):
        return values, data.label_names
    return values, tuple(map(str, range(int(values.max()) + 1)))


def distinct(data: Dataset | np.ndarray, by: str | None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns the same as :func:`classes`, but only classes that occur."""
    return _distinct(_values(data, by), by)


def has_labels(data: Dataset | np.ndarray) -> bool:
    """Returns whether every example has one label."""
    return not isinstance(data, Dataset) or (
        "labels" in data.columns and data.columns["labels"].ndim == 1
    )


def _values(data: Dataset | np.ndarray, by: str | None) -> np.ndarray:
    if not isinstance(data, Dataset):
        values, advice = np.asarray(data), ""
    else:
        name = by or "labels"
        keys = {key: np.asarray(x) for key, x in data.meta.items()}
        keys |= {"labels": data.columns["labels"]} if "labels" in data.columns else {}
        advice = " " + nearest(by or "", [key for key, x in keys.items() if x.ndim == 1])
        if by is None:
            advice = " Name another key with by." + advice
        if name in data.no_keys and name not in keys:
            raise InputError(
                f"The data set {data.name!r} cannot be partitioned by {name!r}."
                f" {data.no_keys[name]}{advice}"
            )
        if name not in keys:
            raise InputError(f"The data set {data.name!r} has no {name!r} to partition by.{advice}")
        values = keys[name]
    if values.ndim != 1 or values.dtype.kind not in "iuUTO":
        raise InputError(
            f"A partition by {_called(by)} needs one integer or text per example, not an array of"
            f" shape {values.shape} and type {values.dtype}.{advice}"
        )
    if by is None and values.dtype.kind in "iu" and not (len(values) and values.min() >= 0):
        raise InputError("A partition by label needs examples, with labels from 0 up.")
    return values


def _distinct(values: np.ndarray, by: str | None) -> tuple[np.ndarray, tuple[str, ...]]:
    column = values.tolist()
    found = set(column)
    if {type(value) for value in found} not in ({int}, {str}):
        kinds = ", ".join(sorted({type(value).__name__ for value in found}))
        raise InputError(
            f"A partition by {_called(by)} needs examples with either whole numbers or texts, not"
            f" {kinds or 'none at all'}."
        )
    ordered = sorted(found)
    number = {value: i for i, value in enumerate(ordered)}
    ids = np.fromiter(map(number.__getitem__, column), np.int64, len(column))
    return ids, tuple(map(str, ordered))


def _called(by: str | None) -> str:
    return "label" if by is None else repr(by)
