"""The loop over time steps, in which the clients of a round work in lanes.

Each time step works on all lanes, and a lane trains one client at a time: where a client begins,
its lane is set up (:func:`_begin`); every busy lane takes one local step (:func:`_step`); where a
client ends, its upload passes the stages and is added to the sum (:func:`_end`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Key, Metrics, Params, Participant, PyTree, Stage, Total, Upload
from fedjax_peft.engine.client import client_update, first_upload
from fedjax_peft.engine.lengths import token_columns
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.setup import Setup
from fedjax_peft.engine.stages import passed
from fedjax_peft.engine.start import RoundStart
from fedjax_peft.engine.uploads import no_measurements
from fedjax_peft.engine.work import PREDICTIONS
from fedjax_peft.numerics import summation, tree
from fedjax_peft.numerics.random import client_key, upload_key

Loop: TypeAlias = Callable[[Array, Callable[[Array, Any], Any], Any], Any]
"""(number of time steps, (time step, carry) -> carry, first carry) -> last carry."""


def run_time_loop(steps: Array, body: Callable[[Array, Any], Any], start: Any) -> Any:
    """Returns the carry after ``steps`` time steps, a number that is known at run time only.

    Such a loop has no derivative in reverse mode (:mod:`fedjax_peft.engine.differentiable` has
    another).
    """
    return jax.lax.fori_loop(0, steps, body, start)


def branch(wanted: Array, change: Callable[[Any], Any], carry: Any) -> Any:
    """Returns ``change(carry)`` if it is wanted, else ``carry``."""
    return jax.lax.cond(wanted, change, lambda x: x, carry)


def turn(wanted: Array, change: Callable[[Any], Any], carry: Any) -> Any:
    """Returns the same as :func:`branch` by a loop of at most one turn, without a derivative.

    A GPU's program copies all of ``carry`` in the branch that changes nothing: 81 copies in a step
    of MiniLM. It copies none in a loop. A TPU's program is the other way round.
    """
    return jax.lax.fori_loop(0, wanted.astype(jnp.int32), lambda _, x: change(x), carry)


class RoundOptions(NamedTuple):
    """The form of a round program; it changes no result."""

    padded: tuple[int, ...] = ()
    """The padded lengths that ``Plan.bucket`` chooses from; empty if there are no tokens."""
    gathered: bool = False
    """Whether the state holds what the clients of the plan's slots keep, ``[slots, ...]``, instead
    of what all clients keep."""
    across: Callable[[Array], Array] = lambda x: x
    """Returns the largest value over all replicas, where several rounds run as one."""
    loop: Loop = run_time_loop
    """Runs the time steps."""
    when: Callable[[Array, Callable[[Any], Any], Any], Any] = branch
    """Runs what only some time steps have."""


class Rows(NamedTuple):
    """What the clients of a round bring along, each ``[slots, ...]``."""

    rank_mask: Params
    """The entries of leaves that they have."""
    client_state: PyTree
    """What they kept from their last round."""
    memory: PyTree
    """What their upload transforms kept."""


class Ended(NamedTuple):
    """What the clients that have ended leave behind; by slot, except for the sum."""

    total: Total
    """The sum of the accepted uploads."""
    client_state: PyTree
    memory: PyTree
    measured: PyTree
    """``Encoded.measured``."""
    finite: Array
    norms: Array
    shares: dict[str, Array]


class Worked(NamedTuple):
    """The state of the loop, and after it what the clients' work gave."""

    lanes: PyTree
    """The local states of the clients that the lanes train, ``[lanes, ...]``."""
    sums: dict[str, tuple[Array, Array]]
    """Metric -> (sum, count), each float32 ``[slots]``."""
    predictions: dict[str, Array]
    """Outputs of all steps, ``[time steps, lanes, batch, ...]``."""
    ended: Ended


class _Now(NamedTuple):
    """The plan of one time step, see :class:`~fedjax_peft.engine.plan.Plan`."""

    slot: Array
    """int32 ``[lanes]``."""
    local: Array
    """int32 ``[lanes]``."""
    examples: Array
    """int32 ``[lanes, batch]``."""


class _Work(NamedTuple):
    """What the lanes do in a time step."""

    begin: Callable[[_Now], PyTree]
    """Returns the local states of clients that begin."""
    steps: list[Callable[[PyTree, _Now], tuple[PyTree, Metrics, Params]]]
    """A local step for each padded length."""


class _Lanes(NamedTuple):
    """What the clients in the lanes need for their work."""

    setup: Setup
    start: RoundStart
    rows: Rows
    stages: tuple[Stage, ...]
    options: RoundOptions
    keys: Key
    """The key of each slot's client, ``[slots]``."""

    @property
    def plan(self) -> Plan:
        return self.start.plan

    @property
    def slots(self) -> int:
        """The number of clients that fit into the round."""
        return len(self.plan.client)

    @property
    def width(self) -> int:
        """The number of lanes."""
        return self.plan.slot.shape[1]

    def at(self, t: Array | int) -> "_Now":
        """Returns what the plan has for a time step."""
        plan = self.plan
        return _Now(*tree.row((plan.slot, plan.local, plan.examples), jnp.asarray(t)))

    def split(self, x: PyTree) -> PyTree:
        """Returns a tree of arrays ``[lanes, ...]``, split over the devices."""
        return self.setup.layout.split_lanes(x, self.setup.splits)

    def step_keys(self, slot: Array, step: Array) -> Key:
        """Returns the keys of a local step; key 0 is for the client's initialisation."""
        return jax.vmap(jax.random.fold_in)(tree.take(self.keys, slot), step)

    def over(self, function: Callable[..., Any], slot: Array, *arguments: Any) -> Any:
        """Returns ``function(client, *arguments)`` of the clients in all lanes, stacked.

        Args:
          slot: of the clients, int32 ``[lanes]``.
          *arguments: each ``[lanes, ...]``.
        """

        def one(who: tuple, *own: Any) -> Any:
            return function(self.start.participant(*who), *own)

        number, mask = tree.take((self.plan.client, self.rows.rank_mask), slot)
        return _lane_map(self.width)(one)((number, mask, self.start.sources(slot)), *arguments)


def run_clients(
    setup: Setup, start: RoundStart, rows: Rows, stages: tuple[Stage, ...], options: RoundOptions
) -> Worked:
    """Returns the results of the clients' work."""
    plan = start.plan
    sources = start.sources(jnp.arange(len(plan.client)))
    keys = jax.vmap(
        lambda number, source: client_key(
            start.client_key, (source or start.present).round_index, number
        )
    )(plan.client, sources)
    lanes = _Lanes(setup, start, rows, stages, options, keys)
    work, first = _work_and_first(lanes)
    body = partial(_time_step, lanes, work)
    return options.loop(options.across(jnp.asarray(plan.steps)), body, first)


def _time_step(lanes: _Lanes, work: _Work, t: Array, carry: Worked) -> Worked:
    """Returns the state of the loop after a time step."""
    plan, slots, across, now = lanes.plan, lanes.slots, lanes.options.across, lanes.at(t)
    live = now.slot < slots
    first = live & (now.local == 0)
    last = live & (now.local + 1 == tree.take(plan.length, now.slot))

    def anyone(which: Array) -> Array:
        # Over all replicas: a condition that differs between replicas would compute both branches.
        return across(jnp.any(which).astype(jnp.int32)) > 0

    when = lanes.options.when
    state = when(anyone(first), lambda s: tree.where(first, work.begin(now), s), carry.lanes)
    if len(work.steps) > 1:
        bucket = across(tree.row(plan.bucket, t))
        stepped, metrics, predictions = jax.lax.switch(bucket, work.steps, state, now)
    else:
        stepped, metrics, predictions = work.steps[0](state, now)
    state = lanes.split(tree.where(live, stepped, state))
    where = jnp.where(live, now.slot, slots)
    return Worked(
        state,
        tree.add(carry.sums, where, metrics),
        tree.put(carry.predictions, t, predictions),
        when(anyone(last), lambda e: _end(lanes, state, now.slot, last, e), carry.ended),
    )


def _begin(lanes: _Lanes, now: _Now) -> PyTree:
    """Returns the local states of clients that begin, for all lanes."""
    slot = now.slot
    keys = lanes.step_keys(slot, jnp.zeros(lanes.width, jnp.int32))

    def init(client: Participant, own: PyTree, key: Key) -> PyTree:
        update = client_update(lanes.setup, lanes.start, client)
        return update.init(client.source.broadcast, own, key)

    return lanes.split(lanes.over(init, slot, tree.take(lanes.rows.client_state, slot), keys))


def _step(
    lanes: _Lanes, length: int | None, state: PyTree, now: _Now
) -> tuple[PyTree, Metrics, Params]:
    """Returns the local states after a step of all lanes, its metrics and its predictions."""
    keys = lanes.step_keys(now.slot, now.local + 1)

    def step(client: Participant, local: PyTree, batch: Params, key: Key) -> tuple[PyTree, Metrics]:
        return client_update(lanes.setup, lanes.start, client).step(local, batch, key)

    batch = lanes.split(_batch(lanes, length, now))
    state, metrics = lanes.over(step, now.slot, state, batch, keys)
    metrics = dict(metrics)
    return state, metrics, metrics.pop(PREDICTIONS, {})


def _batch(lanes: _Lanes, length: int | None, now: _Now) -> Params:
    """Returns the batches of all lanes; ``length`` cuts texts, None keeps them whole."""
    columns, examples = lanes.start.constants.columns, now.examples
    tokens = token_columns(columns)
    # Padding repeats the batch's first example, which belongs to the client. A masked row still
    # enters the gradient as 0 * its derivative, which could overflow for another client's data.
    # A Poisson-sampled batch may have no example at all.
    rows = jnp.where(examples < 0, examples[:, :1], examples)

    def column(name: str, x: Array) -> Array:
        if length is None or name not in tokens:
            return jnp.take(x, rows, axis=0, mode="clip")
        return x.at[rows, :length].get(mode="clip")

    batch = {name: column(name, x) for name, x in columns.items()}
    steps = tree.take(lanes.plan.length, now.slot)
    return {**batch, "mask": examples >= 0, "step": now.local, "steps": steps}


def _end(lanes: _Lanes, state: PyTree, slot: Array, last: Array, ended: Ended) -> Ended:
    """Returns what is left behind after the clients of some lanes have ended.

    Args:
      slot: of the clients, ``[lanes]``.
      last: which of them end, bool ``[lanes]``.
    """
    plan, slots, aggregator = lanes.plan, lanes.slots, lanes.start.aggregator
    noisy = aggregator.randomise is not None
    silent: Any = jnp.zeros_like(last)
    if not isinstance(plan.silent, tuple):
        silent = tree.take(plan.silent, slot)
    weight = jnp.where(last, tree.take(plan.weight, slot), 0.0)
    before, memory = tree.take((lanes.rows.client_state, ended.memory), slot)
    uploads = lanes.over(
        partial(_uploaded, lanes), slot, state, before, memory, weight, last & ~silent
    )
    where = jnp.where(uploads.accepted, slot, slots)
    place, finite, weights = where, uploads.accepted, uploads.weight
    inputs: tuple = (lanes.start.template, lanes.start.constants.fixed)
    if noisy:
        place = jnp.where(last, slot, slots)
        finite = uploads.finite | silent
        weights = jnp.where(last & (weights == 0), 1.0, weights)  # of the noise
        noise = lanes.start.noise_key
        keys = lanes.over(lambda c: upload_key(noise, c.source.round_index, c.number), slot)
        inputs += (keys, lanes.start.present.round_index)
    return Ended(
        summation.add(aggregator, ended.total, uploads.value, weights, place, *inputs),
        tree.put(ended.client_state, where, uploads.client_state),
        tree.put(ended.memory, where, uploads.memory),
        tree.put(ended.measured, where, uploads.measured),
        tree.put(ended.finite, jnp.where(last, slot, slots), finite),
        tree.put(ended.norms, where, uploads.norm),
        tree.put(ended.shares, where, uploads.shares),
    )


def _uploaded(
    lanes: _Lanes,
    client: Participant,
    local: PyTree,
    before: PyTree,
    memory: PyTree,
    weight: Array,
    sends: Array,
) -> Upload:
    """Returns a client's upload after all stages, without what all lanes share."""
    upload = first_upload(lanes.setup, lanes.start, client, local, before, weight)
    upload = passed(lanes.stages, upload._replace(memory=memory, accepted=sends))
    nothing: Any = ()
    return upload._replace(client=nothing, template=nothing)


def _work_and_first(lanes: _Lanes) -> tuple[_Work, Worked]:
    """Returns what the lanes do in a time step, and the first state of the loop."""
    # As jitted functions they are traced once, for their shapes, and not again in the loop.
    begin = jax.jit(partial(_begin, lanes), inline=True)
    whole = jax.jit(partial(_step, lanes, None), inline=True)
    now = lanes.at(0)
    shapes = jax.eval_shape(begin, now)
    # Predictions of shorter steps are padded to these shapes, which have the data's full length.
    _, metrics, predictions = jax.eval_shape(whole, shapes, now)

    def step_of(length: int, state: PyTree, now: _Now) -> tuple[PyTree, Metrics, Params]:
        stepped, measured, found = _step(lanes, length, state, now)
        return stepped, measured, jax.tree.map(_padded, found, predictions)

    first = Worked(
        lanes=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
        sums=jax.tree.map(lambda _: jnp.zeros(lanes.slots, jnp.float32), metrics),
        predictions=jax.tree.map(
            lambda x: jnp.zeros((len(lanes.plan.slot), *x.shape), x.dtype), predictions
        ),
        ended=_nobody(lanes),
    )
    steps: list[Callable] = [partial(step_of, length) for length in lanes.options.padded]
    return _Work(begin, steps or [whole]), first


def _nobody(lanes: _Lanes) -> Ended:
    """Returns what is left behind before any client has ended."""
    setup, start, slots = lanes.setup, lanes.start, lanes.slots
    shares = jax.eval_shape(setup.algorithm.traffic.sent_shares, start.template, start.template)
    return Ended(
        total=summation.empty(start.aggregator, start.template, start.constants.fixed, slots),
        client_state=lanes.rows.client_state,
        memory=lanes.rows.memory,
        measured=no_measurements(
            setup.transform, setup.algorithm, start.template, start.received, slots
        ),
        finite=jnp.ones(slots, bool),
        norms=jnp.zeros(slots, jnp.float32),
        shares={name: jnp.ones(slots, jnp.float32) for name in shares},
    )


def _padded(x: Array, template: jax.ShapeDtypeStruct) -> Array:
    """Returns the array, padded with zeros to the shape of ``template``."""
    return jnp.pad(x, [(0, more - n) for n, more in zip(x.shape, template.shape, strict=True)])


def _lane_map(lanes: int) -> Callable[[Callable], Callable]:
    """Returns ``vmap``, or a plain call if there is one lane.

    A batch axis of size 1 slows matrix products on a CPU.
    """
    if lanes > 1:
        return jax.vmap

    def one(function: Callable) -> Callable:
        def call(*arguments: Any) -> Any:
            squeezed = jax.tree.map(lambda x: x[0], arguments)
            return jax.tree.map(lambda x: x[None], function(*squeezed))

        return call

    return one
