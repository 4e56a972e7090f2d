"""Spellings of a label: formats write one value as text, number, bool or float."""

import re
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedjax_peft.support.errors import InputError, users_level

_WHOLE = re.compile(r"-?[0-9]{1,19}")
_WHOLE_FLOAT = re.compile(r"(-?[0-9]{1,19})\.0*")
_BOOLS = {"true": "True", "false": "False"}


def whole_number(name: str) -> bool:
    """Returns whether a name is a whole number."""
    return _WHOLE.fullmatch(name) is not None


def text_of(value: Any) -> str | None:
    """Returns a label as text; None for a value that is no label, such as a missing one."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return (str(value) or None) if isinstance(value, str | int) else None


def plain(name: str) -> str:
    """Returns the name by which labels are compared: "1" for "1.0", and "True" for "true"."""
    if match := _WHOLE_FLOAT.fullmatch(name):
        return str(int(match[1]))
    return _BOOLS.get(name.casefold(), name)


def spelled(labels: Sequence[Any]) -> Sequence[Any]:
    """Returns the labels of a table as texts that do not depend on the format of its file.

    Columns of whole numbers or of bools get the spelling of :func:`plain`. In other columns, texts
    stay as they are: "1.0" is a name beside "1.5". Labels of which one cannot be used stay too; a
    later check names its row.
    """
    texts = [text_of(label) for label in labels]
    found = {text for text in texts if text is not None}
    if len(found) == 0 or None in texts:
        return labels
    short = {text: plain(text) for text in found}
    same_kind = all(map(whole_number, short.values())) or {*short.values()} <= {*_BOOLS.values()}
    return [short[text] for text in texts if text is not None] if same_kind else texts


def check_spellings(origin: str, labels: Iterable[str], *, mixed: bool = True) -> None:
    """Warns of names of classes that look like one, by name and count.

    Args:
      origin: the table, for messages.
      labels: of all rows.
      mixed: also refuse names beside numbers that seem to be those of the names.

    Raises:
      InputError: some rows have names and others seem to have the numbers of these classes.
    """
    counts = Counter(labels)
    numbers = sorted(int(name) for name in counts if whole_number(name))
    names = [name for name in counts if not whole_number(name)]
    if mixed and len(names) > 1 and _may_be_numbers_of(len(names), numbers):
        raise InputError(
            f"The labels of {origin} are names in some rows and numbers in others:"
            f" {_counted(sorted(names), counts)} beside {_counted(map(str, numbers), counts)}. If"
            " the numbers are those of the names, write the names in all rows. If all are classes"
            " of their own, list them: label_names = [...]."
        )
    alike: dict[str, list[str]] = defaultdict(list)
    for name in sorted(counts):
        alike[_look(name)].append(name)
    for several in alike.values():
        if len(several) > 1:
            warnings.warn(
                f"In {origin}, the classes {_counted(several, counts)} differ in spaces, case or"
                " invisible characters only, and each is a class of its own. If they are one"
                " class, write it alike in all rows.",
                stacklevel=users_level(),
            )


def _may_be_numbers_of(classes: int, numbers: Sequence[int]) -> bool:
    """Returns whether sorted numbers may be those of so many classes, counted from 0 or 1."""
    return bool(numbers) and numbers[0] >= 0 and numbers[-1] < classes + min(numbers[0], 1)


def _look(name: str) -> str:
    """Returns what is left of a name without case, spaces and characters that nobody sees."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return "".join(c for c in folded if unicodedata.category(c)[0] not in "ZC")


def _counted(names: Iterable[str], counts: Counter[str]) -> str:
    """Returns names with their numbers of rows; in ASCII, so that unlike ones do not look alike."""
    return ", ".join(f"{name!a} ({counts[name]:,})" for name in names)
