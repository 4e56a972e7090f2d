"""What is learned: losses and metrics over outputs, labels and masks."""

import inspect
from collections.abc import Callable
from typing import Any

from fedjax_peft.errors import InputError, nearest
from fedjax_peft.tasks.classification import classification
from fedjax_peft.tasks.next_token import next_token
from fedjax_peft.tasks.question_answering import question_answering
from fedjax_peft.tasks.tagging import tagging
from fedjax_peft.typing import Task

__all__ = ["classification", "for_data", "next_token", "question_answering", "tagging"]

_TASKS: dict[str, Callable[..., Task]] = {
    "classification": classification,
    "image_classification": classification,
    "tagging": tagging,
    "question_answering": question_answering,
    "next_token": next_token,
}


def for_data(data: Any, metric: str | None = None) -> Task:
    """Returns the task of a data set (:class:`fedjax_peft.data.Dataset`).

    Args:
      data: the data set.
      metric: whose score is the headline, see :func:`question_answering`; None: the task's default.

    Raises:
      InputError: the data set names an unknown task, or its task has no choice of metrics.
    """
    if data.task not in _TASKS:
        raise InputError(
            f"The data set {data.name!r} is for the task {data.task!r}, which there is not."
            f" {nearest(data.task, _TASKS)}"
        )
    make = _TASKS[data.task]
    if metric is None:
        return make()
    if "metric" not in inspect.signature(make).parameters:
        chosen = sorted(n for n, f in _TASKS.items() if "metric" in inspect.signature(f).parameters)
        raise InputError(
            f"metric = {metric!r} means nothing for the data set {data.name!r}, whose task is"
            f" {data.task}: only {', '.join(chosen)} has a choice of metrics."
        )
    return make(metric=metric)
