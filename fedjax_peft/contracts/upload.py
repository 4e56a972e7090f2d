"""An upload on its way from its client into the sum, and the stages that it passes.

An attack scales what hostile clients send::

    def scaled(upload: Upload) -> Upload:
        start = upload.client.source.template
        longer = jax.tree.map(lambda x, y: y + 10 * (x - y), upload.value, start)
        sent = tree.where(hostile[upload.client.number], longer, upload.value)
        return upload._replace(value=sent)
"""

from typing import Any, NamedTuple, Protocol

from jax import Array

from fedjax_peft.contracts.types import Key, Params, PyTree


class Source(NamedTuple):
    """A version of the server, from which a client starts."""

    broadcast: PyTree
    """What the client received."""
    template: PyTree
    """The upload of a client that learned nothing from this version."""
    round_index: Array
    """The round that gives the client's random numbers, int32."""
    staleness: Any = 0
    """How often the server has been updated since the client fetched this version, int32."""


class Participant(NamedTuple):
    """A client of a round."""

    number: Array
    """The client's number in the federation, int32; -1 for a slot without a client."""
    source: Source
    """The version of the server that it started from."""
    rank_mask: Params
    """Leaf name -> the entries that it has, bool; it has all entries of other leaves."""
    key: Key
    """The key of all clients of the run. A client's own keys are made of it by purpose, round and
    number (:mod:`fedjax_peft.numerics.random`)."""


class Upload(NamedTuple):
    """The upload of one client, and what comes with it."""

    value: PyTree
    """What is sent."""
    weight: Array
    """Its weight in the sum, float32; 0 for one that is left out."""
    client: Participant
    """Who sends it."""
    template: PyTree
    """The upload of a client that learned nothing from the server's present version."""
    client_state: PyTree
    """What the client keeps for its next round."""
    memory: PyTree = ()
    """What its upload transform keeps for its next round."""
    accepted: Any = True
    """Whether it is added to the sum, bool. At first: whether the client has sent anything."""
    finite: Any = True
    """Whether all numbers were finite so far, bool."""
    norm: Any = 0.0
    """Norm of the model change that it describes, float32."""
    shares: dict[str, Array] = {}  # noqa: RUF012
    """``Traffic.sent_shares``."""
    measured: PyTree = ()
    """``Encoded.measured``, what its upload transform measured."""


class Stage(Protocol):
    """Something that happens to an upload on its way; written for a single client."""

    def __call__(self, upload: Upload) -> Upload:
        """Returns the upload as the next stage receives it."""


class Stages(NamedTuple):
    """The stages that a run adds to those of every round."""

    sent: tuple[Stage, ...] = ()
    """What happens to uploads at their clients, after the local work and before upload transforms,
    such as an attack. Leaves that rest in the round (``Traffic.sent_leaves``) stay as they
    are."""
    received: tuple[Stage, ...] = ()
    """What the server makes of uploads before it adds them, such as those of clients that started
    from an older version."""

    def then(self, others: "Stages") -> "Stages":
        """Returns these stages, followed by others at both ends."""
        return Stages(self.sent + others.sent, self.received + others.received)
