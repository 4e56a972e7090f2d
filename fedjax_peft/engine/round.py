"""A whole communication round as one XLA program.

    the server broadcasts                             start.py
    the clients of the plan work, send, and keep      local_work.py, client.py, stages.py
    the server aggregates, updates and measures       server_step.py

The clients' work is a loop over the plan's time steps, whose number is a run-time value. Evaluation
is the same program with clients that measure and do not train (:mod:`~fedjax_peft.engine.work`).
:mod:`~fedjax_peft.engine.reference` is the same round without lanes and jit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Key, Params, PyTree
from fedjax_peft.engine.local_work import RoundOptions, Rows, Worked, run_clients
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.server_step import Collected, Updated, server_step
from fedjax_peft.engine.setup import Constants, Setup
from fedjax_peft.engine.stages import upload_stages
from fedjax_peft.engine.start import RoundStart, start_round
from fedjax_peft.engine.state import State
from fedjax_peft.engine.uploads import TransformState
from fedjax_peft.numerics import tree


class RoundResult(NamedTuple):
    """The results of a round; all arrays stay on the device.

    What the other fields hold is said in :class:`fedjax_peft.engine.state.RoundInfo`.
    """

    state: State
    """The state after the round, without the host's integers (:meth:`State.on_device`)."""
    sums: dict[str, tuple[Array, Array]]
    finite: Array
    norms: Array
    sent_leaves: dict[str, Array]
    aggregation: dict[str, Array]
    predictions: dict[str, Array]
    """Step outputs for each example, ``[time steps, lanes, batch, ...]``; see ``PREDICTIONS``."""
    shares: dict[str, Array] = {}  # noqa: RUF012
    plan: Any = ()
    """The plan without the clients that were lost in the round; ``()``: nobody was."""


_PLAIN = RoundOptions()


def build_round(setup: Setup, options: RoundOptions = _PLAIN) -> Callable[..., RoundResult]:
    """Returns the pure function that runs one round; the caller jits it.

    Args:
      setup: the algorithm and its surroundings. Its arrays are not used: they are arguments of the
        function.
    """

    def round_(
        frozen: Params,
        fixed: Params,
        rank_mask: Params,
        columns: Params,
        state: State,
        plan: Plan,
        key: Key,
        round_index: Array,
    ) -> RoundResult:
        """Runs round ``round_index``; ``state`` may be donated.

        The first four arguments are :class:`fedjax_peft.engine.setup.Constants`.
        """
        constants = Constants(frozen, fixed, rank_mask, columns)
        start = start_round(setup, constants, state, plan, key, round_index)
        rows = _rows(setup, start, options.gathered)
        worked = run_clients(setup, start, rows, upload_stages(setup, start), options)
        updated = server_step(setup, start, _collected(start, worked))
        return RoundResult(
            _after(setup, start, worked, updated, options.gathered),
            worked.sums,
            worked.ended.finite,
            worked.ended.norms,
            start.sent_leaves,
            updated.metrics,
            worked.predictions,
            worked.ended.shares,
        )

    return round_


def _rows(setup: Setup, start: RoundStart, gathered: bool) -> Rows:
    """Returns what the clients of the plan's slots have."""
    state, client, split = start.state, start.plan.client, setup.layout.split_rows

    def of_slots(x: PyTree) -> PyTree:
        return split(x if gathered else tree.take(x, client))

    memory = () if setup.transform is None else of_slots(state.transform_state.memory)
    mask = split(tree.take(start.constants.rank_mask, client))
    return Rows(mask, of_slots(state.client_state), memory)


def _collected(start: RoundStart, worked: Worked) -> Collected:
    """Returns what the server gets of the clients' work."""
    plan, ended = start.plan, worked.ended
    accepted = ended.finite & (plan.weight > 0)
    if not isinstance(plan.silent, tuple):
        accepted = accepted & ~plan.silent
    return Collected(ended.total, worked.sums, accepted, ended.measured)


def _after(
    setup: Setup, start: RoundStart, worked: Worked, updated: Updated, gathered: bool
) -> State:
    """Returns the state after the round."""
    state, ended, client = start.state, worked.ended, start.plan.client
    rows = jnp.where(client < 0, setup.clients, client)

    def stored(everyone: PyTree, new: PyTree) -> PyTree:
        return new if gathered else tree.put(everyone, rows, new)

    transform_state = state.transform_state
    if setup.transform is not None:
        memory = stored(transform_state.memory, ended.memory)
        transform_state = TransformState(updated.transform_state, memory)
    return state._replace(
        server=updated.server,
        client_state=stored(state.client_state, ended.client_state),
        aggregator_state=updated.aggregator_state,
        transform_state=transform_state,
        history=start.history,
    )
