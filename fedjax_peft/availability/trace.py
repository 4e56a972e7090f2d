"""Clients that are available in the intervals of a file."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedjax_peft.contracts import Availability
from fedjax_peft.contracts.arguments import Positive
from fedjax_peft.contracts.part import part
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError

_HEADER = ["client", "start", "end"]
_MOST_BYTES = 1 << 30


@part
def trace(path: str | Path, period: Positive | None = None) -> Availability:
    """Clients are available in the intervals that a file lists.

    The file is CSV with the header ``client,start,end``: the number of a client from 0, and the
    simulated seconds from which on and up to which it is available. The lines can have any order;
    intervals of a client that touch or overlap are joined, also where the trace begins again. A
    client without a line is never available.

    Args:
      path: the file.
      period: seconds after which the whole trace begins again, at least the last ``end``; None: it
        ends there.

    Raises:
      InputError: the file cannot be read, or a line of it makes no sense.
    """
    intervals = _read(Path(path))
    last = max(end for _, _, end in intervals)
    if period is not None and period < last:
        raise InputError(
            f"period = {period:g} of trace is before the end of its last interval, {last:g}."
        )
    clients, starts, ends = _joined(intervals)
    return Availability("trace", _Trace(clients, starts, ends, period))


def _read(path: Path) -> list[tuple[int, float, float]]:
    """Returns the lines of a file."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"The trace {str(path)!r} is larger than 1 GiB.")
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file)
            header = [name.strip() for name in next(rows, [])]
            if header != _HEADER:
                raise InputError(
                    f"The trace {str(path)!r} must begin with the line 'client,start,end', not"
                    f" {show(','.join(header))}."
                )
            found = [_interval(path, number, row) for number, row in enumerate(rows, 2) if row]
    except InputError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        why = getattr(error, "strerror", None) or "it is not a CSV file in UTF-8"
        raise InputError(f"The trace {str(path)!r} cannot be read: {why}.") from None
    if not found:
        raise InputError(f"The trace {str(path)!r} has no interval: nobody is ever available.")
    return found


def _interval(path: Path, number: int, row: list[str]) -> tuple[int, float, float]:
    """Returns (client, start, end) of a line."""
    try:
        client, start, end = int(row[0]), float(row[1]), float(row[2])
        good = len(row) == 3 and 0 <= client < 2**31 and 0 <= start < end < float("inf")
    except (ValueError, IndexError):
        good = False
    if not good:
        raise InputError(
            f"Line {number} of the trace {str(path)!r} is {show(','.join(row))}. It must have a"
            " client number from 0, and two numbers of seconds from 0 up, of which the second is"
            " the larger one."
        )
    return client, start, end


def _joined(intervals: list[tuple[int, float, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns clients, starts and ends of disjoint intervals, by client and time."""
    clients, starts, ends = list[int](), list[float](), list[float]()
    for client, start, end in sorted(intervals):
        if clients and clients[-1] == client and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            clients.append(client)
            starts.append(start)
            ends.append(end)
    return np.array(clients), np.array(starts), np.array(ends)


@dataclass(frozen=True, eq=False)
class _Trace:
    clients: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    period: float | None

    def __call__(
        self, seed: int, clients: np.ndarray, time: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns availability and the next change as :class:`Availability` says."""
        clients = np.asarray(clients)
        passed = 0.0 if self.period is None else np.floor(time / self.period) * self.period
        first = np.searchsorted(self.clients, clients, "left")
        last = np.searchsorted(self.clients, clients, "right")
        begun = self._begun(first, last, time - passed)
        at = np.maximum(begun - 1, 0)
        there = (begun > first) & (time - passed < self.ends[at])
        more = begun < last
        starts = np.where(more, self.starts[np.minimum(begun, len(self.starts) - 1)], np.inf)
        if self.period is not None:  # the first interval of the next repetition
            again = self.starts[np.minimum(first, len(self.starts) - 1)] + self.period
            starts = np.where(more, starts, np.where(last > first, again, np.inf))
        until = np.where(there, self._end(first, last, at), starts) + passed
        return there, np.maximum(until, np.nextafter(time, np.inf))

    def _end(self, first: np.ndarray, last: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Returns the ends of intervals; one that meets the next repetition's first goes on."""
        ends = self.ends[at]
        if self.period is None:
            return ends
        begin = np.minimum(first, len(self.starts) - 1)
        goes_on = (ends == self.period) & (self.starts[begin] == 0)
        always = goes_on & (last - first == 1)
        return np.where(always, np.inf, np.where(goes_on, self.period + self.ends[begin], ends))

    def _begun(self, first: np.ndarray, last: np.ndarray, time: float) -> np.ndarray:
        """Returns, for each client, the index after its last interval that has begun.

        It is a binary search in the part ``[first, last)`` of each client.
        """
        low, high = first.copy(), last.copy()
        while (low < high).any():
            middle = (low + high) // 2
            begun = (low < high) & (self.starts[np.minimum(middle, len(self.starts) - 1)] <= time)
            high = np.where(begun | (low >= high), high, middle)
            low = np.where(begun, middle + 1, low)
        return low
