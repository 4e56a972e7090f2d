"""Scores by class: support, precision, recall and F1 of each class, and the confusion matrix."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedjax_peft.support.display import one_line

MOST = 200
"""Most classes with a confusion matrix."""
_COUNTS = ("support", "predicted", "right")
_PRINTED = 20
"""Most classes whose confusion matrix is printed as text."""


@dataclass(frozen=True, eq=False)
class ByClass:
    """The counts of a classifier's predictions on some examples, by class.

    Of a tagger the classes are the types of entities, an example is an entity, and there is no
    matrix: a predicted entity is right if its words and its type are.
    """

    names: tuple[str, ...]
    support: np.ndarray
    """int ``[classes]``: the examples of each class."""
    predicted: np.ndarray
    """int ``[classes]``: how often each class was predicted."""
    right: np.ndarray
    """int ``[classes]``: how often this was right."""
    matrix: np.ndarray | None = None
    """The confusion matrix, int ``[classes, classes]``: a row is a true class, a column a predicted
    one. None for taggers, and for more than 200 classes."""

    @property
    def precision(self) -> np.ndarray:
        """Right among predicted, ``[classes]``; NaN for a class that was never predicted."""
        return _ratio(self.right, self.predicted)

    @property
    def recall(self) -> np.ndarray:
        """Right among the examples, ``[classes]``; NaN for a class without examples."""
        return _ratio(self.right, self.support)

    @property
    def f1(self) -> np.ndarray:
        """Harmonic mean of both, ``[classes]``; NaN for a class that nowhere occurs."""
        return _ratio(2 * self.right, self.support + self.predicted)

    def rows(self) -> list[dict[str, Any]]:
        """Returns one dict for each class: ``pandas.DataFrame(scores.rows())``."""
        numbers = (self.support, self.precision, self.recall, self.f1)
        keys = ("class", "support", "precision", "recall", "f1")
        values = zip(self.names, *(x.tolist() for x in numbers), strict=True)
        return [dict(zip(keys, one, strict=True)) for one in values]

    def __add__(self, other: "ByClass") -> "ByClass":
        """Returns the counts on the examples of both."""
        both = (self.matrix, other.matrix)
        return ByClass(
            self.names,
            self.support + other.support,
            self.predicted + other.predicted,
            self.right + other.right,
            None if both[0] is None or both[1] is None else both[0] + both[1],
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        names = [*map(one_line, self.names)]
        wide = max(map(len, ["class", *names]))
        yield f"{'class':{wide}}  support  precision  recall    F1"
        for name, row in zip(names, self.rows(), strict=True):
            texts = (text(row[key]) for key in ("precision", "recall", "f1"))
            yield f"{name:{wide}}  {row['support']:7}" + "  {:>9}  {:>6} {:>5}".format(*texts)
        if self.matrix is not None and len(names) <= _PRINTED:
            yield "\nConfusion matrix: a row is a true class, a column a predicted one."
            cell = max(5, *map(len, map(str, range(len(names)))), len(str(self.matrix.max())) + 1)
            yield " " * (wide + 4) + "".join(f"{i:{cell}}" for i in range(len(names)))
            for i, (name, counts) in enumerate(zip(names, self.matrix, strict=True)):
                yield f"{i:2}  {name:{wide}}" + "".join(f"{n:{cell}}" for n in counts)

    def record(self) -> dict[str, Any]:
        """Returns the counts as JSON values; :meth:`read` is the inverse."""
        counts = {name: getattr(self, name) for name in (*_COUNTS, "matrix")}
        lists = {name: x.tolist() for name, x in counts.items() if x is not None}
        return {"classes": list(self.names), **lists}

    @classmethod
    def read(cls, record: Any) -> "ByClass | None":
        """Returns what :meth:`record` wrote; None for anything else."""
        try:
            names = tuple(map(str, record["classes"]))
            support, predicted, right = (_counted(record[k], (len(names),)) for k in _COUNTS)
            matrix = record.get("matrix")
            matrix = None if matrix is None else _counted(matrix, (len(names), len(names)))
            return cls(names, support, predicted, right, matrix)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None


def text(share: float) -> str:
    """Returns a score as text; "-" for one that is not defined."""
    return "-" if np.isnan(share) else f"{share:.3f}"


def _counted(values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns counts as an array of this shape; raises ValueError for anything else."""
    found = np.asarray(values)
    if found.shape != shape or found.dtype.kind not in "iu" or (found < 0).any():
        raise ValueError("no counts")
    return found


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.where(whole > 0, part / np.maximum(whole, 1), np.nan)


def of_labels(gold: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> ByClass:
    """Returns the counts of predicted classes.

    Args:
      gold: int ``[examples]``, indices into ``names``.
      predicted: likewise; a number beyond the names is that of a class without a name.
    """
    highest = int(max(gold.max(initial=-1), predicted.max(initial=-1)))
    names = (*names, *(f"LABEL_{i}" for i in range(len(names), highest + 1)))
    n = len(names)
    support, said = (np.bincount(x, minlength=n) for x in (gold, predicted))
    right = np.bincount(gold[gold == predicted], minlength=n)
    if n > MOST:
        return ByClass(names, support, said, right)
    pairs = np.bincount(gold.astype(np.int64) * n + predicted, minlength=n * n)
    return ByClass(names, support, said, right, pairs.reshape(n, n))


def of_entities(
    gold: Sequence[tuple[str, int, int]],
    predicted: Sequence[tuple[str, int, int]],
    types: Sequence[str],
) -> ByClass:
    """Returns the counts of predicted entities, each (type, first word, last word)."""

    def count(entities: set[tuple[str, int, int]]) -> np.ndarray:
        numbers: Mapping[str, int] = {name: i for i, name in enumerate(types)}
        found = np.array([numbers[kind] for kind, _, _ in entities], np.int64)
        return np.bincount(found, minlength=len(types))

    there, said = {*gold}, {*predicted}
    return ByClass(tuple(types), count(there), count(said), count(there & said))
