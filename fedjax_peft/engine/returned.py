"""Errors for functions of an algorithm that return something of another form than they must."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_peft.contracts import (
    Algorithm,
    Batch,
    ClientUpdate,
    Key,
    Metrics,
    PyTree,
    RoundContext,
)
from fedjax_peft.numerics.forms import check_form, check_pair, check_type
from fedjax_peft.support.errors import InputError


def checked_client(name: str, update: ClientUpdate) -> ClientUpdate:
    """Returns a client update with errors for results that are not those of the contract.

    The error of ``init`` also names an entry that the client state does not have.
    """
    check_type(f"The function `client` of {name!r}", update, ClientUpdate)

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

    def step(state: PyTree, batch: Batch, key: Key) -> tuple[PyTree, Metrics]:
        result = update.step(state, batch, key)
        check_pair(f"The function `step` of {name!r}", result, "state, metrics")
        check_form(_STATE.format(name), result[0], state, dtypes=True)
        if not isinstance(result[1], Mapping):
            raise InputError(f"{_METRICS.format(name)}, and are {type(result[1]).__name__}.")
        for metric, value in result[1].items():
            if not isinstance(value, tuple | list | Mapping):
                raise InputError(f"{_METRICS.format(name)}, and {metric!r} is not.")
        return result

    def final(state: PyTree) -> tuple[PyTree, PyTree]:
        result = update.final(state)
        check_pair(f"The function `final` of {name!r}", result, "upload, client state")
        return jax.tree.map(jnp.asarray, result)

    return ClientUpdate(init, step, final)


def check_upload(name: str, upload: PyTree, template: PyTree) -> None:
    """Raises InputError for an upload of another form than the template."""
    check_form(
        f"The function `final` of {name!r} must return an upload of the form of the broadcast, or"
        " of what ServerUpdate.template returns",
        *(upload, template),
    )


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


def checked_server(algorithm: Algorithm) -> Algorithm:
    """Returns an algorithm with an error for a server state of another form than before."""

    def update(state: PyTree, aggregated: PyTree, context: RoundContext) -> PyTree:
        new: Any = algorithm.server.update(state, aggregated, context)
        what = f"The server state of {algorithm.name!r} must keep its form in a round: see"
        what += f" ServerUpdate.update and the aggregator {algorithm.aggregator.name!r}"
        check_form(what, new, state, dtypes=True)
        return new

    return algorithm._replace(server=algorithm.server._replace(update=update))


_ADVICE = (
    "Clients keep what Algorithm.init_client_state returns before the first round, by default their"
    " private leaves: give the algorithm init_client_state=lambda shared, private: {...}, with the"
    " entries and shapes that `final` returns."
)
_STATE = "The function `step` of {!r} must return a state of the form of the one that it is given"
_METRICS = "The metrics of `step` of {!r} must be a dict of pairs (sum, count)"


def _entries(state: PyTree) -> str:
    """Returns the names of a state's entries, for a message."""
    if not isinstance(state, Mapping):
        return type(state).__name__
    return ", ".join(sorted(map(str, state))) or "no entries"
