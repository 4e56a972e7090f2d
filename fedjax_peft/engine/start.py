"""The start of a round: what the server sends, and what its clients begin with."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Aggregator, Key, Params, Participant, PyTree, Source
from fedjax_peft.engine.history import fetched_by, remember
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.setup import Constants, Setup
from fedjax_peft.engine.state import State
from fedjax_peft.engine.uploads import receive
from fedjax_peft.numerics.random import salted, server_key


class RoundStart(NamedTuple):
    """What is known before the clients of a round begin."""

    constants: Constants
    state: State
    """The state before the round."""
    plan: Plan
    """The plan, with the weights that uploads have in the sum."""
    frozen: Params
    """The frozen leaves, with what the server has added to them."""
    present: Source
    """The server's present version, from which clients start unless the plan says otherwise."""
    history: PyTree
    """The versions that clients need, the present one included."""
    sent_leaves: dict[str, Array]
    """``Traffic.sent_leaves`` of the round."""
    received: PyTree
    """What the server broadcasts for the upload transform."""
    aggregator: Aggregator
    """The aggregator of the round."""
    client_key: Key
    """The key of all clients of the run."""
    noise_key: Key
    """The same, for the noise of mechanisms of differential privacy."""
    server_key: Key
    """The key of the server in this round."""
    metrics: dict[str, Array]
    """Measurements of what was sent to the clients."""

    @property
    def template(self) -> PyTree:
        """The upload of a client that learned nothing from the present version."""
        return self.present.template

    def sources(self, slot: Array) -> Source | tuple[()]:
        """Returns the versions from which the clients of slots start, stacked; ``()``: the present
        one.
        """
        return fetched_by(self.history, self.plan.fetched, slot)

    def participant(
        self, number: Array, rank_mask: Params, source: Source | tuple[()]
    ) -> Participant:
        """Returns a client of the round."""
        return Participant(number, source or self.present, rank_mask, self.client_key)


def start_round(
    setup: Setup, constants: Constants, state: State, plan: Plan, key: Key, round_index: Array
) -> RoundStart:
    """Returns the start of a round.

    Args:
      setup: the algorithm and its surroundings; the arrays in it are not used.
      round_index: the round, int32.
    """
    algorithm, server, transform = setup.algorithm, setup.algorithm.server, setup.transform
    frozen = server.merge_into_frozen(state.server, constants.frozen)
    broadcast, template = server.broadcast(state.server), server.unchanged(state.server)
    noise_key = salted(key, state.salt)
    own_key = server_key(noise_key, round_index)
    broadcast, metrics = receive(transform, broadcast, state.transform_state, own_key)
    present = Source(broadcast, template, round_index)
    if algorithm.weights == "uniform":
        equal: Any = jnp.where(plan.weight > 0, 1.0, 0.0)
        plan = plan._replace(weight=equal)
    return RoundStart(
        constants=constants,
        state=state,
        plan=plan,
        frozen=frozen,
        present=present,
        history=remember(state.history, plan.fetched, present),
        sent_leaves=algorithm.traffic.sent_leaves(broadcast, round_index),
        received=() if transform is None else transform.broadcast(state.transform_state.server),
        aggregator=algorithm.aggregator.bound(state.aggregator_state),
        client_key=key,
        noise_key=noise_key,
        server_key=own_key,
        metrics=metrics,
    )
