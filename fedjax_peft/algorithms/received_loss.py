"""Local training that also measures the loss of the received model on the client's examples.

    F_k(θ) = Σ of the losses of the examples of all local steps / their number

Papers take F_k over all examples of the client before its first step. A client sees its examples in
the batches of its local steps, so F_k is exact if these are whole epochs; with fewer steps it is
the loss of the examples that they take. It costs one more forward pass in each step, without
dropout.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.common import Local, init_local, train

MEASURES = (
    "Clients also send the loss of their examples, which is not clipped and has no noise. Use"
    " 'fedavg'."
)
"""Why private examples are refused."""


class Loss(NamedTuple):
    """A loss on the examples so far."""

    total: Array
    examples: Array

    @property
    def mean(self) -> Array:
        """The mean loss, a float32 scalar; 0 without an example."""
        return self.total / jnp.maximum(self.examples, 1.0)


class Measuring(NamedTuple):
    """A client during its local steps."""

    local: Local
    """It starts from all leaves of the received model, the client's own included."""
    loss: Loss
    """F_k(θ) on the examples so far."""


def begin(optimizer: c.Optimizer, shared: c.Params, private: c.Params) -> Measuring:
    """Returns a client before its first step."""
    local = init_local(optimizer, shared, private, {**shared, **private})
    return Measuring(local, Loss(jnp.zeros(()), jnp.zeros(())))


def step(
    optimizer: c.Optimizer, context: c.ClientContext, state: Measuring, batch: c.Batch, key: c.Key
) -> tuple[Measuring, c.Metrics]:
    """Returns a client after a step, and the metrics of the step."""
    local, metrics = train(optimizer, context, state.local, batch, key)
    total, count = context.task.loss(context.apply(local.start, batch, None, False), batch)
    loss = Loss(state.loss.total + total, state.loss.examples + count)
    return Measuring(local, loss), metrics
