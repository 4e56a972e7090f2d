"""The vocabulary of the library: type aliases, and the contracts of its callables.

Each kind of data has one name here, with a note on which part of the library makes it.
Implementations are plain functions and NamedTuples of functions; no base class is needed.
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax

from fedjax_peft.errors import InputError

PyTree: TypeAlias = Any
Key: TypeAlias = jax.Array
"""A typed JAX random key (``jax.random.key``), never a raw uint32 pair."""

Params: TypeAlias = dict[str, jax.Array]
"""Named arrays: dotted module path -> array. Frozen and trainable trees both have this form, so
leaves are selected by rules about names."""

Splits: TypeAlias = tuple[tuple[str, int], ...]
"""(leaf name, axis): the axis on which several devices share a leaf; the first full match of the
regular expression counts. Each family of models has its own."""

Batch: TypeAlias = Mapping[str, jax.Array]
"""Columns of one batch, each ``[batch, ...]``. ``mask`` (bool ``[batch]``) marks real examples."""

Metrics: TypeAlias = dict[str, tuple[jax.Array, jax.Array]]
"""Metric name -> (sum, count), two float32 scalars. Sums and counts of parts can be added."""

RateSchedule: TypeAlias = Callable[[jax.Array], jax.Array]
"""round (int32 scalar, from 1, traced) -> the factor of the learning rate in this round, a scalar.
"""

Diagnosis: TypeAlias = Callable[[Params, Params, Params], dict[str, jax.Array]]
"""(shared leaves before a round, after it, fixed leaves) -> float32 scalars."""


class Outputs(NamedTuple):
    """What a model returns for a batch."""

    logits: jax.Array
    """float32 ``[batch, classes]`` (or ``[batch, length, classes]`` for token tasks)."""
    hidden: jax.Array | None = None
    """Last hidden states ``[batch, length, width]``, for losses that compare representations; None
    where the model does not return them."""
    states: tuple[jax.Array, ...] = ()
    """Hidden states of the embeddings and of every layer, each ``[batch, length, width]``; ``()``
    where the model does not return them. A compiled function computes only those that are used."""
    second: jax.Array | None = None
    """Logits of the second classifier, ``[batch, classes]`` (FedMCP's, on the global adapter); None
    for a model without one."""
    last: jax.Array | None = None
    """int32 ``[batch]``: the position in ``hidden`` of the token that represents a text. In a
    causal model this is the last real token, the only one that depends on the whole text. None:
    the first token, as in BERT."""
    readout: Callable[[jax.Array], jax.Array] | None = None
    """Hidden states ``[..., width]`` -> logits float32 ``[..., vocabulary]``: the head of a
    language model. A loss that reads only some positions, or a few at a time, uses it in the place
    of ``logits``, which a compiled function then never forms. It is a ``jax.tree_util.Partial`` of
    the head's arrays, so outputs stay a pytree. None for other models."""
    cache: PyTree = None
    """The keys and values of all layers, if the batch has a ``cache``, as in generation."""


class Sampling(NamedTuple):
    """How tokens are chosen. Hashable: each choice is a compiled program."""

    max_new_tokens: int = 64
    """The largest number of tokens in a completion, the end token included."""
    temperature: float = 0.0
    """0: the most likely token (greedy). Otherwise logits are divided by it, and drawn from."""
    top_p: float = 1.0
    """Draw from the smallest set of most likely tokens with at least this probability (nucleus
    sampling, Holtzman et al. 2020), after ``top_k``."""
    top_k: int = 0
    """Draw from this number of most likely tokens; 0: from all."""


class ApplyFn(Protocol):
    """A pure forward pass."""

    def __call__(
        self, frozen: Params, trainable: Params, batch: Batch, key: Key | None, train: bool
    ) -> Outputs:
        """Returns the outputs for ``batch``; ``key`` is needed only if ``train`` (dropout)."""


@runtime_checkable
class Task(Protocol):
    """What the engine and the algorithms use of a task; :class:`fedjax_peft.tasks.Task` is one.

    ``loss`` and ``metrics`` are computed on the device, batch by batch. A score that is not a mean
    over examples (an entity F1, the answers of a reader) is made on the host, by ``score``, from
    what ``predict`` returns for every example.
    """

    @property
    def loss(self) -> Callable[[Outputs, Batch], tuple[jax.Array, jax.Array]]:
        """(outputs, batch) -> (sum of losses, count) over the real examples of the batch."""

    @property
    def metrics(self) -> Callable[[Outputs, Batch], Metrics]:
        """(outputs, batch) -> metrics, evaluated without gradients."""

    @property
    def predict(self) -> Callable[[Outputs, Batch], dict[str, jax.Array]] | None:
        """(outputs, batch) -> arrays ``[batch, ...]`` that ``score`` needs; None: no score."""

    @property
    def score(
        self,
    ) -> Callable[[Mapping[str, float], Mapping[str, Any], Any], dict[str, float]] | None:
        """(means of the metrics, predictions, evaluated data set) -> further metrics."""

    @property
    def headline(self) -> str:
        """The metric that tables and curves show."""

    @property
    def lower_is_better(self) -> tuple[str, ...]:
        """The metrics for which lower is better. For every other metric higher is better."""


class LossFn(Protocol):
    """The training loss of a batch, as a mean over its examples."""

    def __call__(self, params: PyTree, batch: Batch, key: Key, /) -> tuple[jax.Array, Metrics]:
        """Returns (mean loss over the real examples of the batch, a scalar; metrics).

        Everything about the examples comes from ``batch``: the function is also called with batches
        of a single example. Terms that do not depend on the examples, such as a pull towards
        another model, do not belong to it: add their gradient to the result.
        """


class Gradient(Protocol):
    """How local training takes a gradient that depends on its examples."""

    def __call__(
        self, loss: LossFn, params: PyTree, batch: Batch, key: Key
    ) -> tuple[PyTree, Metrics]:
        """Returns (gradient, metrics), the gradient in the structure of ``params``.

        Args:
          loss: the loss.
          params: where the gradient is taken; the trained leaves.
          batch: the examples.
          key: for the random numbers of the loss.
        """


def mean_gradient(loss: LossFn, params: PyTree, batch: Batch, key: Key) -> tuple[PyTree, Metrics]:
    """Returns the gradient of the mean loss of a batch, and its metrics (see :class:`Gradient`)."""
    return jax.grad(loss, has_aux=True)(params, batch, key)


class ClientContext(NamedTuple):
    """What a client update may use: the model bound to its frozen tree, and the task.

    Made by the engine inside the round program, where the frozen tree is an argument.
    """

    apply: Callable[[Params, Batch, Key | None, bool], Outputs]
    """(trainable, batch, key, train) -> outputs."""
    task: Task
    fixed: Params
    """The leaves that never change, as this client has them. ``apply`` already closes over these;
    entries of the same name in ``trainable`` take precedence."""
    round_index: jax.Array
    """The round, int32 from 1."""
    client: jax.Array | int = 0
    """The client's number in the federation, an int32 scalar from 0. Algorithms treat all clients
    alike; attacks do not."""
    gradient: Gradient = mean_gradient
    """(loss, params, batch, key) -> (gradient, metrics). Every gradient that depends on examples is
    taken by it, so that a mechanism of differential privacy can replace it."""
    salt: jax.Array | tuple[()] = ()
    """uint32 ``[2]``: by which the noise of this run differs from that of other runs of its seed
    (:func:`fedjax_peft.random.salted`); ``()`` without a mechanism of differential privacy."""


Probe: TypeAlias = Callable[[ClientContext, Params, Batch], Metrics]
"""(context, all leaves of a model, batch) -> metrics in addition to those of the task."""


class ClientUpdate(NamedTuple):
    """The local work of one client, as three pure functions, each written for a single client.

    The engine maps them over lanes. It discards the steps of idle lanes, optimizer state included.
    A batch may have no real example at all, if examples are drawn independently.
    """

    init: Callable[[PyTree, PyTree, Key], PyTree]
    """(broadcast, client state, key) -> local state at the start of the round. The client state is
    what this client kept from its last round (``Algorithm.init_client_state`` at first)."""
    step: Callable[[PyTree, Batch, Key], tuple[PyTree, Metrics]]
    """(state, batch, key) -> (state, metrics of this step).

    In addition to its columns the batch has two int32 scalars: ``step``, the index of the local
    step from 0, and ``steps``, the number of local steps of this client in the round.
    """
    final: Callable[[PyTree], tuple[PyTree, PyTree]]
    """local state -> (upload, client state for the next round)."""


class Tuning(NamedTuple):
    """Local training of every client before the last evaluation. Its result is not saved."""

    client: Callable[[ClientContext], ClientUpdate]
    """Its ``final`` returns ``({}, client state)``: nothing is sent."""
    epochs: int
    """Passes over a client's examples."""


class Product(NamedTuple):
    """An entry of a lifted upload: the matrix ``a @ b``. The weighted sum is a dense matrix.

    No client's own product is formed, so the memory does not grow with the lanes. Until the end of
    the round the sum is held as the factors of all uploads, where these are smaller than the matrix
    (:mod:`fedjax_peft.summation`); so it never needs more memory than the matrix.
    """

    a: jax.Array
    """``[in, r]``."""
    b: jax.Array
    """``[r, out]``."""


class Factors(NamedTuple):
    """An entry of a lifted upload: the matrix ``a @ b``, as for :class:`Product`.

    The weighted sum is held as the factors of all uploads: ``a`` is then ``[slots, in, r]``, ``b``
    ``[slots, r, out]``, and :attr:`Total.weights` are their weights. It is the same sum, exactly,
    and smaller than the dense matrix while ``slots * r`` is below ``in`` and ``out``. See
    :func:`fedjax_peft.summation.dense`.
    """

    a: jax.Array
    b: jax.Array


class Weighted(NamedTuple):
    """A part of a lifted upload that counts by a weight of its own, not by the client's weight."""

    weight: jax.Array
    """A float32 scalar, not negative. In the sum: the total of these weights."""
    value: PyTree
    """In the sum: the sum weighted by them."""


class Stacked(NamedTuple):
    """A part of a lifted upload that is not summed: in the "sum" it holds all uploads.

    Robust statistics, such as a median, need this (:attr:`Aggregator.needs_all_uploads`).
    """

    value: PyTree
    """In the sum: float32 ``[slots, ...]``; rows of :attr:`Total.weights` 0 are zeros."""


class Integers(NamedTuple):
    """A part of a lifted upload whose sum is exact: integers, summed modulo 2^32 without weights.

    Secure aggregation sums so.
    """

    value: jax.Array
    """int32. In the sum: the sum over the uploads whose weight is not 0."""


class Total(NamedTuple):
    """The sum of the lifted uploads of a round. Made by :mod:`fedjax_peft.summation`."""

    value: PyTree
    """``Σ w_k lift(upload_k)``, float32, in the structure of the lifted upload: a
    :class:`Product` has become a dense matrix; :class:`Factors`, :class:`Weighted` and
    :class:`Stacked` say in their docstrings what they hold."""
    weight: jax.Array
    """``Σ w_k``, a float32 scalar; 0 where no upload was accepted."""
    weights: jax.Array
    """w_k, float32 ``[slots]``; 0 for a slot without an upload."""


class Lift(Protocol):
    """The map from one client's upload into the vector space in which an aggregator sums."""

    def __call__(self, upload: PyTree, template: PyTree, fixed: Params) -> PyTree:
        """Returns a nested dict of arrays, :class:`Product`, :class:`Factors`, :class:`Weighted`,
        :class:`Stacked` and :class:`Integers`.

        Args:
          upload: of one client.
          template: the upload of a client that learned nothing.
          fixed: the leaves that never change, such as LoRA's scale.

        Raises:
          InputError: the aggregator does not fit the shared leaves.
        """


class Aggregated(NamedTuple):
    """What an aggregator gives the server."""

    update: PyTree
    """Same structure as one upload, unless the algorithm's server asks for something else."""
    metrics: dict[str, jax.Array]
    """Float32 scalars about the aggregation, such as its error. May be empty."""
    state: PyTree = ()
    """The aggregator's state for the next round; ``()`` for an aggregator without state."""


class Finish(Protocol):
    """The way back from the sum of the lifted uploads to an update of the server."""

    def __call__(
        self, total: Total, template: PyTree, context: "RoundContext", state: PyTree
    ) -> Aggregated:
        """Returns the update, metrics and the next state.

        Where ``total.weight`` is 0 the update is ``template``. The engine then keeps the old state.

        Args:
          total: the sum.
          template: the upload of a client that learned nothing.
          context: what the server knows about the round. ``context.key`` is for this aggregator.
          state: from :attr:`Aggregator.init` or from the round before.
        """


class Refactor(Protocol):
    """The map from LoRA products to factors."""

    def __call__(self, products: Params, template: Params, scales: Params) -> Aggregated:
        """Returns the factors by leaf name, and metrics.

        Args:
          products: module path -> A·B, float32 ``[in, out]``, without LoRA's scale.
          template: leaves of the factors' shapes.
          scales: module path -> LoRA's s.
        """


def _no_state(template: PyTree) -> PyTree:
    del template
    return ()


class Aggregator(NamedTuple):
    """How uploads combine: lift each into a vector space, sum there by weight, come back.

    The sum streams over clients and lanes, and is the same for all aggregators
    (:mod:`fedjax_peft.summation`). ``template`` is the upload of a client that learned nothing
    (:meth:`ServerUpdate.unchanged`).
    """

    name: str
    lift: Lift
    """Into the space in which uploads are summed."""
    finish: Finish
    """From the sum back to an update."""
    init: Callable[[PyTree], PyTree] = _no_state
    """template -> the state before the first round; ``()``: none."""
    unmasked_policy: Literal["received", "zero", "refused"] = "received"
    """What an upload holds in the directions that its client does not own (``client_ranks``):
    ``received``: the values that came from the server; ``zero``: zeros; ``refused``: such clients
    are refused."""
    truncates: bool = False
    """Whether it cuts the average LoRA product to a lower rank, and loses the rest."""
    refactors: bool = False
    """Whether it factors the average LoRA product anew, so that A and B have another basis in every
    round: their entries cannot be compared, mixed or accumulated over rounds. The product can."""
    needs_all_uploads: bool = False
    """Whether ``lift`` returns :class:`Stacked`: the uploads are combined by something other than a
    sum, and memory grows with the cohort."""
    linear: bool = False
    """Whether its update is ``template`` plus the weighted mean of ``upload - template``, leaf by
    leaf. Upload transforms that change the aggregate, such as noise, need that."""
    refactor: Refactor | None = None
    """From products to factors, where the aggregator can factor a product anew; else None."""
    finish_products: Finish | None = None
    """As ``finish``, but its update is that of :mod:`fedjax_peft.aggregators.products`: the change
    of products, before they are factored. For an aggregator of products that is not a sum; else
    None."""
    unmeasured: "Aggregator | None" = None
    """The same aggregator with a sum of only what the update needs: it measures nothing. Noise on
    the sum, and a norm of what is summed, need that. None: this aggregator is it. It is replaced
    together with ``lift`` and ``finish``."""
    randomise: Callable[[PyTree, Key, jax.Array], PyTree] | None = None
    """(one lifted upload, key, round) -> what its client sends of it. This is what a client does
    with random numbers of its own, such as adding noise. The key is that of the client in this
    round. None: lifted uploads are summed as they are."""
    wire_bytes: Callable[[PyTree], int] | None = None
    """Shapes of one lifted upload, as sent -> its bytes on the wire. None: clients send the upload,
    and the server lifts it."""
    every_round: bool = False
    """Whether a round without uploads is a round like any other, because the sum contains noise:
    the server's and the aggregator's state move, and ``RoundContext.participants`` is the expected
    number of uploads in every round."""
    at_state: Callable[[PyTree], "Aggregator"] | None = None
    """state -> the aggregator of this round, for one whose ``lift`` depends on its state. None: the
    aggregator is the same in every round."""

    def bound(self, state: PyTree) -> "Aggregator":
        """Returns the aggregator of a round that begins with this state of the aggregator."""
        return self if self.at_state is None else self.at_state(state)


class RoundContext(NamedTuple):
    """What the server knows about a round beside the aggregate. Made by the engine."""

    round_index: jax.Array
    """The round, int32 from 1."""
    participants: jax.Array
    """How many uploads were aggregated, float32; 0 where no upload could be used. With
    :attr:`Aggregator.every_round` it is the expected number, the same in every round."""
    total_clients: int
    """How many clients can take part: those that have examples, or all if they send noise."""
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
    clients: jax.Array
    """The clients' numbers, int32 ``[slots]``; the number of clients in the federation for a slot
    without a client. In the order of :attr:`Total.weights`."""
    sendable: PyTree | None = None
    """Which entries of an upload at least one client can change in this round, bool, in the
    structure of the upload; None: all. A leaf that rests (``Algorithm.sent_leaves``) cannot be
    changed, nor a direction that no client owns (``client_ranks``)."""


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
    accepted: jax.Array
    """bool ``[slots]``: whose uploads were aggregated. Entries of other clients mean nothing."""


class Decoded(NamedTuple):
    """What the server's part of an upload transform returns."""

    aggregate: PyTree
    """The mean change, same structure as given."""
    state: PyTree
    """The transform's state for the next round."""
    metrics: dict[str, jax.Array]
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

    A transform sees the part of an upload that ``Algorithm.change_field`` names; other parts are
    sent as they are. Of that part, entries that are not sent look like 0 to the transform, and stay
    as they are whatever it returns: leaves that rest in a round (``Algorithm.sent_leaves``), and
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
    receive: Callable[[PyTree, PyTree, Key], tuple[PyTree, dict[str, jax.Array]]] | None = None
    """(shared leaves, state, key) -> (what clients receive instead, metrics), once a round. The
    server's own leaves stay as they are, and what a client learned from what it received is added
    to them. None: clients receive the leaves themselves."""
    down_wire: TransformWire | None = None
    """The size of what ``receive`` returns."""


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
    update_norm: Callable[[PyTree, PyTree, Params], jax.Array] | None = None
    """(one upload, ``template``, fixed leaves) -> Euclidean length of the change of the model that
    the upload describes, a float32 scalar, 0 for ``template``. None: the length of ``upload -
    template``, of the part that ``Algorithm.change_field`` names. Entries that a client does not
    own (``client_ranks``) equal those of ``template``."""
    frozen_delta: Callable[[PyTree], Params] | None = None
    """server state -> what is added to the frozen tree: leaf name -> float32 array of the leaf's
    shape. None: nothing."""
    measure: Callable[[PyTree, Params, Params, Params], dict[str, jax.Array]] | None = None
    """(aggregated update, weights before, weights after, fixed leaves) -> metrics of the
    aggregation. They replace metrics of the aggregator that have the same name. The weights are the
    leaves that ``frozen_delta`` names, as clients compute with them, in float32. None: no metrics.
    """
    metrics: Callable[[PyTree], dict[str, jax.Array]] | None = None
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
                    " fused projection cannot be folded: attach it without parts. With"
                    " scan_layers = True the weights of all layers are one array: load the model"
                    " without it."
                )
        return {n: x + frozen_delta[n] if n in frozen_delta else x for n, x in frozen.items()}


class Roles(NamedTuple):
    """The roles of trainable leaves: regular expressions, searched in ``"kind:name"``.

    Shared leaves are broadcast and uploaded, private ones stay with their client, fixed ones never
    change. The rules together must cover every leaf; see :func:`fedjax_peft.roles.assign_roles`.
    """

    shared: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()


def _own_leaves(shared: Params, private: Params) -> PyTree:
    del shared
    return private


def _both(broadcast: PyTree, client_state: PyTree) -> Params:
    return {**broadcast, **client_state}


def _all_move(broadcast: PyTree, round_index: jax.Array) -> dict[str, jax.Array]:
    del broadcast, round_index
    return {}


def _all_sent(upload: PyTree, template: PyTree) -> dict[str, jax.Array]:
    del upload, template
    return {}


def _no_metrics(round_index: jax.Array) -> dict[str, jax.Array]:
    del round_index
    return {}


def _anything(kinds: Mapping[str, str], clients: int) -> None:
    del kinds, clients


class Tamper(Protocol):
    """What a client sends in place of its upload, if it is hostile; written for a single client."""

    def __call__(self, client: jax.Array, upload: PyTree, template: PyTree, key: Key) -> PyTree:
        """Returns the upload that the client sends.

        Args:
          client: the client's number in the federation, an int32 scalar.
          upload: the result of its local work.
          template: the upload of a client that learned nothing.
          key: for random numbers of this client in this round.
        """


class Rebase(Protocol):
    """How a server of a later version takes an upload; written for a single upload."""

    def __call__(
        self, upload: PyTree, fetched: PyTree, template: PyTree, staleness: jax.Array
    ) -> PyTree:
        """Returns the upload as if its client had started from the present version.

        Args:
          upload: the result of local work from the fetched version.
          fetched: the upload of a client that learned nothing from the fetched version.
          template: the upload of a client that learned nothing from the present version.
          staleness: how often the server has been updated since the client fetched, int32.
        """


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
    personal: bool = False
    """Whether every client predicts with its own model although no leaf is private."""
    local_model: Callable[[PyTree, PyTree, PyTree], Params] | None = None
    """(broadcast, upload, client state after the local work) -> the leaves with which a client
    predicts before the aggregation. None: ``model`` of the upload and the client state, which is
    right for uploads that have the form of the broadcast."""
    weights: Literal["size", "uniform"] = "size"
    """Weights of uploads in the aggregate: ``size``, by the client's number of examples;
    ``uniform``, all equal."""
    sent_leaves: Callable[[PyTree, jax.Array], dict[str, jax.Array]] = _all_move
    """(broadcast, round) -> leaf name -> bool: whether clients send the leaf in this round. A leaf
    without an entry is sent. It decides which leaves are counted as traffic, and which leaves an
    upload transform sees."""
    relayed_leaves: str | None = None
    """A regular expression: the leaves of uploads that the server passes on to every client one by
    one, because they do not combine to a leaf of the same size (stacking). It decides what is
    counted as traffic; None: no such leaves."""
    redrawn_leaves: str | None = None
    """A regular expression: the leaves of the broadcast that clients make themselves once the
    server was updated, such as new random factors. They are fetched before that only; None: no such
    leaves."""
    sent_shares: Callable[[PyTree, PyTree], dict[str, jax.Array]] = _all_sent
    """(upload, template) -> leaf name -> the share of the leaf's bytes that the client sends, if it
    decides so by what it learned. A leaf without an entry is sent whole. It decides what is counted
    as traffic after a round; what is expected before it, such as for a deadline, is whole."""
    received_part: Callable[[PyTree], PyTree] | None = None
    """broadcast -> what one client receives of it, if clients receive different parts of the same
    size, such as its own cluster's leaves. It decides what is counted as traffic; the client's
    functions must use no other part. None: a client receives all."""
    check: Callable[[Mapping[str, str], int], None] = _anything
    """(kind of each trainable leaf, number of clients) -> None. Raises InputError for a model or a
    number of clients that does not fit."""
    lower_is_better: tuple[str, ...] = ()
    """The metrics added by this algorithm for which lower is better. A second measurement of a
    task's metric, such as ``loss_global``, has the direction of the task's metric."""
    tuning: Tuning | None = None
    """How clients adapt to the final broadcast before a second evaluation, whose metrics are named
    ``tuned_...``. None: no second evaluation."""
    needs_fixed_basis: str | None = None
    """Why the entries of shared leaves must mean the same in every round, and what to use instead,
    in whole sentences, for the error message where the aggregator ``refactors``. None: any
    aggregator fits."""
    change_field: str | None = None
    """The field of an upload that holds the client's leaves, or their change: what upload
    transforms see. Other fields, such as a control variate, are sent as they are. None: the whole
    upload is leaves."""
    no_transforms: str | None = None
    """Why uploads cannot be transformed, in whole sentences, for the error message. None: they can.
    """
    no_kept_optimizer: str | None = None
    """Why clients cannot keep their optimizer's state from round to round, in whole sentences, for
    the error message. None: they can."""
    needs_metrics: str | None = None
    """Why the server needs the clients' training metrics (``RoundContext.metrics``), and what to
    use instead, in whole sentences, for the error message of mechanisms that do not make the
    metrics private. None: it does not."""
    gradients_per_step: int = 1
    """How many gradients a local step takes of its batch at most, by ``ClientContext.gradient``."""
    no_example_privacy: str | None = None
    """Why clipping the gradients of single examples does not protect them, in whole sentences, for
    the error message: a loss that couples the examples of a batch, or another use of the data.
    None: it does."""
    round_metrics: Callable[[jax.Array], dict[str, jax.Array]] = _no_metrics
    """round -> float32 scalars for the round's row, such as the factor of a learning-rate schedule.
    """
    tamper: Tamper | None = None
    """What hostile clients do with their uploads: after the local work, before upload transforms.
    Leaves that rest in the round (``sent_leaves``) stay as they are. None: every client sends what
    it learned."""
    synchronous_only: str | None = None
    """Why all clients of an aggregation must have fetched the same broadcast, in whole sentences,
    for the error message of asynchronous servers. None: they need not."""
    rebase: Rebase | None = None
    """What an asynchronous server makes of an upload that started from an older version. None: it
    takes the upload as it is, which is right if all clients fetched the same version."""

    def before_aggregation(self, broadcast: PyTree, upload: PyTree, client_state: PyTree) -> Params:
        """Returns the leaves with which a client predicts between local work and aggregation."""
        if self.local_model is None:
            return self.model(upload, client_state)
        return self.local_model(broadcast, upload, client_state)

    def change_part(self, upload: PyTree) -> PyTree:
        """Returns the part of an upload that holds the client's leaves or their change."""
        return upload if self.change_field is None else upload[self.change_field]

    def with_change(self, upload: PyTree, part: PyTree) -> PyTree:
        """Returns the upload with its :meth:`change_part` replaced by ``part``."""
        return part if self.change_field is None else {**upload, self.change_field: part}


class Federation(NamedTuple):
    """Facts about a run that privacy mechanisms and attacks depend on. Hashable."""

    clients: int
    """The number of clients in the federation."""
    per_round: int
    """Clients that are drawn for a round; with Poisson sampling, on average."""
    sampling: str
    """How they are drawn: see :data:`fedjax_peft.engine.schedule.Sampling`."""
    batch_size: int
    """Examples in a local step; on average, if they are Poisson-sampled."""
    batch_sampling: str
    """How they are drawn: see :data:`fedjax_peft.engine.schedule.BatchSampling`."""
    most_steps: int
    """The largest number of local steps that a client can take in a round."""
    most_passes: int
    """How often an example of a client is used in a round at most. With Poisson-sampled batches it
    may be used in each of ``most_steps``."""
    fewest_examples: int
    """The examples of the smallest client that has any."""
    columns: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The columns of the examples: name and shape of each, without the axis of the examples."""
    classes: int = 0
    """The number of label names; 0 for data without labels."""
    workloads: tuple[tuple[int, int], ...] = ()
    """The different pairs (examples, most local steps in a round) of the clients that have
    examples. Empty: only the numbers above are known."""
    overflow_probability: float = 0.0
    """The probability, at most, that a Poisson-sampled batch is too large, and is cut."""
    gradients_per_step: int = 1
    """How many gradients a local step takes of its batch at most."""

    @property
    def sampling_probability(self) -> float:
        """The share of all clients that a round samples, on average."""
        return self.per_round / self.clients


class Guarantee(NamedTuple):
    """What differential privacy a run has given so far. Made by the accountant, on the host."""

    epsilon: float
    """ε; ``inf`` without any guarantee."""
    delta: float
    """δ."""


class Privacy(NamedTuple):
    """A mechanism of differential privacy: a wrapper of any algorithm, and its accountant."""

    name: str
    unit: Literal["client", "example"]
    """Whose data the guarantee protects."""
    protect: Callable[[Algorithm, Federation], Algorithm]
    """Returns the algorithm with the mechanism in it. Raises InputError with the reason if the
    algorithm, or the way in which clients are drawn, does not fit."""
    guarantee: Callable[[Federation, int], Guarantee]
    """(facts, rounds) -> the guarantee after this number of rounds. It runs on the host."""
    statement: Callable[[Federation], str]
    """facts -> the guarantee in words: its unit, its neighbours, its sampling, and who is
    trusted."""


class Attack(NamedTuple):
    """What hostile clients do: a wrapper of any algorithm."""

    name: str
    apply: Callable[[Algorithm, Federation], Algorithm]
    """Returns the algorithm under attack. Raises InputError with the reason if it does not fit."""
    hostile: Callable[[int], tuple[int, ...]]
    """The number of clients in the federation -> the numbers of its hostile clients, ascending."""
    triggered: Callable[[Any], Any] | None = None
    """Of a backdoor: a :class:`fedjax_peft.data.Dataset` -> the data set that tests it. The share
    of its examples that a model gets right is the success rate of the backdoor. None: the attack
    has no goal that examples can test."""


class Job(NamedTuple):
    """The work of one client of an asynchronous server, from its download to its upload."""

    client: int
    """The client's number in the federation."""
    number: int
    """The job's number, from 0, in the order in which jobs start."""
    round_index: int
    """The aggregation that came next when the client fetched, from 1. Together with the client, it
    determines the random numbers of the job, its examples and its number of steps."""
    version: int
    """The server's version that the client fetched: how often the server had been updated."""
    place: int
    """Where the history of broadcasts holds this version."""
    steps: int
    """Local steps."""
    first: bool
    """Whether it is the client's first job."""
    start: float
    """Simulated seconds at which the client begins to fetch."""
    finish: float
    """Simulated seconds at which the server has the upload; for a lost job, at which it ends."""


class Aggregation(NamedTuple):
    """One aggregation of an asynchronous server, and the time since the one before it."""

    time: float
    """Simulated seconds since the start of the run."""
    version: int
    """The server's version before the aggregation."""
    place: int
    """Where the history of broadcasts holds this version."""
    jobs: tuple[Job, ...]
    """The jobs whose uploads are aggregated, by client; no client twice."""
    started: tuple[Job, ...] = ()
    """The jobs that started since the aggregation before."""
    lost: tuple[Job, ...] = ()
    """The jobs that ended without an upload since then: their clients failed or left."""
    discarded: tuple[Job, ...] = ()
    """The jobs whose uploads came since then and were too stale."""
    in_flight: int = 0
    """The number of clients that are still at work."""
    versions: int = 1
    """The number of versions that the server holds: the present one and those still needed."""


class Timeline(Protocol):
    """The events of an asynchronous run in simulated time: a pure function of its settings."""

    def __call__(self, round_index: int) -> Aggregation:
        """Returns an aggregation by its number, from 1."""


class Asynchronous(NamedTuple):
    """An asynchronous server: when it aggregates, and what it does with stale uploads."""

    name: str
    apply: Callable[[Algorithm, Federation], Algorithm]
    """Returns the algorithm with a server that takes stale uploads (``Algorithm.rebase``). Raises
    InputError with the reason if the algorithm does not fit."""
    buffer_size: int | None = None
    """The server aggregates whenever this number of uploads has arrived; None: see ``period``."""
    period: float | None = None
    """The server aggregates every ``period`` simulated seconds; None: see ``buffer_size``."""
    concurrency: int | None = None
    """The number of clients that work at the same time; None: ``clients_per_round``."""
    max_staleness: int | None = None
    """Uploads with a larger staleness are discarded; None: none are."""


class Availability(NamedTuple):
    """When clients can take part: a pure function of the seed, the client and the time."""

    name: str
    at: Callable[[int, Any, float], tuple[Any, Any]]
    """(seed, client numbers, int ``[n]``, simulated seconds) -> (bool ``[n]``: whether each client
    is available, float64 ``[n]``: the time at which that changes next; ``inf``: never)."""
