"""Where a client store has its records: in host memory, in a temporary file, or with a run."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from fedjax_peft.engine.stores.client_records import ClientRow, FileMedium, MemoryMedium, Packing
from fedjax_peft.engine.stores.client_store import ClientPlace, ClientStore
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file


def store_in(place: ClientPlace, kept: Callable[[], ClientRow], clients: int) -> ClientStore | None:
    """Returns the store of what clients keep; None on the device, or if it is nothing.

    Args:
      kept: returns what one client keeps; only the shapes are computed.
    """
    if place == "device" or not jax.tree.leaves(row := jax.eval_shape(kept)):
        return None
    return (memory_store if place == "host" else temporary_store)(row, clients)


def memory_store(row: ClientRow, clients: int) -> ClientStore:
    """Returns an empty store in host memory for rows of this structure and these shapes."""
    packing = Packing(row)
    return ClientStore(packing, clients, MemoryMedium(packing.nbytes))


def temporary_store(row: ClientRow, clients: int) -> ClientStore:
    """Returns an empty store in a file that disappears with the process, even if it is killed.

    The file is in the directory for temporary files (the environment variable ``TMPDIR``).
    """
    packing = Packing(row)
    with tempfile.TemporaryFile() as file:
        descriptor = os.dup(file.fileno())
    name = f"a temporary file in {tempfile.gettempdir()}"
    return ClientStore(packing, clients, FileMedium(descriptor, name, packing.nbytes))


def start_index(clients: int) -> dict[str, np.ndarray]:
    """Returns an index in which all clients have slot 0, the start of a run directory's store."""
    return {"slot": np.zeros(clients, np.int32), "checksum": np.zeros(clients, np.uint32)}


_RECORDS, _FORMAT = "records.bin", "format.json"


def open_store(
    directory: Path, row: ClientRow, clients: int, mode: Literal["new", "resume", "read"]
) -> ClientStore:
    """Returns the store of a run directory.

    Args:
      row: the structure and the shapes of one client. To ``read``, its last leaves may be missing.
      mode: ``new`` removes all records; ``resume`` goes on from a checkpoint; ``read`` never
        writes.
    """
    path, packing = directory / _RECORDS, Packing(row)
    facts = _facts(packing, clients)
    try:
        if mode == "new":
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            replace_file(directory / _FORMAT, (json.dumps(facts, indent=1) + "\n").encode())
        else:
            found = json.loads((directory / _FORMAT).read_text())
            _check_facts(path, found, facts)
            packing = Packing(row, found["leaves"])
            flags = os.O_RDONLY if mode == "read" else os.O_RDWR
            descriptor = os.open(path, flags | os.O_CLOEXEC)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"The clients' state in {directory} cannot be opened: {reason}.") from None
    return ClientStore(packing, clients, FileMedium(descriptor, str(path), packing.nbytes))


def has_store(directory: Path) -> bool:
    """Returns whether a directory holds records of clients."""
    return (directory / _FORMAT).exists()


def _facts(packing: Packing, clients: int) -> dict[str, Any]:
    leaves = zip(packing.names, packing.shapes, packing.dtypes, strict=True)
    return {
        "format": 1,
        "clients": clients,
        "record_bytes": packing.nbytes,
        "leaves": [[name, list(shape), str(dtype)] for name, shape, dtype in leaves],
    }


def _check_facts(path: Path, found: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raises InputError if records do not begin with these leaves, or are of other clients."""
    leaves = found["leaves"][: len(facts["leaves"])]
    if (found["format"], found["clients"], leaves) != (1, facts["clients"], facts["leaves"]):
        raise InputError(
            f"The records in {path} are of another model, another algorithm or other clients, so"
            " this run cannot use them."
        )
