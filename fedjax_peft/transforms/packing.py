"""The entries of a change that travel, as arrays without the others.

Transforms return what the server reads, in the shape of the change. Where a transform sends only
some entries, the next one of a chain encodes these alone: it is given the ``entries`` largest
entries of each leaf, in the order of their places, and its result goes back to these places.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedjax_peft.contracts import PyTree, Wire


def is_wire(value: object) -> bool:
    """Returns whether a value is a :class:`fedjax_peft.contracts.Wire`."""
    return isinstance(value, Wire)


def wires_of(template: PyTree) -> PyTree:
    """Returns the :class:`fedjax_peft.contracts.Wire` of every leaf that is sent as it is."""
    return jax.tree.map(lambda x: Wire(x.size, 8 * x.dtype.itemsize), template)


def all_entries(template: PyTree, wires: PyTree) -> PyTree:
    """Returns the wires if they send every entry, or else those of leaves sent as they are."""
    whole = wires_of(template)
    sent, every = (jax.tree.leaves(x, is_leaf=is_wire) for x in (wires, whole))
    return wires if [w.entries for w in sent] == [w.entries for w in every] else whole


def pack(update: PyTree, wires: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Returns the entries that travel, and the function that puts new values in their places.

    Args:
      wires: a :class:`fedjax_peft.contracts.Wire` for each leaf, or one for all leaves together.
    """
    if is_wire(wires) and isinstance(update, dict | list | tuple):
        flat, whole = ravel_pytree(update)
        values, back = pack(flat, wires)
        return values, lambda new: whole(back(new))
    leaves, structure = jax.tree.flatten(update)
    sizes = jax.tree.leaves(wires, is_leaf=is_wire)
    packed = [_pack_leaf(x, wire.entries) for x, wire in zip(leaves, sizes, strict=True)]

    def unpack(new: PyTree) -> PyTree:
        pairs = zip(packed, jax.tree.leaves(new), strict=True)
        return jax.tree.unflatten(structure, [back(x) for (_, back), x in pairs])

    return jax.tree.unflatten(structure, [values for values, _ in packed]), unpack


def _pack_leaf(x: Array, entries: int) -> tuple[Array, Callable[[Array], Array]]:
    if entries >= x.size:
        return x, lambda new: new
    flat = x.reshape(-1)
    places = jnp.sort(jax.lax.top_k(jnp.abs(flat), entries)[1])
    return flat[places], lambda new: jnp.zeros_like(flat).at[places].set(new).reshape(x.shape)
