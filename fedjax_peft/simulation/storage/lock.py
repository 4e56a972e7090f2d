"""The lock file of a run directory: one process at a time writes to it.

The operating system holds the lock for the open file, and frees it when the process ends, however
it ends. A file system without such locks gives no protection.
"""

import contextlib
import json
import os
import secrets
import socket
from datetime import datetime
from pathlib import Path
from typing import Any, Self, TextIO

from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import naming

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = "run.lock"


class RunLock:
    """The right to write to a run directory, from :meth:`take` to :meth:`release`.

    The file says who has it: the process, its host, and since when.
    """

    def __init__(self, path: Path, file: TextIO):
        self._path, self._file = path, file

    @classmethod
    def take(cls, directory: Path) -> "RunLock":
        """Takes the lock of an existing directory.

        Raises:
          InputError: another process, or this one, already holds the lock; or Windows has no such
            locks.
        """
        if fcntl is None:
            raise InputError(
                "A run with a directory needs Linux or macOS. On Windows, use Linux inside Windows"
                " (WSL2: `wsl --install`), or run without a directory: leave `out` out in Python."
            )
        path = directory / NAME
        while True:
            with naming(path):
                file = path.open("a", encoding="utf-8")
            if not _locked(file):
                file.close()
                raise InputError(_refusal(directory, _read(path)))
            if _is_at(path, file):
                break
            file.close()  # the process that held the lock has removed the file meanwhile
        content = {"pid": os.getpid(), "host": socket.gethostname(), "token": secrets.token_hex(8)}
        content["since"] = datetime.now().astimezone().isoformat(timespec="seconds")
        with naming(path):
            file.truncate(0)
            file.write(json.dumps(content) + "\n")
            file.flush()
        return cls(path, file)

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


def _locked(file: TextIO) -> bool:
    """Returns whether this process has the operating system's lock of a file now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
