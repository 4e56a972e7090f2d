"""The server's part of a round: what it knows, its state, its update and its broadcast."""

from collections.abc import Callable
from typing import NamedTuple

from jax import Array

from fedjax_peft.contracts.types import Key, Metrics, Params, PyTree
from fedjax_peft.support.errors import InputError


class RoundContext(NamedTuple):
    """What the server knows about a round beside the aggregate. Made by the engine."""

    round_index: Array
    """The round, int32 from 1."""
    participants: Array
    """How many uploads were aggregated, float32; 0 where no upload could be used. With
    :attr:`Aggregator.every_round` it is the expected number, the same in every round."""
    total_clients: int
    """How many clients can take part: those that have examples and a weight above 0, or all if they
    send noise."""
    metrics: Metrics
    """Training metrics of the participants, summed. A client whose value is not finite is left out
    of that metric, so both sum and count can be 0."""
    fixed: Params
    """The trainable leaves that never change, such as LoRA's scale."""
    key: Key
    """For the server's random numbers in this round. Each user descends from it by a name:
    ``stream(context.key, "my noise")``."""
    sampling_probability: float
    """The share of all clients that a round samples, on average. With Poisson sampling it is the
    probability of each client."""
    clients: Array
    """The clients' numbers, int32 ``[slots]``; the number of clients in the federation for a slot
    without a client. In the order of :attr:`Total.weights`."""
    sendable: PyTree | None = None
    """Which entries of an upload at least one client can change in this round, bool, in the
    structure of the upload; None: all. A leaf that rests (``Traffic.sent_leaves``) cannot be
    changed, nor a direction that no client owns (``client_ranks``)."""


class ServerUpdate(NamedTuple):
    """The server's part of an algorithm: its state, its update, and what it broadcasts."""

    init: Callable[[Params], PyTree]
    """initial shared leaves -> server state."""
    update: Callable[[PyTree, PyTree, RoundContext], PyTree]
    """(server state, aggregated update, context) -> server state."""
    broadcast: Callable[[PyTree], PyTree]
    """server state -> what clients receive, such as the shared leaves."""
    params: Callable[[PyTree], Params] | None = None
    """server state -> shared leaves of the global model; None: the broadcast itself."""
    template: Callable[[PyTree], PyTree] | None = None
    """server state -> the upload of a client that learned nothing; None: the broadcast itself."""
    update_norm: Callable[[PyTree, PyTree, Params], Array] | None = None
    """(one upload, ``template``, fixed leaves) -> Euclidean length of the change of the model that
    the upload describes, a float32 scalar, 0 for ``template``. None: the length of ``upload -
    template``, of the part that ``Traffic.change_field`` names. Entries that a client does not
    own (``client_ranks``) equal those of ``template``."""
    frozen_delta: Callable[[PyTree], Params] | None = None
    """server state -> what is added to the frozen tree: leaf name -> float32 array of the leaf's
    shape. None: nothing."""
    measure: Callable[[PyTree, Params, Params, Params], dict[str, Array]] | None = None
    """(aggregated update, weights before, weights after, fixed leaves) -> metrics of the
    aggregation. They replace metrics of the aggregator that have the same name. The weights are the
    leaves that ``frozen_delta`` names, as clients compute with them, in float32. None: no metrics.
    """
    metrics: Callable[[PyTree], dict[str, Array]] | None = None
    """server state -> float32 scalars about the last update; None: no metrics."""

    def model(self, state: PyTree) -> Params:
        """Returns the shared leaves of the global model."""
        return (self.params or self.broadcast)(state)

    def unchanged(self, state: PyTree) -> PyTree:
        """Returns the upload of a client that learned nothing."""
        return (self.template or self.broadcast)(state)

    def merge_into_frozen(self, state: PyTree, frozen: Params) -> Params:
        """Returns the frozen tree plus ``frozen_delta``.

        These sums are float32 even where the frozen leaf has a narrower dtype, in which most of the
        added amount would be rounded away.

        Raises:
          InputError: ``frozen_delta`` names a leaf that does not exist or has another shape.
        """
        frozen_delta = {} if self.frozen_delta is None else self.frozen_delta(state)
        for name, x in frozen_delta.items():
            if f"{name}.codes" in frozen:
                raise InputError(
                    "This algorithm adds what it has learned to the frozen weights, and those of"
                    f" {name!r} are quantised: a sum would need them all in float32. Load the model"
                    " without quantize, or choose an algorithm that changes adapters only."
                )
            if name not in frozen or frozen[name].shape != x.shape:
                raise InputError(
                    "This algorithm adds what it has learned to the frozen weights, and the model"
                    f" has no frozen {name!r} of shape {x.shape} to add to. LoRA on parts of a"
                    " fused projection and several LoRAs on one layer (lora_sum) cannot be folded:"
                    " attach lora without parts. With scan_layers = True the weights of all layers"
                    " are one array: load the model without it."
                )
        return {n: x + frozen_delta[n] if n in frozen_delta else x for n, x in frozen.items()}
