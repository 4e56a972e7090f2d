"""``report --watch``: what has become of every point, and the table so far, until all have ended.

In a terminal the whole is drawn again when something has changed. Elsewhere each point gets a line
when it begins and when it ends.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from fedjax_peft.cli import status
from fedjax_peft.cli.status import State
from fedjax_peft.report.study import SWEEP
from fedjax_peft.simulation.points import read_rows
from fedjax_peft.simulation.rows import Row
from fedjax_peft.simulation.storage.lock import RunLock
from fedjax_peft.support.display import redraws
from fedjax_peft.support.errors import InputError

_POLL = 1.0
"""Seconds between two looks at the files."""
_SHARE = 0.25
"""The largest share of a processor that reading the runs again and again may take."""
_FIRST = ("failed", "running", "waiting", "done")
"""The kinds of points, of which those at the end are left out where there is no room."""
_STYLES = {"failed": "red", "running": "green", "waiting": "dim", "done": ""}

Tables = Callable[[int], Sequence[RenderableType]]
"""The width of the console -> the tables of the runs as they are now."""


class Watched:
    """The points of some studies; files are read again only if they have changed."""

    def __init__(self, paths: Sequence[Path]):
        """Raises InputError if a path does not exist."""
        if missing := [path for path in paths if not path.exists()]:
            raise InputError(f"{missing[0]} does not exist.")
        self._paths = paths
        self._home = paths[0] if len(paths) == 1 else Path(os.path.commonpath(paths))
        self._planned: dict[Path, tuple[object, dict[Path, int]]] = {}
        self._last: dict[Path, tuple[object, Sequence[Row]]] = {}

    def look(self) -> dict[str, State]:
        """Returns the name of each point -> what has become of it.

        Raises:
          InputError: a path is neither a study nor a run.
        """
        known = {run: n for path in self._paths for run, n in self._points(path).items()}
        states = [status.state(run, self._rows(run), n) for run, n in known.items()]
        return dict(zip(status.names_of(known, self._home), states, strict=True))

    def ended(self, states: Mapping[str, State]) -> bool:
        """Returns whether all points have ended, and nobody is about to begin others."""
        at_work = any(RunLock.holder(path) is not None for path in self._paths)  # as a search
        return not at_work and all(one.kind in ("done", "failed") for one in states.values())

    def version(self) -> object:
        """Returns a value that differs when rows have been added."""
        return {run: stamp for run, (stamp, rows) in self._last.items() if rows}

    def _points(self, path: Path) -> dict[Path, int]:
        stamp = _stamp(path / SWEEP)
        if stamp is None or self._planned.get(path, (None,))[0] != stamp:
            self._planned[path] = stamp, status.points(path)
        return self._planned[path][1]

    def _rows(self, run: Path) -> Sequence[Row]:
        """Returns the last row of a run, if it has one."""
        stamp = _stamp(run / "metrics.jsonl")
        if self._last.get(run, (None,))[0] != stamp:
            self._last[run] = stamp, read_rows(run)[-1:]
        return self._last[run][1] if stamp is not None else ()


def watch(paths: Sequence[Path], tables: Tables, console: Console) -> None:
    """Shows points and tables until all points have ended, or until Ctrl-C.

    Raises:
      InputError: as :class:`Watched`.
    """
    watched = Watched(paths)
    shown = _Screen if redraws(sys.stdout) and not console.is_dumb_terminal else _Lines
    states = watched.look()  # what is wrong with the paths is said before the screen is taken
    with contextlib.suppress(KeyboardInterrupt), shown(console) as show:
        while True:
            began = time.thread_time()
            show(states, watched.version(), tables)
            if watched.ended(states):
                break
            time.sleep(max(_POLL, (time.thread_time() - began) / _SHARE))
            states = watched.look()
    for name, one in states.items():
        if one.kind == "failed" and shown is _Screen:  # a line has said it elsewhere
            print(one.line(name, 0))
    print(status.counts(states.values()), end="\n\n")


class _Lines:
    """A line for each point whose kind or process has changed."""

    def __init__(self, console: Console):
        self._seen: dict[str, object] = {}

    def __enter__(self) -> Callable[[Mapping[str, State], object, Tables], None]:
        return self._show

    def __exit__(self, *_: object) -> None:
        pass

    def _show(self, states: Mapping[str, State], version: object, tables: Tables) -> None:
        width = max(map(len, states))
        for name, one in states.items():
            what = (one.kind, one.holder)
            if self._seen.get(name) != what:
                print(one.line(name, width), flush=True)
                self._seen[name] = what


class _Screen:
    """The points and the tables, drawn again at the same place; removed at the end."""

    def __init__(self, console: Console):
        self._console, self._drawn = console, (object(), object())
        self._tables: Sequence[RenderableType] = ()
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Callable[[Mapping[str, State], object, Tables], None]:
        self._live.__enter__()
        return self._show

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def _show(self, states: Mapping[str, State], version: object, tables: Tables) -> None:
        if (states, version) == self._drawn:
            return
        if version != self._drawn[1]:
            self._tables = tables(self._console.width)
        self._drawn = dict(states), version
        below = Group("", *self._tables) if self._tables else Group()
        taken = len(self._console.render_lines(below)) + 2
        lines = _lines(states, max(self._console.height - taken, 3))
        counts = f"{status.counts(states.values())} (Ctrl-C ends this; the runs go on)"
        self._live.update(Group(*lines, Text(counts), below), refresh=True)


def _lines(states: Mapping[str, State], room: int) -> list[Text]:
    """Returns the lines of as many points as there is room for."""
    names, width = list(states), max(map(len, states))
    if len(names) > room:
        order = sorted(names, key=lambda name: _FIRST.index(states[name].kind))
        chosen = {*order[: room - 1]}
        names = [name for name in names if name in chosen]
    lines = [(states[name].line(name, width), _STYLES[states[name].kind]) for name in names]
    if left := len(states) - len(names):
        lines.append((f"and {left} more", "dim"))
    return [Text(text, style, no_wrap=True, overflow="ellipsis") for text, style in lines]


def _stamp(file: Path) -> object:
    """Returns a value that differs when a file has changed; None if it does not exist."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = file.stat()
        return found.st_mtime_ns, found.st_size
    return None
