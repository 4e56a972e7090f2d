"""The client state: errors for algorithms that do not say how it begins."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from fedjax_peft.contracts import ClientUpdate, Key, PyTree
from fedjax_peft.support.errors import InputError


def with_clear_errors(name: str, update: ClientUpdate) -> ClientUpdate:
    """Returns the client update; its error names an entry that the client state does not have."""

    def init(broadcast: PyTree, client_state: PyTree, key: Key) -> PyTree:
        try:
            return update.init(broadcast, client_state, key)
        except KeyError as error:
            entry, known = error.args[0], [client_state, broadcast]
            if any(isinstance(x, Mapping) and entry in x for x in known):
                raise
            raise InputError(
                f"The client function of {name!r} reads {entry!r}, which is neither in the client"
                f" state ({_entries(client_state)}) nor in the broadcast ({_entries(broadcast)})."
                f" {_ADVICE}"
            ) from error

    return update._replace(init=init)


def check_client_state(name: str, after: PyTree, before: PyTree) -> None:
    """Raises InputError if a client state has another form than before the round.

    Args:
      after: the client state that ``ClientUpdate.final`` returned.
    """

    def form(x: PyTree) -> tuple:
        return jax.tree.structure(x), [*map(jnp.shape, jax.tree.leaves(x))]

    if form(after) != form(before):
        raise InputError(
            f"The client function of {name!r} keeps another client state ({_entries(after)}) than"
            f" it began with ({_entries(before)}), or arrays of another shape. {_ADVICE}"
        )


_ADVICE = (
    "Clients keep what Algorithm.init_client_state returns before the first round, by default their"
    " private leaves: give the algorithm init_client_state=lambda shared, private: {...}, with the"
    " entries and shapes that `final` returns."
)


def _entries(state: PyTree) -> str:
    """Returns the names of a state's entries, for a message."""
    if not isinstance(state, Mapping):
        return type(state).__name__
    return ", ".join(sorted(map(str, state))) or "no entries"
