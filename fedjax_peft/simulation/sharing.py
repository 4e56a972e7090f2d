"""Several processes that work on the points of one study, on any machines with one file system.

Each takes points that nobody has. The lock of a point's directory says who has it, its rows say
whether it has finished, and the file ``POINT.failed`` beside it says why it failed.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_peft.simulation.storage.lock import Holder, RunLock, check_locks, locked_here_only
from fedjax_peft.simulation.storage.record import environment
from fedjax_peft.support.display import one_line
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import read_text, replace_file

_POLL = 2.0
"""Seconds between two looks at the points that others have."""
_SILENT = 3600.0
"""Seconds without a sign of life after which nobody waits for a process on another machine that
holds no lock that can be seen from here."""


class Share(NamedTuple):
    """How a process shares a study with others."""

    take_over: float | None = None
    """Seconds without a sign of life after which the point of another machine is taken over; None:
    never. The points of processes of this machine are taken over when these have ended."""
    wait: bool = True
    """Wait for the points that others have, and take over those of processes that end."""


class Failure(NamedTuple):
    """Why a point failed."""

    error: str
    host: str
    pid: int
    since: str

    def __str__(self) -> str:
        """Returns the reason and the place."""
        return f"{self.error} (process {self.pid} on {self.host}, {self.since})"


def failure_file(run: Path) -> Path:
    """Returns the file that says why the point of a directory failed."""
    return run.with_name(f"{run.name}.failed")


def read_failure(run: Path) -> Failure | None:
    """Returns why the point of a directory failed; None if it did not, or runs again."""
    try:
        found = json.loads(read_text(failure_file(run)))
        return Failure(*(found[name] for name in Failure._fields))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def note_failure(run: Path, error: str | None) -> None:
    """Writes why a point failed; None removes the file."""
    file = failure_file(run)
    if error is None:
        file.unlink(missing_ok=True)
        return
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    failure = Failure(error, socket.gethostname(), os.getpid(), now)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, (json.dumps(failure._asdict()) + "\n").encode())


class Queue:
    """The points that this process has still to run, or to wait for."""

    def __init__(self, jobs: Sequence[Any], out: Path, share: Share):
        """The names of ``jobs`` are the directories of their runs in ``out``.

        Raises:
          InputError: locks do not hold there; or another worker has other versions of packages.
        """
        check_locks(out)
        if option := locked_here_only(out):
            text = (
                f"locks in {out} hold on this machine only, for it is mounted with {option}:"
                " workers on other machines may run the same points. Work on this one alone, or"
                " mount it without the option."
            )
            print(one_line(f"fedjax_peft: {text}"), file=sys.stderr)
        self.left, self._out, self._share = list(jobs), out, share
        self._before = {job.name: read_failure(out / job.name) for job in jobs}
        self._mine: set[str] = set()
        self._told = False
        for job in jobs:
            if RunLock.holder(out / job.name) is not None:
                _check_versions(out / job.name)

    def free(self, ended: Callable[[Any, str | None], bool]) -> Iterator[Any]:
        """Yields the jobs that nobody has, each when it is asked for.

        Args:
          ended: reports a job that has finished elsewhere, or failed there with an error; returns
            whether this is so.
        """
        for job in list(self.left):
            run, failed = self._out / job.name, read_failure(self._out / job.name)
            if ended(job, str(failed) if failed and failed != self._before[job.name] else None):
                self.left.remove(job)
            elif self._is_free(run):
                self.left.remove(job)
                yield job

    def give_back(self, job: Any) -> None:
        """Puts back a job that another process was faster to take."""
        self.left.append(job)

    def _is_free(self, run: Path) -> bool:
        holder = RunLock.holder(run)
        if holder is None:
            return True
        if not holder.elsewhere:
            return False
        limit = self._share.take_over
        if limit is not None and holder.silent > limit:
            print(one_line(f"fedjax_peft: taking {run} over from {holder}"), file=sys.stderr)
            RunLock.break_open(run)
            return True
        return False

    def wait(self, check: Callable[[], None]) -> None:
        """Waits a little for the points that others have; forgets them if nobody is to wait.

        Args:
          check: raises for a signal.

        Raises:
          InputError: the points left are those of silent processes on other machines.
        """
        if not self._share.wait:
            self.left.clear()
        if not self.left:
            return
        holders = [(job.name, RunLock.holder(self._out / job.name)) for job in self.left]
        held = [(name, holder) for name, holder in holders if holder is not None]
        lost = [one for one in held if one[1].elsewhere and one[1].silent > _SILENT]
        if self._share.take_over is None and len(lost) == len(holders):
            raise InputError(_lost(lost))
        if held and not self._told:
            name, holder = held[0]
            more = f", and {len(held) - 1} more" if len(held) > 1 else ""
            text = f"waiting for the last points, which others run: {name} ({holder}){more}"
            print(one_line(f"fedjax_peft: {text}"), file=sys.stderr)
            self._told = True
        end = time.monotonic() + (_POLL if held else 0.0)
        while time.monotonic() < end:
            check()
            time.sleep(0.1)


def _lost(lost: Sequence[tuple[str, Holder]]) -> str:
    name, holder = lost[0]
    hours = min(one.silent for _, one in lost) / 3600
    return (
        f"Points that are not done: {len(lost)}. Who has them gave no sign of life for"
        f" {hours:.1f} hours, such as {holder}, which has {name} since {holder.since}. If they are"
        " gone, give --take-over 1h: their points go on from their checkpoints."
    )


def _check_versions(run: Path) -> None:
    """Raises InputError if the process that has a point has other versions of packages."""
    try:
        theirs = json.loads(read_text(run / "environment.json"))["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    check_versions(theirs, f"The worker that has {run}")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that numbers depend on."""
    return {"python": ".".join(map(str, sys.version_info[:2])), **environment()["versions"]}


def check_versions(theirs: Mapping[str, str], who: str) -> None:
    """Raises InputError if versions differ from those of this process.

    Args:
      who: has them, such as ``The process that submits``.
    """
    mine = versions()
    other = [f"{n} {x}, here {mine[n]}" for n, x in theirs.items() if n in mine and mine[n] != x]
    if other:
        raise InputError(
            f"{who} has another version of {'; '.join(other)}. The workers of a study need equal"
            " versions, or the last digits of its runs would depend on who ran them. Install the"
            f" same on {socket.gethostname()}, or start this worker when the others have ended."
        )
