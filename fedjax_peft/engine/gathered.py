"""Round programs whose clients are in a store: only the rows of the plan are on the device."""

from collections.abc import Callable, Mapping
from typing import Any

from fedjax_peft.engine.devices.layout import Layout
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.program import OuterProgram
from fedjax_peft.engine.round import RoundResult
from fedjax_peft.engine.setup import Setup
from fedjax_peft.engine.state import State
from fedjax_peft.engine.stores.client_records import ClientRow
from fedjax_peft.engine.stores.client_store import StoredClients
from fedjax_peft.engine.uploads import TransformState
from fedjax_peft.engine.work import Work


class GatheredProgram(OuterProgram):
    """A program that takes and returns states with :class:`StoredClients`.

    The program inside gets the rows of the plan's slots, ``[slots, ...]``, in the places of the
    arrays over all clients.
    """

    def __init__(self, program: Any, layout: Layout, work: Work):
        """Takes a program that was made with ``gathered=True``, its layout and its work."""
        super().__init__(program)
        self._layout, self._work = layout, work

    def __call__(self, state: State, plan: Plan, round_index: int) -> RoundResult:
        """Runs round ``round_index``; returns without waiting for the device."""
        stored = _stored(state)
        rows = stored.on_device(plan.client, self._layout.put_clients)
        result = self._program(with_rows(state, rows), plan, round_index)
        if self._work not in ("training", "tuning"):
            return result
        after, memory = split_memory(result.state)
        new = stored.after(plan.client, ClientRow(after.client_state, memory))
        return result._replace(state=after._replace(client_state=new))

    def _shaped(self, state: State, plan: Plan) -> tuple[State, Plan]:
        """Returns a state with rows of zeros."""
        rows = _stored(state).store.packing.zeros(len(plan.client))
        return with_rows(state, self._layout.put_clients(rows)), plan


def gathering(make: Callable[..., Any]) -> Callable[..., GatheredProgram]:
    """Returns a function that makes gathered programs, from one that makes programs."""

    def made(
        setup: Setup, columns: Mapping[str, Any], *, work: Work = "training", **form: Any
    ) -> GatheredProgram:
        program = make(setup, columns, work=work, gathered=True, **form)
        return GatheredProgram(program, setup.layout, work)

    return made


def with_rows(state: State, rows: ClientRow) -> State:
    """Returns a state with these rows in the places of the arrays over all clients."""
    transform = state.transform_state
    if isinstance(transform, TransformState):
        transform = transform._replace(memory=rows.memory)
    return state._replace(client_state=rows.client_state, transform_state=transform)


def split_memory(state: State) -> tuple[State, Any]:
    """Returns a state without the clients' memory of the upload transform, and the memory."""
    transform = state.transform_state
    if not isinstance(transform, TransformState):
        return state, ()
    return state._replace(transform_state=transform._replace(memory=())), transform.memory


def _stored(state: State) -> StoredClients:
    assert isinstance(state.client_state, StoredClients)
    return state.client_state
