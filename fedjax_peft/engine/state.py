"""What goes from round to round, and what a round reports."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_peft.engine.plan import Plan
from fedjax_peft.typing import PyTree

__all__ = ["RoundInfo", "State"]


class State(NamedTuple):
    """All that one round hands to the next: a pytree that can be saved and restored.

    A state that was saved after round n and restored continues exactly as the first one did.
    """

    server: PyTree
    """The server's state, such as the shared leaves and the state of its optimizer."""
    client_state: PyTree = ()
    """What every client keeps from round to round, such as its private leaves; arrays
    ``[clients, ...]``."""
    aggregator_state: PyTree = ()
    """The state of the aggregator; ``()`` for one without."""
    transform_state: PyTree = ()
    """The state of the upload transforms; ``()`` without transforms."""
    round_index: int = 0
    """Rounds that are done. An integer on the host: reading it does not wait for the device."""
    seed: int = 0
    """The seed of all that is random in the rounds. An integer on the host."""

    def copy(self) -> "State":
        """Returns a copy of the arrays, which stays valid when this state is consumed."""
        arrays = jax.tree.map(jnp.copy, self.on_device())
        return arrays._replace(round_index=self.round_index, seed=self.seed)

    def on_device(self) -> "State":
        """Returns the arrays alone, as the round program takes them: without the integers."""
        nothing: Any = ()
        return self._replace(round_index=nothing, seed=nothing)


class RoundInfo(NamedTuple):
    """What happened in a round.

    The arrays stay on the device until they are read, so that a loop does not wait for them.
    """

    round_index: int
    """The round, from 1."""
    plan: Plan
    """Who took part with how many local steps, in numpy: ``plan.client`` and ``plan.length``."""
    sums: dict[str, tuple[jax.Array, jax.Array]]
    """Training metric -> (sum, count), each float32 ``[slots]``: one slot for each client."""
    finite: jax.Array
    """bool ``[slots]``: False for a client whose upload was not finite and was dropped."""
    norms: jax.Array
    """float32 ``[slots]``: length of the change of the model that a client's upload means."""
    sent_leaves: dict[str, jax.Array]
    """Leaves that are not sent in every round -> whether they were in this one."""
    aggregation: dict[str, jax.Array]
    """Metrics of the aggregator, of the server and of the diagnosis, float32 scalars."""
