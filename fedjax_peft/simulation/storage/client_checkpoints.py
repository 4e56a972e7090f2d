"""Checkpoints of clients that are in a store: the run directory's ``clients``.

A checkpoint holds a version of the store: the slot and the checksum of every client's record. The
records themselves are in one file, so a checkpoint only writes what has changed since the last one.
A state whose clients are in a temporary file moves into the run's file when the run begins. A state
whose clients are in host memory stays there, and its changed records are copied at checkpoints.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft.engine.state import State
from fedjax_peft.engine.stores.client_records import ClientRow
from fedjax_peft.engine.stores.client_store import StoredClients, room_for
from fedjax_peft.engine.stores.store_files import open_store, start_index


def index_template(state: State) -> State:
    """Returns a state with an index in the place of stored clients, as a checkpoint has it."""
    if not isinstance(state.client_state, StoredClients):
        return state
    return state._replace(client_state=_on_device(state.client_state.index))


class ClientCheckpoints:
    """The clients of one run on disk; does nothing for states whose clients are on the device."""

    def __init__(self, run: Path | None, *, host: bool):
        """Opens nothing yet.

        Args:
          host: whether the clients stay in host memory between checkpoints.
        """
        self._directory, self._host = None if run is None else run / "clients", host
        self._saved: dict[int, StoredClients] = {}
        self._mirror: StoredClients | None = None
        self._start: StoredClients | None = None

    def begin(self, state: State) -> State:
        """Returns the state of a new run, with its clients in the run directory."""
        clients = state.client_state
        if self._directory is None or not isinstance(clients, StoredClients):
            return state
        row = _first(clients)
        store = open_store(self._directory, row, len(clients), "new")
        started = store.start(row)
        self._start = started.copy()  # its record stays in slot 0, for ever
        return self._with(state, started)

    def resume(self, state: State, saved: dict[int, State], round_index: int) -> State:
        """Returns the state of a checkpoint, whose clients are in the run directory.

        Args:
          state: the state before the first round, whose clients are in a store.
          saved: round -> the state of each readable checkpoint, with an index as client state. The
            records of all of them are kept.
        """
        clients = state.client_state
        assert isinstance(clients, StoredClients)
        assert self._directory is not None
        row = _first(clients)
        store = open_store(self._directory, row, len(clients), "resume")
        for index, one in saved.items():
            self._saved[index] = store.open(one.client_state)
        self._start = store.open(start_index(len(clients)))
        now = self._saved[round_index].copy()
        restored = saved[round_index]
        if not self._host:
            return restored._replace(client_state=now)
        _copy(now, clients, np.flatnonzero(now.index["slot"] != 0))
        return self._with(restored._replace(client_state=clients), now)

    def write(self, state: State) -> State:
        """Returns the state as a checkpoint has it; all records are safely on disk."""
        clients = state.client_state
        if not isinstance(clients, StoredClients):
            return state
        if self._mirror is not None:
            _copy(clients, self._mirror, clients.changed())
        version = (clients if self._mirror is None else self._mirror).copy()
        version.store.sync()
        self._saved[int(state.round_index)] = version
        return state._replace(client_state=_on_device(version.index))

    def keep(self, rounds: list[int]) -> None:
        """Frees the records that only other rounds' checkpoints need."""
        self._saved = {index: one for index, one in self._saved.items() if index in rounds}

    def _with(self, state: State, clients: StoredClients) -> State:
        """Returns a state whose clients are where they stay during the run."""
        if self._host:
            assert isinstance(state.client_state, StoredClients)
            state.client_state.changed()
            self._mirror = clients
            return state
        return state._replace(client_state=clients)


def _copy(source: StoredClients, target: StoredClients, clients: np.ndarray) -> None:
    """Copies the records of some clients, as many at a time as memory has room for."""
    room = room_for(source.store.packing.nbytes)
    for first in range(0, len(clients), room):
        part = clients[first : first + room]
        target.put(part, source.take(part))


def _first(clients: StoredClients) -> ClientRow:
    """Returns what the first client keeps; before the first round all clients keep the same."""
    return jax.tree.map(lambda x: x[0], clients.take([0]))


def _on_device(index: dict[str, Any]) -> dict[str, Any]:
    """Returns an index as arrays that a checkpoint can hold; checkpoints hold no numpy arrays."""
    return {name: jnp.array(x) for name, x in index.items()}
