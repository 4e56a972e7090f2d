"""A whole communication round as one XLA program.

The program loops over the plan's time steps; the number of steps is a run-time value. Each time
step works on all lanes, and a lane trains one client at a time:

    where a client begins, its lane is set up from the broadcast and the client's state
    every busy lane takes one local step
    where a client ends, its upload goes into the accumulator and its client state is written back

The aggregation and the server update follow the loop. Evaluation is the same loop, but its steps
measure and do not train.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from fedjax_peft.contracts import (
    Aggregated,
    Aggregator,
    Algorithm,
    ApplyFn,
    ClientContext,
    ClientUpdate,
    Diagnosis,
    Encoded,
    Key,
    Measurements,
    Metrics,
    Params,
    Probe,
    PyTree,
    Rebase,
    RoundContext,
    Stacked,
    Task,
    Total,
    Traffic,
    Transform,
)
from fedjax_peft.engine.history import Source, fetched_by, remember
from fedjax_peft.engine.kept import check_kept, reading
from fedjax_peft.engine.lengths import token_columns
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.state import State
from fedjax_peft.engine.uploads import (
    TransformState,
    as_received,
    decode,
    encoder,
    no_measurements,
    receive,
    relative_to,
    sendable,
)
from fedjax_peft.numerics import summation, tree
from fedjax_peft.numerics.precision import effective
from fedjax_peft.numerics.random import (
    attack_key,
    client_key,
    salted,
    server_key,
    transform_key,
    upload_key,
)

__all__ = [
    "PREDICTIONS",
    "RoundResult",
    "Work",
    "at_work",
    "build_round",
    "distance",
    "evaluation",
    "keeping_uploads",
    "run_time_loop",
    "tuning",
]

PREDICTIONS = "predictions"
"""The optional entry of a step's metrics that holds arrays ``[batch, ...]``. These arrays are
stored for every step; all other metrics are summed."""


Work = Literal["training", "tuning", "uploads", "personal", "global", "local"]
"""What the clients of a round do. ``training``: train and send. ``tuning``: train their client
state only. ``uploads``: train, and the server's state becomes the uploads, ``[slots, ...]``.
``personal``: measure their own models. ``global``: measure the global model. ``local``: measure
their models before the aggregation, from the client state (upload, client state)."""


Loop: TypeAlias = Callable[[jax.Array, Callable[[jax.Array, Any], Any], Any], Any]
"""(number of time steps, (time step, carry) -> carry, first carry) -> last carry."""


def run_time_loop(steps: jax.Array, body: Callable[[jax.Array, Any], Any], start: Any) -> Any:
    """Returns the carry after ``steps`` time steps, a number that is known at run time only.

    Such a loop has no derivative in reverse mode (:mod:`fedjax_peft.engine.differentiable` has
    another).
    """
    return jax.lax.fori_loop(0, steps, body, start)


class RoundResult(NamedTuple):
    """The results of a round; all arrays stay on the device."""

    state: State
    """The state after the round, without the host's integers (:meth:`State.on_device`)."""
    sums: dict[str, tuple[jax.Array, jax.Array]]
    """Metric -> (sum, count), each float32 ``[slots]``."""
    finite: jax.Array
    """bool ``[slots]``: False for a client whose upload was not finite and was dropped."""
    norms: jax.Array
    """float32 ``[slots]``: norm of the model change that each client's upload describes."""
    sent_leaves: dict[str, jax.Array]
    """For each leaf that is not sent in every round: whether it was sent in this round."""
    aggregation: dict[str, jax.Array]
    """Metrics of the aggregator, the server, the diagnosis and ``Algorithm.round_metrics``."""
    predictions: dict[str, jax.Array]
    """Step outputs for each example, ``[time steps, lanes, batch, ...]``; see ``PREDICTIONS``."""
    shares: dict[str, jax.Array] = {}  # noqa: RUF012
    """``Traffic.sent_shares`` of each client, float32 ``[slots]``."""


def build_round(
    algorithm: Algorithm,
    apply: ApplyFn,
    task: Task,
    clients: int,
    constrain: Callable[[Any], Any] = lambda tree: tree,
    diagnosis: Diagnosis | None = None,
    padded: tuple[int, ...] = (),
    total_clients: int | None = None,
    dtype: Any = jnp.float32,
    sampling_probability: float = 1.0,
    transform: Transform | None = None,
    across: Callable[[jax.Array], jax.Array] = lambda x: x,
    split_rows: Callable[[Any], Any] = lambda tree: tree,
    gathered: bool = False,
    loop: Loop = run_time_loop,
) -> Callable[..., RoundResult]:
    """Returns the pure function that runs one round; the caller jits it.

    Args:
      algorithm: the federated algorithm.
      apply: the model.
      task: the loss and metrics.
      clients: the number of clients in the federation.
      constrain: splits a tree over the devices; applied to every tree with a leading lane axis.
      diagnosis: additional measurements of the global model.
      padded: the padded lengths that ``Plan.bucket`` chooses from; empty if there are no tokens.
      total_clients: the number of clients that have examples; by default all clients.
      dtype: the dtype in which ``apply`` computes.
      sampling_probability: the share of all clients that a round samples, on average.
      transform: the upload transform.
      across: returns the largest value over all replicas, where several rounds run as one.
      split_rows: splits a tree over the devices; applied to every tree of a cohort's rows
        ``[slots, ...]``.
      gathered: whether the state holds what the clients of the plan's slots keep, ``[slots, ...]``,
        instead of what all clients keep.
      loop: runs the time steps.
    """
    server_ = algorithm.server
    update_norm = server_.update_norm or partial(distance, algorithm)
    total_clients = clients if total_clients is None else total_clients

    def round_(
        frozen: Params,
        fixed: Params,
        rank_mask: Params,
        columns: Params,
        state: State,
        plan: Plan,
        key: Key,
        round_index: jax.Array,
    ) -> RoundResult:
        """Runs round ``round_index``; ``state`` may be donated.

        ``rank_mask`` says which entries of a leaf each client has, bool ``[clients, ...]`` by leaf
        name. Entries that a client does not have are 0 in a fixed leaf; in a trained leaf they keep
        the values that the client received.
        """
        server, client_state, transform_state = (
            state.server,
            state.client_state,
            state.transform_state,
        )
        base = server_.merge_into_frozen(server, frozen)

        def update(
            client: jax.Array, client_mask: Params, source: Source | tuple[()]
        ) -> ClientUpdate:
            start = source or present
            own = {
                n: jnp.where(client_mask[n], x, 0) if n in client_mask else x
                for n, x in fixed.items()
            }

            def bound(params: Params, batch: Any, key: Key | None, train: bool) -> Any:
                return apply(base, {**own, **params}, batch, key, train)

            facts = (own, start.round_index, client)
            context = ClientContext(bound, task, *facts, salt=state.salt)
            made = reading(algorithm.name, algorithm.client(context))
            return relative_to(start.template, transform, start.broadcast, made)

        broadcast, template = server_.broadcast(server), server_.unchanged(server)
        noise_key = salted(key, state.salt)
        own_key = server_key(noise_key, round_index)
        broadcast, received_metrics = receive(transform, broadcast, transform_state, own_key)
        sent_leaves = algorithm.traffic.sent_leaves(broadcast, round_index)
        present = Source(broadcast, template, round_index)
        history = remember(state.history, plan.fetched, present)

        def tamper(client: jax.Array, upload: PyTree, start: Source, key: Key) -> PyTree:
            assert algorithm.tamper is not None
            sent = algorithm.tamper(client, upload, start.template, key)
            return as_received(sent_leaves, sent, upload)

        encode, memory, measurements = None, (), ()
        if transform is not None:
            received = transform.broadcast(transform_state.server)

            def encode(start: Source, *client: Any) -> tuple[PyTree, Encoded]:
                made = encoder(transform, algorithm, start.template, received, sent_leaves)
                return made(*client)

            inputs = (transform, algorithm, template, received)
            measurements = no_measurements(*inputs, len(plan.client))
            memory = transform_state.memory
            memory = split_rows(memory if gathered else tree.take(memory, plan.client))
        if algorithm.weights == "uniform":
            ones: Any = jnp.where(plan.weight > 0, 1.0, 0.0)
            plan = plan._replace(weight=ones)
        aggregator = algorithm.aggregator.bound(state.aggregator_state)
        carry = _run_clients(
            algorithm.name,
            update,
            aggregator,
            None if algorithm.tamper is None else tamper,
            present,
            partial(fetched_by, history, plan.fetched),
            algorithm.rebase,
            fixed,
            lambda upload, sent, start: (
                update_norm(upload, start.template, fixed),
                algorithm.traffic.sent_shares(sent, start.template),
            ),
            encode,
            memory,
            measurements,
            split_rows(client_state if gathered else tree.take(client_state, plan.client)),
            split_rows(tree.take(rank_mask, plan.client)),
            columns,
            plan,
            key,
            noise_key,
            constrain,
            padded,
            across,
            loop,
        )
        accepted = carry.finite & (plan.weight > 0)
        if not isinstance(plan.silent, tuple):
            accepted = accepted & ~plan.silent
        rows = jnp.where(plan.client < 0, clients, plan.client)
        summed = {name: _summed(pair, accepted) for name, pair in carry.sums.items()}
        participants = jnp.sum(carry.total.weights > 0, dtype=jnp.float32)
        if aggregator.every_round:
            participants = jnp.float32(sampling_probability * total_clients)
        context = RoundContext(
            round_index=round_index,
            participants=participants,
            total_clients=total_clients,
            metrics=summed,
            fixed=fixed,
            key=own_key,
            sampling_probability=sampling_probability,
            clients=rows,
            sendable=sendable(aggregator, template, sent_leaves, rank_mask),
        )
        result = summation.finish(
            aggregator, carry.total, template, context, state.aggregator_state
        )
        aggregate, measured = result.update, result.metrics
        if transform is not None:
            aggregate, new_transform, metrics = decode(
                transform,
                algorithm,
                template,
                aggregate,
                transform_state.server,
                Measurements(carry.measured, accepted),
                context,
                sent_leaves,
            )
            measured = measured | metrics
        new = server_.update(server, aggregate, context)
        if server_.frozen_delta is not None and server_.measure is not None:
            names = server_.frozen_delta(server)
            before, after = (
                {n: effective(weights[n].astype(jnp.float32), dtype) for n in names}
                for weights in (base, server_.merge_into_frozen(new, frozen))
            )
            measured = measured | server_.measure(aggregate, before, after, fixed)
        if server_.metrics is not None:
            measured = measured | server_.metrics(new)
        if diagnosis is not None:
            measured = measured | diagnosis(server_.model(server), server_.model(new), fixed)
        measured = measured | received_metrics | algorithm.round_metrics(round_index)
        kept, memory = carry.client_state, carry.memory
        if not gathered:
            kept = tree.put(client_state, rows, kept)
        if transform is not None:
            memory = memory if gathered else tree.put(transform_state.memory, rows, memory)
            transform_state = TransformState(new_transform, memory)
        return RoundResult(
            state._replace(
                server=new,
                client_state=kept,
                aggregator_state=result.state,
                transform_state=transform_state,
                history=history,
            ),
            carry.sums,
            carry.finite,
            carry.norms,
            sent_leaves,
            measured,
            carry.predictions,
            carry.shares,
        )

    return round_


def _summed(pair: tuple[jax.Array, jax.Array], accepted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (sum, count) of a metric over the accepted clients whose value is finite.

    A client's upload can be finite although its metric is not, for example an infinite loss. Such a
    value is left out, because the server would carry it into all later rounds.

    Args:
      pair: (sums, counts), each ``[slots]``.
      accepted: bool ``[slots]``: True for clients whose upload was aggregated.
    """
    good = accepted & jnp.isfinite(pair[0])
    total, count = (jnp.sum(jnp.where(good, x, 0.0)) for x in pair)
    return total, count


class _Ended(NamedTuple):
    """The part of the loop state that changes when clients end."""

    total: Total
    client_state: PyTree
    memory: PyTree
    measured: PyTree
    finite: jax.Array
    norms: jax.Array
    shares: dict[str, jax.Array]


class _Carry(NamedTuple):
    state: PyTree
    total: Total
    client_state: PyTree
    memory: PyTree
    measured: PyTree
    sums: dict[str, tuple[jax.Array, jax.Array]]
    finite: jax.Array
    norms: jax.Array
    shares: dict[str, jax.Array]
    predictions: dict[str, jax.Array]


def _run_clients(
    name: str,
    update: Callable[[jax.Array, Params, Source | tuple[()]], ClientUpdate],
    aggregator: Aggregator,
    tamper: Callable[[jax.Array, PyTree, Source, Key], PyTree] | None,
    present: Source,
    fetched: Callable[[jax.Array], Source | tuple[()]],
    rebase: Rebase | None,
    fixed: Params,
    measured: Callable[[PyTree, PyTree, Source], tuple[jax.Array, dict[str, jax.Array]]],
    encode: Callable[..., tuple[PyTree, Encoded]] | None,
    memory: PyTree,
    measurements: PyTree,
    client_state: PyTree,
    rank_mask: Params,
    columns: Params,
    plan: Plan,
    key: Key,
    noise_key: Key,
    constrain: Callable[[Any], Any],
    padded: tuple[int, ...],
    across: Callable[[jax.Array], jax.Array],
    loop: Loop,
) -> _Carry:
    lanes, slots = plan.slot.shape[1], plan.client.shape[0]
    over_lanes = _lane_map(lanes)
    template, round_index = present.template, present.round_index
    tokens = token_columns(columns)

    def column(name: str, x: jax.Array, rows: jax.Array, length: int | None) -> jax.Array:
        if length is None or name not in tokens:
            return jnp.take(x, rows, axis=0, mode="clip")
        return x.at[rows, :length].get(mode="clip")

    def batch_at(t: jax.Array, length: int | None) -> Params:
        examples = plan.examples[t]
        # Padding repeats the batch's first example, which belongs to the client. A masked row still
        # enters the gradient as 0 * its derivative, which could overflow for another client's data.
        # A Poisson-sampled batch may have no example at all.
        rows = jnp.where(examples < 0, examples[:, :1], examples)
        batch = {n: column(n, x, rows, length) for n, x in columns.items()}
        steps = jnp.take(plan.length, plan.slot[t], mode="clip")
        metadata = {"mask": examples >= 0, "step": plan.local[t], "steps": steps}
        return constrain({**batch, **metadata})

    def keys_of(
        make: Callable[[Key, jax.Array, jax.Array], Key],
        client: Any,
        source: Source | tuple[()],
        root: Key = key,
    ) -> Key:
        return jax.vmap(lambda c, s: make(root, (s or present).round_index, c))(client, source)

    sources = fetched(jnp.arange(slots))
    client_keys = keys_of(client_key, plan.client, sources)
    transform_keys = keys_of(transform_key, plan.client, sources)

    def keys_at(t: jax.Array, step: jax.Array) -> Key:
        return jax.vmap(jax.random.fold_in)(tree.take(client_keys, plan.slot[t]), step)

    def begin(t: jax.Array) -> PyTree:
        init = over_lanes(
            lambda c, mask, s, p, k: update(c, mask, s).init((s or present).broadcast, p, k)
        )
        keys = keys_at(t, jnp.zeros(lanes, jnp.int32))
        slot = plan.slot[t]
        who, own = tree.take((plan.client, rank_mask), slot), tree.take(client_state, slot)
        return constrain(init(*who, fetched(slot), own, keys))

    def advance(length: int | None, state: PyTree, t: jax.Array) -> tuple[PyTree, Metrics, Params]:
        # The keys of local steps count from 1: key 0 is for the client's initialisation.
        keys = keys_at(t, plan.local[t] + 1)
        step = over_lanes(lambda c, mask, s, x, b, k: update(c, mask, s).step(x, b, k))
        who = tree.take((plan.client, rank_mask), plan.slot[t])
        source = fetched(plan.slot[t])
        state, metrics = step(*who, source, state, batch_at(t, length), keys)
        metrics = dict(metrics)
        return state, metrics, metrics.pop(PREDICTIONS, {})

    def advance_at(length: int, state: PyTree, t: jax.Array) -> tuple[PyTree, Metrics, Params]:
        stepped, metrics, predictions = advance(length, state, t)
        return stepped, metrics, jax.tree.map(_padded, predictions, prediction_shapes)

    steps = [partial(advance_at, length) for length in padded] or [partial(advance, None)]

    def anyone(lanes: jax.Array) -> jax.Array:
        # Over all replicas: a condition that differs between replicas would compute both branches.
        return across(jnp.any(lanes).astype(jnp.int32)) > 0

    def body(t: jax.Array, carry: _Carry) -> _Carry:
        slot, local = plan.slot[t], plan.local[t]
        live = slot < slots
        first = live & (local == 0)
        last = live & (local + 1 == jnp.take(plan.length, slot, mode="clip"))
        state = jax.lax.cond(
            anyone(first), lambda s: tree.where(first, begin(t), s), lambda s: s, carry.state
        )
        if len(steps) > 1:
            stepped, metrics, predictions = jax.lax.switch(across(plan.bucket[t]), steps, state, t)
        else:
            stepped, metrics, predictions = steps[0](state, t)
        state = constrain(tree.where(live, stepped, state))
        where = jnp.where(live, slot, slots)
        sums = jax.tree.map(lambda s, m: s.at[where].add(m, mode="drop"), carry.sums, metrics)
        ended = jax.lax.cond(
            anyone(last),
            lambda c: end(state, slot, last, c),
            lambda c: c,
            _Ended(*(getattr(carry, name) for name in _Ended._fields)),
        )
        predictions = jax.tree.map(lambda x, y: x.at[t].set(y), carry.predictions, predictions)
        return _Carry(state=state, sums=sums, predictions=predictions, **ended._asdict())

    def owned(client_mask: Params, uploads: PyTree) -> PyTree:
        """Returns uploads with zeros beyond a client's rank, if the aggregator asks for zeros."""
        if aggregator.unmasked_policy != "zero":
            return uploads
        zeros = tree.broadcast(jax.tree.map(jnp.zeros_like, template), 1)
        return as_received(client_mask, uploads, zeros)

    def end(state: PyTree, slot: jax.Array, last: jax.Array, carry: _Ended) -> _Ended:
        client, client_mask = tree.take((plan.client, rank_mask), slot)
        source = fetched(slot)
        final = over_lanes(lambda c, mask, s, x: update(c, mask, s).final(x))
        uploads, own = final(client, client_mask, source, state)
        if tamper is not None:
            keys = keys_of(attack_key, client, source)
            attacked = over_lanes(lambda c, u, s, k: tamper(c, u, s or present, k))
            uploads = attacked(client, uploads, source, keys)
        received = source.template if isinstance(source, Source) else tree.broadcast(template, 1)
        uploads = as_received(client_mask, uploads, received)
        # The slots are passed too: the lane map needs an array, and an upload may be empty.
        measure = over_lanes(lambda u, o, s, _: measured(u, o, s or present))
        lengths, shares = measure(uploads, owned(client_mask, uploads), source, slot)
        remembered, noted = tree.take(carry.memory, slot), ()
        usable: Any = True
        if encode is not None:
            # Checked before the transform, which could make an infinite upload finite.
            usable = tree.all_finite(uploads, axis=0)
            keys = tree.take(transform_keys, slot)
            encoding = over_lanes(lambda s, *client: encode(s or present, *client))
            uploads, encoded = encoding(source, client_mask, uploads, remembered, keys)
            remembered, noted = encoded.memory, encoded.measured
        if rebase is not None and isinstance(source, Source):
            uploads = over_lanes(lambda u, s: rebase(u, s.template, template, s.staleness))(
                uploads, source
            )
        uploads = owned(client_mask, uploads)
        before = tree.take(client_state, slot)
        check_kept(name, own, before)
        own = as_received(client_mask, own, before)
        good = tree.all_finite((uploads, own, remembered), axis=0) & usable
        silent: Any = jnp.zeros_like(good)
        if not isinstance(plan.silent, tuple):
            silent = jnp.take(plan.silent, slot, mode="clip")
        accepted = last & good & ~silent
        where = jnp.where(accepted, slot, slots)
        # With noise of the clients' own, one that has nothing usable sends a change of 0 and its
        # noise: its data decide whether it has, and a missing share of the noise would tell.
        noisy = aggregator.randomise is not None
        there, place = (last, jnp.where(last, slot, slots)) if noisy else (accepted, where)
        zeros = jax.tree.map(jnp.zeros_like, uploads)
        uploads = tree.where(accepted, uploads, tree.broadcast(template, lanes) if noisy else zeros)
        weights = jnp.where(there, jnp.take(plan.weight, slot, mode="clip"), 0.0)
        inputs: tuple = (uploads, weights, place, template, fixed)
        good = good | silent if noisy else good & ~silent
        if noisy:
            inputs += (keys_of(upload_key, client, source, noise_key), round_index)
        return _Ended(
            summation.add(aggregator, carry.total, *inputs),
            tree.put(carry.client_state, where, own),
            tree.put(carry.memory, where, remembered),
            tree.put(carry.measured, where, noted),
            carry.finite.at[jnp.where(last, slot, slots)].set(good, mode="drop"),
            carry.norms.at[where].set(lengths, mode="drop"),
            tree.put(carry.shares, where, shares),
        )

    share_names = jax.eval_shape(measured, template, template, present)[1]
    shapes = jax.eval_shape(begin, 0)
    # Predictions of shorter steps are padded to these shapes, which have the data's full length.
    _, metric_shapes, prediction_shapes = jax.eval_shape(partial(advance, None), shapes, 0)
    start = _Carry(
        state=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
        total=summation.empty(aggregator, template, fixed, slots),
        client_state=client_state,
        memory=memory,
        measured=measurements,
        sums=jax.tree.map(lambda _: jnp.zeros(slots, jnp.float32), metric_shapes),
        finite=jnp.ones(slots, bool),
        norms=jnp.zeros(slots, jnp.float32),
        shares={name: jnp.ones(slots, jnp.float32) for name in share_names},
        predictions=jax.tree.map(
            lambda x: jnp.zeros((len(plan.slot), *x.shape), x.dtype), prediction_shapes
        ),
    )
    return loop(across(jnp.asarray(plan.steps)), body, start)


def _padded(x: jax.Array, template: jax.ShapeDtypeStruct) -> jax.Array:
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


def distance(algorithm: Algorithm, upload: PyTree, template: PyTree, fixed: Params) -> jax.Array:
    """Returns the norm of an upload's change of the leaves (``ServerUpdate.update_norm``)."""
    del fixed
    return tree.distance(algorithm.change_part(upload), algorithm.change_part(template))


def at_work(algorithm: Algorithm, work: Work, probe: Probe | None = None) -> Algorithm:
    """Returns the algorithm with clients that do the given kind of work."""
    if work == "training":
        return algorithm
    if work == "tuning":
        return tuning(algorithm)
    if work == "uploads":
        return keeping_uploads(algorithm)
    if work == "local":
        before = algorithm.before_aggregation
        algorithm = algorithm._replace(model=lambda broadcast, sent: before(broadcast, *sent))
    return evaluation(algorithm, personal=work != "global", probe=probe)


def evaluation(algorithm: Algorithm, *, personal: bool, probe: Probe | None = None) -> Algorithm:
    """Returns the algorithm with clients that only measure.

    Its round changes neither the server nor the client state. ``RoundResult.predictions`` has two
    entries: ``metrics``, the metrics of every step, and ``predictions``, the model outputs from
    which the task's score is computed.

    Args:
      algorithm: the algorithm that was trained.
      personal: True measures each client's own model; False measures the global model, to which all
        leaves then belong.
      probe: additional measurements.
    """

    def client(context: ClientContext) -> ClientUpdate:
        def step(state: Any, batch: Any, key: Key) -> tuple[Any, Any]:
            del key
            broadcast, kept = state
            leaves = algorithm.model(broadcast, kept) if personal else broadcast
            outputs = context.apply(leaves, batch, None, False)
            metrics: dict[str, Any] = dict(context.task.metrics(outputs, batch))
            if probe is not None:
                metrics |= probe(context, leaves, batch)
            predict = context.task.predict
            predictions = {} if predict is None else predict(outputs, batch)
            # A user's task may have no `generate`.
            if (generate := getattr(context.task, "generate", None)) is not None:
                predictions = predictions | generate(
                    lambda columns: context.apply(leaves, columns, None, False), batch
                )
            return state, {PREDICTIONS: {"metrics": metrics, "predictions": predictions}}

        return ClientUpdate(
            init=lambda broadcast, client_state, key: (broadcast, client_state),
            step=step,
            final=lambda state: ({}, state[1]),
        )

    return _sending_nothing(algorithm, client, personal=personal)


def tuning(algorithm: Algorithm) -> Algorithm:
    """Returns the algorithm with clients that train as ``algorithm.tuning`` says and send nothing.

    Its round changes the client state only; the server stays as it is.
    """
    assert algorithm.tuning is not None
    return _sending_nothing(algorithm, algorithm.tuning.client, personal=True)


def keeping_uploads(algorithm: Algorithm) -> Algorithm:
    """Returns the algorithm with a server whose state becomes the uploads, ``[slots, ...]``.

    The local work is that of the algorithm. Hostile clients do not tamper with their uploads, which
    are then the clients' own models. A client whose upload is not finite has zeros.
    """
    keep = Aggregator(
        "uploads",
        lift=lambda upload, template, fixed: Stacked(upload),
        finish=lambda total, template, context, state: Aggregated(total.value.value, {}, state),
    )
    server = algorithm.server._replace(
        update=lambda state, uploads, context: uploads, measure=None, metrics=None
    )
    return algorithm._replace(aggregator=keep, server=server, tamper=None, rebase=None)


def _sending_nothing(
    algorithm: Algorithm, client: Callable[[ClientContext], ClientUpdate], *, personal: bool
) -> Algorithm:
    """Returns the algorithm with another client update and a server that never changes.

    If ``personal``, clients receive the broadcast; otherwise the leaves of the global model.
    """
    nothing = Aggregator(
        "none",
        lift=lambda upload, template, fixed: (),
        finish=lambda total, template, context, state: Aggregated(template, {}, state),
    )
    still = algorithm.server._replace(
        update_norm=None,
        measure=None,
        update=lambda state, update, context: state,
        broadcast=algorithm.server.broadcast if personal else algorithm.server.model,
        template=lambda state: {},
        metrics=None,
    )
    return algorithm._replace(
        client=client,
        aggregator=nothing,
        server=still,
        traffic=Traffic(),
        round_metrics=lambda round_index: {},
        tamper=None,
    )
