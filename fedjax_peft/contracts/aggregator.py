"""How uploads combine: the spaces in which they are summed, and the way back."""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from jax import Array

from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Key, Params, PyTree


class Product(NamedTuple):
    """An entry of a lifted upload: the matrix ``a @ b``. The weighted sum is a dense matrix.

    No client's own product is formed, so the memory does not grow with the lanes. Until the end of
    the round the sum is held as the factors of all uploads, where these are smaller than the matrix
    (:mod:`fedjax_peft.numerics.summation`); so it never needs more memory than the matrix.
    """

    a: Array
    """``[in, r]``."""
    b: Array
    """``[r, out]``."""


class Factors(NamedTuple):
    """An entry of a lifted upload: the matrix ``a @ b``, as for :class:`Product`.

    The weighted sum is held as the factors of all uploads: ``a`` is then ``[slots, in, r]``, ``b``
    ``[slots, r, out]``, and :attr:`Total.weights` are their weights. It is the same sum, exactly,
    and smaller than the dense matrix while ``slots * r`` is below ``in`` and ``out``. See
    :func:`fedjax_peft.numerics.summation.dense`.
    """

    a: Array
    b: Array


class Weighted(NamedTuple):
    """A part of a lifted upload that counts by a weight of its own, not by the client's weight."""

    weight: Array
    """A float32 scalar, not negative. In the sum: the total of these weights."""
    value: PyTree
    """In the sum: the sum weighted by them."""


class Stacked(NamedTuple):
    """A part of a lifted upload that is not summed: in the "sum" it holds all uploads.

    Robust statistics, such as a median, need this (:attr:`Aggregator.needs_all_uploads`).
    """

    value: PyTree
    """In the sum: float32 ``[slots, ...]``. Rows count where :attr:`Total.weights` is above 0. The
    other rows are zeros, or uploads of clients whose weight is 0."""


class Segmented(NamedTuple):
    """A part of a lifted upload that is added to one of several rows, such as those of clusters."""

    place: Array
    """float32 ``[rows]``: 1 for the row of the upload, else 0. In the sum: the weight of each row.
    """
    value: PyTree
    """Arrays. In the sum: the weighted sum of each row, ``[rows, ...]``."""


class Integers(NamedTuple):
    """A part of a lifted upload whose sum is exact: integers, summed modulo 2^32 without weights.

    Secure aggregation sums so.
    """

    value: Array
    """int32. In the sum: the sum over the uploads whose weight is not 0."""


class Total(NamedTuple):
    """The sum of the lifted uploads of a round. Made by :mod:`fedjax_peft.numerics.summation`."""

    value: PyTree
    """``Σ w_k lift(upload_k)``, float32, in the structure of the lifted upload: a
    :class:`Product` has become a dense matrix; :class:`Factors`, :class:`Weighted`,
    :class:`Stacked` and :class:`Segmented` say in their docstrings what they hold."""
    weight: Array
    """``Σ w_k``, a float32 scalar; 0 where no upload was accepted."""
    weights: Array
    """w_k, float32 ``[slots]``; 0 for a slot without an upload."""


class Lift(Protocol):
    """The map from one client's upload into the vector space in which an aggregator sums."""

    def __call__(self, upload: PyTree, template: PyTree, fixed: Params) -> PyTree:
        """Returns a nested dict of arrays, :class:`Product`, :class:`Factors`, :class:`Weighted`,
        :class:`Stacked`, :class:`Segmented` and :class:`Integers`.

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
    metrics: dict[str, Array]
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
    return ()


def _whole(state: PyTree, start: PyTree) -> PyTree:
    return state


class Aggregator(NamedTuple):
    """How uploads combine: lift each into a vector space, sum there by weight, come back.

    The sum streams over clients and lanes, and is the same for all aggregators
    (:mod:`fedjax_peft.numerics.summation`). ``template`` is the upload of a client that learned
    nothing (:meth:`ServerUpdate.unchanged`).
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
    robust: bool = False
    """Whether it limits what a hostile upload can do, in any leaves, not only in LoRA's factors."""
    trusted: int | None = None
    """The client by whose upload it judges the others'; None: there is none."""
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
    randomise: Callable[[PyTree, Key, Array], PyTree] | None = None
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

    carry: Callable[[PyTree, PyTree], PyTree] = _whole
    """(the state after an earlier run, the one of ``init``) -> the state with which a run begins
    that starts from that run, by default the first. Noise that is correlated over rounds begins
    anew: its guarantee is for the rounds of one run."""

    def bound(self, state: PyTree) -> "Aggregator":
        """Returns the aggregator of a round that begins with this state of the aggregator."""
        return self if self.at_state is None else self.at_state(state)
