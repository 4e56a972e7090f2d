"""The versions of the server that clients of an asynchronous run still need.

A version is what a client that fetched it starts from. The history holds several of them, stacked
``[places, ...]``; the plan says which place holds which version. Every aggregation first puts the
present version into its place.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft.contracts import PyTree, ServerUpdate, Source, Transform
from fedjax_peft.engine.plan import Fetched
from fedjax_peft.engine.uploads import TransformState, receive
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.random import server_key, stream


def start_history(
    places: int,
    server: ServerUpdate,
    transform: Transform | None,
    state: PyTree,
    transform_state: TransformState | tuple[()],
) -> PyTree:
    """Returns a history of zeros with room for ``places`` versions.

    Args:
      places: the largest number of versions that are needed at the same time.
    """

    def version() -> tuple[PyTree, PyTree]:
        key = server_key(stream(0, "clients"), 1)
        broadcast, _ = receive(transform, server.broadcast(state), transform_state, key)
        return broadcast, server.unchanged(state)

    return jax.tree.map(lambda x: jnp.zeros((places, *x.shape), x.dtype), jax.eval_shape(version))


def remember(history: PyTree, fetched: Fetched | tuple[()], present: Source) -> PyTree:
    """Returns the history with the present version in its place; ``()`` stays as it is."""
    if not isinstance(fetched, Fetched):
        return history
    return tree.put(history, fetched.present, (present.broadcast, present.template))


def fetched_by(history: PyTree, fetched: Fetched | tuple[()], slot: Array) -> Source | tuple[()]:
    """Returns the :class:`Source` of slots, stacked; ``()`` if all start from the present version.

    Args:
      slot: int32, any shape.
    """
    if not isinstance(fetched, Fetched):
        return ()
    place, round_index, staleness = tree.take(
        (fetched.place, fetched.round_index, fetched.staleness), slot
    )
    broadcast, template = tree.take(history, place)
    return Source(broadcast, template, round_index, staleness)


def places_of(history: PyTree) -> int:
    """Returns the number of versions that a history has room for."""
    return next((len(x) for x in jax.tree.leaves(history)), 0)


def grown(history: PyTree, fetched: Fetched | tuple[()]) -> PyTree:
    """Returns the history with room for all versions that a plan needs.

    The session that made it may have foreseen fewer rounds.
    """
    if not isinstance(fetched, Fetched):
        return history
    last = int(max(fetched.present, np.max(fetched.place, initial=0)))
    more = (1 << last.bit_length()) - places_of(history)
    if more <= 0:
        return history
    return jax.tree.map(lambda x: jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)]), history)
