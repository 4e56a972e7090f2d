"""Checkpoints of a run: server state, client state, round index. Atomic, by orbax."""

import contextlib
import errno
import functools
import io
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedjax_peft.contracts import PyTree
from fedjax_peft.engine.devices.layout import on_one_device
from fedjax_peft.engine.state import KEPT, State
from fedjax_peft.engine.stores.client_records import ClientRow
from fedjax_peft.engine.stores.store_files import has_store, open_store, start_index
from fedjax_peft.numerics import tree
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.libraries import log_level

_log = logging.getLogger(__name__)
_quiet = functools.partial(log_level, "absl")
"""Orbax logs every step at INFO, through absl, which would break up a progress display."""

_ONE_WRITE = threading.Lock()
"""Orbax never returned when several threads of a process saved at the same time, so they take
turns."""


def saved_parts(state: State) -> tuple:
    """Returns the parts of a state that a checkpoint stores, which are those of ``KEPT``.

    These are (server, client state), followed by a dict of the other states if at least one of
    them has leaves.
    """
    server, client_state, *_ = (getattr(state, name) for name in KEPT)
    others = {name: getattr(state, name) for name in KEPT[2:]}
    others = {name: value for name, value in others.items() if jax.tree.leaves(value)}
    return (server, client_state, *([others] if others else []))


def with_saved_parts(state: State, parts: tuple) -> State:
    """Returns a state with the parts that a checkpoint holds; see :func:`saved_parts`."""
    server, client_state, *others = parts
    state = state._replace(server=server, client_state=client_state)
    return state._replace(**others[0]) if others else state


class Checkpoints:
    """The checkpoints of one run directory; the last two are kept."""

    @_quiet(logging.WARNING)
    def __init__(self, directory: Path) -> None:
        self._manager = ocp.CheckpointManager(
            directory.resolve(),
            options=ocp.CheckpointManagerOptions(max_to_keep=2),
            item_handlers=ocp.StandardCheckpointHandler(),
        )

    @property
    @_quiet(logging.WARNING)
    def latest(self) -> int | None:
        """The round of the newest complete checkpoint."""
        return self._manager.latest_step()

    @_quiet(logging.WARNING)
    def save(self, round_index: int, state: PyTree) -> None:
        """Saves the state after round ``round_index``; returns when it is safely on disk.

        Raises:
          InputError: the checkpoint cannot be written, for example because the disk is full;
            earlier checkpoints stay valid.
        """
        if self.latest == round_index:
            return
        directory = Path(self._manager.directory)
        with _ONE_WRITE:
            try:
                _check_room(directory, state)
                # Threads of orbax print messages if a write fails; the exception suffices.
                with _quiet(logging.CRITICAL), contextlib.redirect_stderr(io.StringIO()):
                    self._manager.save(round_index, args=ocp.args.StandardSave(state))
                    self._manager.wait_until_finished()
            except Exception as error:  # orbax raises many kinds
                for path in directory.glob("*.orbax-checkpoint-tmp*"):  # nothing ever reads these
                    shutil.rmtree(path, ignore_errors=True)
                raise InputError(
                    f"The checkpoint of round {round_index} cannot be written to {directory}:"
                    f" {_reason(error)}. If the disk is full, make room there; then continue the"
                    " run from its last checkpoint with --resume."
                ) from error

    @_quiet(logging.WARNING)
    def restore(self, template: PyTree, last: int) -> tuple[int, PyTree] | None:
        """Returns (round, state) of the newest readable checkpoint, None if there is no checkpoint.

        Newer checkpoints, which cannot be read, are removed, because orbax does not save a round
        that is older than its newest checkpoint.

        Args:
          template: a state of the same structure and shapes; its numpy arrays are restored as
            numpy arrays.
          last: the last round whose metrics are known; later checkpoints are not used.

        Raises:
          InputError: checkpoints exist, but none of them fits the state or can be read.
        """
        steps, abstract = self._manager.all_steps(), _abstract(template)
        if not steps:
            return None

        def read(round_index: int) -> PyTree:
            if round_index > last:
                raise ValueError(f"the metrics end at round {last}")
            wanted = self._with_stored_places(round_index, abstract)
            return self._manager.restore(round_index, args=ocp.args.StandardRestore(wanted))

        found, state, reasons = _newest(self._manager, read)
        for round_index in steps:
            if round_index > found:
                self._manager.delete(round_index)
        if reasons:
            _log.warning("Resumed from round %d; checkpoints skipped: %s", found, reasons)
        return found, state

    @_quiet(logging.WARNING)
    def readable(self, template: PyTree) -> dict[int, PyTree]:
        """Returns round -> state of all checkpoints that can be read."""
        found, args = {}, ocp.args.StandardRestore(_abstract(template))
        for round_index in self.rounds:
            with contextlib.suppress(Exception):  # orbax raises many kinds
                found[round_index] = self._manager.restore(round_index, args=args)
        return found

    @property
    @_quiet(logging.WARNING)
    def rounds(self) -> list[int]:
        """The rounds of all complete checkpoints."""
        return sorted(self._manager.all_steps())

    def _with_stored_places(self, round_index: int, template: PyTree) -> PyTree:
        """Returns the template with as many places in its history as the checkpoint has.

        A run that is continued for more rounds may need more places; it adds them later.
        """
        stored = self._manager.item_metadata(round_index).tree
        shapes = {leaf.name: tuple(leaf.shape) for leaf in jax.tree.leaves(stored)}

        def one(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            if "history" not in name.split(".")[:2] or name not in shapes:
                return leaf
            shape = (*shapes[name][:1], *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding)

        return jax.tree.map_with_path(one, template)

    @_quiet(logging.WARNING)
    def close(self) -> None:
        """Releases orbax's threads."""
        self._manager.close()


def _abstract(template: PyTree) -> PyTree:
    """Returns the shapes and the places of a state's arrays."""
    return jax.tree.map(
        lambda x: (
            x
            if isinstance(x, np.ndarray)
            else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        ),
        template,
    )


def read_checkpoint(
    directory: Path, server: PyTree, client_state: PyTree
) -> tuple[int, tuple[PyTree, PyTree, dict[str, PyTree]]]:
    """Returns (round, (server's state, client state, other states by the name of their field)).

    The client state is as ``State.client_state`` has it; the other states are nested dicts and
    lists, with the names of their leaves. The number of clients is read from the checkpoint.
    Nothing on disk is changed.

    Args:
      server: shapes of the server's state.
      client_state: shapes of the state of one client.
    """
    with (
        _quiet(logging.CRITICAL),  # orbax warns about read_only, and prints damaged arrays
        ocp.CheckpointManager(
            directory.resolve(),
            options=ocp.CheckpointManagerOptions(read_only=True),
            item_handlers=ocp.StandardCheckpointHandler(),
        ) as manager,
    ):

        def read(round_index: int) -> tuple[PyTree, PyTree, dict[str, PyTree]]:
            _, stored, *others = manager.item_metadata(round_index).tree
            clients = next((x.shape[0] for x in jax.tree.leaves(stored)), 0)
            stacked = jax.eval_shape(functools.partial(tree.broadcast, n=clients), client_state)
            in_store = clients and has_store(directory.parent / "clients")
            if in_store:
                stacked = start_index(clients)
            template = on_one_device((server, stacked, *others))
            args = ocp.args.StandardRestore(template)
            found, kept, *others = manager.restore(round_index, args=args)
            if in_store:
                row = ClientRow(client_state)
                kept = open_store(directory.parent / "clients", row, clients, "read").open(kept)
            return found, kept, others[0] if others else {}

        round_index, found, reasons = _newest(manager, read)
        if reasons:
            text = "What server and clients keep is that of round %d; checkpoints skipped: %s"
            _log.warning(text, round_index, reasons)
        return round_index, found


def _newest(
    manager: ocp.CheckpointManager, read: Callable[[int], Any]
) -> tuple[int, Any, list[str]]:
    """Returns the round of the newest readable checkpoint, what it holds, and why not a newer one.

    Raises:
      InputError: there is no checkpoint that can be read.
    """
    reasons: list[str] = []
    for round_index in sorted(manager.all_steps(), reverse=True):
        try:
            return round_index, read(round_index), reasons
        except InputError:
            raise
        except Exception as error:  # orbax raises many kinds
            reasons.append(f"round {round_index}: {_reason(error)}")
    why = "; ".join(reasons) or "there is none"
    raise InputError(f"No checkpoint in {manager.directory} can be restored: {why}.")


_SYSTEM = re.compile(
    "|".join(
        os.strerror(code)
        for code in (
            *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS),
            *(errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENAMETOOLONG, errno.ENOTDIR),
        )
    )
)
"""Error messages of the operating system. tensorstore puts a long text of its own before them."""


def _reason(error: Exception) -> str:
    """Returns the operating system's message in an error, or the first sentence of the error."""
    if found := _SYSTEM.search(str(error)):
        return found[0]
    return (str(error).strip() or repr(error)).splitlines()[0].partition(". ")[0]


def _check_room(directory: Path, state: PyTree) -> None:
    """Raises OSError if the disk has no room for a state.

    Without this check orbax fails in several threads, and each of them prints a traceback.
    """
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    if shutil.disk_usage(directory).free < size + _OVERHEAD:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))


_OVERHEAD = 1 << 16
"""Approximate bytes that a checkpoint needs besides the arrays, for names and shapes."""
