"""Live progress of a run: the events that ``simulate`` sends, and displays of them.

``simulate`` calls ``on_phase`` with a :class:`Phase` at the start of each phase that takes time.
A display is a function of these events. :func:`phase_display` makes the display for Python and
notebooks; :mod:`fedjax_peft.cli.console` has the display of the command line.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, Self

from fedjax_peft.simulation.rows import Row
from fedjax_peft.support.display import redraws

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
    rounds in words, or None), ``device``, ``out`` and ``resumed_from`` (a round, or None).
    ``compiling``: ``program``, "round" or the name of an evaluation ("test", "global_test",
    "client", "validation", "global_validation", "client_validation", "test_backdoor",
    "global_test_backdoor"). ``evaluating``: ``evaluation``, the name of the evaluation.
    ``finished``: ``stopped``, why the run ended before its last round, or None."""


class Display(Protocol):
    """A display of phases; a call shows a phase."""

    def __call__(self, phase: Phase) -> None:
        """Shows the phase that the run begins."""

    def hidden(self) -> AbstractContextManager[None]:
        """Returns a context manager that hides the display, so that other code can print."""

    def close(self) -> None:
        """Leaves the last state on the screen and ends the display."""


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

    def apart(self, on_round: Callable[[Row], Any] | None) -> Callable[[Row], Any] | None:
        """Returns a function that calls ``on_round`` with the display hidden, so it can print."""
        display = self._display
        if display is None or on_round is None:
            return on_round

        def call(row: Row) -> Any:
            with display.hidden():
                return on_round(row)

        return call


def phase_display(show: bool | Literal["auto"]) -> Display | None:
    """Returns the display of a run in Python or a notebook; None if nothing is shown.

    The display writes to stderr.

    Args:
      show: ``"auto"`` shows one line, which is updated in place, in a terminal or notebook, and
        nothing elsewhere. True also shows plain lines elsewhere. False shows nothing.
    """
    if show is False:
        return None
    if redraws():
        return _Bar()
    return _Lines() if show is True else None


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


class _Bar:
    """One progress line over the rounds, which tqdm updates in place."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, phase: Phase) -> None:
        from tqdm import tqdm

        if self._bar is None:
            text = "{desc} |{bar:24}| {n_fmt}/{total_fmt} rounds [{elapsed}{postfix}]"
            name = phase.details.get("algorithm", "run")
            self._bar = tqdm(desc=name, total=phase.rounds, bar_format=text, file=sys.stderr)
        # In these phases the current round is not done yet; the other phases follow the training.
        before = phase.name in ("starting", "training", "compiling")
        self._bar.n = max(phase.round_index - before, 0)
        self._bar.set_postfix_str(describe(phase) + _left(phase), refresh=True)

    def hidden(self) -> AbstractContextManager[None]:
        return nullcontext() if self._bar is None else self._cleared()

    @contextmanager
    def _cleared(self) -> Iterator[None]:
        self._bar.clear()
        try:
            yield
        finally:
            self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _Lines:
    """Plain lines for the phases; most phases are shown at most once in five seconds."""

    SECONDS = 5.0

    def __init__(self) -> None:
        self._shown = -self.SECONDS

    def __call__(self, phase: Phase) -> None:
        always = phase.name in ("starting", "compiling", "finished")
        now = time.monotonic()
        if always or now - self._shown >= self.SECONDS:
            self._shown = now
            print(f"fedjax_peft: {describe(phase)}{_left(phase)}", file=sys.stderr, flush=True)

    def hidden(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


def _left(phase: Phase) -> str:
    if phase.seconds_left is None or phase.name == "finished":
        return ""
    return f", {duration(phase.seconds_left)} left"


def duration(seconds: float) -> str:
    """Returns seconds in words: ``12 s``, ``3 min 05 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
