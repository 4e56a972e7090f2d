"""The costs of a run, estimated before it begins: work and bytes of the first round, memory."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from fedjax_peft.engine.schedule import Schedule
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.state import State
from fedjax_peft.engine.stores.client_store import StoredClients
from fedjax_peft.numerics import tree
from fedjax_peft.simulation.asynchrony import aggregation_row
from fedjax_peft.simulation.cost import Costs


class Estimate(NamedTuple):
    """Costs of the first communication round, and memory that the whole run needs on the device."""

    clients: int
    """Clients that send an upload in the first round."""
    steps: int
    """Local steps of these clients together."""
    bytes_up: int
    """Bytes that these clients upload together."""
    bytes_down: int
    """Bytes that all clients of the round fetch, also those that then fail, leave or are late. In
    later rounds a client may fetch less, because it already has the initial values, or more,
    because it has missed rounds."""
    memory: Mapping[str, int]
    """Bytes on the device: ``model`` (the frozen weights), ``server`` (the server's state),
    ``clients`` (the state that clients keep between rounds, that of upload transforms included) and
    ``data`` (the training examples, or with ``examples="host"`` those of the round). The local
    steps need additional memory for the activations and optimizer states of the clients that run
    side by side."""
    stored: Mapping[str, int]
    """Bytes on the ``host`` or the ``disk`` when all clients have trained, if the clients' state is
    there. ``clients`` of ``memory`` is then that of one round."""


def estimate(
    session: Session,
    state: State,
    costs: Costs,
    skipped_leaves: Collection[str],
    schedule: Schedule,
    late: Mapping[int, int],
    left: Collection[int],
) -> Estimate:
    """Returns the estimated costs of a run that has not begun.

    Args:
      costs: the costs of the run, in which no round is recorded yet.
      schedule: of the first round, like ``late`` and ``left`` (those of its ``Turn``).
    """
    working = schedule.client_steps(1)
    steps = {c: n for c, n in {**working, **late}.items() if n and c not in left}
    members = [*schedule.origins(1)] if schedule.all_send else [*working]
    sent = members if schedule.all_send else [*steps]
    fetched = {*members, *schedule.failed(1)}
    row = {
        "bytes_up": sum(costs.up(client, skipped_leaves) for client in sent),
        "bytes_down": sum(costs.down(client) for client in fetched),
    }
    if schedule.timelines is not None:
        row = aggregation_row(schedule.aggregation(1), 0.0, costs)
    stored, place = state.client_state, session.client_place
    in_store = isinstance(stored, StoredClients)
    record = stored.store.packing.nbytes if in_store else 0
    examples = min(len(x) for x in session.columns.values())
    if session.examples_place == "host":
        examples = min(examples, sum(steps.values()) * schedule.room)
    memory = {
        "model": tree.nbytes(session.setup.frozen),
        "server": tree.nbytes((state.server, state.aggregator_state, state.history)),
        "clients": tree.nbytes((state.client_state, state.transform_state))
        + record * schedule.per_round,
        "data": sum(examples * (x.nbytes // len(x)) for x in session.columns.values()),
    }
    return Estimate(
        clients=len(sent),
        steps=sum(steps.values()),
        bytes_up=row["bytes_up"],
        bytes_down=row["bytes_down"],
        memory=memory,
        stored={place: record * len(stored)} if in_store else {},
    )
