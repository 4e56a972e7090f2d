"""The contract of a task: encoder, loss, metrics, score, head and inputs.

A task is one file with a function that returns a :class:`Task`. :mod:`fedjax_peft.tasks` lists the
built-in ones. A config names your own task as ``[task] name = "my_file.py:function"``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from fedjax_peft.contracts import Batch, Metrics, Outputs, Sampling
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.data.encoders.base import Encoder
from fedjax_peft.support.errors import InputError
from fedjax_peft.tasks.by_class import ByClass
from fedjax_peft.tasks.common import SumAndCount

Means: TypeAlias = Mapping[str, float]
"""Metric -> its mean over the evaluated examples."""
Predictions: TypeAlias = Mapping[str, Any]
"""What a task's ``predict`` gave for every example, ``[examples, ...]`` in numpy."""
Scores: TypeAlias = dict[str, float]


class Field(NamedTuple):
    """A field of an input row, such as one line of the JSON file that ``predict`` reads."""

    name: str
    kind: type
    """``str`` or ``list``."""
    required: bool = True


class Inputs(NamedTuple):
    """How a trained model answers rows without labels, as ``fedjax-peft predict`` does."""

    fields: tuple[Field, ...]
    """The fields of a row."""
    unlabelled: Callable[[dict[str, list[Any]], Sequence[str]], dict[str, list[Any]]] = (
        lambda columns, names: columns
    )
    """(columns of the fields, label names) -> the columns that the task's encoder reads, with
    placeholders for the labels."""
    answers: Callable[[Predictions, Dataset], list[dict[str, Any]]] = lambda found, data: []
    """(predictions ``[examples, ...]`` in numpy, encoded rows) -> one JSON object for each row."""
    predict: Callable[[Outputs, Batch], dict[str, jax.Array]] | None = None
    """Makes the predictions, on the device; None: the task's own ``predict``."""
    sampling: Sampling | None = None
    """How a language model completes the rows' prompts (the first field that a row has); each row's
    answer is then a ``completion``, and the functions above are not used. None: it predicts."""


LossAndMetrics: TypeAlias = Callable[[Outputs, Batch], tuple[SumAndCount, Metrics]]
"""(outputs, batch) -> ((sum of losses, count), metrics)."""


class Task(NamedTuple):
    """A task. ``loss`` and ``metrics`` are enough for data that are arrays already.

    The engine uses the first six fields (:class:`fedjax_peft.contracts.Task`). Metrics are (sum,
    count), so that padded rows and unequal batches average correctly. ``score`` computes metrics
    that are not means over examples, such as an entity F1. It runs on the host, with the output of
    ``predict`` for every example.

    A function that returns a task must use the same functions on every call. Compiled programs are
    then used again.
    """

    loss: Callable[[Outputs, Batch], SumAndCount]
    """(outputs, batch) -> (sum of losses, count) over the real examples of the batch."""
    metrics: Callable[[Outputs, Batch], Metrics]
    """(outputs, batch) -> metrics, evaluated without gradients."""
    predict: Callable[[Outputs, Batch], dict[str, jax.Array]] | None = None
    """(outputs, batch) -> arrays ``[batch, ...]`` that ``score`` needs of every example. An axis of
    tokens may be shorter than the data's: ``score`` receives it padded with zeros."""
    score: Callable[[Means, Predictions, Any], Scores] | None = None
    """(means of the metrics, predictions ``[examples, ...]`` in numpy, the evaluated
    :class:`fedjax_peft.data.Dataset`) -> further metrics."""
    headline: str = "accuracy"
    """The metric that tables and curves show."""
    lower_is_better: tuple[str, ...] = ("loss",)
    """The metrics for which lower is better. For every other metric higher is better."""
    name: str = "own"
    """The name in messages; for a built-in task, also the name in a config."""
    encoder: Encoder | None = None
    """Turns rows into arrays; None: the data are arrays already."""
    head: str = "classification"
    """The kind of head that a model needs, a key of :data:`fedjax_peft.models.heads.KINDS`."""
    inputs: Inputs | None = None
    """How a trained model answers rows without labels; None: ``predict`` refuses the task."""
    check: Callable[[Dataset, str], None] = lambda data, which: None
    """(data set, its role, such as "training") -> None. Raises InputError for data on which
    the task cannot be trained or scored."""
    loss_and_metrics: LossAndMetrics | None = None
    """(outputs, batch) -> (result of ``loss``, result of ``metrics``), for a task whose loss and
    metrics share a long computation; a training step then makes it once. None: it calls both."""
    generate: Callable[[Callable[[Batch], Outputs], Batch], dict[str, jax.Array]] | None = None
    """(evaluated model: batch -> outputs, batch) -> further arrays ``[batch, ...]`` for ``score``,
    where one call of the model is not enough, as for completions
    (:func:`fedjax_peft.tasks.completions.completing`)."""
    words: Callable[[Dataset], str | None] | None = None
    """(evaluated data) -> the rule for words (:mod:`fedjax_peft.tasks.words`) of the scores of
    texts, which rows name as ``tokenizer``; None: no texts are scored."""
    by_class: Callable[[Predictions, Any], ByClass] | None = None
    """(predictions, evaluated data) -> the counts of each class, for scores by class; None: the
    task has no classes. Arguments are those of ``score``."""
    prepare: Callable[[Any, Dataset, Sequence[np.ndarray]], Dataset] | None = None
    """(model that a run starts from, data, the rows of each client) -> the data with what the loss
    needs beside the examples, such as the log-likelihoods of a reference model. Called once before
    the first round, for each data set; evaluated data have no clients' rows."""

    def __repr__(self) -> str:
        return f"Task({self.name!r})"


def prompted(sampling: Sampling, *, conversations: bool = False) -> Inputs:
    """Returns the inputs of a language model's task: rows have a ``prompt``, or ``messages``.

    Args:
      sampling: how completions are made.
      conversations: whether rows may have ``messages``, a list, in the place of a prompt.
    """
    fields: tuple[Field, ...] = (Field("prompt", str, required=not conversations),)
    if conversations:
        fields += (Field("messages", list, required=False),)
    return Inputs(fields, sampling=sampling)


def check_labels(task: str) -> Callable[[Dataset, str], None]:
    """Returns a function that raises InputError for data without a column ``labels``.

    Args:
      task: its name, for the message.
    """

    def check(data: Dataset, which: str) -> None:
        if "labels" not in data.columns:
            raise InputError(f"The {which} data are for {task}, but have no column 'labels'.")

    return check
