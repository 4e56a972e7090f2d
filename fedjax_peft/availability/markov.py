"""Clients that come and go at random: a Markov chain of two states in continuous time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedjax_peft.availability.draws import uniforms
from fedjax_peft.contracts import Availability
from fedjax_peft.contracts.arguments import Positive
from fedjax_peft.contracts.part import part

_EVENTS = 4.0
"""Events of one kind of a client in a block of time, on average."""
_MOST = 32
"""The most events in a block; more have a probability below 1e-16."""


@part
def markov(mean_on: Positive = 3_600.0, mean_off: Positive = 3_600.0) -> Availability:
    """Clients are available for random times, independently of each other.

    The times for which a client is available, and those for which it is not, are exponentially
    distributed. At the start of the run, each client is available with the probability
    ``mean_on / (mean_on + mean_off)``, as at any later time.

    The chain is computed from two streams of events, which do not depend on each other: a client
    comes at the rate 1 / mean_off, and leaves at the rate 1 / mean_on; who is there already cannot
    come. Its state follows from the last event before, without all the times in between.

    Args:
      mean_on: mean seconds for which a client is available.
      mean_off: mean seconds for which it is not.
    """
    return Availability("markov", _Markov(float(mean_on), float(mean_off)))


@dataclass(frozen=True)
class _Markov:
    mean_on: float
    mean_off: float

    def __call__(
        self, seed: int, clients: np.ndarray, time: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns availability and the next change as :class:`Availability` says."""
        comes = _Events(seed, np.asarray(clients), "comes", self.mean_off)
        leaves = _Events(seed, np.asarray(clients), "leaves", self.mean_on)
        there = comes.last(time) > leaves.last(time)
        return there, np.where(there, leaves.next(time), comes.next(time))


class _Events(NamedTuple):
    """The events of one kind, at a constant rate, of each client."""

    seed: int
    clients: np.ndarray
    kind: str
    mean: float
    """Mean seconds between two events."""

    def last(self, time: float) -> np.ndarray:
        """Returns the time of each client's last event up to a time."""
        return self._search(time, -1, lambda times: np.where(times <= time, times, -np.inf).max(1))

    def next(self, time: float) -> np.ndarray:
        """Returns the time of each client's first event after a time."""
        return self._search(time, 1, lambda times: np.where(times > time, times, np.inf).min(1))

    def _search(
        self, time: float, direction: int, nearest: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Returns the nearest events, from block to block until every client has one."""
        found = np.full(self.clients.shape, np.inf)
        block = int(time // (_EVENTS * self.mean))
        while not np.isfinite(found).all():
            rows = np.flatnonzero(~np.isfinite(found))
            found[rows] = nearest(self._times(self.clients[rows], block))
            block += direction
        return found

    def _times(self, clients: np.ndarray, block: int) -> np.ndarray:
        """Returns the times of the events in a block, ``[clients, _MOST]``; ``nan`` fills up."""
        number = np.searchsorted(_POISSON, uniforms(self.seed, self.kind, clients, np.int64(block)))
        places = np.arange(_MOST)
        at = uniforms(self.seed, self.kind, clients[:, None], np.int64(block), places)
        return np.where(places < number[:, None], (block + at) * _EVENTS * self.mean, np.nan)


def _poisson() -> np.ndarray:
    """Returns the distribution function of the Poisson distribution of the number of events."""
    numbers = np.arange(1, _MOST + 1)
    weights = np.concatenate([[1.0], np.cumprod(_EVENTS / numbers)])
    return np.cumsum(weights)[:-1] * np.exp(-_EVENTS)


_POISSON = _poisson()
