"""Scores by class and confusion matrices of a report, after the last round of each run."""

import functools
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_peft.report.columns import Frame, texts
from fedjax_peft.report.drawing import Runs
from fedjax_peft.report.wording import MISSING, percent
from fedjax_peft.simulation.rows import by_class_of
from fedjax_peft.simulation.score_names import Score
from fedjax_peft.support.display import one_line
from fedjax_peft.tasks.by_class import MOST, ByClass

SHOWN = 30
"""Most classes whose confusion matrix the page has; of more, it lists the commonest confusions."""
PAIRS = 15
"""Confusions in such a list."""
_NAMED = (8, 12)
"""Most classes, and most characters of a name, for which columns are headed by names."""
_TESTS = {
    "test": "the test set",
    "client": "the clients’ own tests, all clients together",
}
"""Evaluation -> its examples in words; the first one that is recorded is shown."""


class Matrix(NamedTuple):
    """The confusion matrix of a row of the report, or the commonest confusions of many classes."""

    run: str
    names: list[str]
    heads: list[str]
    """The heads of the columns: names, or numbers where these are long."""
    rows: list[list[tuple[int, float]]]
    """Of each true class: (count, share of the class) of each predicted one; empty for many."""
    pairs: Frame | None
    """The commonest confusions; None for few classes."""


class Scores(NamedTuple):
    """What the page shows of classes."""

    frame: Frame
    """A row for each class."""
    matrices: list[Matrix]
    note: str
    data: list[dict[str, Any]]
    """The scores for a file."""
    counts: list[dict[str, Any]]
    """The confusions for a file."""


def scores(runs: Runs) -> Scores | None:
    """Returns the scores by class; None without any.

    The counts of several seeds are added. Runs with other classes than the first are left out.

    Args:
        runs: Name -> seed -> rows.
    """
    found: dict[str, dict[str, list[ByClass]]] = {}
    for name, by_seed in runs.items():
        for rows in by_seed.values():
            for test, one in by_class_of(rows).items():
                found.setdefault(test, {}).setdefault(name, []).append(one)
    if found.keys().isdisjoint(_TESTS):
        return None
    test = next(one for one in _TESTS if one in found)
    first = next(iter(found[test].values()))[0].names
    summed = {
        name: functools.reduce(operator.add, several)
        for name, several in found[test].items()
        if all(one.names == first for one in several)
    }
    columns = {f"F1 (%): {name}": one.f1 for name, one in summed.items()}
    one = next(iter(summed.values()))
    if len(runs) == 1:
        columns = {"Precision (%)": one.precision, "Recall (%)": one.recall, "F1 (%)": one.f1}
    shown = [texts("Examples", [f"{n:,}" for n in one.support])]
    shown += [texts(title, [*map(_text, shares)]) for title, shares in columns.items()]
    return Scores(
        Frame("Class", [*map(one_line, first)], shown),
        [_matrix(n, one, one.matrix) for n, one in summed.items() if one.matrix is not None],
        _note(test, runs, summed),
        [{"name": name} | row for name, one in summed.items() for row in one.rows()],
        [pair for name, one in summed.items() for pair in _pairs(name, one)],
    )


def _text(share: float) -> str:
    return MISSING if np.isnan(share) else percent(share)


def _matrix(run: str, one: ByClass, counts: np.ndarray) -> Matrix:
    names = [*map(one_line, one.names)]
    if len(names) > SHOWN:
        wrong = [pair for pair in _pairs(run, one) if pair["true"] != pair["predicted"]]
        wrong.sort(key=lambda pair: -pair["count"])
        true, *columns = (
            [str(pair[key]) for pair in wrong[:PAIRS]] for key in ("true", "predicted", "count")
        )
        predicted, counted = texts("Predicted class", columns[0], is_text=True), columns[1]
        frame = Frame("True class", true, [predicted, texts("Examples", counted)])
        return Matrix(run, names, [], [], frame if wrong else None)
    few = len(names) <= _NAMED[0] and max(map(len, names)) <= _NAMED[1]
    heads = names if few else [str(i) for i in range(1, len(names) + 1)]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    pairs = zip(counts.tolist(), shares.tolist(), strict=True)
    return Matrix(run, names, heads, [[*zip(*both, strict=True)] for both in pairs], None)


def _pairs(run: str, one: ByClass) -> list[dict[str, Any]]:
    """Returns the counts of a matrix that are not 0, row by row."""
    if one.matrix is None:
        return []
    return [
        {"name": run, "true": one.names[i], "predicted": one.names[j], "count": count}
        for i, row in enumerate(one.matrix.tolist())
        for j, count in enumerate(row)
        if count
    ]


def _note(test: str, runs: Runs, summed: Mapping[str, ByClass]) -> str:
    """Returns sentences on what was counted."""
    lasts = [rows[-1] for by_seed in runs.values() for rows in by_seed.values() if rows]
    first = next(iter(summed.values()))
    said = [f"After the last round, on {_TESTS[test]}."]
    if first.matrix is None and len(first.names) <= MOST:
        said.append("A class is a type of entity.")
    said.append(
        "Precision is the share of right ones among the predictions of a class, recall among its"
        " examples; F1 is their harmonic mean. “-”: not defined."
    )
    if any(Score(test, "count").name in row for row in lasts) and test == "test":
        said.append("An example counts once for each client’s model that is tested on it.")
    if any(len(by_seed) > 1 for by_seed in runs.values()):
        said.append("The counts of all seeds are added.")
    if len(runs) > len(summed):
        said.append("Runs with other classes, or without a record of them, are left out.")
    return " ".join(said)
