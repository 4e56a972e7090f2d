"""The loop over rounds: it makes the moments of a run, and asks measures and listeners."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedjax_peft.engine.calls import Calling
from fedjax_peft.engine.devices.distributed import agree, seconds_since
from fedjax_peft.engine.lanes import Lanes
from fedjax_peft.engine.session import Session
from fedjax_peft.engine.state import State
from fedjax_peft.simulation.clock import Clock
from fedjax_peft.simulation.moment import Listener, Measure, Moment
from fedjax_peft.simulation.progress import Phases
from fedjax_peft.simulation.round_rows import round_row
from fedjax_peft.simulation.rows import Row, unreadable
from fedjax_peft.simulation.stopping import Stop
from fedjax_peft.simulation.storage.saver import Saver, going_on
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError

PATIENCE = 60.0
"""Seconds after which a listener that has not returned is named on stderr."""


@dataclass(kw_only=True)
class Rounds:
    """Makes the moments of one run."""

    session: Session
    clock: Clock
    phases: Phases
    last: int
    """The last round."""
    measures: Sequence[Measure]
    """In the order of their fields."""
    before: Measure | None = None
    """A measure of the state before a round, with the turn of the round."""
    nonfinite: str = "drop"
    each: bool = False
    """Whether rows have fields of every client."""
    lower: Sequence[str] = ("loss",)
    """Metrics of which lower values are better."""
    _makers: dict[str, int] = field(default_factory=dict)
    """Field of the last moment's row -> the place of the measure that made it."""

    def start(self, state: State, row: Row) -> Calling[Moment]:
        """Returns the moment before the first round; ``row`` has what no measure knows."""
        return (yield from self.measured(Moment(state, {"round": 0} | row, (), self.last == 0)))

    def after(self, state: State, rows: Sequence[Row]) -> Calling[Moment]:
        """Runs the round after a state and returns its moment.

        Args:
          rows: of the rounds so far.

        Raises:
          InputError: an upload is not finite, and ``nonfinite`` is "raise".
        """
        session, index = self.session, int(state.round_index) + 1
        moment = Moment(state, {}, rows, index == self.last, turn=self.clock.turn(state, rows))
        assert moment.turn is not None
        plan, early = moment.turn.plan, {}
        if self.before is not None:
            early = yield from _made(self.before(moment))
        if not session.known(state, plan):
            self.phases.send("compiling", index, program="round")
        self.phases.send("training", index)
        began, compiled = time.perf_counter(), session.compile_seconds
        moment.state, info = yield from session.stepping(state, plan)
        self.clock.look_ahead(moment.state)
        row = round_row(info, each=self.each, lower=self.lower)
        share = session.padding_share(plan, moment.state.seed) if plan.useful else None
        row |= {} if share is None else {"padding_share": share}
        compiled = agree(session.compile_seconds - compiled)
        moment.seconds["train_s"] = seconds_since(began) - compiled
        moment.seconds |= {"compile_s": compiled} if compiled else {}
        if self.nonfinite == "raise" and row["dropped"]:
            raise InputError(
                f"In round {index} the uploads of the clients {row['dropped']} were not finite."
            )
        moment.row, moment.info = row, info
        moment = yield from self.measured(moment)
        moment.row |= early
        return moment

    def measured(self, moment: Moment) -> Calling[Moment]:
        """Returns the moment with the fields of all measures.

        Raises:
          InputError: a measure has a field that is not its own, or that could not be read again.
        """
        self._makers.clear()
        yield from self._ask(moment)
        moment.row["time"] = moment.seconds
        return moment

    def ended(self, moment: Moment, why: str) -> Calling[Moment]:
        """Returns the moment as the last one, with what only the last row has."""
        moment.last = True
        yield from self._ask(moment)
        moment.row["stopped"] = why
        return moment

    def _ask(self, moment: Moment) -> Calling[None]:
        """Adds the fields of all measures to a moment's row."""
        for place, measure in enumerate(self.measures):
            found = yield from _made(measure(moment))
            for name, value in found.items():
                has = name in moment.row or name in ("time", "stopped")
                if has and self._makers.get(name) != place:
                    raise InputError(
                        f"The measure {_name(measure)} has the field {name!r}, which the row of a"
                        " round has already. Give its field another name."
                    )
                if wrong := unreadable(name, value):
                    raise InputError(
                        f"The measure {_name(measure)} has the field {name!r} ="
                        f" {show(value, 60)}, but {wrong}. Give its field another name or value."
                    )
            self._makers |= dict.fromkeys(found, place)
            moment.row |= found


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _made(fields: Row | Calling[Row]) -> Calling[Row]:
    """Returns the fields of a measure, which may be a generator."""
    return (yield from fields) if isinstance(fields, Generator) else fields


@dataclass
class Driver:
    """Runs the rounds of a run until its end: each is recorded, told to listeners, and saved."""

    rounds: Rounds
    saver: Saver
    listeners: "Listeners"
    rule: Stop | None
    """Ends the run by its rows."""

    def begin(self, state: State, row: Row) -> Calling[State]:
        """Returns the state after the last round of a run that begins.

        Args:
          row: the fields of row 0 that no measure knows.
        """
        moment = yield from self.rounds.start(state, row)
        return (yield from self._drive(moment))

    def go_on(self, state: State, due: Callable[[int], bool], lanes: Lanes) -> Calling[State]:
        """Returns the state after the last round of a run that goes on.

        Args:
          state: of its last checkpoint.
          due: round -> whether it has an evaluation.
          lanes: as for ``Placement``.
        """
        rounds, record = self.rounds, self.saver.record
        rounds.clock.recall(record.rows)
        if lanes == "auto":  # a resumed run keeps its lanes, also on other devices
            rounds.session.request_lanes(record.rows[-1].get("lanes", lanes))
        rows = agree(going_on(record.rows, due, record.before))
        finished = record.rows[-1]["round"] >= rounds.last
        why = None if finished else self._met(rows)
        if finished or why:
            rounds.phases.send("finished", state.round_index, stopped=why)
            return state
        record.replace(rows)
        moment = yield from rounds.after(state, list(rows))
        return (yield from self._drive(moment))

    def _drive(self, moment: Moment) -> Calling[State]:
        rounds, record = self.rounds, self.saver.record
        while True:
            begins = moment.info is None
            if not (begins or moment.last) and (why := self._met([*moment.rows, moment.row])):
                moment = yield from rounds.ended(moment, why)
            if not begins:
                parts = ("train_s", "eval_s", "local_s")
                rounds.phases.took(sum(moment.seconds.get(part, 0.0) for part in parts))
            record.add({**moment.row})
            why = self.listeners(moment)
            if why and not moment.last:
                moment = yield from rounds.ended(moment, why)
                record.amend(moment.row)
            self.saver.pause(moment, due="origin" in moment.row)
            if self.listeners.error is not None:
                raise self.listeners.error
            if moment.last:
                stopped = moment.row.get("stopped")
                rounds.phases.send("finished", moment.round_index, stopped=stopped)
                return moment.state
            moment = yield from rounds.after(moment.state, record.rows[:])

    def _met(self, rows: Sequence[Row]) -> str | None:
        """Returns why the stop rule ends the run after these rows, None if it does not."""
        answer = None if self.rule is None else self.rule(rows)
        if answer and not isinstance(answer, str):
            answer = "the stop rule was met"
        return agree(answer or None)


class Listeners:
    """The listeners of a run; a context manager, which enters and leaves those that are."""

    def __init__(self, listeners: Sequence[Listener], phases: Phases):
        self._listeners, self._phases = listeners, phases
        self._stack = contextlib.ExitStack()
        self.error: Exception | None = None
        """What a listener has raised: the run ends with it, after its checkpoint."""

    def __enter__(self) -> "Listeners":
        for listener in self._listeners:
            if isinstance(listener, contextlib.AbstractContextManager):
                self._stack.enter_context(listener)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def __call__(self, moment: Moment) -> str | None:
        """Returns why the run ends, None if it goes on; all processes get the same answer."""
        found: list[str] = []
        for listener in self._listeners:
            name = _name(listener)
            try:
                with self._phases.hidden(), _named(name):
                    answer = listener(moment)
            except Exception as error:
                error.add_note(f"The listener {name} raised this after round {moment.round_index}.")
                self.error = self.error or error
                answer = f"the listener {name} failed"
            if answer is not None and answer is not False:
                found += [answer if isinstance(answer, str) else f"{name} returned {answer!r}"]
        return agree(found[0] if found else None)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Names a listener on stderr that does not return."""
    text = f"fedjax_peft: the listener {name} has not returned for {PATIENCE:g} s"
    timer = threading.Timer(PATIENCE, print, (text,), {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def told(on_round: Callable[[Row], Any]) -> Listener:
    """Returns the listener that calls ``Records.on_round``."""

    def on_row(moment: Moment) -> str | None:
        answer = on_round(moment.row)
        asked = isinstance(answer, bool | np.bool_) and bool(answer)
        return "on_round returned True" if asked else None

    return on_row
