"""A task: the loss, the metrics and the predictions of a model."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from jax import Array

from fedjax_peft.contracts.model import Outputs
from fedjax_peft.contracts.types import Batch, Metrics


@runtime_checkable
class Task(Protocol):
    """What the engine and the algorithms use of a task; :class:`fedjax_peft.tasks.Task` is one.

    ``loss`` and ``metrics`` are computed on the device, batch by batch. A score that is not a mean
    over examples (an entity F1, the answers of a reader) is made on the host, by ``score``, from
    what ``predict`` returns for every example.
    """

    @property
    def loss(self) -> Callable[[Outputs, Batch], tuple[Array, Array]]:
        """(outputs, batch) -> (sum of losses, count) over the real examples of the batch."""

    @property
    def metrics(self) -> Callable[[Outputs, Batch], Metrics]:
        """(outputs, batch) -> metrics, evaluated without gradients."""

    @property
    def predict(self) -> Callable[[Outputs, Batch], dict[str, Array]] | None:
        """(outputs, batch) -> arrays ``[batch, ...]`` that ``score`` needs; None: no score."""

    @property
    def score(
        self,
    ) -> Callable[[Mapping[str, float], Mapping[str, Any], Any], dict[str, float]] | None:
        """(means of the metrics, predictions, evaluated data set) -> further metrics."""

    @property
    def headline(self) -> str:
        """The metric that tables and curves show."""

    @property
    def lower_is_better(self) -> tuple[str, ...]:
        """The metrics for which lower is better. For every other metric higher is better."""


def loss_and_metrics(
    task: Task, outputs: Outputs, batch: Batch
) -> tuple[tuple[Array, Array], Metrics]:
    """Returns ((sum of losses, count), metrics) of a task, by one computation if it has one.

    The metrics have no derivative.
    """
    together = getattr(task, "loss_and_metrics", None)
    if together is None:
        # Derivatives that nobody asks for would still be traced.
        return task.loss(outputs, batch), task.metrics(jax.lax.stop_gradient(outputs), batch)
    loss, metrics = together(outputs, batch)
    return loss, jax.lax.stop_gradient(metrics)
