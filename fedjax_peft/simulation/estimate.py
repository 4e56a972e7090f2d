"""The costs of a run, estimated before it begins: work and bytes of the first round, memory."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from fedjax_peft import tree
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.state import State
from fedjax_peft.simulation.cost import Costs

__all__ = ["Estimate", "estimate"]


class Estimate(NamedTuple):
    """Costs of the first communication round, and memory that the whole run needs on the device."""

    clients: int
    """Clients that take part in the first round."""
    steps: int
    """Local steps of these clients together."""
    bytes_up: int
    """Bytes that these clients upload together."""
    bytes_down: int
    """Bytes that these clients fetch together. In later rounds a client may fetch less, because it
    already has the initial values, or more, because it has missed rounds."""
    memory: Mapping[str, int]
    """Bytes on the device: ``model`` (the frozen weights), ``server`` (the server's state),
    ``clients`` (the state that clients keep between rounds, that of upload transforms included) and
    ``data`` (the training examples). The local steps need additional memory for the activations and
    optimizer states of the clients that run side by side."""


def estimate(
    session: Session, state: State, costs: Costs, skipped_leaves: Collection[str]
) -> Estimate:
    """Returns the estimated costs of a run that has not begun.

    Args:
      session: the session of the run.
      state: the state before the first round.
      costs: the costs of the run, in which no round is recorded yet.
      skipped_leaves: the leaves that clients do not send in the first round.
    """
    schedule = session.schedule(state.seed)
    steps = {c: n for c in schedule.present(1) if (n := schedule.steps(c, 1))}
    memory = {
        "model": session.setup.frozen,
        "server": (state.server, state.aggregator_state),
        "clients": (state.client_state, state.transform_state),
        "data": session.columns,
    }
    return Estimate(
        clients=len(steps),
        steps=sum(steps.values()),
        bytes_up=sum(costs.up(client, skipped_leaves) for client in steps),
        bytes_down=sum(costs.down(client) for client in steps),
        memory={name: tree.nbytes(part) for name, part in memory.items()},
    )
