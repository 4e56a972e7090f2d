"""The largest entries of a change (top-k sparsification; Aji and Heafield 2017, Stich et al. 2018).

    C(x)_i = x_i  if |x_i| is among the k largest, else 0

k is a share of the entries of each leaf, or of all leaves together. Ties go to the entry that comes
first.
Checked against a NumPy transcription.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedjax_peft.contracts import Key, PyTree, Transform, Wire
from fedjax_peft.contracts.arguments import PositiveShare
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.hyperparameters import constants
from fedjax_peft.transforms.compressing import compressor, count, index_bits


@part
@constants("share")
def top_k(
    share: PositiveShare, *, error_feedback: bool = True, across_leaves: bool = False
) -> Transform:
    """Sends the entries of largest absolute value.

    On the wire: 32 bits for each entry that is sent, or those of the compressor after it, and which
    ones these are: indices of ``ceil(log2 n)`` bits or a bitmap of ``n`` bits, whichever is
    smaller.

    Args:
      share: the share of the ``n`` entries, rounded up to whole entries. It cannot be a run-time
        value.
      error_feedback: whether clients add what was not sent to their next change.
      across_leaves: choose among all leaves together instead of in each leaf.
    """

    def encode(update: PyTree, memory: PyTree, key: Key) -> tuple[PyTree, PyTree]:
        if across_leaves:
            flat, back = ravel_pytree(update)
            return back(_largest(flat, share)), memory
        return jax.tree.map(lambda x: _largest(x, share), update), memory

    def wire(template: PyTree, wires: PyTree) -> PyTree:
        if across_leaves:
            every = jax.tree.leaves(wires, is_leaf=lambda x: isinstance(x, Wire))
            # In the first bits of all leaves: their dtypes, and so their bits, are the same.
            bits = max((w.bits for w in every), default=32)
            whole = Wire(sum(w.entries for w in every), bits, sum(w.extra for w in every))
            return _sparse(whole.entries, whole, share)
        return jax.tree.map(lambda x, w: _sparse(x.size, w, share), template, wires)

    return compressor("top_k", encode, wire, feedback=error_feedback)


def _largest(x: Array, share: float) -> Array:
    if not x.size:
        return x
    flat = x.reshape(-1)
    places = jax.lax.top_k(jnp.abs(flat), count(share, x.size))[1]
    return jnp.zeros_like(flat).at[places].set(flat[places]).reshape(x.shape)


def _sparse(entries: int, wire: Any, share: float) -> Any:
    if not entries:
        return wire
    chosen = count(share, entries)
    return wire._replace(entries=chosen, extra=wire.extra + index_bits(chosen, entries))
