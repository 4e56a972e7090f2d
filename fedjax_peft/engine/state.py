"""The state between two rounds, and the report of a round."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import PyTree
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.stores.client_store import StoredClients
from fedjax_peft.support.errors import InputError

KEPT = ("server", "client_state", "aggregator_state", "transform_state", "history")
"""The fields of a :class:`State` that a run keeps: checkpoints hold them, and a run that starts
from another one begins with them. The others are given when a run begins or goes on."""


class State(NamedTuple):
    """Everything that one round passes to the next: a pytree that can be saved and restored.

    A run that continues from a restored state gives exactly the results of an uninterrupted run.
    """

    server: PyTree
    """The server's state, such as the shared leaves and the state of its optimizer."""
    client_state: PyTree = ()
    """What every client keeps from round to round, such as its private leaves; arrays
    ``[clients, ...]``, or :class:`fedjax_peft.engine.stores.client_store.StoredClients`, which then
    also hold the clients' memory of the upload transforms."""
    aggregator_state: PyTree = ()
    """The state of the aggregator; ``()`` if the aggregator has no state."""
    transform_state: PyTree = ()
    """The state of the upload transforms; ``()`` without transforms."""
    history: PyTree = ()
    """The versions of the server that clients at work have fetched, ``[places, ...]``; ``()`` if
    all clients start from the present version (:mod:`fedjax_peft.engine.history`)."""
    values: Mapping[str, Array] = {}
    """The run-time values of the algorithm and the transforms, such as the learning rate; float32
    scalars. See :mod:`fedjax_peft.numerics.hyperparameters`."""
    salt: Array | tuple[()] = ()
    """uint32 ``[2]``, made from the run's settings: by which its noise differs from that of other
    runs of its seed; ``()`` without a mechanism of differential privacy."""
    round_index: int = 0
    """Completed rounds. An integer on the host, so reading it does not wait for the device."""
    seed: int = 0
    """The seed of all random numbers in the rounds. An integer on the host."""

    def copy(self) -> "State":
        """Returns a copy of the arrays, which stays valid when this state is consumed."""
        arrays = jax.tree.map(jnp.copy, self.on_device())
        if isinstance(self.client_state, StoredClients):
            arrays = arrays._replace(client_state=self.client_state.copy())
        return arrays._replace(round_index=self.round_index, seed=self.seed)

    def on_device(self) -> "State":
        """Returns the state without the integers, as the round program takes it."""
        nothing: Any = ()
        return self._replace(round_index=nothing, seed=nothing)

    def check_alive(self) -> None:
        """Raises InputError if a step has consumed this state."""
        if any(x.is_deleted() for x in jax.tree.leaves(self) if isinstance(x, Array)):
            raise InputError(
                "This state was consumed by an earlier step, which reused its memory. Go on from"
                " the state that the step returned, or give state.copy() to the step."
            )


class RoundInfo(NamedTuple):
    """The report of a round.

    The arrays stay on the device until they are read, so that a loop does not wait for them.
    """

    round_index: int
    """The round, from 1."""
    plan: Plan
    """Clients and their local steps, as numpy arrays: ``plan.client`` and ``plan.length``."""
    sums: dict[str, tuple[Array, Array]]
    """Training metric -> (sum, count), each float32 ``[slots]``: one slot for each client."""
    finite: Array
    """bool ``[slots]``: False for a client whose upload was not finite and was dropped."""
    norms: Array
    """float32 ``[slots]``: norm of the model change that each client's upload describes."""
    sent_leaves: dict[str, Array]
    """For each leaf that is not sent in every round: whether it was sent in this round."""
    aggregation: dict[str, Array]
    """Metrics of the aggregator, the server, the diagnosis and ``Algorithm.round_metrics``, float32
    scalars."""
    shares: dict[str, Array] = {}  # noqa: RUF012
    """``Traffic.sent_shares`` of each client, float32 ``[slots]``."""

    @classmethod
    def of_nobody(cls, round_index: int, plan: Plan) -> "RoundInfo":
        """Returns the report of a round in which nobody takes part."""
        slots = len(plan.client)
        return cls(
            round_index, plan, {}, jnp.ones(slots, bool), jnp.zeros(slots, jnp.float32), {}, {}
        )
