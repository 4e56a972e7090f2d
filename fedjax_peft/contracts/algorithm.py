"""A federated algorithm: roles of leaves, local work, aggregation and server."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from jax import Array

from fedjax_peft.contracts.aggregator import Aggregator
from fedjax_peft.contracts.client import ClientContext, ClientUpdate, Tuning
from fedjax_peft.contracts.feature import Feature
from fedjax_peft.contracts.server import ServerUpdate
from fedjax_peft.contracts.types import Params, PyTree

Weights: TypeAlias = Literal["size", "uniform"]
"""The weights of clients in the aggregate: by their numbers of examples, or all the same."""


class Roles(NamedTuple):
    """The roles of trainable leaves: regular expressions, searched in ``"kind:name"``.

    Shared leaves are broadcast and uploaded, private ones stay with their client, fixed ones never
    change. The rules together must cover every leaf; see
    :func:`fedjax_peft.numerics.roles.assign_roles`.
    """

    shared: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()


def _own_leaves(shared: Params, private: Params) -> PyTree:
    return private


def _both(broadcast: PyTree, client_state: PyTree) -> Params:
    return {**broadcast, **client_state}


def _anything(kinds: Mapping[str, str], clients: int) -> None:
    pass


def _nothing(*arguments: PyTree) -> dict[str, Array]:
    return {}


class Traffic(NamedTuple):
    """What travels, where that is not the whole broadcast down and the whole upload up.

    Bytes are counted by it. The engine uses ``sent_leaves``, ``sent_shares`` and ``change_field``.
    """

    sent_leaves: Callable[[PyTree, Array], dict[str, Array]] = _nothing
    """(broadcast, round) -> leaf name -> bool: whether clients send the leaf in this round. A leaf
    without an entry is sent. Upload transforms do not see leaves that rest."""
    sent_shares: Callable[[PyTree, PyTree], dict[str, Array]] = _nothing
    """(upload, template) -> leaf name -> the share of the leaf's bytes that the client sends, if it
    decides so by what it learned. A leaf without an entry is sent whole. What is expected before a
    round, such as for a deadline, is whole."""
    relayed_leaves: str | None = None
    """A regular expression: the leaves of uploads that the server passes on to every client one by
    one, because they do not combine to a leaf of the same size (stacking). None: no such leaves."""
    redrawn_leaves: str | None = None
    """A regular expression: the leaves of the broadcast that clients make themselves once the
    server was updated, such as new random factors. They are fetched before that only; None: no such
    leaves."""
    received_part: Callable[[PyTree], PyTree] | None = None
    """broadcast -> what one client receives of it, if clients receive different parts of the same
    size, such as its own cluster's leaves. The client's functions must use no other part. ``{}``:
    nothing travels, because clients and server are one place. None: a client receives all."""
    peers: tuple[int, ...] = ()
    """client -> with how many others it exchanges models, where there is no server: its upload and
    what it receives travel once for each. ``()``: with a server, once."""
    change_field: str | None = None
    """The field of an upload that holds the client's leaves, or their change: what upload
    transforms see. Other fields, such as a control variate, are sent as they are. None: the whole
    upload is leaves."""


class Algorithm(NamedTuple):
    """A federated algorithm: the roles of leaves, the local work, and how uploads combine.

    The first five fields are enough for most algorithms. The defaults of the others are for the
    plain case: the broadcast is the shared leaves, and a client keeps its private leaves.
    """

    name: str
    roles: Roles
    client: Callable[[ClientContext], ClientUpdate]
    aggregator: Aggregator
    server: ServerUpdate
    init_client_state: Callable[[Params, Params], PyTree] = _own_leaves
    """(initial shared leaves, initial private leaves) -> the client state before the first round.
    It never leaves its client."""
    model: Callable[[PyTree, PyTree], Params] = _both
    """(broadcast, client state) -> the leaves with which a client predicts."""
    local_model: Callable[[PyTree, PyTree, PyTree], Params] | None = None
    """(broadcast, upload, client state after the local work) -> the leaves with which a client
    predicts before the aggregation. None: ``model`` of the upload and the client state, which is
    right for uploads that have the form of the broadcast."""
    personal: bool = False
    """Whether every client predicts with its own model although no leaf is private."""
    weights: Weights = "size"
    """Of uploads in the aggregate."""
    tuning: Tuning | None = None
    """How clients adapt to the final broadcast before a second evaluation, whose metrics are named
    ``tuned_...``. None: no second evaluation."""
    traffic: Traffic = Traffic()
    """What travels, where that is not the whole broadcast and the whole upload."""
    incompatible: Mapping[Feature, str] = {}
    """What the algorithm cannot be combined with -> why, and what to use instead, in whole
    sentences for the error message. What follows from its other parts need not be said:
    :func:`fedjax_peft.contracts.compatibility.refusals` has both."""
    check: Callable[[Mapping[str, str], int], None] = _anything
    """(kind of each trainable leaf, number of clients) -> None. Raises InputError for a model or a
    number of clients that does not fit."""
    gradients_per_step: int = 1
    """How many gradients a local step takes of its batch at most, by ``ClientContext.gradient``:
    privacy accounting needs it."""
    round_metrics: Callable[[Array], dict[str, Array]] = _nothing
    """round -> float32 scalars for the round's row, such as the factor of a learning-rate schedule.
    """
    lower_is_better: tuple[str, ...] = ()
    """The metrics added by this algorithm for which lower is better. A second measurement of a
    task's metric, such as ``loss_global``, has the direction of the task's metric."""

    def __hash__(self) -> int:
        """Returns a hash, by which compiled programs are found again; a mapping has none itself."""
        return hash(tuple(frozenset(x.items()) if isinstance(x, Mapping) else x for x in self))

    def before_aggregation(self, broadcast: PyTree, upload: PyTree, client_state: PyTree) -> Params:
        """Returns the leaves with which a client predicts between local work and aggregation."""
        if self.local_model is None:
            return self.model(upload, client_state)
        return self.local_model(broadcast, upload, client_state)

    def change_part(self, upload: PyTree) -> PyTree:
        """Returns the part of an upload that holds the client's leaves or their change."""
        field = self.traffic.change_field
        return upload if field is None else upload[field]

    def with_change(self, upload: PyTree, part: PyTree) -> PyTree:
        """Returns the upload with its :meth:`change_part` replaced by ``part``."""
        field = self.traffic.change_field
        return part if field is None else {**upload, field: part}
