"""The clients' training before the last evaluation, for algorithms with ``Algorithm.tuning``."""

from collections.abc import Mapping
from typing import Any

from fedjax_peft.engine.program import Program, Setup
from fedjax_peft.engine.schedule import Schedule
from fedjax_peft.engine.state import State
from fedjax_peft.rows import Row

__all__ = ["tuned", "tuned_figures"]


def tuned(
    setup: Setup,
    columns: Mapping[str, Any],
    schedule: Schedule,
    lanes: int,
    state: State,
) -> State:
    """Returns the state after every client has trained as ``Algorithm.tuning`` says.

    Args:
      setup: of the run.
      columns: of the training data, on the device.
      schedule: of the run; its batch size and padded lengths are used.
      lanes: of the run.
      state: after the last round; it is not consumed. The random streams are those of the round
        after it.
    """
    assert setup.algorithm.tuning is not None
    everyone = schedule._replace(
        per_round=setup.clients,
        slots=setup.clients,
        epochs=setup.algorithm.tuning.epochs,
        local_steps=None,
        sampling="all",
        failure_rate=0.0,
    )
    program = Program(setup, columns, work="tuning", padded=everyone.padded)
    round_index = state.round_index + 1
    plan = everyone.plan(round_index, lanes, everyone.time_steps(1, lanes))
    tuned = program(state.copy(), plan, round_index).state
    return state._replace(client_state=tuned.client_state)


def tuned_figures(row: Row) -> Row:
    """Returns the scores of an evaluated row under the names of tuned models."""
    return {
        f"tuned_{name}": value
        for name, value in row.items()
        if name.startswith(("test_", "client_")) and isinstance(value, float)
    }
