"""A communication round as a plain Python loop over clients, one at a time and without jit.

This file is the readable form of :mod:`fedjax_peft.engine.round`, and the reference that tests
compare it with. What a round computes::

    server broadcasts                                                          start_round
    for each client of the cohort:
        local state           <-  init(broadcast, client state)                _train
        for each local batch:
            local state       <-  step(local state, batch)
        upload, client state  <-  final(local state)                           first_upload
        upload                <-  stages(upload)                               upload_stages
    server                    <-  update(server, aggregate(uploads))           server_step

``simulate(..., placement=Placement(engine="reference"))`` runs it, so a breakpoint or a print in an
algorithm shows real numbers. It is slow, because every operation is dispatched separately.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft.contracts import Params, Participant, PyTree, Total, Upload
from fedjax_peft.engine.client import client_update, first_upload
from fedjax_peft.engine.plan import Plan
from fedjax_peft.engine.round import RoundResult
from fedjax_peft.engine.server_step import Collected, Updated, server_step
from fedjax_peft.engine.setup import Constants, Setup
from fedjax_peft.engine.stages import passed, upload_stages
from fedjax_peft.engine.start import RoundStart, start_round
from fedjax_peft.engine.state import State
from fedjax_peft.engine.uploads import no_measurements
from fedjax_peft.engine.work import PREDICTIONS, Work, at_work
from fedjax_peft.numerics import summation, tree
from fedjax_peft.numerics.random import client_key, stream, upload_key


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
        self._setup, self._work, self._gathered = setup, work, gathered
        self.use(columns)

    def use(self, columns: Mapping[str, Any]) -> None:
        """Replaces the examples."""
        self._columns = {name: jnp.asarray(x) for name, x in columns.items()}

    def compile(self, state: State, plan: Plan) -> None:
        """Does nothing, because there is nothing to compile."""

    def known(self, state: State, plan: Plan) -> bool:
        """Returns True: a call never compiles a round."""
        return True

    def __call__(self, state: State, plan: Plan, round_index: int) -> RoundResult:
        """Runs round ``round_index``; the state is not consumed."""
        setup = at_work(self._setup.made(state.values), self._work)
        constants = Constants(setup.frozen, setup.fixed, setup.rank_mask or {}, self._columns)
        key = stream(int(state.seed), "clients")
        state = jax.tree.map(jnp.asarray, state.on_device())
        start = start_round(setup, constants, state, plan, key, jnp.int32(round_index))
        rows = np.arange(len(plan.client)) if self._gathered else plan.client
        return _run(setup, start, rows)


class _Records:
    """What the local steps of a round measure."""

    def __init__(self, plan: Plan):
        self._shape, self._slots = plan.slot.shape, len(plan.client)
        self.sums: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.predictions: PyTree = None

    def add(self, slot: int, place: tuple[int, int], metrics: Mapping[str, Any]) -> None:
        """Adds a local step's metrics to the client's sums, and stores the step's predictions."""
        metrics = dict(metrics)
        predictions = metrics.pop(PREDICTIONS, {})
        for name, pair in metrics.items():
            empty = (np.zeros(self._slots, np.float32), np.zeros(self._slots, np.float32))
            for total, part in zip(self.sums.setdefault(name, empty), pair, strict=True):
                total[slot] += part
        if self.predictions is None:
            self.predictions = jax.tree.map(
                lambda x: np.zeros((*self._shape, *x.shape), x.dtype), predictions
            )

        def store(all_: np.ndarray, one: Array) -> None:
            all_[place] = one

        jax.tree.map(store, self.predictions, predictions)


def _run(setup: Setup, start: RoundStart, rows: np.ndarray) -> RoundResult:
    """Returns the result of a round; the order is that of a paper's algorithm box."""
    plan, records = start.plan, _Records(start.plan)
    stages = upload_stages(setup, start)

    # The clients train, one after the other. An upload that is not finite is dropped.
    uploads: dict[int, Upload] = {}
    finite, weights = np.ones(len(plan.client), bool), np.array(plan.weight)
    for slot in np.flatnonzero(plan.length * ~plan.silent_slots).tolist():
        upload = passed(stages, _train(setup, start, slot, int(rows[slot]), records))
        finite[slot], weights[slot] = upload.accepted, upload.weight
        if upload.accepted:
            uploads[slot] = upload

    # The server aggregates the uploads and updates its state.
    worked = np.isin(np.arange(len(finite)), list(uploads))
    collected = Collected(
        _sum(start, uploads, weights),
        records.sums,
        jnp.asarray(worked & (np.asarray(plan.weight) > 0)),
        _measured(setup, start, uploads),
    )
    updated = server_step(setup, start, collected)

    shares = {name: np.ones(len(finite), np.float32) for x in uploads.values() for name in x.shares}
    norms = np.zeros(len(finite), np.float32)
    for slot, upload in uploads.items():
        norms[slot] = upload.norm
        for name, share in upload.shares.items():
            shares[name][slot] = share
    return RoundResult(
        _after(setup, start, uploads, updated, rows),
        {name: (jnp.asarray(x), jnp.asarray(n)) for name, (x, n) in records.sums.items()},
        jnp.asarray(finite),
        jnp.asarray(norms),
        start.sent_leaves,
        updated.metrics,
        records.predictions or {},
        {name: jnp.asarray(x) for name, x in shares.items()},
    )


def _participant(start: RoundStart, slot: int) -> Participant:
    """Returns the client of a slot, with the version of the server that it starts from."""
    client = int(start.plan.client[slot])
    mask = tree.take(start.constants.rank_mask, client)
    return start.participant(jnp.int32(client), mask, start.sources(jnp.int32(slot)))


def _train(setup: Setup, start: RoundStart, slot: int, row: int, records: _Records) -> Upload:
    """Returns a client's upload after its local steps."""
    plan, client = start.plan, _participant(start, slot)
    update = client_update(setup, start, client)
    key = client_key(client.key, client.source.round_index, client.number)
    before = tree.take(start.state.client_state, row)

    local = update.init(client.source.broadcast, before, jax.random.fold_in(key, 0))
    places = np.argwhere(plan.slot[: int(plan.steps)] == slot)
    for step, (time, lane) in enumerate(places.tolist()):
        batch = _batch(start, slot, step, plan.examples[time, lane])
        local, metrics = update.step(local, batch, jax.random.fold_in(key, step + 1))
        records.add(slot, (time, lane), metrics)
    upload = first_upload(setup, start, client, local, before, jnp.asarray(plan.weight[slot]))
    if setup.transform is None:
        return upload
    return upload._replace(memory=tree.take(start.state.transform_state.memory, row))


def _batch(start: RoundStart, slot: int, step: int, examples: np.ndarray) -> Params:
    """Returns the batch of a local step; padding repeats its first example."""
    rows = np.where(examples < 0, examples[:1], examples)
    batch = {name: x[rows] for name, x in start.constants.columns.items()}
    steps = jnp.asarray(start.plan.length[slot])
    return {**batch, "mask": jnp.asarray(examples >= 0), "step": jnp.int32(step), "steps": steps}


def _sum(start: RoundStart, uploads: Mapping[int, Upload], weights: np.ndarray) -> Total:
    """Returns the sum of the uploads, which are added one at a time.

    Args:
      weights: of all slots, after the stages.
    """
    aggregator, template, plan = start.aggregator, start.template, start.plan
    fixed = start.constants.fixed
    noisy = aggregator.randomise is not None
    total = summation.empty(aggregator, template, fixed, len(plan.client))
    # A client that adds noise itself sends it even if it has nothing else to send.
    everyone = np.flatnonzero(plan.client >= 0).tolist()
    for slot in everyone if noisy else uploads:
        own = uploads[slot].value if slot in uploads else template
        stacked = jax.tree.map(lambda x: jnp.asarray(x)[None], own)
        weight, place = jnp.asarray(weights[[slot]]), jnp.array([slot], jnp.int32)
        weight = jnp.where(noisy & (weight == 0), 1.0, weight)  # of the noise
        inputs: tuple = (stacked, weight, place, template, fixed)
        if noisy:
            client = _participant(start, slot)
            key = upload_key(start.noise_key, client.source.round_index, client.number)
            inputs += (key[None], start.present.round_index)
        total = summation.add(aggregator, total, *inputs)
    return total


def _measured(setup: Setup, start: RoundStart, uploads: Mapping[int, Upload]) -> PyTree:
    """Returns the upload transform's measurements of all clients, ``[slots]``."""
    inputs = (setup.transform, setup.algorithm, start.template, start.received)
    measured = no_measurements(*inputs, len(start.plan.client))
    for slot, upload in uploads.items():
        measured = tree.put(measured, slot, upload.measured)
    return measured


def _after(
    setup: Setup,
    start: RoundStart,
    uploads: Mapping[int, Upload],
    updated: Updated,
    rows: np.ndarray,
) -> State:
    """Returns the state after the round, with what the clients of accepted uploads keep."""
    client_state, transform_state = start.state.client_state, start.state.transform_state
    if setup.transform is not None:
        transform_state = transform_state._replace(server=updated.transform_state)
    for slot, upload in uploads.items():
        row = int(rows[slot])
        client_state = tree.put(client_state, row, upload.client_state)
        if setup.transform is not None:
            memory = tree.put(transform_state.memory, row, upload.memory)
            transform_state = transform_state._replace(memory=memory)
    return start.state._replace(
        server=updated.server,
        client_state=client_state,
        aggregator_state=updated.aggregator_state,
        transform_state=transform_state,
        history=start.history,
    )
