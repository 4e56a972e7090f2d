"""Live progress of a run: the events that ``simulate`` sends, and the display of them.

``simulate`` calls ``on_phase`` with a :class:`Phase` at the start of each phase that takes time.
:class:`RunDisplay` shows them, in Python, in notebooks and on the command line: as a bar where a
line can be updated in place, otherwise as plain lines.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self, TextIO

from fedjax_peft.simulation.rows import Row
from fedjax_peft.support.display import one_line, redraws

SECONDS = 5.0
"""The first time without a line after which the state is printed, if lines are plain."""
LONGEST = 300.0
"""The longest such time. It doubles with each of these lines, so that they do not fill a log."""
_ALWAYS = ("reading", "loading", "starting", "compiling", "finished")
"""Phases that plain lines always name."""

PhaseName = Literal[
    "reading", "loading", "starting", "compiling", "training", "evaluating", "saving", "finished"
]


class Phase(NamedTuple):
    """A phase that a run begins now. ``simulate`` calls ``on_phase`` with every phase.

    A round sends ``training``, then ``evaluating`` if it is evaluated (again after every part of
    the examples), then ``saving`` if a checkpoint is written. ``compiling`` comes before each of
    these phases that needs a new program.
    """

    name: PhaseName
    """``reading`` (reading and tokenizing the data) and ``loading`` (loading the model) come only
    in runs from a config, before ``simulate`` is called. ``starting`` comes once, before the first
    program is compiled, and ``finished`` once, at the end. If an exception ends the run, there is
    no ``finished``."""
    round_index: int
    """The communication round, from 1; 0 is the evaluation before training."""
    rounds: int
    """Communication rounds of the whole run."""
    done: int = 0
    """``evaluating``: examples evaluated so far (an example counts once for every model)."""
    total: int = 0
    """``evaluating``: all examples of this evaluation."""
    seconds_left: float | None = None
    """Estimated seconds for the rest of the run, from the rounds of this process, without their
    compilation; None until the first round has ended."""
    details: Mapping[str, Any] = MappingProxyType({})
    """``starting``: ``algorithm``, ``clients``, ``clients_per_round``, ``parameters`` (by kind),
    ``fresh`` (the modules of the head that have new values), ``train_examples``, ``batch_size``,
    ``most_examples`` (of a client), ``test_examples``, ``evaluations`` (name -> examples, each
    counted once for every model), ``eval_every``, ``estimate``
    (an :class:`fedjax_peft.simulation.estimate.Estimate`), ``privacy`` (the guarantee after all
    rounds in words, or None), ``device``, ``dtype`` (of the arithmetic), ``out`` and
    ``resumed_from`` (a round, or None).
    ``compiling``: ``program``, "round" or the name of an evaluation ("test", "global_test",
    "client", "validation", "global_validation", "client_validation", "test_backdoor",
    "global_test_backdoor"). ``evaluating``: ``evaluation``, the name of the evaluation.
    ``finished``: ``stopped``, why the run ended before its last round, or None."""


class Phases:
    """Sends the phases of one run to ``on_phase`` and the display, and estimates the time left.

    It is a context manager, which closes the display at the end of the block.
    """

    def __init__(
        self,
        rounds: int,
        on_phase: Callable[[Phase], None] | None,
        show: bool | Literal["auto"],
        check: Callable[[Phase], None] = lambda phase: None,
    ):
        self._rounds = rounds
        self._display = phase_display(show)
        self._listeners = [f for f in (check, on_phase, self._display) if f is not None]
        self._seconds: list[float] = []
        self._round = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.close()

    def send(
        self,
        name: PhaseName,
        round_index: int | None = None,
        *,
        done: int = 0,
        total: int = 0,
        **details: Any,
    ) -> None:
        """Sends a phase; without ``round_index`` it has the round of the previous phase."""
        self._round = self._round if round_index is None else round_index
        left = None
        if self._seconds:
            to_do = self._rounds - self._round + (name in ("training", "compiling"))
            left = to_do * sum(self._seconds) / len(self._seconds)
        phase = Phase(name, self._round, self._rounds, done, total, left, details)
        for listener in self._listeners:
            listener(phase)

    def evaluating(self, evaluation: str, total: int, done: int) -> None:
        """Sends how many of the ``total`` examples of an evaluation are done."""
        self.send("evaluating", done=done, total=total, evaluation=evaluation)

    def took(self, seconds: float) -> None:
        """Records the seconds of a round, without compilation."""
        self._seconds.append(seconds)

    def hidden(self) -> AbstractContextManager[None]:
        """Returns a context manager that hides the display, so that listeners can print."""
        return nullcontext() if self._display is None else self._display.hidden()


def phase_display(show: bool | Literal["auto"]) -> "RunDisplay | None":
    """Returns the display of a run in Python or a notebook; None if nothing is shown.

    The display writes to stderr.

    Args:
      show: ``"auto"`` shows one line, which is updated in place, in a terminal or notebook, and
        nothing elsewhere. True also shows plain lines elsewhere. False shows nothing.
    """
    if show is False or (show == "auto" and not redraws(sys.stderr)):
        return None
    return RunDisplay(None, None, sys.stderr)


def describe(phase: Phase) -> str:
    """Returns a phase in a few words, such as ``evaluating test 128 of 400``."""
    details, stopped = phase.details, phase.details.get("stopped")
    texts = {
        "reading": "reading and tokenizing the data",
        "loading": "loading the model",
        "compiling": f"compiling ({details.get('program', 'round')})",
        "evaluating": f"evaluating {details.get('evaluation', '')} {phase.done} of {phase.total}",
        "training": f"training round {phase.round_index} of {phase.rounds}",
        "finished": f"stopped: {stopped}" if stopped else "finished",
    }
    return texts.get(phase.name, phase.name)


def duration(seconds: float) -> str:
    """Returns seconds in words: ``12 s``, ``3 min 05 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


# Displays.


class Bar:
    """One line with the done steps and the state, which tqdm updates in place.

    At any width, only the state at the end of the line is cut. What other code prints beside a bar
    on stdout stands above it.
    """

    def __init__(self, title: str, total: int, file: TextIO):
        from tqdm import tqdm
        from tqdm.contrib import DummyTqdmFile

        form = "{desc} |{bar:10}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
        size = {"ncols": _columns(file), "nrows": 24}  # tqdm shows nothing in a terminal of size 0
        options = {"total": total, "bar_format": form, "file": file, **size}
        self._bar = tqdm(desc=title if len(title) <= 24 else f"{title[:23]}…", **options)
        self._file, self._others = file, ExitStack()
        if file is sys.stdout:
            self._others.enter_context(redirect_stdout(DummyTqdmFile(sys.stdout)))
            self._others.enter_context(redirect_stderr(DummyTqdmFile(sys.stderr)))

    def show(self, text: str, done: int | None = None, *, silence: float | None = 0.0) -> None:
        """Shows the state, and how many steps are done."""
        self._bar.n = self._bar.n if done is None else done
        self._bar.set_postfix_str(text, refresh=True)

    def print(self, text: str) -> None:
        """Prints a line above the bar."""
        with self.hidden():
            print(text, file=self._file, flush=True)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hides the bar in a block, so that other code can print."""
        self._bar.clear()
        try:
            yield
        finally:
            self._bar.refresh()

    def close(self) -> None:
        """Leaves the last state on the screen."""
        self._others.close()
        self._bar.close()


def _columns(file: TextIO) -> int:
    """Returns the width of a terminal; 120 if it has none, as a notebook."""
    try:
        return os.get_terminal_size(file.fileno()).columns or 120
    except (OSError, ValueError):
        return 120


class Lines:
    """Plain lines; a state that lasts is printed again and again, after longer and longer times."""

    def __init__(self, title: str, file: TextIO):
        self._title, self._file = title, file
        self._lock = threading.Lock()
        self._printed = self._started = time.monotonic()
        self._state, self._pause = "", SECONDS
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def show(self, text: str, done: int | None = None, *, silence: float | None = 0.0) -> None:
        """Prints the state if nothing was printed for ``silence`` seconds.

        None stands for the time after which a state is printed again.
        """
        now = time.monotonic()
        self._state, self._started = text, now
        if silence is None and now - self._printed >= self._pause:
            self._fill(text)
        elif silence is not None and now - self._printed >= silence:
            self.print(f"{self._title}  {text}")

    def _fill(self, text: str) -> None:
        """Prints a line that only says that the run goes on; the next one waits twice as long."""
        self._pause = min(2 * self._pause, LONGEST)
        self.print(f"{self._title}  {text}")

    def print(self, text: str) -> None:
        """Prints a line."""
        with self._lock:
            self._printed = time.monotonic()
            print(text, file=self._file, flush=True)

    def hidden(self) -> AbstractContextManager[None]:
        """Hides nothing: other code can print."""
        return nullcontext()

    def close(self) -> None:
        """Ends the repetition."""
        self._closed.set()
        self._thread.join()

    def _repeat(self) -> None:
        while not self._closed.wait(SECONDS / 10):
            now = time.monotonic()
            if self._state and now - self._printed >= self._pause:
                try:
                    self._fill(f"{self._state}, {now - self._started:.0f} s")
                except (OSError, ValueError):  # the main thread will raise and report it too
                    return


class RunDisplay:
    """Shows the phases of a run, and a line for each row if there is a text for it."""

    def __init__(
        self,
        title: str | None,
        rounds: int | None,
        file: TextIO,
        *,
        banner: Callable[[Phase], str] | None = None,
        text: Callable[[Row], str] | None = None,
        verbose: bool = False,
    ):
        """Begins the display.

        Args:
          title: the name of the run; None: that of its algorithm.
          rounds: of the run, for the lines of rows.
          banner: the phase ``starting`` -> its lines; without it, nothing is printed then.
          text: row -> its line.
          verbose: whether all rows stay in a terminal, and plain lines name all phases.
        """
        self._title, self._rounds, self._file = one_line(title or "fedjax_peft"), rounds, file
        self._named = title is not None
        self._banner, self._text, self._verbose = banner, text, verbose
        self._redraws = redraws(file)
        # A bar begins with the first round, because reading and loading can show their own.
        self._output: Bar | Lines | None = None if self._redraws else Lines(self._title, file)
        self._before = self._last = ""

    def __call__(self, phase: Phase) -> None:
        """Shows a phase that begins."""
        text = self._before + describe(phase)  # what compiles, and the phase that follows
        self._before = f"{text}, then " if phase.name == "compiling" else ""
        if phase.name == "starting" and self._banner is not None:
            self._print(self._banner(phase))
        if self._redraws and phase.name in ("reading", "loading"):
            self._print(f"{self._title}  {text}")
            return
        if self._output is None:
            name = self._title if self._named else str(phase.details.get("algorithm", "run"))
            self._output = Bar(name, phase.rounds, self._file)
        if stopped := phase.details.get("stopped"):
            self._print(f"{self._title}  stopped after round {phase.round_index}: {stopped}")
        if phase.name in ("starting", "finished") and self._text is not None:
            text = ""  # the banner, or the last row, says it
        left = phase.seconds_left if phase.name != "finished" else None
        parts = ["" if left is None else f"{duration(left)} left", self._last, text]
        # In these phases the current round is not done yet; the other phases follow the training.
        done = phase.round_index - (phase.name in ("starting", "training", "compiling"))
        silence = 0.0 if phase.name in _ALWAYS else 1.0 if self._verbose else None
        shown = (
            text if self._text is not None and not self._redraws else "  ".join(filter(None, parts))
        )
        if shown:
            self._output.show(shown, max(done, 0), silence=silence)

    def on_round(self, row: Row) -> None:
        """Shows a row."""
        if self._text is None:
            return
        self._last = self._text(row)
        if self._verbose or not self._redraws:
            self._print(f"{self._title}  round {row['round']}/{self._rounds}  {self._last}")
        if self._redraws and self._output is not None:
            self._output.show(self._last, row["round"])

    def _print(self, text: str) -> None:
        if self._output is None:
            print(text, file=self._file, flush=True)
        else:
            self._output.print(text)

    def hidden(self) -> AbstractContextManager[None]:
        """Returns a context manager that hides the display, so that other code can print."""
        return nullcontext() if self._output is None else self._output.hidden()

    def close(self) -> None:
        """Leaves the last state on the screen and ends the display."""
        if self._output is not None:
            self._output.close()
