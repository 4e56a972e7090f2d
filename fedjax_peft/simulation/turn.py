"""The turn of a round: when the round begins, who is available then, and who works."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fedjax_peft.contracts import Availability
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.schedule import Schedule
from fedjax_peft.support.errors import InputError


class Opening(NamedTuple):
    """The beginning of a round."""

    time: float
    """Simulated seconds since the start of the run."""
    waited: float
    """Seconds for which the server waited, because no client was available."""
    among: np.ndarray
    """int ``[n]``: the clients that are available, ascending."""
    until: np.ndarray
    """float ``[n]``: when each of them leaves."""


def open_round(availability: Availability, seed: int, clients: np.ndarray, now: float) -> Opening:
    """Returns the first moment from ``now`` on at which a client is available.

    Args:
      clients: int ``[clients]``: the clients that have examples.
      now: simulated seconds since the start of the run.

    Raises:
      InputError: nobody is ever available again.
    """
    time = now
    while True:
        there, until = availability.at(seed, clients, time)
        if there.any():
            return Opening(time, time - now, clients[there], until[there])
        time = float(until.min())
        if math.isinf(time):
            raise InputError(
                f"No client is available after {now:.0f} simulated seconds, so no round can begin."
                " Ask for fewer rounds, or use an availability that goes on, such as a trace with"
                " a period."
            )


def leaving(opening: Opening, seconds: Mapping[int, float]) -> dict[int, float]:
    """Returns the clients that leave before their upload has arrived -> seconds until they leave.

    Args:
      seconds: client -> seconds from the beginning of the round to the end of its upload.
    """
    own = np.searchsorted(opening.among, [*seconds])
    stays = dict(zip(seconds, (opening.until[own] - opening.time).tolist(), strict=True))
    return {client: stays[client] for client, s in seconds.items() if stays[client] < s}


class Turn(NamedTuple):
    """Who works in a round."""

    plan: Plan
    schedule: Schedule
    """That of the round, which draws among the available clients."""
    late: Mapping[int, int] = MappingProxyType({})
    """Late clients -> the local steps that they still send, 0 for nothing."""
    left: Mapping[int, float] = MappingProxyType({})
    """Clients that leave during the round -> seconds from its beginning."""
    opening: Opening | None = None
    """The beginning of the round; None if all clients are always available."""
