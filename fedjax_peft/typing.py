"""The vocabulary of the library: aliases and the contracts of its callables.

Every role of data has one name here, with a note on who makes it. Implementations are plain
functions and NamedTuples of functions; nothing needs to inherit from anything.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax

PyTree: TypeAlias = Any
Key: TypeAlias = jax.Array
"""A typed JAX random key (``jax.random.key``), never a raw uint32 pair."""

Params: TypeAlias = dict[str, jax.Array]
"""Named arrays: dotted module path -> array. Frozen and trainable trees both have this form, so a
rule about leaves is a rule about names."""

Batch: TypeAlias = Mapping[str, jax.Array]
"""Columns of one batch, each ``[batch, ...]``. ``mask`` (bool ``[batch]``) marks real examples."""

Metrics: TypeAlias = dict[str, tuple[jax.Array, jax.Array]]
"""Metric name -> (sum, count), two float32 scalars, so that parts can be added up exactly."""


class Outputs(NamedTuple):
    """What a model returns for a batch."""

    logits: jax.Array
    """float32 ``[batch, classes]`` (or ``[batch, length, classes]`` for token tasks)."""
    hidden: jax.Array
    """Last hidden states ``[batch, length, width]``, for losses that compare representations."""
    states: tuple[jax.Array, ...] = ()
    """Hidden states of the embeddings and of every layer, where the model tells them. What nobody
    reads is not computed in a compiled function."""
    second: jax.Array | None = None
    """Logits of the second classifier, where there is one (FedMCP's, on the global adapter)."""


class ApplyFn(Protocol):
    """A pure forward pass."""

    def __call__(
        self, frozen: Params, trainable: Params, batch: Batch, key: Key | None, train: bool
    ) -> Outputs:
        """Returns the outputs for ``batch``; ``key`` is needed only if ``train`` (dropout)."""


class Task(NamedTuple):
    """What is learned: a loss and metrics over outputs, labels and masks."""

    loss: Callable[[Outputs, Batch], tuple[jax.Array, jax.Array]]
    """(outputs, batch) -> (sum of losses, count) over the real examples of the batch."""
    metrics: Callable[[Outputs, Batch], Metrics]
    """(outputs, batch) -> metrics, evaluated without gradients."""


class Problem(NamedTuple):
    """What a client update may use: the model bound to its frozen tree, and the task.

    Made by the engine inside the round program, where the frozen tree is an argument.
    """

    apply: Callable[[Params, Batch, Key | None, bool], Outputs]
    """(trainable, batch, key, train) -> outputs."""
    task: Task


class ClientUpdate(NamedTuple):
    """The local work of one client, as three pure functions (written for a single client).

    The engine maps them over lanes. A step whose batch is all padding is discarded by the engine,
    optimizer state included, so none of the three needs to know about masks.
    """

    init: Callable[[PyTree, PyTree, Key], PyTree]
    """(broadcast, private, key) -> local state."""
    step: Callable[[PyTree, Batch, Key], tuple[PyTree, Metrics]]
    """(state, batch, key) -> (state, metrics of this step)."""
    final: Callable[[PyTree], tuple[PyTree, PyTree]]
    """state -> (upload, private)."""


class Aggregated(NamedTuple):
    """What an aggregator gives the server."""

    update: PyTree
    """Same structure as one upload."""
    metrics: dict[str, jax.Array]
    """Float32 scalars about the aggregation, such as its error. May be empty."""


class Aggregator(NamedTuple):
    """A commutative monoid over uploads: it streams over clients and sums over devices.

    ``like`` is the broadcast of the round: what a client that learned nothing would upload.
    """

    name: str
    zero: Callable[[PyTree, int], PyTree]
    """(like, slots) -> empty accumulator for at most ``slots`` uploads."""
    add: Callable[[PyTree, PyTree, jax.Array, jax.Array, PyTree], PyTree]
    """(acc, uploads, weights, slots, like) -> acc.

    Uploads are stacked ``[lanes, ...]``; ``weights`` float32 ``[lanes]`` is 0 for a lane that has
    nothing to add (its upload is then all zeros); ``slots`` int32 ``[lanes]`` is the client's
    place in the cohort, out of range for such a lane.
    """
    finish: Callable[[PyTree, PyTree, Params], Aggregated]
    """(acc, like, fixed) -> aggregated; its update equals ``like`` where the total weight is 0.

    ``fixed`` holds the leaves that never change, such as LoRA's scale.
    """


class ServerUpdate(NamedTuple):
    """How the server moves. ``broadcast`` is what clients receive."""

    init: Callable[[PyTree], PyTree]
    """initial shared leaves -> server state."""
    update: Callable[[PyTree, PyTree], PyTree]
    """(server state, aggregated update) -> server state."""
    broadcast: Callable[[PyTree], PyTree]
    """server state -> shared leaves."""


class Roles(NamedTuple):
    """Which trainable leaves are whose: regular expressions searched in ``"kind:name"``.

    Shared leaves are broadcast and uploaded, private ones stay with their client, fixed ones never
    change. Together the rules must cover every leaf; see :func:`fedjax_peft.tree.assign_roles`.
    """

    shared: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()


class Algorithm(NamedTuple):
    """A federated algorithm: which leaves are whose, the local work, and how uploads combine."""

    name: str
    roles: Roles
    client: Callable[[Problem], ClientUpdate]
    aggregator: Aggregator
    server: ServerUpdate
