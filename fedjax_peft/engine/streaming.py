"""Round programs whose examples stay on the host: a round's own examples go to the device.

The examples may then be larger than the device's memory, and, in memory-mapped files, larger than
the host's.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from fedjax_peft.contracts import Params
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.program import OuterProgram
from fedjax_peft.engine.round import RoundResult
from fedjax_peft.engine.setup import Setup
from fedjax_peft.engine.state import State

ExamplesPlace: TypeAlias = Literal["device", "host"]
"""Where the training examples are. ``device``: all of them on the device. ``host``: in arrays of
the host, perhaps memory-mapped files; only the examples of a round are on the device."""


def of_plan(columns: Mapping[str, np.ndarray], plan: Plan) -> tuple[Params, Plan]:
    """Returns the examples of a plan, and the plan with their new indices.

    The number of rows depends on the shapes of the arguments only, so that nothing is compiled
    again. Rows of zeros, which the plan does not read, fill the arrays.

    Args:
      columns: all examples, ``[examples, ...]``.
      plan: its ``examples`` are rows of ``columns``.
    """
    rows = np.unique(plan.examples)
    rows = rows[rows >= 0]
    chosen: dict[str, Any] = {}
    for name, x in columns.items():
        some = np.zeros((min(len(x), plan.examples.size), *x.shape[1:]), x.dtype)
        some[: len(rows)] = x[rows]
        chosen[name] = some
    examples = np.where(plan.examples < 0, -1, np.searchsorted(rows, plan.examples))
    return chosen, plan._replace(examples=examples.astype(np.int32))


class StreamedProgram(OuterProgram):
    """A program that gets the examples of its plan at every call."""

    def __init__(self, program: Any, columns: Mapping[str, np.ndarray]):
        """Takes a program that was made without examples, and all examples."""
        super().__init__(program)
        self._columns = columns

    def __call__(self, state: State, plan: Plan, round_index: int) -> RoundResult:
        """Runs round ``round_index``; returns without waiting for the device."""
        return self._program(state, self._use(plan), round_index)

    def _shaped(self, state: State, plan: Plan) -> tuple[State, Plan]:
        """Returns the state, and the plan with the indices of its examples."""
        return state, self._use(plan)

    def _use(self, plan: Plan) -> Plan:
        """Gives the program the examples of a plan; returns the plan with their indices."""
        columns, plan = of_plan(self._columns, plan)
        self._program.use(columns)
        return plan


def streaming(make: Callable[..., Any]) -> Callable[..., StreamedProgram]:
    """Returns a function that makes streamed programs, from one that makes programs."""

    def made(setup: Setup, columns: Mapping[str, Any], **form: Any) -> StreamedProgram:
        return StreamedProgram(make(setup, {}, **form), columns)

    return made
