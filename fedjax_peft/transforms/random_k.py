"""Entries drawn at random (random-k sparsification; Konečný et al. 2016, Stich et al. 2018).

    C(x)_i = (n / k) · x_i  if i is among k drawn entries, else 0        E[C(x)] = x
    C(x)_i = x_i            the same, with error feedback

The k entries of each leaf follow from the client's key of the round, which the server knows. So
only values are sent, and no indices.
Checked against a NumPy transcription, and the mean over many keys.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Key, PyTree, Transform, Wire
from fedjax_peft.contracts.arguments import PositiveShare
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.hyperparameters import constants
from fedjax_peft.transforms.compressing import compressor, count, keys_of


@part
@constants("share")
def random_k(share: PositiveShare, *, error_feedback: bool = False) -> Transform:
    """Sends entries that are drawn at random with a seed that the server knows.

    On the wire: 32 bits for each entry that is sent, or those of the compressor after it. A client
    with a rank of its own (``client_ranks``) also sends the drawn entries that it does not have, as
    zeros; no more entries are counted than it has.

    Args:
      share: the share of the ``n`` entries of each leaf, rounded up to ``k`` whole entries. It
        cannot be a run-time value.
      error_feedback: send entries as they are, and add what was not sent to the next change. False:
        multiply them by ``n / k``, so that the result is unbiased.
    """

    def leaf(x: Array, key: Key) -> Array:
        if not x.size:
            return x
        chosen = count(share, x.size)
        places = jax.lax.top_k(jax.random.uniform(key, (x.size,)), chosen)[1]
        flat, factor = x.reshape(-1), 1.0 if error_feedback else x.size / chosen
        return jnp.zeros_like(flat).at[places].set(factor * flat[places]).reshape(x.shape)

    def encode(update: PyTree, memory: PyTree, key: Key) -> tuple[PyTree, PyTree]:
        return jax.tree.map(leaf, update, keys_of(key, update)), memory

    def wire(template: PyTree, wires: PyTree) -> PyTree:
        def size(x: Array, w: Wire) -> Wire:
            return w._replace(entries=count(share, x.size)) if x.size else w

        return jax.tree.map(size, template, wires)

    return compressor("random_k", encode, wire, feedback=error_feedback)
