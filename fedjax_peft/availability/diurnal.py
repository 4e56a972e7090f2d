"""Clients that are available at the same time of every day, as in their local time."""

from dataclasses import dataclass

import numpy as np

from fedjax_peft.availability.draws import uniforms
from fedjax_peft.contracts import Availability
from fedjax_peft.contracts.arguments import Positive, PositiveShare, Share
from fedjax_peft.contracts.part import part


@part
def diurnal(
    period: Positive = 86_400.0, share: PositiveShare = 0.5, spread: Share = 1.0
) -> Availability:
    """Clients are available for a part of every day.

    A client is available from the beginning of its day for ``share * period`` seconds, such as the
    night, in which phones are charged. The beginnings of the clients' days are uniformly
    distributed over ``spread * period`` seconds, as time zones are. The model is our choice.

    Args:
      period: seconds of a day.
      share: the share of the day in which a client is available.
      spread: 0: all days begin at the time 0. 1: they begin at any time, so that the number of
        available clients is the same at all times, up to chance.
    """
    return Availability("diurnal", _Diurnal(float(period), float(share), float(spread)))


@dataclass(frozen=True)
class _Diurnal:
    period: float
    share: float
    spread: float

    def __call__(
        self, seed: int, clients: np.ndarray, time: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns availability and the next change as :class:`Availability` says."""
        clients = np.asarray(clients)
        if self.share == 1.0:
            return np.ones(clients.shape, bool), np.full(clients.shape, np.inf)
        begins = uniforms(seed, "diurnal", clients) * self.spread * self.period
        day = np.floor((time - begins) / self.period)
        start = begins + day * self.period
        end = start + self.share * self.period
        there = time < end
        # A change that rounding puts at the present time would come again and again.
        after = np.nextafter(time, np.inf)
        return there, np.maximum(np.where(there, end, start + self.period), after)
