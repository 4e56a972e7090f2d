"""The clients' training before the last evaluation, for algorithms with ``Algorithm.tuning``."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_peft.engine.program import Program, Setup
from fedjax_peft.engine.schedule import Schedule
from fedjax_peft.rows import Row
from fedjax_peft.typing import PyTree

__all__ = ["tuned", "tuned_figures"]


def tuned(
    setup: Setup,
    columns: Mapping[str, Any],
    schedule: Schedule,
    lanes: int,
    server: PyTree,
    client_state: PyTree,
    round_index: int,
) -> PyTree:
    """Returns what all clients keep, ``[clients, ...]``, after ``Algorithm.tuning``.

    Args:
      setup: of the run.
      columns: of the training data, on the device.
      schedule: of the run; its batch size and padded lengths are used.
      lanes: of the run.
      server: its state, which is not given up.
      store: what the clients keep, which is not given up.
      round_index: whose random streams are used; the round after the last one.
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
    plan = everyone.plan(round_index, lanes, everyone.time_steps(1, lanes))
    server, client_state = jax.tree.map(jnp.copy, (server, client_state))
    return program(server, client_state, plan, round_index).client_state


def tuned_figures(row: Row) -> Row:
    """Returns the scores of an evaluated row under the names of tuned models."""
    return {
        f"tuned_{name}": value
        for name, value in row.items()
        if name.startswith(("test_", "client_")) and isinstance(value, float)
    }
