"""The parts that compressors share: their measured error, error feedback, blocks, random keys."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Wire
from fedjax_peft.contracts.part import part
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.transform import Decoded, Encoded, Measurements, Transform, TransformWire
from fedjax_peft.contracts.types import Key, PyTree
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.random import stream
from fedjax_peft.support.errors import InputError

FLOAT = 32
"""Bits of a scale, a float32."""


def compressor(
    name: str,
    encode: Callable[[PyTree, PyTree, Key], tuple[PyTree, PyTree]],
    wire: TransformWire,
    *,
    memory: Callable[[PyTree], PyTree] = lambda template: (),
    final: bool = False,
    feedback: bool = False,
) -> Transform:
    """Returns the transform that encodes a change, and measures the relative error.

    The row of a round gains ``compression_error``: the mean over the aggregated clients of
    ``‖C(x) - x‖ / ‖x‖``, where ``x`` is what the compressor is given (with error feedback: the
    change plus the memory) and ``C(x)`` is what the server reads.

    Args:
      encode: (change, memory, key) -> (what the server reads, memory).
      memory: template -> the memory at the start.
      final: as ``Transform.final``.
      feedback: add :func:`error_feedback`.
    """

    def client(update: PyTree, memory: PyTree, received: PyTree, key: Key) -> Encoded:
        made, memory = encode(update, memory, key)
        made = jax.tree.map(lambda new, x: new.astype(x.dtype), made, update)
        size = tree.norm(update)
        lost = tree.norm(jax.tree.map(jnp.subtract, made, update))
        return Encoded(made, memory, lost / jnp.where(size > 0, size, 1.0))

    made = Transform(name, client, memory=memory, server=mean_error, wire=wire, final=final)
    return error_feedback(made) if feedback else made


def mean_error(
    aggregate: PyTree, state: PyTree, measured: Measurements, context: RoundContext
) -> Decoded:
    """Returns the server's part of a compressor: it only reports the mean relative error."""
    accepted = measured.accepted
    total = jnp.sum(jnp.where(accepted, measured.values, 0.0))
    # 0 / 0 is NaN: nobody has no error.
    return Decoded(aggregate, state, {"compression_error": total / jnp.sum(accepted)})


@part
def error_feedback(transform: Transform) -> Transform:
    """Returns a compressor whose clients add to their change what was lost before.

        p_t = Δ_t + e_t        sent: C(p_t)        e_{t+1} = p_t - C(p_t)

    (Seide et al. 2014; Karimireddy et al. 2019). The sum of what is sent is the sum of the changes
    minus the last memory. A client that does not take part keeps its memory.

    The memory is a change of A and B entry by entry. After an aggregator that factors LoRA's
    products anew, such as FRA, the factors have another basis, in which the memory means something
    else; a session warns of it.

    Args:
      transform: a compressor, or a :func:`fedjax_peft.transforms.chain` of compressors.

    Raises:
      InputError: the transform changes the aggregate at the server, as noise does.
    """
    if transform.changes_aggregate:
        raise InputError(
            f"Error feedback cannot be added to {transform.name!r}, whose server changes the"
            " aggregate: clients do not know what became of their own part."
        )

    def client(update: PyTree, memory: PyTree, received: PyTree, key: Key) -> Encoded:
        total = jax.tree.map(jnp.add, update, memory["lost"])
        encoded = transform.client(total, memory["own"], received, key)
        lost = jax.tree.map(jnp.subtract, total, encoded.update)
        return encoded._replace(memory={"lost": lost, "own": encoded.memory})

    def memory(template: PyTree) -> PyTree:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), template)
        return {"lost": zeros, "own": transform.memory(template)}

    return transform._replace(client=client, memory=memory)


def feeds_back(memory: PyTree) -> bool:
    """Returns whether a memory, of a transform or of a chain, has that of error feedback in it."""
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(memory))
    return any(jax.tree_util.DictKey("lost") in path for path in paths)


def keys_of(key: Key, update: PyTree) -> PyTree:
    """Returns a key for every leaf, which depends on the leaf's name."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: stream(key, jax.tree_util.keystr(path)), update
    )


def count(share: float, entries: int) -> int:
    """Returns how many entries a share is: rounded up, at least one, at most all."""
    return min(max(math.ceil(share * entries - 1e-9), 1), entries)


def index_bits(chosen: int, entries: int) -> int:
    """Returns the bits that say which entries were chosen: indices or a bitmap, the smaller."""
    if chosen >= entries:
        return 0
    return min(chosen * math.ceil(math.log2(entries)), entries)


def by_block(code: Callable[[Array], Array], x: Array, block: int | None) -> Array:
    """Returns a leaf whose blocks of consecutive entries were coded one by one.

    Args:
      code: float32 ``[blocks, block]`` -> the same shape; the last block is filled with zeros.
      block: entries in a block; None: the whole leaf is one block.
    """
    size = x.size if block is None else block
    flat = x.astype(jnp.float32).reshape(-1)
    flat = jnp.pad(flat, (0, -x.size % max(size, 1)))
    return code(flat.reshape(-1, max(size, 1))).reshape(-1)[: x.size].reshape(x.shape)


def wire_with_scales(x: Array, wire: Wire, bits: int, block: int | None) -> Wire:
    """Returns the size of a leaf with this number of bits an entry and a scale for each block."""
    scales = 1 if block is None else -(-x.size // block)
    return wire._replace(bits=bits, extra=wire.extra + FLOAT * scales)
