"""The lock file of a run directory: one process at a time writes to it.

The operating system holds the lock for the open file, and frees it when the process ends, however
it ends. A file system without such locks gives no protection. The lock of a process on another
machine may be held although that machine is gone, or look free although it is not; then only the
time since the last sign of life can tell (:meth:`RunLock.holder`).
"""

import contextlib
import json
import os
import secrets
import socket
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Self, TextIO

from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import naming

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = "run.lock"
_SIGNS = (NAME, "metrics.jsonl", "environment.json", "checkpoints")
"""What a run at work writes in its directory."""


_MOUNTS = Path("/proc/self/mountinfo")
_LOCAL = {"nolock", "local_lock=all", "local_lock=flock", "localflock"}
"""Options of NFS and Lustre with which a machine keeps locks to itself."""


class InUse(InputError):
    """Another process, or this one, holds the lock of a directory."""


class Holder(NamedTuple):
    """Who has the lock of a run directory."""

    pid: int
    host: str
    since: str
    silent: float
    """Seconds since the last sign of life: a round, a checkpoint."""

    @property
    def elsewhere(self) -> bool:
        """Whether it is a process of another machine."""
        return self.host != socket.gethostname()

    def __str__(self) -> str:
        """Returns the process in words."""
        return f"process {self.pid} on {self.host}"


class RunLock:
    """The right to write to a run directory, from :meth:`take` to :meth:`release`.

    The file says who has it: the process, its host, and since when.
    """

    def __init__(self, path: Path, file: TextIO):
        self._path, self._file = path, file

    @classmethod
    def take(cls, directory: Path, *, wait: float = 0.0) -> "RunLock":
        """Takes the lock of an existing directory.

        Args:
          wait: seconds to wait for a process that holds it.

        Raises:
          InUse: another process, or this one, holds the lock.
          InputError: Windows has no such locks.
        """
        if fcntl is None:
            raise InputError(
                "A run with a directory needs Linux or macOS. On Windows, use Linux inside Windows"
                " (WSL2: `wsl --install`), or run without a directory: leave `out` out in Python."
            )
        path, end = directory / NAME, time.monotonic() + wait
        while True:
            with naming(path):
                file = path.open("a", encoding="utf-8")
            locked = _locked(file)
            if locked and _is_at(path, file):
                break
            file.close()  # the process that held the lock may have removed the file meanwhile
            if not locked and time.monotonic() >= end:
                raise InUse(_refusal(directory, _read(path)))
            time.sleep(0 if locked else 0.05)
        content = {"pid": os.getpid(), "host": socket.gethostname(), "token": secrets.token_hex(8)}
        content["since"] = datetime.now().astimezone().isoformat(timespec="seconds")
        with naming(path):
            file.truncate(0)
            file.write(json.dumps(content) + "\n")
            file.flush()
        return cls(path, file)

    @classmethod
    def holder(cls, directory: Path) -> Holder | None:
        """Returns the process that has the lock of a directory; None if nobody has it.

        A lock that a process of another machine has left counts as held: it may be alive, on a file
        system whose locks hold on one machine only.
        """
        path = directory / NAME
        try:
            file = path.open(encoding="utf-8")
        except FileNotFoundError:
            return None
        with file:
            free = _locked(file, shared=True)
            content = _read(path)
        try:
            found = Holder(content["pid"], content["host"], content["since"], _silence(directory))
        except KeyError:  # it is being taken, or its process died when it took it
            return None if free else Holder(0, socket.gethostname(), "just now", 0.0)
        return found if found.elsewhere or not free else None

    @classmethod
    def break_open(cls, directory: Path) -> None:
        """Removes the lock of a process that is thought to be gone; if it is not, it will end."""
        (directory / NAME).unlink(missing_ok=True)

    def check(self) -> None:
        """Raises InUse if another process has taken this lock over."""
        if not _is_at(self._path, self._file):
            raise InUse(
                f"Another process has taken {self._path.parent} over from this one, which gave no"
                " sign of life for the time of --take-over. This one leaves it, so that the rows of"
                " two do not mix. Give --take-over more than the time of a round."
            )

    def release(self) -> None:
        """Removes the file, and then frees the lock."""
        if self._file.closed:
            return
        if _is_at(self._path, self._file):
            self._path.unlink()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def check_locks(directory: Path) -> None:
    """Raises InputError if the file system of a directory has no locks, or they do not hold."""
    if fcntl is None:
        return  # `take` says what is missing
    descriptor, name = tempfile.mkstemp(dir=directory, prefix=".lock")
    with open(descriptor, "a") as one, open(name, "a") as other:
        Path(name).unlink()
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            reason = "do not hold" if _locked(other) else ""
        except OSError as error:
            reason = f"are missing ({error.strerror})"
    if reason:
        raise InputError(
            f"Locks on the file system of {directory} {reason}, so that several workers would run"
            " the same points there. Choose a directory on a file system with locks, such as NFS 4"
            " or Lustre mounted with the option flock, or run the study in one process without"
            " --share."
        )


def locked_here_only(directory: Path, mounts: Path = _MOUNTS) -> str | None:
    """Returns the mount option by which locks in a directory hold on this machine only, if any.

    No lock can show it: they hold between all processes that this machine has.

    Args:
      mounts: Linux's list of the mounts (proc_pid_mountinfo(5)); elsewhere nothing is known.
    """
    device = directory.stat().st_dev
    with contextlib.suppress(OSError, IndexError):
        for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
            place, _, system = line.partition(" - ")
            if place.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                own, shared = place.split()[5], system.split()[2]
                found = sorted(_LOCAL & {*own.split(","), *shared.split(",")})
                return found[0] if found else None
    return None


def _silence(directory: Path) -> float:
    """Returns the seconds since a run's files have changed."""
    changed = []
    for name in _SIGNS:
        with contextlib.suppress(OSError):
            changed.append((directory / name).stat().st_mtime)
    return max(time.time() - max(changed, default=time.time()), 0.0)


def _locked(file: TextIO, *, shared: bool = False) -> bool:
    """Returns whether this process has the operating system's lock of a file now."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _is_at(path: Path, file: TextIO) -> bool:
    """Returns whether an open file is the one of this path, and no other has replaced it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _read(path: Path) -> dict[str, Any]:
    """Returns the content of a lock, {} if it is gone or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _refusal(directory: Path, content: dict[str, Any]) -> str:
    pid, host, since = (show(content.get(key, "?")) for key in ("pid", "host", "since"))
    mine = content.get("pid") == os.getpid() and content.get("host") == socket.gethostname()
    who = "this process" if mine else f"process {pid} on {host}"
    return (
        f"{directory} is in use by another run, of {who}, since {since}. Two runs in one directory"
        " would mix their results: wait until it ends, or choose another directory with --out."
    )
