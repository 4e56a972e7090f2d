"""Uploads on their way to the server: which entries a client sends, and upload transforms.

A transform sees the change of the declared part of an upload (``Traffic.change_field``):

    change  ←  upload - template                                      template: nothing was learned
    upload  ←  template + client's part of the transform (change)                   in every lane
    update  ←  template + server's part of the transform (update - template)        once a round

Where the transform changes what clients receive (``Transform.receive``), the upload becomes
``template`` plus what the client learned from what it received, before anything else.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts.aggregator import Aggregator
from fedjax_peft.contracts.algorithm import Algorithm
from fedjax_peft.contracts.client import ClientUpdate
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.transform import Decoded, Measurements, Transform
from fedjax_peft.contracts.types import Key, PyTree
from fedjax_peft.contracts.upload import Stage, Upload
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.random import stream, transform_key


class TransformState(NamedTuple):
    """The state of an upload transform between rounds."""

    server: PyTree
    """The server's state of the transform."""
    memory: PyTree
    """The clients' state of the transform, ``[clients, ...]``."""


def start_transform(
    transform: Transform | None, algorithm: Algorithm, server: PyTree
) -> TransformState | tuple[()]:
    """Returns the state of a transform before the first round; ``()`` without a transform.

    Its ``memory`` is that of one client.
    """
    if transform is None:
        return ()
    template = algorithm.change_part(algorithm.server.unchanged(server))
    # Copies: the round program donates its state, and the template may hold the model's arrays.
    state = jax.tree.map(jnp.array, transform.init(template))
    return TransformState(state, transform.memory(template))


def receive(
    transform: Transform | None, leaves: PyTree, state: TransformState | tuple[()], key: Key
) -> tuple[PyTree, dict[str, Array]]:
    """Returns what clients receive in the place of the shared leaves, and metrics."""
    if transform is None or transform.receive is None:
        return leaves, {}
    assert isinstance(state, TransformState)
    return transform.receive(leaves, state.server, stream(key, "downlink"))


def relative_to(
    template: PyTree, transform: Transform | None, received: PyTree, update: ClientUpdate
) -> ClientUpdate:
    """Returns the client update whose upload is ``template`` plus what was learned.

    Args:
      received: what clients received, from :func:`receive`.
      update: its upload is ``received`` plus what was learned.
    """
    if transform is None or transform.receive is None:
        return update

    def final(state: PyTree) -> tuple[PyTree, PyTree]:
        upload, client_state = update.final(state)
        moved = jax.tree.map(
            lambda t, u, r: (t + (u - r)).astype(t.dtype), template, upload, received
        )
        return moved, client_state

    return update._replace(final=final)


def encoder(
    transform: Transform, algorithm: Algorithm, received: PyTree, sent_leaves: Mapping[str, Array]
) -> Stage:
    """Returns the stage that applies the client's part of a transform to an upload.

    Args:
      sent_leaves: ``Traffic.sent_leaves`` of this round.
    """

    def encode(upload: Upload) -> Upload:
        client, memory = upload.client, upload.memory
        # Checked before the transform, which could make an infinite upload finite.
        finite = tree.all_finite(upload.value) & upload.finite
        key = transform_key(client.key, client.source.round_index, client.number)
        start, learned = map(algorithm.change_part, (client.source.template, upload.value))
        change = jax.tree.map(jnp.subtract, learned, start)
        zeros = jax.tree.map(jnp.zeros_like, change)
        seen = as_received(sent_leaves, change, zeros)
        known = memory
        for masks in (sent_leaves, client.rank_mask):
            known = _of_sent(masks, change, known, jax.tree.map(jnp.zeros_like, known))
        encoded = transform.client(seen, known, received, key)
        made, kept = encoded.update, encoded.memory
        for masks in (client.rank_mask, sent_leaves):
            made = as_received(masks, made, change)
            kept = _of_sent(masks, change, kept, memory)
        value = algorithm.with_change(upload.value, _moved(start, learned, change, made))
        return upload._replace(value=value, memory=kept, measured=encoded.measured, finite=finite)

    return encode


def _of_sent(masks: Mapping[str, Array], change: PyTree, memory: PyTree, other: PyTree) -> PyTree:
    """Returns a memory; entries for what is not sent are those of ``other``.

    Only arrays with a leaf's name and shape have an entry for each of the leaf's, such as what
    error feedback keeps.
    """
    leaves = jax.tree_util.tree_leaves_with_path(change)
    shapes = {tree.leaf_name(path): x.shape for path, x in leaves}

    def one(path: tuple, x: Array, y: Array) -> Array:
        name = tree.leaf_name(path)
        masked = name in masks and x.shape == shapes.get(name)
        return jnp.where(masks[name], x, y) if masked else x

    return jax.tree_util.tree_map_with_path(one, memory, other) if masks else memory


def no_measurements(
    transform: Transform | None,
    algorithm: Algorithm,
    template: PyTree,
    received: PyTree,
    slots: int,
) -> PyTree:
    """Returns zeros ``[slots]`` for every scalar that the transform's client part measures."""
    if transform is None:
        return ()
    start = algorithm.change_part(template)
    key = jax.eval_shape(lambda: jax.random.key(0))
    encoded = jax.eval_shape(transform.client, start, transform.memory(start), received, key)
    return jax.tree.map(lambda _: jnp.zeros(slots, jnp.float32), encoded.measured)


def decode(
    transform: Transform,
    algorithm: Algorithm,
    template: PyTree,
    update: PyTree,
    state: PyTree,
    measured: Measurements,
    context: RoundContext,
    sent_leaves: Mapping[str, Array],
) -> tuple[PyTree, PyTree, dict[str, Array]]:
    """Returns the results of the transform's server part: (aggregated update, state, metrics).

    If no upload was accepted, the update and the state stay as they are.

    Args:
      sent_leaves: ``Traffic.sent_leaves`` of this round.
    """
    if transform.server is None:
        return update, state, {}
    some = context.participants > 0
    if not transform.changes_aggregate:
        done = transform.server({}, state, measured, context)
        return update, tree.where(some, done.state, state), done.metrics
    start, mean = algorithm.change_part(template), algorithm.change_part(update)
    change = jax.tree.map(jnp.subtract, mean, start)
    done = transform.server(change, state, measured, context)
    made = as_received(sent_leaves, tree.where(some, done.aggregate, change), change)
    moved = _moved(start, mean, change, made)
    new: Decoded = done._replace(state=tree.where(some, done.state, state))
    return algorithm.with_change(update, moved), new.state, new.metrics


def as_received(masks: Mapping[str, Array], new: PyTree, received: PyTree) -> PyTree:
    """Returns the new leaves; entries outside a leaf's mask have their received values.

    Args:
      masks: leaf name -> bool, broadcastable to the leaf. All entries of a leaf without a mask are
        new.
      received: the received values, in the structure of ``new``.
    """
    if not masks or not isinstance(new, dict):
        return new
    return {
        name: jnp.where(masks[name], x, received[name])
        if name in masks
        else as_received(masks, x, received[name])
        for name, x in new.items()
    }


def sendable(
    aggregator: Aggregator,
    template: PyTree,
    sent_leaves: Mapping[str, Array],
    rank_mask: Mapping[str, Array],
) -> PyTree | None:
    """Returns which entries of an upload some client can change (``RoundContext.sendable``).

    Args:
      aggregator: whose ``unmasked_policy`` says what is sent for entries outside the rank masks.
      sent_leaves: ``Traffic.sent_leaves`` of this round.
      rank_mask: the entries that each client has, bool ``[clients, ...]`` by leaf name.
    """
    masks = {} if aggregator.unmasked_policy == "zero" else rank_mask
    if not sent_leaves and not masks:
        return None
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, bool), template)
    some = jax.tree.map(lambda x: jnp.ones(x.shape, bool), template)
    some = as_received({n: jnp.any(x, axis=0) for n, x in masks.items()}, some, nothing)
    return as_received(sent_leaves, some, nothing)


def _moved(start: PyTree, end: PyTree, change: PyTree, made: PyTree) -> PyTree:
    """Returns ``start + made``, or ``end`` in the entries where ``made`` equals ``change``.

    These entries stay bit-identical: ``start + (end - start)`` may differ from ``end`` by rounding.
    """
    return jax.tree.map(
        lambda s, e, c, m: jnp.where(m == c, e, (s + m).astype(e.dtype)), start, end, change, made
    )
