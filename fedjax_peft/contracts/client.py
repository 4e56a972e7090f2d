"""The work of a client: its context, its local steps and its gradient."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts.model import Outputs
from fedjax_peft.contracts.task import Task, loss_and_metrics
from fedjax_peft.contracts.types import Batch, Key, Metrics, Params, PyTree


class LossFn(Protocol):
    """The training loss of a batch, as a mean over its examples."""

    def __call__(self, params: PyTree, batch: Batch, key: Key, /) -> tuple[Array, Metrics]:
        """Returns (mean loss over the real examples of the batch, a scalar; metrics).

        Everything about the examples comes from ``batch``: the function is also called with batches
        of a single example. Terms that do not depend on the examples, such as a pull towards
        another model, do not belong to it: add their gradient to the result.
        """


class Gradient(Protocol):
    """How local training takes a gradient that depends on its examples."""

    def __call__(
        self, loss: LossFn, params: PyTree, batch: Batch, key: Key
    ) -> tuple[PyTree, Metrics]:
        """Returns (gradient, metrics), the gradient in the structure of ``params``.

        Args:
          loss: the loss.
          params: where the gradient is taken; the trained leaves.
          batch: the examples.
          key: for the random numbers of the loss.
        """


def mean_gradient(loss: LossFn, params: PyTree, batch: Batch, key: Key) -> tuple[PyTree, Metrics]:
    """Returns the gradient of the mean loss of a batch, and its metrics (see :class:`Gradient`)."""
    return jax.grad(loss, has_aux=True)(params, batch, key)


class ClientContext(NamedTuple):
    """What a client update may use: the model bound to its frozen tree, and the task.

    Made by the engine inside the round program, where the frozen tree is an argument.
    """

    apply: Callable[[Params, Batch, Key | None, bool], Outputs]
    """(trainable, batch, key, train) -> outputs."""
    task: Task
    fixed: Params
    """The leaves that never change, as this client has them. ``apply`` already closes over these;
    entries of the same name in ``trainable`` take precedence."""
    round_index: Array
    """The round, int32 from 1."""
    client: Array | int = 0
    """The client's number in the federation, an int32 scalar from 0. Algorithms treat all clients
    alike; attacks do not."""
    gradient: Gradient = mean_gradient
    """(loss, params, batch, key) -> (gradient, metrics). Every gradient that depends on examples is
    taken by it, so that a mechanism of differential privacy can replace it."""
    salt: Array | tuple[()] = ()
    """uint32 ``[2]``: by which the noise of this run differs from that of other runs of its seed
    (:func:`fedjax_peft.numerics.random.salted`); ``()`` without a mechanism of differential
    privacy."""

    def objective(self, params: Params, batch: Batch, key: Key) -> tuple[Array, Metrics]:
        """Returns the mean training loss of a batch and the task's metrics; a :class:`LossFn`."""
        outputs = self.apply(params, batch, key, True)
        (total, count), metrics = loss_and_metrics(self.task, outputs, batch)
        return total / jnp.maximum(count, 1.0), metrics


class ClientUpdate(NamedTuple):
    """The local work of one client, as three pure functions, each written for a single client.

    The engine maps them over lanes. It discards the steps of idle lanes, optimizer state included.
    A batch may have no real example at all, if examples are drawn independently.
    """

    init: Callable[[PyTree, PyTree, Key], PyTree]
    """(broadcast, client state, key) -> local state at the start of the round. The client state is
    what this client kept from its last round (``Algorithm.init_client_state`` at first)."""
    step: Callable[[PyTree, Batch, Key], tuple[PyTree, Metrics]]
    """(state, batch, key) -> (state, metrics of this step).

    In addition to its columns the batch has two int32 scalars: ``step``, the index of the local
    step from 0, and ``steps``, the number of local steps of this client in the round.
    """
    final: Callable[[PyTree], tuple[PyTree, PyTree]]
    """local state -> (upload, client state for the next round)."""


class Tuning(NamedTuple):
    """Local training of every client before the last evaluation. Its result is not saved."""

    client: Callable[[ClientContext], ClientUpdate]
    """Its ``final`` returns ``({}, client state)``: nothing is sent."""
    epochs: int
    """Passes over a client's examples."""


Probe: TypeAlias = Callable[[ClientContext, Params, Batch], Metrics]
"""(context, all leaves of a model, batch) -> metrics in addition to those of the task."""
