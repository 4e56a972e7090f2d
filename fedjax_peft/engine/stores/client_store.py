"""A store for what the clients keep between rounds, in host memory or in a file.

A client's state is packed into one *record* of bytes, so that a client is read and written at once.
Records are in *slots*. A version of all clients (:class:`StoredClients`) says for every client in
which slot its record is, and which checksum the record has:

* All clients start with the same state, so at first they share one slot. A client gets a slot when
  it trains for the first time. Clients that never train need no room.
* Versions share slots. A slot is overwritten only if no other version refers to it; otherwise the
  record goes into a free slot. So a checkpoint is a version that is kept: the slots and checksums
  of all clients, 8 bytes per client. Its records are on disk already and stay as they are.

A process that is killed in the middle of a write damages only slots that no checkpoint refers to.
"""

import contextlib
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft.contracts import PyTree
from fedjax_peft.engine.stores.client_records import ClientRow, Medium, Packing
from fedjax_peft.numerics import tree
from fedjax_peft.support.errors import InputError

ClientPlace: TypeAlias = Literal["device", "host", "disk"]
"""Where the state of all clients is between rounds. ``device``: in the device's memory. ``host``:
in the host's memory. ``disk``: in a file. With ``host`` and ``disk``, only the clients of a round
are on the device."""


class ClientStore:
    """Records in slots, and how many entries of all versions refer to each slot."""

    def __init__(self, packing: Packing, clients: int, medium: Medium):
        """Makes an empty store; see :mod:`fedjax_peft.engine.stores.store_files`."""
        self.packing, self.clients, self._medium = packing, clients, medium
        self._references = np.zeros(16, np.int64)
        self._lock = threading.RLock()
        self._released: list[np.ndarray] = []
        self._worker: ThreadPoolExecutor | None = None

    def start(self, row: ClientRow) -> "StoredClients":
        """Returns the version in which all clients have the same state, ``row``."""
        record = self.packing.pack(jax.tree.map(lambda x: np.asarray(x)[None], row))[0]
        with self._lock:
            slot = int(self._free(1)[0])
            self._write(slot, record)
            self._references[slot] += self.clients
        checksum = np.full(self.clients, zlib.crc32(record), np.uint32)
        return StoredClients(self, np.full(self.clients, slot, np.int32), checksum)

    def open(self, index: dict[str, Any]) -> "StoredClients":
        """Returns the version of a checkpoint's :attr:`StoredClients.index`."""
        slot = np.array(index["slot"], np.int32)
        with self._lock:
            self._refer(slot)
        return StoredClients(self, slot, np.array(index["checksum"], np.uint32))

    def submit(self, work: Any) -> Future:
        """Runs ``work()`` in the store's thread, after everything that was given to it before."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "fedjax-peft-clients")
        return self._worker.submit(work)

    def sync(self) -> None:
        """Returns when everything that was written is safe on disk."""
        with self._naming():
            self._medium.sync()

    @property
    def slots(self) -> int:
        """The number of slots in use."""
        with self._lock:
            self._collect()
            return int(np.count_nonzero(self._references))

    def read(self, slots: np.ndarray, checksums: np.ndarray, clients: np.ndarray) -> np.ndarray:
        """Returns the records of clients, uint8 ``[n, nbytes]``; zeros for a client below 0."""
        records = np.zeros((len(clients), self.packing.nbytes), np.uint8)
        with self._lock, self._naming():
            for i, client in enumerate(clients.tolist()):
                if client < 0:
                    continue
                self._medium.read(int(slots[i]), records[i])
                if zlib.crc32(records[i]) != int(checksums[i]):
                    raise InputError(
                        f"The record of client {client} in {self._medium.name} is damaged: it does"
                        " not have its checksum. Restore the file from a backup. Without one,"
                        " delete the newest directory in the run's checkpoints and continue with"
                        " --resume from the one before; or run again."
                    )
        return records

    def replace(self, slots: np.ndarray, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Writes the new records of clients; returns their slots and checksums.

        Args:
          slots: the slots of the old records, to which a version no longer refers.
          records: uint8 ``[n, nbytes]``.
        """
        with self._lock:
            self._collect()
            shared = self._references[slots] > 1
            new = slots.copy()
            new[shared] = self._free(int(shared.sum()))
            for slot, record in zip(new.tolist(), records, strict=True):
                self._write(slot, record)
            np.subtract.at(self._references, slots[shared], 1)
            self._references[new[shared]] += 1
        return new, np.array([zlib.crc32(record) for record in records], np.uint32)

    def share(self, slots: np.ndarray) -> np.ndarray:
        """Returns a copy of a version's slots, for another version."""
        with self._lock:
            self._refer(slots)
        return slots.copy()

    def release(self, slots: np.ndarray) -> None:
        """Forgets a version. May be called at any time by the garbage collector."""
        self._released.append(slots)  # without the lock, which this thread may hold

    def _collect(self) -> None:
        while self._released:
            self._count(self._released.pop(), -1)

    def _refer(self, slots: np.ndarray) -> None:
        self._collect()
        self._count(slots, 1)

    def _count(self, slots: np.ndarray, sign: int) -> None:
        counts = np.bincount(slots)
        self._grow(len(counts))
        self._references[: len(counts)] += sign * counts

    def _free(self, n: int) -> np.ndarray:
        """Returns the first ``n`` slots to which no version refers."""
        free = np.flatnonzero(self._references == 0)
        if len(free) < n:
            self._grow(len(self._references) + n)
            free = np.flatnonzero(self._references == 0)
        return free[:n].astype(np.int32)

    def _grow(self, slots: int) -> None:
        missing = slots - len(self._references)
        if missing > 0:
            missing = max(missing, len(self._references))
            self._references = np.concatenate([self._references, np.zeros(missing, np.int64)])

    def _write(self, slot: int, record: np.ndarray) -> None:
        with self._naming():
            self._medium.write(slot, record)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Turns errors of the operating system into advice."""
        try:
            yield
        except OSError as error:
            raise InputError(
                f"The clients' state cannot be read from or written to {self._medium.name}:"
                f" {error.strerror}. If the disk is full, make room there; then continue the run"
                " from its last checkpoint with --resume."
            ) from error


class _Pending(NamedTuple):
    """The rows of a round, which are still on the device."""

    clients: np.ndarray
    rows: ClientRow
    written: Future


class StoredClients:
    """One version of what all clients keep: in ``State.client_state``, the place of the arrays.

    It is a pytree without leaves, so it goes through transformations of a state unchanged. A round
    consumes it, as it consumes the arrays of the state; :meth:`copy` returns a version that stays.
    """

    def __init__(self, store: ClientStore, slot: np.ndarray, checksum: np.ndarray):
        """Takes the slot and the checksum of every client; see :meth:`ClientStore.start`."""
        self.store = store
        self._slot, self._checksum = slot, checksum
        self._changed = np.zeros(store.clients, bool)
        self._consumed = False
        self._pending: _Pending | None = None
        self._ahead: tuple[np.ndarray, Future] | None = None

    def __del__(self) -> None:
        """Frees the slots to which no other version refers."""
        if not getattr(self, "_consumed", True):
            self.store.release(self._slot)

    def __len__(self) -> int:
        """Returns the number of clients."""
        return self.store.clients

    def is_deleted(self) -> bool:
        """Returns whether a round has consumed this version, as ``jax.Array.is_deleted``."""
        return self._consumed

    def take(self, clients: Any) -> ClientRow:
        """Returns what some clients keep, as numpy arrays ``[n, ...]``.

        Raises:
          InputError: a record is damaged or cannot be read.
        """
        self.settle()
        return self._read(np.asarray(clients, np.int64))

    def named(self, clients: Any) -> dict[str, np.ndarray]:
        """Returns everything that the records of some clients hold, by the names of the leaves."""
        self.settle()
        return self.store.packing.named(self._records(np.asarray(clients, np.int64)))

    def put(self, clients: Any, rows: ClientRow) -> None:
        """Replaces what some clients keep; every client occurs once.

        Raises:
          InputError: the records cannot be written, for example because the disk is full.
        """
        self.settle()
        self._pending = self._ahead = None  # they are older than the new rows
        self._replace(np.asarray(clients, np.int64), rows)

    def copy(self) -> "StoredClients":
        """Returns the same version, which stays when this one is consumed. No record is copied."""
        self.settle()
        made = StoredClients(self.store, self.store.share(self._slot), self._checksum.copy())
        made._changed = self._changed.copy()
        return made

    @property
    def index(self) -> dict[str, np.ndarray]:
        """The slot (int32) and the checksum (uint32) of every client's record."""
        self.settle()
        return {"slot": self._slot, "checksum": self._checksum}

    def changed(self) -> np.ndarray:
        """Returns the clients that were written since the last call."""
        self.settle()
        found = np.flatnonzero(self._changed)
        self._changed[:] = False
        return found

    # What follows overlaps reading and writing with the rounds on the device.

    def on_device(self, clients: np.ndarray, place: Any) -> ClientRow:
        """Returns what the clients of a plan's slots keep, on the device, ``[slots, ...]``.

        Args:
          clients: int32 ``[slots]``; -1 for a slot without work.
        """
        _check_alive(self)
        if self._ahead is not None and np.array_equal(self._ahead[0], clients):
            rows = self._ahead[1].result()
        else:
            rows = place(self._read(self._settled(clients)))
        if self._pending is None:
            return rows
        source = _positions(self._pending.clients, clients)
        if not (source >= 0).any():
            return rows
        more = len(jax.tree.leaves(rows)[0]) - len(source)  # rows that several devices share evenly
        source = np.pad(source, (0, more), constant_values=-1)
        return place(_merged(rows, self._pending.rows, source))

    def after(self, clients: np.ndarray, rows: ClientRow) -> "StoredClients":
        """Returns the version after a round; this one is consumed.

        The call does not wait for the round. It waits until the rows of the round before are
        written, so that the rows of one round at most wait on the device.

        Args:
          rows: on the device, ``[slots, ...]``.
        """
        _check_alive(self)
        self.settle()
        made = StoredClients(self.store, self._slot, self._checksum)
        made._changed, self._consumed = self._changed, True
        for x in jax.tree.leaves(rows):
            x.copy_to_host_async()
        made._pending = _Pending(clients, rows, Future())
        return made

    def prefetch(self, clients: np.ndarray, place: Any) -> None:
        """Begins to read the clients of the next round, and then to write those of the last one."""
        if self._ahead is not None:
            return
        known = self._settled(clients)
        ahead = self.store.submit(lambda: place(self._read(known)))
        self._ahead = (clients.copy(), ahead)
        if self._pending is not None and self._pending.written.set_running_or_notify_cancel():
            self.store.submit(self._write_pending)

    def settle(self) -> None:
        """Returns when the rows of the last round are written.

        Raises:
          InputError: they cannot be written; or a round has consumed this version.
        """
        _check_alive(self)
        if self._pending is None:
            return
        if not self._pending.written.running() and not self._pending.written.done():
            self._pending.written.set_running_or_notify_cancel()
            self._write_pending()
        self._pending.written.result()

    def _write_pending(self) -> None:
        assert self._pending is not None
        clients, rows, written = self._pending
        try:
            live = np.flatnonzero(clients >= 0)
            host = jax.tree.map(lambda x: np.asarray(x)[live], jax.device_get(rows))
            if len(live):
                self._replace(clients[live], host)
            written.set_result(None)
        except BaseException as error:
            written.set_exception(error)

    def _settled(self, clients: np.ndarray) -> np.ndarray:
        """Returns the clients, -1 for those whose newest rows are still on the device."""
        if self._pending is None:
            return clients
        return np.where(_positions(self._pending.clients, clients) >= 0, -1, clients)

    def _read(self, clients: np.ndarray) -> ClientRow:
        return self.store.packing.unpack(self._records(clients))

    def _records(self, clients: np.ndarray) -> np.ndarray:
        of = np.maximum(clients, 0)
        return self.store.read(self._slot[of], self._checksum[of], clients)

    def _replace(self, clients: np.ndarray, rows: ClientRow) -> None:
        new, checksums = self.store.replace(self._slot[clients], self.store.packing.pack(rows))
        self._slot[clients], self._checksum[clients] = new, checksums
        self._changed[clients] = True


jax.tree_util.register_pytree_node(StoredClients, lambda x: ((), x), lambda x, _: x)


def _check_alive(version: StoredClients) -> None:
    if version.is_deleted():
        raise InputError(
            "The clients' state was consumed by an earlier round. Go on from the state that the"
            " round returned, or give state.copy() to the round."
        )


def _positions(clients: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns where each wanted client is among ``clients``, int32; -1 if it is not there."""
    where = {int(client): i for i, client in enumerate(clients) if client >= 0}
    return np.array([where.get(int(client), -1) for client in wanted], np.int32)


@jax.jit
def _merged(rows: ClientRow, newer: ClientRow, source: Array) -> ClientRow:
    """Returns rows ``[slots, ...]``, taken from ``newer`` where ``source`` is not -1."""
    return tree.where(source >= 0, tree.take(newer, jnp.maximum(source, 0)), rows)


def client_rows(client_state: PyTree, client: int) -> PyTree:
    """Returns what one client keeps, from a state's ``client_state`` in either form."""
    if isinstance(client_state, StoredClients):
        rows = client_state.take([client]).client_state
        return jax.tree.map(lambda x: jnp.asarray(x[0]), rows)
    return tree.take(client_state, client)


def client_count(client_state: PyTree) -> int:
    """Returns the number of clients that keep a state, from ``client_state`` in either form."""
    if isinstance(client_state, StoredClients):
        names = client_state.store.packing.names
        return len(client_state) if any(n.startswith("client_state") for n in names) else 0
    return next((x.shape[0] for x in jax.tree.leaves(client_state)), 0)


def room_for(record_bytes: int) -> int:
    """Returns how many clients are handled at once when all clients are evaluated or tuned."""
    return max(1, min(_MOST_BYTES // max(record_bytes, 1), _MOST_CLIENTS))


_MOST_BYTES, _MOST_CLIENTS = 1 << 28, 1 << 12
"""Bytes and number of the clients that are on the device at the same time outside of rounds."""
