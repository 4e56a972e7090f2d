"""The places of a state's arrays on the devices."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from fedjax_peft.engine.devices.layout import Layout
from fedjax_peft.engine.state import State
from fedjax_peft.engine.uploads import TransformState


def place_state(layout: Layout, state: State) -> State:
    """Returns a state (:meth:`State.on_device`) with its arrays on the devices."""
    return _mapped(state, layout.put, layout.put_clients)


def state_shardings(layout: Layout, *, transforms: bool) -> State:
    """Returns the shardings of the parts of a state, which each apply to all arrays of a part."""
    nothing: Any = ()
    transform = TransformState(nothing, nothing) if transforms else nothing
    state = State(nothing, transform_state=transform).on_device()
    return _mapped(state, lambda part: layout.whole, lambda part: layout.by_row)


def map_client_rows(function: Callable[[Array], Any], state: State) -> State:
    """Returns a state with a function applied to every array ``[clients, ...]``."""
    return _mapped(state, lambda part: part, lambda part: jax.tree.map(function, part))


def _mapped(state: State, shared: Callable[[Any], Any], by_client: Callable[[Any], Any]) -> State:
    """Returns a state; the functions map the parts that clients share, and those by client."""
    transform = state.transform_state
    if isinstance(transform, TransformState):
        transform = TransformState(shared(transform.server), by_client(transform.memory))
    return state._replace(
        server=shared(state.server),
        client_state=by_client(state.client_state),
        aggregator_state=shared(state.aggregator_state),
        transform_state=transform,
        history=shared(state.history),
        values=shared(state.values),
        salt=shared(state.salt),
    )
