"""What a run will cost, told before it begins: the first round's work and bytes, and memory."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from fedjax_peft import tree
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.state import State
from fedjax_peft.simulation.cost import Costs

__all__ = ["Estimate", "estimate"]


class Estimate(NamedTuple):
    """The first communication round, and what stays on the device for the whole run."""

    clients: int
    """Clients that take part in the first round."""
    steps: int
    """Local steps of these clients together."""
    bytes_up: int
    """Bytes that these clients upload together."""
    bytes_down: int
    """Bytes that they fetch together. In later rounds a client may fetch less (it knows its start)
    or more (it has missed rounds)."""
    memory: Mapping[str, int]
    """Bytes on the device: ``model`` (the frozen weights), ``server`` (the server's state),
    ``clients`` (what clients keep between rounds, for upload transforms too) and ``data`` (the
    training examples). The local steps need more: activations and optimizer states of the clients
    that run side by side."""


def estimate(
    session: Session, state: State, costs: Costs, skipped_leaves: Collection[str]
) -> Estimate:
    """Returns the costs of a run that has not begun.

    Args:
      session: of the run.
      state: before the first round.
      costs: of the run, without any round yet.
      skipped_leaves: the leaves that clients do not send in the first round.
    """
    schedule = session.schedule(state.seed)
    clients = [client for client in schedule.present(1) if schedule.steps(client)]
    memory = {
        "model": session.setup.frozen,
        "server": (state.server, state.aggregator_state),
        "clients": (state.client_state, state.transform_state),
        "data": session.columns,
    }
    return Estimate(
        clients=len(clients),
        steps=sum(schedule.steps(client) for client in clients),
        bytes_up=sum(costs.up(client, skipped_leaves) for client in clients),
        bytes_down=sum(costs.down(client) for client in clients),
        memory={name: tree.nbytes(part) for name, part in memory.items()},
    )
