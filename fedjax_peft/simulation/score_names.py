"""The names of the scores in a row of metrics: this file alone composes and reads them.

A row is flat, so the name of a score says what was measured, and of which models::

    test_accuracy    client_accuracy_mean_seen    tuned_client_validation_loss_worst    test_count

Rows stay flat because that is how csv, trackers, stop rules and users' programs name a score.
"""

import functools
import math
import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

_COMMON = r"(global_)?(test|validation)|local|train"
"""Evaluations whose models see the same examples, or those of a round's training."""
_OWN = "client(_validation)?"
"""Evaluations of clients on their own examples, whose scores are statistics over clients."""
_OVER = "mean|weighted|std|worst|worst_tenth"
_NAME = re.compile(
    rf"(?P<tuned>tuned_)?((?P<common>{_COMMON})_(?P<score>.+?)(_(?P<over>std|worst|mean))?"
    rf"|(?P<own>{_OWN})_((?P<of>.+?)_(?P<kind>{_OVER})|(?P<size>count|examples)))"
    r"(_(?P<group>seen|unseen))?"
)

BACKDOOR_SUCCESS = "backdoor_success"
"""The metric of the evaluations on examples with a trigger; an attack's success is bad."""


class Score(NamedTuple):
    """What the name of a score says."""

    evaluation: str
    """``test``, ``validation``, ``client`` or ``client_validation``; ``global_test`` and
    ``global_validation`` beside personal models; ``local`` and ``train`` of a round's clients."""
    metric: str
    """A metric of the task, or a size: ``count`` of clients, ``examples``."""
    statistic: str = ""
    """Over clients: ``mean``, ``weighted``, ``std``, ``worst`` or ``worst_tenth``."""
    group: str = ""
    """``seen`` or ``unseen`` clients alone."""
    tuned: bool = False
    """Whether the clients have tuned the models before."""

    @property
    def name(self) -> str:
        """The name of the field."""
        words = ("tuned" if self.tuned else "", *self[:4])
        return "_".join(filter(None, words))

    @property
    def on_test(self) -> bool:
        """Whether it is measured on test data, of the server or of the clients."""
        return plain(self.evaluation) in ("test", "client", "local")

    @classmethod
    @functools.lru_cache(4096)  # the rows of a run have the same names again and again
    def read(cls, name: str) -> "Score | None":
        """Returns what a field's name says; None if it is not that of a score."""
        if (found := _NAME.fullmatch(name)) is None:
            return None
        part = found.groupdict("")
        return cls(
            part["common"] or part["own"],
            part["score"] or part["of"] or part["size"],
            part["over"] or part["kind"],
            part["group"],
            bool(part["tuned"]),
        )


def usual_scores(metric: str, split: str = "test") -> tuple[str, str]:
    """Returns the fields of a metric on common examples, and on the clients' own ones.

    Args:
      split: ``test`` or ``validation``.
    """
    own = "client" if split == "test" else f"client_{split}"
    return Score(split, metric).name, Score(own, metric, "mean").name


def plain(field: str) -> str:
    """Returns the field of a score without the prefix of the global model."""
    return field.removeprefix("global_")


def of_global(field: str) -> str:
    """Returns the field of the global model beside personal ones, for that of any model."""
    return f"global_{plain(field)}"


def is_global(field: str) -> bool:
    """Returns whether a field is of the global model beside personal ones."""
    return field != plain(field)


def is_lower_better(metric: str, declared: Collection[str]) -> bool:
    """Returns whether lower values of a metric are better.

    Args:
      metric: the name of the metric. A second measurement of a metric has a suffix, such as
        ``loss_global``, and the same direction as the first.
      declared: ``lower_is_better`` of the task, and of the algorithm if it adds metrics.
    """
    return any(metric == name or metric.startswith(f"{name}_") for name in declared)


def worst(values: np.ndarray, metric: str, declared: Collection[str]) -> float:
    """Returns the worst value of a metric; see :func:`is_lower_better` for the arguments."""
    return float(values.max() if is_lower_better(metric, declared) else values.min())


def worst_tenth(values: Iterable[float], *, lower: bool) -> float:
    """Returns the mean of the worst tenth of values, rounded up: of 11 values, the worst two.

    It is NaN if a value is: nobody knows how bad that one is.

    Args:
      values: at least one.
      lower: whether lower values are better.
    """
    ordered = sorted(values, reverse=lower)
    if any(map(math.isnan, ordered)):
        return math.nan
    worst = ordered[: math.ceil(len(ordered) / 10)]
    return sum(worst) / len(worst)
