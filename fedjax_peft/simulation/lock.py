"""The lock file of a run directory: one process at a time writes to it."""

import contextlib
import functools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import naming

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = "run.lock"
BEAT = 15.0
"""Seconds between two heartbeats; a heartbeat sets the lock file's modification time."""
SILENCE = 120.0
"""Seconds without a heartbeat after which the lock of another machine is stale."""


class RunLock:
    """The right to write to a run directory, from :meth:`take` to :meth:`release`.

    The file holds the process, its host and the start time of the lock. A lock is stale, and is
    replaced, if its process has ended. A process on another host or in another container cannot be
    looked up; its lock is stale if the heartbeats have stopped.
    """

    def __init__(self, path: Path, content: dict[str, Any]):
        self._path, self._content = path, content
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="run.lock")

    @classmethod
    def take(cls, directory: Path) -> "RunLock":
        """Takes the lock of an existing directory.

        Raises:
          InputError: another process, or this one, already holds the lock.
        """
        path, content = directory / NAME, _content()
        while not _create(path, content):
            other = _read(path)
            if not _is_stale(path, other):
                raise InputError(_refusal(directory, other))
            _remove(path, functools.partial(_is_stale, path))
        lock = cls(path, content)
        lock._thread.start()
        return lock

    def release(self) -> None:
        """Removes the file, unless another process has taken over the lock."""
        self._released.set()
        self._thread.join()
        _remove(self._path, lambda content: content == self._content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._released.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self._path)


def _content() -> dict[str, Any]:
    """Returns what identifies this process, and this lock."""
    pid = os.getpid()
    return {
        "pid": pid,
        "host": socket.gethostname(),
        "namespace": _namespace(),
        "process_start": _start_of(pid),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "token": secrets.token_hex(8),
    }


def _create(path: Path, content: dict[str, Any]) -> bool:
    """Returns whether the file was created; False if it already exists."""
    with naming(path):
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
    return True


def _read(path: Path) -> dict[str, Any]:
    """Returns the content of a lock, {} if it is gone or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_stale(path: Path, content: dict[str, Any]) -> bool:
    pid, mine = content.get("pid"), _content()
    here = all(content.get(key) == mine[key] for key in ("host", "namespace"))
    if here and type(pid) is int and os.name == "posix":
        return not _is_alive(pid, content.get("process_start"))
    try:
        return time.time() - path.stat().st_mtime > SILENCE
    except OSError:  # it is gone
        return True


def _remove(path: Path, condition: Callable[[dict[str, Any]], bool]) -> None:
    """Removes the lock if `condition(content)` holds.

    The check and the removal are atomic: both happen under the operating system's lock of this
    file, and every removal calls this function. So a new lock that another process has created in
    the meantime is never removed in place of the old lock.
    """
    with naming(path), contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return  # another process has removed the file that was opened
        if condition(_read(path)):
            path.unlink()


def _is_alive(pid: int, start: Any) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # the process of another user, which is alive
    now = _start_of(pid)
    return now is None or (now != "" and (start is None or now == start))


def _start_of(pid: int) -> str | None:
    """Returns the start time of a process, "" if it has ended, None if the time is not known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # from the third field on; the second is the name
    return "" if fields[0] in "ZX" else fields[19]


def _namespace() -> str:
    """Returns the boot and container in which process ids are valid, "" if they are not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _refusal(directory: Path, content: dict[str, Any]) -> str:
    pid, host, since = (show(content.get(key, "?")) for key in ("pid", "host", "since"))
    mine = content.get("pid") == os.getpid() and content.get("host") == socket.gethostname()
    who = "this process" if mine else f"process {pid} on {host}"
    advice = "" if mine else f" If that process is gone, delete {directory / NAME}."
    return (
        f"{directory} is in use by another run, of {who}, since {since}. Two runs in one directory"
        " would mix their results: wait until it ends, or choose another directory with --out."
        f"{advice}"
    )
