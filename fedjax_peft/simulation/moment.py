"""Moments of a run, the measures that describe them, and the listeners that watch.

A :class:`Moment` is a run between two rounds. *Measures* add fields to its row, and *listeners* are
told of it when its row is complete; both are functions of a moment::

    def stop_at_night(moment):
        if time.localtime().tm_hour >= 22:
            return "it is late"          # why the run ends; None: it goes on

    fp.simulate(..., records=fp.Records(listeners=[stop_at_night]))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fedjax_peft.engine.calls import Calling
from fedjax_peft.engine.state import RoundInfo, State
from fedjax_peft.simulation.rows import Row
from fedjax_peft.simulation.turn import Turn


@dataclass
class Moment:
    """A run between two rounds: after a round, or before the first one."""

    state: State
    """The state after the round. The next round consumes it: to keep it, take ``state.copy()``."""
    row: Row
    """The fields of the round so far; measures return more of them."""
    rows: Sequence[Row]
    """The rows of the rounds before."""
    last: bool = False
    """Whether the run ends here, as far as is known. A listener can end it, and the measures are
    then asked a second time."""
    info: RoundInfo | None = None
    """What the session says of the round; None before the first one."""
    turn: Turn | None = None
    """Who has worked; None before the first round."""
    seconds: Row = field(default_factory=dict)
    """Wall-clock seconds of the parts of the round, the row's ``time``."""
    by_class: Row = field(default_factory=dict)
    """Scores by class, which the last row alone has."""

    @property
    def round_index(self) -> int:
        """The round, from 1; 0 before the first one."""
        return int(self.state.round_index)


Measure: TypeAlias = Callable[[Moment], Row | Calling[Row]]
"""Returns fields of a moment's row: those that it still lacks, if it is asked again. A measure that
needs a program is a generator (:mod:`fedjax_peft.engine.calls`). It remembers nothing but the rows,
so that it needs no code for a resumed run. Fields whose lower values are better can be named in an
attribute ``lower_is_better`` of the function; the names of scores name the metric alone."""

Listener: TypeAlias = Callable[[Moment], str | None]
"""Is told of every moment whose row is complete. Returns why the run ends, None if it goes on. If
it is a context manager, it is entered before the first round and left after the last one."""
