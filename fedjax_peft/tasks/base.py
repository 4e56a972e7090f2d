"""The contract of a task: what is read, what is learned, and how it is scored and predicted.

A task is one file with a function that returns a :class:`Task`. The library's own are listed in
:mod:`fedjax_peft.tasks`; a config names one of your own as ``[task] name = "my_file.py:function"``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encoders.base import Encoder
from fedjax_peft.errors import InputError
from fedjax_peft.typing import Batch, Metrics, Outputs

__all__ = ["Field", "Inputs", "Task", "check_labels"]


class Field(NamedTuple):
    """A field of an input row, such as one line of the JSON file that ``predict`` reads."""

    name: str
    kind: type
    """``str`` or ``list``."""
    required: bool = True


class Inputs(NamedTuple):
    """How a trained model answers rows without labels, as ``fedjax-peft predict`` does."""

    fields: tuple[Field, ...]
    """What a row has."""
    unlabelled: Callable[[dict[str, list[Any]], Sequence[str]], dict[str, list[Any]]]
    """(columns of the fields, label names) -> the columns that the task's encoder reads, with
    placeholders for the labels."""
    answers: Callable[[Mapping[str, Any], Dataset], list[dict[str, Any]]]
    """(predictions ``[examples, ...]`` in numpy, encoded rows) -> one JSON object for each row."""
    predict: Callable[[Outputs, Batch], dict[str, jax.Array]] | None = None
    """Makes the predictions, on the device; None: the task's own ``predict``."""


def _any_data(data: Dataset, which: str) -> None:
    del data, which


class Task(NamedTuple):
    """A task. ``loss`` and ``metrics`` are enough for data that are arrays already.

    The first six fields are what the engine uses (:class:`fedjax_peft.typing.Task`). Metrics are
    (sum, count), so that padded rows and unequal batches average correctly. A figure that is not a
    mean over examples, such as an entity F1, is made on the host, by ``score``, from what
    ``predict`` returns for every example.

    Return the same functions on every call: a program that was compiled for a task is then found
    again.
    """

    loss: Callable[[Outputs, Batch], tuple[jax.Array, jax.Array]]
    """(outputs, batch) -> (sum of losses, count) over the real examples of the batch."""
    metrics: Callable[[Outputs, Batch], Metrics]
    """(outputs, batch) -> metrics, evaluated without gradients."""
    predict: Callable[[Outputs, Batch], dict[str, jax.Array]] | None = None
    """(outputs, batch) -> arrays ``[batch, ...]`` that ``score`` needs of every example. An axis of
    tokens may be shorter than the data's: ``score`` receives it padded with zeros."""
    score: Callable[[Mapping[str, float], Mapping[str, Any], Any], dict[str, float]] | None = None
    """(means of the metrics, predictions ``[examples, ...]`` in numpy, the evaluated
    :class:`fedjax_peft.data.Dataset`) -> further metrics."""
    headline: str = "accuracy"
    """The metric that tables and curves show."""
    lower_is_better: tuple[str, ...] = ("loss",)
    """The metrics for which lower is better. For every other metric higher is better."""
    name: str = "own"
    """What messages call the task; for a task of the library, its name in a config."""
    encoder: Encoder | None = None
    """How rows become arrays; None: the data are arrays already."""
    head: str = "classification"
    """The kind of head that a model needs, a key of :data:`fedjax_peft.models.heads.KINDS`."""
    inputs: Inputs | None = None
    """How a trained model answers rows without labels; None: only in Python."""
    check: Callable[[Dataset, str], None] = _any_data
    """(data set, which one it is, such as "training") -> None. Raises InputError for data on which
    the task cannot be trained or scored."""

    def __repr__(self) -> str:
        """Returns the name: messages of tests and debuggers stay short."""
        return f"Task({self.name!r})"


def check_labels(task: str) -> Callable[[Dataset, str], None]:
    """Returns a function that raises InputError for data without a column ``labels``.

    Args:
      task: its name, for the message.
    """

    def check(data: Dataset, which: str) -> None:
        if "labels" not in data.columns:
            raise InputError(f"The {which} data are for {task}, but have no column 'labels'.")

    return check
