"""Spellings of a label: formats write one value as text, number, bool or float."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

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
    return str(value) if isinstance(value, str | int) and str(value).strip() else None


def plain(name: str) -> str:
    """Returns the name by which labels are compared: "1" for "1.0", "True" for "true".

    Spaces around a name do not count.
    """
    name = name.strip()
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


def as_named(labels: Sequence[Any], names: Sequence[str]) -> Sequence[Any]:
    """Returns labels in the spelling of the names of classes; unknown ones stay."""
    known = {*names}
    if not all(isinstance(label, str) for label in labels) or known >= {*labels}:
        return labels
    alike = {plain(name): name for name in names}
    return [label if label in known else alike.get(plain(label), label) for label in labels]


def may_number(classes: int, numbers: Iterable[str]) -> bool:
    """Returns whether there are numbers that may be those of several classes, from 0 or 1."""
    found = sorted(map(int, numbers))
    return classes > 1 and bool(found) and found[0] >= 0 and found[-1] < classes + min(found[0], 1)


def look(name: str) -> str:
    """Returns what is left of a name without case, spaces and characters that nobody sees."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return "".join(c for c in folded if unicodedata.category(c)[0] not in "ZC")
