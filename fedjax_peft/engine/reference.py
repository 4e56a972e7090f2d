"""A communication round as a plain Python loop over clients, one at a time and without jit.

This file is the readable form of :mod:`fedjax_peft.engine.round`, and the reference that tests
compare it with. What a round computes::

    server broadcasts
    for each client of the cohort:
        local state           <-  init(broadcast, client state)
        for each local batch:
            local state       <-  step(local state, batch)
        upload, client state  <-  final(local state)
    server                    <-  update(server, aggregate(uploads))

``simulate(..., engine="reference")`` runs it, so a breakpoint or a print in an algorithm shows real
numbers. It is slow, because every operation is dispatched separately.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft.contracts import (
    Aggregated,
    Algorithm,
    ClientContext,
    Key,
    Measurements,
    Params,
    PyTree,
    RoundContext,
)
from fedjax_peft.engine.history import Source, fetched_by, remember
from fedjax_peft.engine.kept import check_kept, reading
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.program import Setup
from fedjax_peft.engine.round import PREDICTIONS, RoundResult, Work, at_work, distance
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
    stream,
    transform_key,
    upload_key,
)

__all__ = ["ReferenceProgram"]


class ReferenceProgram:
    """A round in plain Python, with the methods of :class:`fedjax_peft.engine.program.Program`."""

    compile_seconds = 0.0
    peak_bytes = 0

    def __init__(
        self,
        setup: Setup,
        columns: Mapping[str, Any],
        *,
        work: Work = "training",
        padded: tuple[int, ...] = (),
        gathered: bool = False,
    ):
        """Takes the arguments of a program; texts are always computed at their full length."""
        del padded
        self._setup, self._work, self._gathered = setup, work, gathered
        self.use(columns)

    def use(self, columns: Mapping[str, Any]) -> None:
        """Replaces the examples."""
        self._columns = {name: jnp.asarray(x) for name, x in columns.items()}

    def compile(self, state: State, plan: Plan) -> None:
        """Does nothing, because there is nothing to compile."""

    def known(self, state: State, plan: Plan) -> bool:
        """Returns True: a call never compiles a round."""
        del state, plan
        return True

    def __call__(self, state: State, plan: Plan, round_index: int) -> RoundResult:
        """Runs round ``round_index``; the state is not consumed."""
        setup = self._setup.made(state.values)
        if self._work != "training":
            setup = setup._replace(transform=None, diagnosis=None)
        algorithm = at_work(setup.algorithm, self._work, setup.probe)
        key = stream(int(state.seed), "clients")
        state = jax.tree.map(jnp.asarray, state.on_device())
        rows = np.arange(len(plan.client)) if self._gathered else plan.client
        return _Round(setup, algorithm, self._columns, state, plan, key, round_index, rows).run()


class _Sent(NamedTuple):
    """The upload, the client state and the measurements of one client after local training."""

    upload: PyTree
    client_state: PyTree
    memory: PyTree
    """The client's state of the upload transform."""
    measured: PyTree
    """The upload transform's measurements of this client."""
    norm: jax.Array
    """Norm of the model change that the upload describes."""
    shares: dict[str, jax.Array]
    """``Traffic.sent_shares`` of the upload."""


class _Round:
    """One round; :meth:`run` follows the order of a paper's algorithm box."""

    def __init__(
        self,
        setup: Setup,
        algorithm: Algorithm,
        columns: Params,
        state: State,
        plan: Plan,
        key: Key,
        index: int,
        rows: np.ndarray,
    ):
        self.rows = rows  # of each slot, in what the clients keep
        self.setup, self.algorithm, self.columns = setup, algorithm, columns
        self.state, self.plan, self.key = state, plan, key
        self.index, self.round_index = index, jnp.int32(index)
        self.sums: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.predictions: PyTree = None
        sizes = plan.weight
        uniform = algorithm.weights == "uniform"
        self.weights = (sizes > 0).astype(np.float32) if uniform else sizes
        self.aggregator = algorithm.aggregator.bound(state.aggregator_state)
        self.noise_key = salted(key, state.salt)

    def run(self) -> RoundResult:
        """Returns the state after the round, and what was measured."""
        algorithm, server, state = self.algorithm, self.algorithm.server, self.state

        # The server broadcasts. The template is the upload of a client that learns nothing.
        self.frozen = server.merge_into_frozen(state.server, self.setup.frozen)
        self.broadcast, self.template = (
            server.broadcast(state.server),
            server.unchanged(state.server),
        )
        self.broadcast, self.received = receive(
            self.setup.transform,
            self.broadcast,
            state.transform_state,
            server_key(self.noise_key, self.index),
        )
        self.sent_leaves = algorithm.traffic.sent_leaves(self.broadcast, self.round_index)
        self.present = Source(self.broadcast, self.template, self.round_index)
        self.history = remember(state.history, self.plan.fetched, self.present)

        # The clients train, one after the other. An upload that is not finite is dropped.
        sent: dict[int, _Sent] = {}
        finite = np.ones(len(self.plan.client), bool)
        for slot in np.flatnonzero(self.plan.length * ~self.plan.silent_slots).tolist():
            one = self._train_client(slot)
            if one is None:
                finite[slot] = False
            else:
                sent[slot] = one

        # The server aggregates the uploads and updates its state.
        new, aggregator_state, transform_state, measured = self._update_server(sent)

        # The new client states are stored.
        kept = state.client_state
        for slot, one in sent.items():
            row = int(self.rows[slot])
            kept = tree.put(kept, row, one.client_state)
            if self.setup.transform is not None:
                memory = tree.put(transform_state.memory, row, one.memory)
                transform_state = transform_state._replace(memory=memory)
        norms = np.zeros(len(finite), np.float32)
        for slot, one in sent.items():
            norms[slot] = one.norm
        shares = {
            name: np.ones(len(finite), np.float32) for one in sent.values() for name in one.shares
        }
        for slot, one in sent.items():
            for name, share in one.shares.items():
                shares[name][slot] = share
        return RoundResult(
            state._replace(
                server=new,
                client_state=kept,
                aggregator_state=aggregator_state,
                transform_state=transform_state,
                history=self.history,
            ),
            {name: (jnp.asarray(x), jnp.asarray(n)) for name, (x, n) in self.sums.items()},
            jnp.asarray(finite),
            jnp.asarray(norms),
            self.sent_leaves,
            measured,
            self.predictions or {},
            {name: jnp.asarray(x) for name, x in shares.items()},
        )

    def _train_client(self, slot: int) -> _Sent | None:
        """Returns a client's results after its local steps; None if they are not finite."""
        client = int(self.plan.client[slot])
        mask = tree.take(self.setup.rank_mask or {}, client)
        fixed = {
            name: jnp.where(mask[name], x, 0) if name in mask else x
            for name, x in self.setup.fixed.items()
        }

        def apply(params: Params, batch: Any, key: Key | None, train: bool) -> Any:
            return self.setup.apply(self.frozen, {**fixed, **params}, batch, key, train)

        # What the client starts from: the present version, or an older one that it has fetched.
        source = fetched_by(self.history, self.plan.fetched, jnp.int32(slot)) or self.present
        facts = (fixed, source.round_index, jnp.int32(client))
        context = ClientContext(apply, self.setup.task, *facts, salt=self.state.salt)
        update = reading(self.algorithm.name, self.algorithm.client(context))
        update = relative_to(source.template, self.setup.transform, source.broadcast, update)
        key = client_key(self.key, source.round_index, client)
        before = tree.take(self.state.client_state, int(self.rows[slot]))

        local = update.init(source.broadcast, before, jax.random.fold_in(key, 0))
        places = np.argwhere(self.plan.slot[: int(self.plan.steps)] == slot)
        for step, (time, lane) in enumerate(places.tolist()):
            batch = self._batch(slot, step, self.plan.examples[time, lane])
            local, metrics = update.step(local, batch, jax.random.fold_in(key, step + 1))
            self._record(slot, (time, lane), metrics)
        upload, own = update.final(local)
        if self.algorithm.tamper is not None:
            key = attack_key(self.key, source.round_index, client)
            sent = self.algorithm.tamper(jnp.int32(client), upload, source.template, key)
            upload = as_received(self.sent_leaves, sent, upload)

        upload = as_received(mask, upload, source.template)
        check_kept(self.algorithm.name, own, before)
        own = as_received(mask, own, before)
        return self._encoded(slot, mask, upload, own, source)

    def _batch(self, slot: int, step: int, examples: np.ndarray) -> Params:
        """Returns the batch of a local step; padding repeats its first example."""
        rows = np.where(examples < 0, examples[:1], examples)
        batch = {name: x[rows] for name, x in self.columns.items()}
        steps = jnp.asarray(self.plan.length[slot])
        return {
            **batch,
            "mask": jnp.asarray(examples >= 0),
            "step": jnp.int32(step),
            "steps": steps,
        }

    def _record(self, slot: int, place: tuple[int, int], metrics: Mapping[str, Any]) -> None:
        """Adds a local step's metrics to the client's sums, and stores the step's predictions."""
        metrics = dict(metrics)
        predictions = metrics.pop(PREDICTIONS, {})
        for name, pair in metrics.items():
            slots = len(self.plan.client)
            empty = (np.zeros(slots, np.float32), np.zeros(slots, np.float32))
            for total, part in zip(self.sums.setdefault(name, empty), pair, strict=True):
                total[slot] += part
        if self.predictions is None:
            shape = self.plan.slot.shape
            self.predictions = jax.tree.map(
                lambda x: np.zeros((*shape, *x.shape), x.dtype), predictions
            )

        def store(all_: np.ndarray, one: jax.Array) -> None:
            all_[place] = one

        jax.tree.map(store, self.predictions, predictions)

    def _encoded(
        self, slot: int, mask: Params, upload: PyTree, own: PyTree, source: Source
    ) -> _Sent | None:
        """Returns a client's results with a transformed upload; None if anything is not finite."""
        update_norm = self.algorithm.server.update_norm or partial(distance, self.algorithm)
        norm = update_norm(upload, source.template, self.setup.fixed)
        shares = self.algorithm.traffic.sent_shares(self._owned(mask, upload), source.template)
        finite = tree.all_finite((upload, own))
        memory: PyTree = ()
        measured: PyTree = ()
        if self.setup.transform is not None:
            before = tree.take(self.state.transform_state.memory, int(self.rows[slot]))
            received = self.setup.transform.broadcast(self.state.transform_state.server)
            inputs = (self.setup.transform, self.algorithm, source.template, received)
            encode = encoder(*inputs, self.sent_leaves)
            key = transform_key(self.key, source.round_index, int(self.plan.client[slot]))
            upload, encoded = encode(mask, upload, before, key)
            memory, measured = encoded.memory, encoded.measured
            finite = finite & tree.all_finite((upload, memory))
        rebase = self.algorithm.rebase
        if rebase is not None and source is not self.present:
            upload = rebase(upload, source.template, self.template, source.staleness)
        upload = self._owned(mask, upload)
        return _Sent(upload, own, memory, measured, norm, shares) if finite else None

    def _owned(self, mask: Params, upload: PyTree) -> PyTree:
        """Returns an upload with zeros beyond the client's rank, if the aggregator asks for it."""
        if self.aggregator.unmasked_policy != "zero":
            return upload
        return as_received(mask, upload, jax.tree.map(jnp.zeros_like, self.template))

    def _update_server(
        self, sent: Mapping[int, _Sent]
    ) -> tuple[PyTree, PyTree, PyTree, dict[str, jax.Array]]:
        """Returns the states of server, aggregator and transform after the round, and metrics."""
        algorithm, server, state = self.algorithm, self.algorithm.server, self.state
        worked = [slot in sent for slot in range(len(self.weights))]
        accepted = jnp.asarray(worked & (self.weights > 0))
        noisy = self.aggregator.randomise is not None
        # A client that adds noise itself sends it even if it has nothing else to send.
        there = jnp.asarray(self.weights > 0) if noisy else accepted
        setup, participants = self.setup, jnp.sum(there, dtype=jnp.float32)
        total_clients = setup.clients if setup.total_clients is None else setup.total_clients
        if self.aggregator.every_round:
            participants = jnp.float32(setup.sampling_probability * total_clients)
        context = RoundContext(
            round_index=self.round_index,
            participants=participants,
            total_clients=total_clients,
            metrics={name: _summed(pair, accepted) for name, pair in self.sums.items()},
            fixed=self.setup.fixed,
            key=server_key(self.noise_key, self.index),
            clients=jnp.where(self.plan.client < 0, setup.clients, self.plan.client),
            sampling_probability=setup.sampling_probability,
            sendable=sendable(
                *(self.aggregator, self.template, self.sent_leaves, setup.rank_mask or {})
            ),
        )
        result = self._aggregate(sent, context)
        aggregate, metrics, transform_state = result.update, result.metrics, state.transform_state
        if self.setup.transform is not None:
            aggregate, new_transform, more = decode(
                *(self.setup.transform, algorithm, self.template, aggregate),
                transform_state.server,
                Measurements(self._measured(sent), accepted),
                context,
                self.sent_leaves,
            )
            transform_state = TransformState(new_transform, transform_state.memory)
            metrics = metrics | more
        new = server.update(state.server, aggregate, context)
        if server.frozen_delta is not None and server.measure is not None:
            weights = (self.frozen, server.merge_into_frozen(new, self.setup.frozen))
            names = server.frozen_delta(state.server)
            before, after = (
                {n: effective(x[n].astype(jnp.float32), self.setup.dtype) for n in names}
                for x in weights
            )
            metrics = metrics | server.measure(aggregate, before, after, self.setup.fixed)
        if server.metrics is not None:
            metrics = metrics | server.metrics(new)
        if self.setup.diagnosis is not None:
            models = (server.model(state.server), server.model(new))
            metrics = metrics | self.setup.diagnosis(*models, self.setup.fixed)
        metrics = metrics | self.received | algorithm.round_metrics(self.round_index)
        return new, result.state, transform_state, metrics

    def _aggregate(self, sent: Mapping[int, _Sent], context: RoundContext) -> Aggregated:
        """Returns the aggregate of the uploads, which are added one at a time."""
        aggregator = self.aggregator
        fixed = self.setup.fixed
        total = summation.empty(aggregator, self.template, fixed, len(self.weights))
        everyone = np.flatnonzero(self.weights > 0).tolist()
        for slot in sent if aggregator.randomise is None else everyone:
            own = sent[slot].upload if slot in sent else self.template
            upload = jax.tree.map(lambda x: jnp.asarray(x)[None], own)
            weight, place = jnp.asarray(self.weights[[slot]]), jnp.array([slot], jnp.int32)
            inputs: tuple = (upload, weight, place, self.template, fixed)
            if aggregator.randomise is not None:
                source = fetched_by(self.history, self.plan.fetched, jnp.int32(slot))
                number = (source or self.present).round_index
                key = upload_key(self.noise_key, number, int(self.plan.client[slot]))
                inputs += (key[None], self.round_index)
            total = summation.add(aggregator, total, *inputs)
        state = self.state.aggregator_state
        return summation.finish(aggregator, total, self.template, context, state)

    def _measured(self, sent: Mapping[int, _Sent]) -> PyTree:
        """Returns the upload transform's measurements of all clients, ``[slots]``."""
        transform = self.setup.transform
        assert transform is not None
        received = transform.broadcast(self.state.transform_state.server)
        inputs = (transform, self.algorithm, self.template, received)
        measured = no_measurements(*inputs, len(self.weights))
        for slot, one in sent.items():
            measured = tree.put(measured, slot, one.measured)
        return measured


def _summed(pair: tuple[np.ndarray, np.ndarray], accepted: jax.Array) -> tuple:
    """Returns (sum, count) of a metric over the accepted clients whose value is finite."""
    good = accepted & jnp.isfinite(pair[0])
    return tuple(jnp.sum(jnp.where(good, x, 0.0)) for x in pair)
