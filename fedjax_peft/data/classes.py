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

    Names are looked up. ``LABEL_2`` is the name of number 2 in both lists, and a class that is
    called so in ``known`` may be that of any name. Where all names are whole numbers, with 0, and
    no known one is, they are the numbers themselves.

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
    theirs = [plain(name) for name in names]
    numbers = {name: i for i, name in enumerate(numbered(len(known)))}
    numbers |= {plain(name): i for i, name in enumerate(known)}
    if "0" in theirs and all(map(whole_number, theirs)) and not any(map(whole_number, numbers)):
        numbers |= {str(i): i for i in range(len(known))}
    found = [numbers.get(name, -1) for name in theirs]
    for i, name in enumerate(known[: len(names)]):
        if found[i] < 0 and name == f"LABEL_{i}":
            found[i] = i  # a class without a name may be that of any name
    if all(found[i] == i for i in used):
        return None
    lost = [names[i] for i in used if found[i] < 0]
    if lost and not has_names(known):
        return None  # a number that the model does not have is the error of another check
    if lost:
        advice = f" {nearest(lost[0], known)}" if len(known) > _SHOWN else ""
        raise InputError(
            f"{what} has the class{'es' if len(lost) > 1 else ''} {_listed(lost)}, and {whose} has"
            f" the classes {_listed(known)}.{advice} Labels are compared by these names. {remedy}"
        )
    return np.array(found, np.int32)


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
    """Returns a data set, whose numbers agree, with the known names: a model may predict them all.

    Classes without a known name keep that of the data.
    """
    if "labels" not in data.columns:
        return data
    own = data.label_names
    names = [
        own[i] if i < len(own) and name == f"LABEL_{i}" else name for i, name in enumerate(known)
    ]
    every = (*names, *own[len(names) :])
    unlike = len({*every}) < len(every)  # a class that nobody has may have the name of another
    return data if every == tuple(own) or unlike else replace(data, label_names=every)
