"""Tasks: encoder, loss, metrics, score, head and inputs. One file for each task.

Each function in ``__all__`` returns a :class:`Task`. The other functions look a task up by its
name, by the columns of a table, or by the head of a model. What needs a task is here too: reading
its data (``sources``, ``clients``), and what a trained model answers (``inference``,
``generation``).
"""

import inspect
from collections.abc import Callable, Collection
from typing import Any

from fedjax_peft.support.errors import InputError, check_known, nearest
from fedjax_peft.tasks.base import Task as Task
from fedjax_peft.tasks.classification import classification
from fedjax_peft.tasks.image_classification import image_classification
from fedjax_peft.tasks.instruction_tuning import instruction_tuning
from fedjax_peft.tasks.multiple_choice import multiple_choice
from fedjax_peft.tasks.next_token import next_token
from fedjax_peft.tasks.preference import preference
from fedjax_peft.tasks.question_answering import question_answering
from fedjax_peft.tasks.tagging import tagging

__all__ = [
    "classification",
    "image_classification",
    "instruction_tuning",
    "multiple_choice",
    "next_token",
    "preference",
    "question_answering",
    "tagging",
]

# Of two tasks with the same head, the first is the head's own.
_FUNCTIONS: dict[str, Callable[..., Task]] = {
    "classification": classification,
    "image_classification": image_classification,
    "next_token": next_token,
    "instruction_tuning": instruction_tuning,
    "multiple_choice": multiple_choice,
    "preference": preference,
    "question_answering": question_answering,
    "tagging": tagging,
}


def find(name: str) -> Callable[..., Task]:
    """Returns the function of this module with the given name; it returns a :class:`Task`.

    Raises:
      InputError: there is none (the nearest name is in the message).
    """
    check_known("task", name, __all__)
    return _FUNCTIONS[name]


def as_task(task: Task | str) -> Task:
    """Returns a task that is given as it is, or by its name."""
    return find(task)() if isinstance(task, str) else task


def for_data(data: Any, metric: str | None = None) -> Task:
    """Returns the task of a data set (:class:`fedjax_peft.data.Dataset`).

    Args:
      data: the data set.
      metric: which metric is the headline, see :func:`question_answering`; None: the default.

    Raises:
      InputError: the data set names an unknown task, or its task has no choice of metrics.
    """
    task = data.task
    if task is None:
        task = classification()
    elif isinstance(task, str):
        if task not in _FUNCTIONS:
            raise InputError(
                f"The data set {data.name!r} is for the task {task!r}, which does not exist."
                f" {nearest(task, __all__)} For a task of your own, give the object:"
                " task=my_task()."
            )
        task = _FUNCTIONS[task]()
    if metric is None:
        return task
    with_metric = [n for n, f in _FUNCTIONS.items() if "metric" in inspect.signature(f).parameters]
    if task.name not in with_metric:
        raise InputError(
            f"metric = {metric!r} means nothing for the data set {data.name!r}, whose task is"
            f" {task.name}: only {', '.join(with_metric)} has a choice of metrics."
        )
    return _FUNCTIONS[task.name](metric=metric)


def for_columns(columns: Collection[str], origin: str) -> Task:
    """Returns the task of a table without an entry in the catalogue, by the names of its columns.

    It is the task whose encoder recognises most columns, or classification if no encoder recognises
    any.

    Args:
      columns: their names.
      origin: where the table is from, for the message.

    Raises:
      InputError: two tasks fit equally well.
    """
    scores: dict[str, int] = {}
    for name, function in _FUNCTIONS.items():
        encoder = function().encoder
        scores[name] = 0 if encoder is None else encoder.recognises(columns)
    most = max(scores.values())
    fitting = [name for name, score in scores.items() if score == most]
    if not most:
        return classification()
    if len(fitting) > 1:
        raise InputError(
            f"The columns of {origin} fit several tasks: {' and '.join(fitting)}. Choose one:"
            f' task = "{fitting[0]}".'
        )
    return _FUNCTIONS[fitting[0]]()


def for_head(kind: str) -> Task:
    """Returns the first task whose models have a head of the given kind, else classification."""
    tasks = (function() for function in _FUNCTIONS.values())
    return next((task for task in tasks if task.head == kind), classification())


def head_kind(name: str) -> str:
    """Returns the kind of head of the task with this name; any other name is returned unchanged.

    A config may name a head by its task.
    """
    return _FUNCTIONS[name]().head if name in _FUNCTIONS else name
