"""The trackers of a run: each is called in a thread of its own, and none can stop the run.

What a tracker has taken is noted in ``tracking.json`` in the run directory, with the run's id, so
that a resumed run and ``fedjax-peft sync`` go on from there.
"""

import copy
import json
import queue
import re
import secrets
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_peft.contracts.part import call_of
from fedjax_peft.simulation.rows import Row, has_ended, read_metrics
from fedjax_peft.simulation.storage.lock import RunLock
from fedjax_peft.simulation.trackers.base import TrackedRun, Tracker
from fedjax_peft.support.display import argument, one_line
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file
from fedjax_peft.support.secrets import hide, without_secrets

NAME = "tracking.json"
PATIENCE = 30.0
"""Seconds that a tracker may take for a row before the end of a run no longer waits for it. Time
that has passed during the run counts, so a service that hangs does not hold up a longer run."""

_IMPORTS = 10
"""Times the patience that the import of a library, which needs no network, may take at the end."""
_LOOK = 0.1
"""Seconds between two looks at a tracker that is waited for."""


class Tracking:
    """Sends the rows of one run to its trackers."""

    def __init__(
        self, out: Path | None, config: Mapping[str, Any], trackers: Sequence[Tracker] = ()
    ):
        self._out, self._id, self._taken = out, secrets.token_hex(8), dict[str, int]()
        if trackers and out is not None and (out / NAME).exists():
            self._id, self._taken = _read(out / NAME)
        self._workers = [
            _Worker(named, _tracked(out, config, self._id)) for named in _told_apart(trackers)
        ]
        self._note()  # a run that is killed keeps its id

    def catch_up(self, rows: Sequence[Row]) -> None:
        """Sends the rows that a resumed run has, and that a tracker has not taken before."""
        for worker in self._workers:
            for row in rows:
                if row["round"] > self._taken.get(worker.key, -1):
                    worker.send(row)

    def add(self, row: Row) -> None:
        """Sends a row, or the new fields of the last one; returns at once."""
        for worker in self._workers:
            worker.send(row)
            self._warn(worker)

    def close(self, *, ended: bool) -> None:
        """Waits until the trackers have taken all rows, as long as they take some.

        Args:
          ended: whether the run has come to its end without an error.
        """
        for worker in self._workers:
            worker.end(ended)
        for worker in self._workers:
            worker.wait()
            self._taken[worker.key] = max(worker.taken, self._taken.get(worker.key, -1))
        self._note()
        for worker in self._workers:
            self._warn(worker)

    def _note(self) -> None:
        """Writes the run's id, and the last round that each tracker has taken."""
        if self._workers and self._out is not None:
            _write(self._out, self._id, self._taken)

    def _warn(self, worker: "_Worker") -> None:
        """Warns once of a tracker that takes no more rows."""
        if worker.problem is None or worker.warned:
            return
        worker.warned = True
        where = "in the run's metrics"
        if self._out is not None:
            command = f"fedjax-peft sync {argument(self._out)}"
            where = f"in {self._out / 'metrics.jsonl'}; send them with: {command}"
        warnings.warn(
            f"The tracker {worker.name} takes no more rows: {worker.problem} The run goes on"
            f" without it. All rows are {where}",
            stacklevel=2,
        )


class _Worker:
    """A tracker and its thread."""

    def __init__(self, named: "_Named", run: TrackedRun):
        tracker, self.name, self.key = named
        self.taken = -1
        """The last round whose row the tracker has taken."""
        self.problem: str | None = None
        self.warned = False
        self._tracker, self._run = tracker, run
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._thread: threading.Thread | None = None

    def send(self, row: Row) -> None:
        if self._thread is None:
            # A thread that waits for a network must not keep the program from ending.
            self._thread = threading.Thread(target=self._work, daemon=True, name=self.name)
            self._thread.start()
        self._excuse_imports()
        self._rows.put(copy.deepcopy(row))  # one tracker's changes are nobody else's

    def end(self, ended: bool) -> None:
        self._run.ended = ended
        self._rows.put(None)

    def wait(self) -> None:
        """Returns when the thread has ended, or has been at one row for ``PATIENCE`` seconds."""
        end = time.monotonic() + _IMPORTS * PATIENCE
        while self._thread is not None and self._thread.is_alive():
            if time.monotonic() < end:
                self._excuse_imports()
            since = self._busy_since
            left = PATIENCE - (0 if since is None else time.monotonic() - since)
            if left <= 0:
                self.problem = self.problem or f"It has not answered for {PATIENCE:g} s."
                return
            self._thread.join(min(left, _LOOK))

    def _excuse_imports(self) -> None:
        """Starts the time of the present row anew if the thread imports a library."""
        frame = sys._current_frames().get(getattr(self._thread, "ident", None) or 0)
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                self._busy_since = time.monotonic()
                return
            frame = frame.f_back

    def _next(self) -> Row | None:
        """Returns the next row, None after the last one."""
        self._busy_since = None
        row = self._rows.get()
        self._busy_since = time.monotonic()
        return row

    def _work(self) -> None:
        try:
            while (row := self._next()) is not None:
                self._tracker(row, self._run)
                self.taken = row["round"]
        except BaseException as error:  # also exit(), which would end the thread without a word
            self.problem = _sentence(error)
        try:
            self._run.close()
        except BaseException as error:
            self.problem = self.problem or _sentence(error)


def sync(directory: Path, config: Mapping[str, Any], trackers: Sequence[Tracker]) -> dict[str, int]:
    """Sends the rows of a run that trackers have not taken; returns tracker -> rows sent.

    Args:
      directory: of the run, in which no process may be running.
      config: the settings of the run.

    Raises:
      InputError: a tracker raises an exception, or a process runs in the directory.
    """
    sent = {}
    with RunLock.take(directory):
        rows = read_metrics(directory / "metrics.jsonl")
        known = (directory / NAME).exists()
        identity, taken = _read(directory / NAME) if known else (secrets.token_hex(8), {})
        for tracker, name, key in _told_apart(trackers):
            run = _tracked(directory, config, identity)
            run.ended = has_ended(rows, config.get("rounds", 0))
            missing = [row for row in rows if row["round"] > taken.get(key, -1)]
            try:
                for row in missing:
                    tracker(copy.deepcopy(row), run)
                    taken[key] = row["round"]
                run.close()
            except (Exception, SystemExit) as error:
                raise InputError(
                    f"The tracker {name} does not take the rows of {directory}: {_sentence(error)}"
                ) from error
            finally:
                _write(directory, identity, taken)
            sent[name] = len(missing)
    return sent


def recorded(trackers: Sequence[Tracker]) -> dict[str, Any]:
    """Returns the table ``[trackers]`` of a config, without functions of the user."""
    return {_name(one): _options(one) for one in trackers if _options(one) is not None}


def _tracked(out: Path | None, config: Mapping[str, Any], identity: str) -> TrackedRun:
    """Returns what trackers know of a run."""
    config = without_secrets(copy.deepcopy(dict(config)))
    name, algorithm = config.get("name"), config.get("algorithm")
    if out is None:
        usual = next((x for x in (name, algorithm) if isinstance(x, str)), "run")
        return TrackedRun(id=identity, name=usual, group=None, out=None, config=config)
    path = out.resolve()
    sweep = next((above for above in path.parents[:2] if (above / _SWEEP).exists()), None)
    if sweep is not None:
        name = str(path.relative_to(sweep))
    usual = name if isinstance(name, str) else path.name
    group = None if sweep is None else sweep.name
    return TrackedRun(id=identity, name=usual, group=group, out=out, config=config)


_SWEEP = "sweep.toml"
"""The file of a sweep's directory, whose points are in it or in the folders of its methods."""


def _name(tracker: Tracker) -> str:
    call, usual = call_of(tracker), getattr(tracker, "__name__", type(tracker).__name__)
    return usual if call is None else re.split(r"[.:]", call.name)[-1]


def _options(tracker: Tracker) -> dict[str, Any] | None:
    """Returns the options of a tracker of the library; None of a function of the user."""
    call = call_of(tracker)
    return None if call is None or ":" in call.name else dict(call.arguments)


def _key(tracker: Tracker) -> str:
    """Returns what tells trackers apart: the name, with the options that say where rows go."""
    options = without_secrets({"trackers": _options(tracker) or {}})["trackers"]
    return f"{_name(tracker)} {json.dumps(options, sort_keys=True)}" if options else _name(tracker)


class _Named(NamedTuple):
    """A tracker with the name in messages, and the key of what it has taken."""

    tracker: Tracker
    name: str
    key: str


def _told_apart(trackers: Sequence[Tracker]) -> list[_Named]:
    """Returns trackers with their names; the second one of a name or a key has a number."""
    found: list[_Named] = []
    names, keys = Counter[str](), Counter[str]()
    for tracker in trackers:
        name, key = _name(tracker), _key(tracker)
        names[name] += 1
        keys[key] += 1
        found.append(_Named(tracker, _numbered(name, names[name]), _numbered(key, keys[key])))
    return found


def _numbered(text: str, count: int) -> str:
    return text if count == 1 else f"{text} ({count})"


def _sentence(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # of a user's own kind
        text = ""
    text = hide(one_line(f"{type(error).__name__}: {text}"))
    return f"{text.rstrip('. :')[:_LONGEST]}."


_LONGEST = 300
"""Letters of an exception's message, which can be a page of HTML."""


def _read(path: Path) -> tuple[str, dict[str, int]]:
    """Returns the run's id, and tracker -> the last round that it has taken.

    Raises:
      InputError: the file is damaged.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return str(table["id"]), {str(key): int(last) for key, last in table["taken"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged: {error!r}.") from None


def _write(directory: Path, identity: str, taken: Mapping[str, int]) -> None:
    table = {"id": identity, "taken": dict(taken)}
    replace_file(directory / NAME, (json.dumps(table, indent=1) + "\n").encode())
