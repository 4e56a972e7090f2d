"""What a client keeps as a record of bytes, and the memory or file that holds records in slots.

Files are read and written by ``pread`` and ``pwrite``. A memory map would be shorter, but a full
disk would kill the process (SIGBUS) instead of raising an error, and the pages of the map would
count as memory of the process.
"""

import itertools
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedjax_peft.contracts import PyTree


class ClientRow(NamedTuple):
    """What one client keeps, or, with a leading axis, what several clients keep."""

    client_state: PyTree = ()
    """As ``State.client_state``."""
    memory: PyTree = ()
    """As ``TransformState.memory``."""


class Packing:
    """The places of all leaves of a row in a record."""

    def __init__(self, row: ClientRow, stored: Sequence[Sequence[Any]] = ()):
        """Computes the places.

        Args:
          stored: name, shape and type of all leaves of a record, if it has more than the row, which
            are then its first.
        """
        paths, self._structure = jax.tree_util.tree_flatten_with_path(row)
        self.names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
        self.shapes = [tuple(np.shape(x)) for _, x in paths]
        self.dtypes = [np.dtype(x.dtype) for _, x in paths]
        self._own = len(paths)
        for name, shape, dtype in stored[self._own :]:
            self.names.append(name)
            self.shapes.append(tuple(shape))
            self.dtypes.append(np.dtype(dtype))
        sizes = [
            int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        self._ends = np.cumsum([0, *sizes])
        self.nbytes = int(self._ends[-1])

    def pack(self, rows: ClientRow) -> np.ndarray:
        """Returns the records of stacked rows, uint8 ``[n, nbytes]``."""
        leaves = [np.ascontiguousarray(x) for x in jax.tree.leaves(rows)]
        n = len(leaves[0])
        records = np.empty((n, self.nbytes), np.uint8)
        for x, (first, last) in zip(leaves, self._parts(), strict=True):
            records[:, first:last] = x.reshape(n, -1).view(np.uint8)
        return records

    def unpack(self, records: np.ndarray) -> ClientRow:
        """Returns the stacked rows of records, as arrays that do not share their memory."""
        leaves = [*self.named(records).values()]
        return jax.tree.unflatten(self._structure, leaves[: self._own])

    def named(self, records: np.ndarray) -> dict[str, np.ndarray]:
        """Returns name -> array ``[n, ...]`` of all leaves of records, also of those not read."""
        places = zip(self.names, self._parts(), self.shapes, self.dtypes, strict=True)
        return {
            name: np.ascontiguousarray(records[:, first:last])
            .reshape(-1)
            .view(dtype)
            .reshape(len(records), *shape)
            for name, (first, last), shape, dtype in places
        }

    def zeros(self, n: int) -> ClientRow:
        """Returns rows of zeros, ``[n, ...]``."""
        return self.unpack(np.zeros((n, self.nbytes), np.uint8))

    def _parts(self) -> Iterator[tuple[int, int]]:
        ends = self._ends.tolist()
        return itertools.pairwise(ends)


class Medium(Protocol):
    """Numbered slots that hold records."""

    name: str
    """For error messages."""

    def read(self, slot: int, record: np.ndarray) -> None:
        """Reads a slot into ``record``; bytes that are not there stay as they are."""

    def write(self, slot: int, record: np.ndarray) -> None:
        """Writes a slot."""

    def sync(self) -> None:
        """Returns when everything that was written is safe."""


class MemoryMedium:
    """Slots in host memory, in pieces that are allocated when they are needed."""

    name = "host memory"

    def __init__(self, nbytes: int):
        self._nbytes, self._each = nbytes, max(1, _PIECE // max(nbytes, 1))
        self._pieces: list[np.ndarray] = []

    def read(self, slot: int, record: np.ndarray) -> None:
        record[:] = self._pieces[slot // self._each][slot % self._each]

    def write(self, slot: int, record: np.ndarray) -> None:
        while slot // self._each >= len(self._pieces):
            self._pieces.append(np.empty((self._each, self._nbytes), np.uint8))
        self._pieces[slot // self._each][slot % self._each] = record

    def sync(self) -> None:
        pass


_PIECE = 1 << 26
"""Bytes of a piece of memory. A process has about 65,000 memory maps, so pieces are large."""


class FileMedium:
    """Slots one after the other in a file."""

    def __init__(self, descriptor: int, name: str, nbytes: int):
        self._file, self.name, self._nbytes = descriptor, name, nbytes
        weakref.finalize(self, os.close, descriptor)

    def read(self, slot: int, record: np.ndarray) -> None:
        view, start = record.data, slot * self._nbytes
        while view:
            done = os.preadv(self._file, [view], start)
            if not done:  # the file is too short; the checksum will tell
                return
            view, start = view[done:], start + done

    def write(self, slot: int, record: np.ndarray) -> None:
        view, start = record.data, slot * self._nbytes
        while view:
            done = os.pwrite(self._file, view, start)
            view, start = view[done:], start + done

    def sync(self) -> None:
        os.fsync(self._file)
