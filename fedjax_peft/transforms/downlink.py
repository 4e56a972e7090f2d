"""Compression of what the server broadcasts.

    w_t = θ_0 + C(θ_t - θ_0)          what clients receive
    θ_{t+1} = θ_t + agg(Δ_k)          Δ_k: what client k learned from w_t on

θ_0 is the start, which every client has: it follows from the seed, like the frozen weights, and is
not counted as sent. Any client can read the message of any round, so those that were not in earlier
cohorts have nothing to catch up on. The server keeps its own leaves θ_t uncompressed, so what one
message leaves out is in the next one, and there is no error memory: it would be added to a message
that contains the loss already.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Encoded, Key, PyTree, Transform
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics import tree
from fedjax_peft.support.errors import InputError


@part
def downlink(transform: Transform) -> Transform:
    """Returns the transform that compresses the broadcast and leaves uploads as they are.

    ``chain(downlink(int8()), top_k(0.1))`` compresses both ways. The row of a round gains
    ``downlink_error``: the norm of what the broadcast lost over the norm of ``θ_t - θ_0``.

    A leaf that the server has not changed since a client's last round is not sent to it again,
    unless the compressor draws random numbers: its message then differs from round to round.

    Args:
      transform: a compressor without memory, so without error feedback, or a chain of such
        compressors.

    Raises:
      InputError: the transform is no compressor, or it has a memory or a part at the server that
        changes the aggregate.
    """
    if transform.wire is None or transform.changes_aggregate:
        raise InputError(
            f"downlink takes a compressor such as fp.transforms.int8(), and {transform.name!r} is"
            " none."
        )
    if jax.tree.leaves(transform.memory(_EXAMPLE)):
        raise InputError(
            f"downlink takes a compressor without memory, and {transform.name!r} has one. Give"
            " error_feedback=False: the server keeps its own leaves, so nothing is lost for ever."
        )

    def receive(leaves: PyTree, state: PyTree, key: Key) -> tuple[PyTree, dict[str, Array]]:
        change = jax.tree.map(jnp.subtract, leaves, state)
        known = transform.broadcast(transform.init(change))
        made = transform.client(change, transform.memory(change), known, key).update
        size, lost = tree.norm(change), tree.distance(made, change)
        received = jax.tree.map(lambda s, c: (s + c).astype(s.dtype), state, made)
        return received, {"downlink_error": lost / jnp.where(size > 0, size, 1.0)}

    return Transform(
        f"downlink {transform.name}",
        lambda update, memory, received, key: Encoded(update, memory),
        init=lambda template: template,
        broadcast=lambda state: (),
        receive=receive,
        down_wire=transform.wire,
    )


_EXAMPLE: Any = {
    "m.lora_a": jax.ShapeDtypeStruct((64, 8), jnp.float32),
    "m.lora_b": jax.ShapeDtypeStruct((8, 64), jnp.float32),
}
"""Leaves of which a transform with a memory keeps something."""
