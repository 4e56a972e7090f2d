"""Numbers of classes that mean the same in a model, in its head's file, and in all data.

A label is a number, and what it means is in a list of names: ``Dataset.label_names``,
``Model.labels``, or the file of a head. Two lists are compared here, and nowhere else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedjax_peft.data.dataset import IGNORE, Dataset
from fedjax_peft.data.spelling import plain, whole_number
from fedjax_peft.support.errors import InputError, nearest


def numbered(count: int) -> tuple[str, ...]:
    """Returns the names of classes that have none, as in ``transformers``: ``LABEL_0``, ..."""
    return tuple(f"LABEL_{i}" for i in range(count))


def has_names(labels: Sequence[str]) -> bool:
    """Returns whether the classes of a model have names, and not numbers only."""
    return tuple(labels) != numbered(len(labels))


def known_names(labels: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of a model's classes; where it has none, those of its training data.

    Args:
      labels: of the model (``Model.labels``); empty: it does not say how many classes it has.
      names: of the training data.
    """
    if has_names(labels):
        return tuple(labels)
    return (*names, *numbered(len(labels))[len(names) :])


_SHOWN = 12
"""Names in a message."""
_REMEDY = (
    "Read the data with the names of the model (label_names=model.labels), or, if only the names"
    " differ and the order is the same, rename them: dataclasses.replace(data,"
    " label_names=model.labels). Other classes need a head of their own."
)


def class_numbers(
    known: Sequence[str],
    names: Sequence[str],
    what: str,
    whose: str,
    used: Iterable[int] | None = None,
    remedy: str = _REMEDY,
) -> np.ndarray | None:
    """Returns the number of each name in ``known``, int32 ``[names]``; None: numbers agree.

    Numbers agree where both lists have the same name at a number, or one of them has none there:
    ``LABEL_2``, or the number itself, ``2``. Otherwise names are looked up. Names that are whole
    numbers from 0 up stand for these numbers.

    Args:
      known: the classes of a model or head.
      names: the classes of other data.
      what: these data, for the message.
      whose: likewise, what has the known classes.
      used: the numbers of the names that have examples; others may be unknown. None: all.
      remedy: a sentence for the message.

    Raises:
      InputError: a name is not known.
    """
    used = range(len(names)) if used is None else used
    numbers = {plain(name): i for i, name in enumerate(known)}
    if "0" in names and not any(map(whole_number, numbers)):
        numbers |= {str(i): i for i in range(len(known))}
    found = [numbers.get(plain(name), -1) for name in names]
    for i, (one, other) in enumerate(zip(map(plain, known), map(plain, names), strict=False)):
        found[i] = i if _agree(one, other, i) else found[i]
    if not has_names(known) or all(found[i] == i for i in used):
        return None  # a number that the model does not have is the error of another check
    lost = [names[i] for i in used if found[i] < 0]
    if lost:
        advice = f" {nearest(lost[0], known)}" if len(known) > _SHOWN else ""
        raise InputError(
            f"{what} has the class{'es' if len(lost) > 1 else ''} {_listed(lost)}, and {whose} has"
            f" the classes {_listed(known)}.{advice} Labels are compared by these names. {remedy}"
        )
    return np.array(found, np.int32)


def _agree(known: str, name: str, number: int) -> bool:
    """Returns whether two names of one number may mean the same class."""
    if f"LABEL_{number}" in (known, name) or known == name:
        return True
    return name == str(number) and not whole_number(known)


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + rest


def in_classes(data: Dataset, known: Sequence[str], what: str, whose: str = "the model") -> Dataset:
    """Returns a data set whose labels are numbers of the known classes.

    The data set itself is returned if all numbers agree, or if it has no labels. Otherwise only the
    column ``labels`` is made anew.

    Args:
      what: its role, such as "test".

    Raises:
      InputError: it has examples of a class that is not known.
    """
    names = data.label_names
    if "labels" not in data.columns or not known or names == tuple(known):
        return data
    labels = data.labels
    used = np.unique(labels[labels != IGNORE]).tolist()
    numbers = class_numbers(known, names, f"The {what} set {data.name!r}", whose, used)
    if numbers is None:
        return data
    columns: dict[str, Any] = {
        **data.columns,
        "labels": np.where(labels < 0, labels, numbers[np.maximum(labels, 0)]).astype(labels.dtype),
    }
    if "classes" in columns:  # of combined data: no longer the first ones
        columns["classes"] = np.full_like(columns["classes"], len(known))
    return replace(data, columns=columns, label_names=tuple(known))


def with_all_names(data: Dataset, known: Sequence[str]) -> Dataset:
    """Returns a data set that also names the classes that it lacks, which a model may predict."""
    more = tuple(known[len(data.label_names) :]) if "labels" in data.columns else ()
    return replace(data, label_names=(*data.label_names, *more)) if more else data
