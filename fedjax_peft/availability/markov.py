"""Clients that come and go at random: a Markov chain of two states in continuous time."""

from dataclasses import dataclass

import numpy as np

from fedjax_peft.availability.draws import uniforms
from fedjax_peft.contracts import Availability
from fedjax_peft.support.checks import check_number

_EVENTS = 4.0
"""Events of a client in a block of time, on average."""
_MOST = 32
"""The most events in a block; more have a probability below 1e-16."""


def markov(mean_on: float = 3_600.0, mean_off: float = 3_600.0) -> Availability:
    """Clients are available for random times, independently of each other.

    The times for which a client is available, and those for which it is not, are exponentially
    distributed. At the start of the run, each client is available with the probability
    ``mean_on / (mean_on + mean_off)``, as at any later time.

    The chain is computed by uniformisation: events come at the rate 1 / mean_on + 1 / mean_off, and
    at each event the state is drawn anew with this probability. That is the same chain, and its
    state at any time follows from the last event before, without all the times in between.

    Args:
      mean_on: mean seconds for which a client is available.
      mean_off: mean seconds for which it is not.

    Raises:
      InputError: a number is not positive.
    """
    check_number("markov", "mean_on", mean_on, positive=True)
    check_number("markov", "mean_off", mean_off, positive=True)
    return Availability("markov", _Markov(float(mean_on), float(mean_off)))


@dataclass(frozen=True)
class _Markov:
    mean_on: float
    mean_off: float

    def __call__(
        self, seed: int, clients: np.ndarray, time: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns availability and the next change as :class:`Availability` says."""
        clients = np.asarray(clients)
        first = int(time // self._block)
        there, found = np.zeros(clients.shape, bool), np.zeros(clients.shape, bool)
        block = first
        while not found.all():  # backwards, to the last event of each client
            rows = np.flatnonzero(~found)
            times, states = self._events(seed, clients[rows], block)
            past = times <= time
            last = past.sum(axis=1) - 1
            some = last >= 0
            there[rows[some]] = states[some, last[some]]
            found[rows[some]] = True
            block -= 1
        until, block = np.full(clients.shape, np.inf), first
        while not np.isfinite(until).all():  # forwards, to the first event that changes the state
            rows = np.flatnonzero(~np.isfinite(until))
            times, states = self._events(seed, clients[rows], block)
            changes = (times > time) & np.isfinite(times) & (states != there[rows, None])
            some = changes.any(axis=1)
            until[rows[some]] = times[some, changes.argmax(axis=1)[some]]
            block += 1
        return there, until

    @property
    def _block(self) -> float:
        """The seconds of a block of time."""
        return _EVENTS / (1 / self.mean_on + 1 / self.mean_off)

    def _events(self, seed: int, clients: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the times of the events in a block, ascending, and the states after them.

        Both are ``[clients, _MOST]``; the times after the last event are ``inf``.
        """
        number = np.searchsorted(_POISSON, uniforms(seed, "events", clients, np.int64(block)))
        places = np.arange(_MOST)
        each = (clients[:, None], np.int64(block), places)
        times = (block + uniforms(seed, "times", *each)) * self._block
        times = np.sort(np.where(places < number[:, None], times, np.inf), axis=1)
        on = self.mean_on / (self.mean_on + self.mean_off)
        return times, uniforms(seed, "states", *each) < on


def _poisson() -> np.ndarray:
    """Returns the distribution function of the Poisson distribution of the number of events."""
    numbers = np.arange(1, _MOST + 1)
    weights = np.concatenate([[1.0], np.cumprod(_EVENTS / numbers)])
    return np.cumsum(weights)[:-1] * np.exp(-_EVENTS)


_POISSON = _poisson()
