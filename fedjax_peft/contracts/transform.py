"""Upload transforms, such as compression: a part at the client, one at the server, the bytes."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, Protocol

from jax import Array

from fedjax_peft.contracts.aggregator import _no_state
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Key, PyTree


class Encoded(NamedTuple):
    """What an upload transform makes of one client's change."""

    update: PyTree
    """What the server reads from the upload: the structure, shapes and dtypes of the change."""
    memory: PyTree = ()
    """What the client keeps for its next round."""
    measured: PyTree = ()
    """Float32 scalars about this client, for :class:`TransformServer`."""


class Measurements(NamedTuple):
    """What an upload transform measured of the clients of a round. Made by the engine."""

    values: PyTree
    """The scalars of ``Encoded.measured``, each float32 ``[slots]``, one entry for each client."""
    accepted: Array
    """bool ``[slots]``: whose uploads were aggregated. Entries of other clients mean nothing."""


class Decoded(NamedTuple):
    """What the server's part of an upload transform returns."""

    aggregate: PyTree
    """The mean change, same structure as given."""
    state: PyTree
    """The transform's state for the next round."""
    metrics: dict[str, Array]
    """Float32 scalars for the round's row of metrics; one that is not finite is written as null."""


class TransformClient(Protocol):
    """The client's part of an upload transform, written for a single client."""

    def __call__(self, update: PyTree, memory: PyTree, received: PyTree, key: Key) -> Encoded:
        """Returns the encoded change.

        Args:
          update: the change: what the client sends minus what it would send had it learned nothing.
          memory: what this client kept from its last round.
          received: what the server broadcasts for this transform (``Transform.broadcast``).
          key: for random numbers of this client in this round.
        """


class TransformServer(Protocol):
    """The server's part of an upload transform, once a round, after the aggregation."""

    def __call__(
        self, aggregate: PyTree, state: PyTree, measured: Measurements, context: RoundContext
    ) -> Decoded:
        """Returns the aggregate, the next state and metrics.

        It is not called for a round in which no upload was accepted, or its results are discarded.

        Args:
          aggregate: the mean of the encoded changes; ``{}`` unless ``Transform.changes_aggregate``.
          state: the transform's state.
          measured: what the clients' parts measured.
          context: what the server knows of the round.
        """


class Wire(NamedTuple):
    """The size of one encoded leaf on the wire.

    Numbers and bits are separate, so that transforms compose: a sparsifier changes the number of
    entries, a quantiser the bits of each.
    """

    entries: int
    """How many numbers travel."""
    bits: int | Fraction
    """Bits of each number. A fraction where several numbers share bits."""
    extra: int = 0
    """Further bits: indices, scales, headers."""

    @property
    def nbytes(self) -> int:
        """The size in bytes, rounded up once."""
        return math.ceil((self.entries * self.bits + self.extra) / 8)


class TransformWire(Protocol):
    """The size of an encoded change on the wire."""

    def __call__(self, template: PyTree, wires: PyTree) -> PyTree:
        """Returns a :class:`Wire` for each leaf of an encoded upload.

        A single :class:`Wire` for the whole change means that the entries that travel are chosen
        among all leaves together. In a chain, transforms after it see one array of these entries.

        Args:
          template: shapes and dtypes of what the transform is given.
          wires: in the structure of ``template``, the :class:`Wire` of each leaf without this
            transform, as the one before it in a chain leaves it.
        """


def _whole_state(state: PyTree) -> PyTree:
    return state


class Transform(NamedTuple):
    """A transform of uploads: a pair of pure functions, at the client and at the server.

    It applies to the **change** of a model: upload minus ``template``, the upload of a client that
    learned nothing. The client's part runs after local training, before aggregation; the server's
    part runs between the aggregation and the server's update. Transforms compose by
    :func:`fedjax_peft.transforms.chain`.

    A transform sees the part of an upload that ``Traffic.change_field`` names; other parts are
    sent as they are. Of that part, entries that are not sent look like 0 to the transform, and stay
    as they are whatever it returns: leaves that rest in a round (``Traffic.sent_leaves``), and
    directions that the client does not own (``client_ranks``). The same holds for a memory: if an
    array of it has a leaf's name and shape, these entries look like 0 and stay as they are. An
    upload that is not finite, before or after the transform, is dropped, and its client keeps its
    former memory.
    """

    name: str
    client: TransformClient
    init: Callable[[PyTree], PyTree] = _no_state
    """template of the change (shapes are enough) -> the server's state at the start; ``()``: none.
    """
    broadcast: Callable[[PyTree], PyTree] = _whole_state
    """state -> what every client receives of it at the start of a round. It is counted in
    ``bytes_down``."""
    memory: Callable[[PyTree], PyTree] = _no_state
    """template of the change -> what one client keeps at the start, such as zeros for error
    feedback; ``()``: nothing."""
    server: TransformServer | None = None
    """The server's part; None: there is none."""
    changes_aggregate: bool = False
    """Whether ``server`` changes the aggregate. Such a transform is refused with an aggregator that
    is not ``linear``."""
    wire: TransformWire | None = None
    """The size of an encoded change; None: what it was before. In a :func:`chain
    <fedjax_peft.transforms.chain>`, a transform with ``wire`` is given the entries that the
    transforms before it send, as arrays ``[entries]``, where these are not all entries."""
    final: bool = False
    """Whether what the server reads has more entries than what is sent, such as a product of
    factors. No later transform of a chain can then encode what is sent."""
    receive: Callable[[PyTree, PyTree, Key], tuple[PyTree, dict[str, Array]]] | None = None
    """(shared leaves, state, key) -> (what clients receive instead, metrics), once a round. The
    server's own leaves stay as they are, and what a client learned from what it received is added
    to them. None: clients receive the leaves themselves."""
    down_wire: TransformWire | None = None
    """The size of what ``receive`` returns."""
