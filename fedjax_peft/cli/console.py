"""The display of a run on the command line: a banner, its phases, and a line for each round.

A terminal shows a progress bar. Other outputs get plain lines, at least one every few seconds.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from fedjax_peft.simulation.estimate import Estimate
from fedjax_peft.simulation.progress import Phase, describe, duration
from fedjax_peft.simulation.rows import Row, is_personal, read_metrics
from fedjax_peft.support.display import one_line

SECONDS = 5.0
"""The first time without a line after which the phase is printed, if the output is no terminal."""
LONGEST = 300.0
"""The longest such time. It doubles with each of these lines, so that they do not fill a log."""


class Screen(NamedTuple):
    """The display of a run: what to call with each phase that starts, and each row of metrics."""

    on_phase: Callable[[Phase], None]
    on_round: Callable[[Row], None]


@contextmanager
def screen(
    title: str, description: str, rounds: int, metrics: Path, *, verbosity: int = 0
) -> Iterator[Screen]:
    """Yields the display of a run, which is closed at the end of the block.

    Args:
      description: the algorithm, model and data in a few words, for the banner.
      metrics: the run's ``metrics.jsonl``, which has the rows before a resume.
      verbosity: -1 shows nothing, 0 is the default, 1 shows every phase and its duration.
    """
    if verbosity < 0:
        yield Screen(lambda phase: None, lambda row: None)
        return
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    verbose = verbosity > 0
    run = _Shown(one_line(title), description, rounds, _row_text(metrics, timed=verbose))
    display = _Bar(console, run, verbose) if console.is_terminal else _Lines(run, verbose)
    with closing(display):
        yield Screen(display.on_phase, display.on_round)


class DryRun(Exception):
    """Raised to end a run before its first program is compiled."""


def dry_run(title: str, description: str, show: Callable[[str], None]) -> Callable[[Phase], None]:
    """Returns an ``on_phase`` that shows the banner and then raises :class:`DryRun`."""

    def on_phase(phase: Phase) -> None:
        if phase.name == "starting":
            show(banner(title, description, phase))
            raise DryRun

    return on_phase


def banner(title: str, description: str, phase: Phase) -> str:
    """Returns a few lines on a run and the cost of its first round.

    Args:
      phase: the phase ``starting`` of the run.
    """
    details = phase.details
    costs: Estimate = details["estimate"]
    trained = {k: n for k, n in details["parameters"].items() if k != "frozen" and n}
    full = not details["parameters"].get("frozen")  # then what adapters would be is all weights
    words = {kind: "backbone" if full and kind == "adapter" else kind for kind in trained}
    several = f" ({' + '.join(f'{n:,} {words[kind]}' for kind, n in trained.items())})"
    evaluated = [f"{n:,} examples ({name})" for name, n in details["evaluations"].items()]
    every, most = details["eval_every"], details["most_examples"]
    large = details["batch_size"] > most
    memory = {k: n for k, n in costs.memory.items() if n}
    stored = [
        f"on the {place}, {decimal(n)} when all have trained" for place, n in costs.stored.items()
    ]
    lines = {
        "clients": f"{details['clients']:,}, of which {details['clients_per_round']:,} per round;"
        f" {details['train_examples']:,} training examples",
        "parameters": f"{sum(trained.values()):,} trained{several if len(trained) > 1 else ''},"
        f" {details['parameters'].get('frozen', 0):,} frozen",
        **({"new values": ", ".join(details["fresh"])} if details.get("fresh") else {}),
        "first round": f"{costs.steps:,} local steps of {costs.clients:,} clients,"
        f" {decimal(costs.bytes_up)} up, {decimal(costs.bytes_down)} down",
        **({"batch": f"{most:,} examples at most: no client has more"} if large else {}),
        "evaluation": f"{', '.join(evaluated)} before round 1 and after"
        f" {'every round' if every == 1 else f'every {every} rounds'}"
        if evaluated
        else "none",
        "memory": f"{', '.join(f'{decimal(n)} {k}' for k, n in memory.items())};"
        " a training step needs more, which `fedjax-peft plan` counts",
        **({"client state": stored[0]} if stored else {}),
        **({"privacy": details["privacy"]} if details.get("privacy") else {}),
        "device": details["device"],
        "out": str(details["out"]) if details["out"] is not None else "(nothing is written)",
    }
    if details["resumed_from"] is not None:
        lines["resumed"] = f"after round {details['resumed_from']} of {phase.rounds}"
    width = max(map(len, lines))
    body = (f"  {name:{width}}  {one_line(text)}" for name, text in lines.items())
    return "\n".join([f"{one_line(title)}: {one_line(description)}, {phase.rounds} rounds", *body])


class _Shown(NamedTuple):
    """The run that is shown."""

    title: str
    description: str
    rounds: int
    text: Callable[[Row], str]
    """Row -> its line."""

    def banner(self, phase: Phase) -> str:
        """Returns the lines of the phase ``starting``."""
        return banner(self.title, self.description, phase)

    def stopped(self, phase: Phase) -> str:
        """Returns the line of a run that has ended before its last round."""
        why = phase.details["stopped"]
        return f"{self.title}  stopped after round {phase.round_index}: {why}"


class _Describe:
    """Describes phases in words; ``compiling`` is combined with the phase that follows it."""

    def __init__(self) -> None:
        self._compiling = ""

    def __call__(self, phase: Phase) -> str:
        text = self._compiling + describe(phase)
        self._compiling = f"{text}, then " if phase.name == "compiling" else ""
        return text


class _Watch:
    """Prints lines, and repeats the current phase if nothing was printed for some time."""

    def __init__(self, title: str, file: TextIO):
        self._title, self._file = title, file
        self._lock = threading.Lock()
        self._printed = self._started = time.monotonic()
        self._phase, self._pause = "", SECONDS
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def start(self, phase: str, *, silence: float | None = 0.0) -> None:
        """Sets the current phase, and prints it if nothing was printed for ``silence`` seconds.

        Without ``silence``, the time is the one after which a phase is repeated.
        """
        now = time.monotonic()
        self._phase, self._started = phase, now
        if silence is None and now - self._printed >= self._pause:
            self._fill(phase)
        elif silence is not None and now - self._printed >= silence:
            self.print(f"{self._title}  {phase}")

    def _fill(self, text: str) -> None:
        """Prints a line that only says that the run goes on; the next one waits twice as long."""
        self._pause = min(2 * self._pause, LONGEST)
        self.print(f"{self._title}  {text}")

    def print(self, text: str) -> None:
        with self._lock:
            self._printed = time.monotonic()
            print(text, file=self._file, flush=True)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _repeat(self) -> None:
        while not self._closed.wait(SECONDS / 10):
            now = time.monotonic()
            if self._phase and now - self._printed >= self._pause:
                try:
                    self._fill(f"{self._phase}, {now - self._started:.0f} s")
                except (OSError, ValueError):  # the main thread will raise and report it too
                    return


@contextmanager
def progress_lines(title: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that prints a phase to stderr and repeats it while the phase lasts."""
    with closing(_Watch(title, sys.stderr)) as watch:
        yield watch.start


class _Lines:
    """Plain lines: one for each round and each long phase, and one after a time without a line."""

    def __init__(self, run: _Shown, verbose: bool):
        self._run = run
        self._silence = 1.0 if verbose else None
        self._describe = _Describe()
        self._watch = _Watch(run.title, sys.stdout)

    def on_phase(self, phase: Phase) -> None:
        if phase.name == "finished":
            if phase.details.get("stopped"):
                self._watch.print(self._run.stopped(phase))
            return
        text = self._describe(phase)
        if phase.name == "starting":
            self._watch.print(self._run.banner(phase))
            return
        always = phase.name in ("reading", "loading", "compiling")
        self._watch.start(text, silence=0.0 if always else self._silence)

    def on_round(self, row: Row) -> None:
        run = self._run
        self._watch.print(f"{run.title}  round {row['round']}/{run.rounds}  {run.text(row)}")

    def close(self) -> None:
        self._watch.close()


class _Bar:
    """A progress bar over the rounds, with the metrics of the last round and the current phase."""

    def __init__(self, console: Console, run: _Shown, verbose: bool):
        self._console, self._run, self._verbose = console, run, verbose
        self._describe = _Describe()
        self._last = ""
        # One line in a terminal of any width: the last text has what the others leave, and is cut.
        name = Column(no_wrap=True, overflow="ellipsis", max_width=24)
        rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=name),
            BarColumn(bar_width=10),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[state]}", markup=False, table_column=rest),
            console=console,
            expand=True,
        )
        self._task: Any = None

    def on_phase(self, phase: Phase) -> None:
        if phase.name in ("reading", "loading"):  # these phases can show their own progress bars
            self._console.print(f"{self._run.title}  {describe(phase)}")
            return
        if phase.name == "starting":
            self._console.print(self._run.banner(phase))
            self.begin(phase.round_index)
            return
        if phase.details.get("stopped"):
            self._console.print(self._run.stopped(phase))
        left = phase.seconds_left
        time_left = "" if left is None else f"{duration(left)} left"
        state = self._describe(phase) if phase.name != "finished" else ""
        self._show("  ".join(filter(None, (time_left if state else "", self._last, state))))

    def begin(self, done: int) -> None:
        """Shows the bar of a run that has made some of its rounds."""
        title, _, rounds, _ = self._run
        self._task = self._progress.add_task(title, total=rounds, completed=done, state="")
        self._progress.start()

    def on_round(self, row: Row) -> None:
        self._last = self._run.text(row)
        if self._verbose:
            self._console.print(f"round {row['round']}/{self._run.rounds}  {self._last}")
        if self._task is not None:
            self._progress.update(self._task, completed=row["round"])
        self._show(self._last)

    def _show(self, state: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, state=state, refresh=True)

    def close(self) -> None:
        self._progress.stop()


def _row_text(metrics: Path, *, timed: bool) -> Callable[[Row], str]:
    """Returns a function from a row to its line, with the bytes sent since the start of the run."""
    sent: int | None = None

    def total(row: Row) -> int:
        nonlocal sent
        if sent is None:
            earlier = read_metrics(metrics) if metrics.exists() else []
            sent = sum(_bytes(other) for other in earlier if other["round"] < row["round"])
        sent += _bytes(row)
        return sent

    def text(row: Row) -> str:
        parts = []
        if row.get("train_loss") is not None:
            parts.append(f"loss {row['train_loss']:.3f}")
        name = row.get("headline")
        own = f"personal {name}" if is_personal(row, f"test_{name}") else name
        for key, label in ((f"test_{name}", own), (f"client_{name}_mean", f"clients' {name}")):
            if row.get(key) is not None:
                parts.append(f"{label} {row[key]:.3f}")
                break
        for key in (f"validation_{name}", f"client_validation_{name}_mean"):
            if row.get(key) is not None:
                parts.append(f"validation {row[key]:.3f}")
                break
        parts.append(f"{total(row) / 1e6:.1f} MB")
        if row.get("dropped"):
            parts.append(f"dropped {row['dropped']}")
        if timed:
            names = {"compile_s": "compiling", "train_s": "training", "eval_s": "evaluating"}
            spent: Mapping[str, float] = row.get("time", {})
            parts += [f"{what} {spent[key]:.1f} s" for key, what in names.items() if key in spent]
        return "  ".join(parts)

    return text


def _bytes(row: Row) -> int:
    return row.get("bytes_up", 0) + row.get("bytes_down", 0)
