"""What the server does after the sum: finish, decode, update, measure."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Measurements, PyTree, RoundContext, Total
from fedjax_peft.engine.setup import Setup
from fedjax_peft.engine.start import RoundStart
from fedjax_peft.engine.uploads import decode, sendable
from fedjax_peft.numerics import summation
from fedjax_peft.numerics.forms import check_scalars
from fedjax_peft.numerics.precision import effective


class Collected(NamedTuple):
    """What the server has of the clients of a round."""

    total: Total
    """The sum of the accepted uploads."""
    sums: dict[str, tuple[Any, Any]]
    """Training metric -> (sum, count), each float32 ``[slots]``."""
    accepted: Array
    """bool ``[slots]``: whose uploads are in the sum."""
    measured: PyTree
    """What the upload transform measured of them, each float32 ``[slots]``."""


class Updated(NamedTuple):
    """What a round changes at the server, and what it measures there."""

    server: PyTree
    aggregator_state: PyTree
    transform_state: PyTree
    """The server's state of the upload transform."""
    metrics: dict[str, Array]


def server_step(setup: Setup, start: RoundStart, collected: Collected) -> Updated:
    """Returns the server after a round."""
    state, template, algorithm = start.state, start.template, setup.algorithm
    context = round_context(setup, start, collected)
    finished = summation.finish(
        start.aggregator, collected.total, template, context, state.aggregator_state
    )
    update, metrics, transform_state = finished.update, finished.metrics, ()
    if setup.transform is not None:
        update, transform_state, more = decode(
            setup.transform,
            algorithm,
            template,
            update,
            state.transform_state.server,
            Measurements(collected.measured, collected.accepted),
            context,
            start.sent_leaves,
        )
        metrics = metrics | more
    server = algorithm.server.update(state.server, update, context)
    metrics = metrics | _measured(setup, start, update, server)
    check_scalars(f"The metrics of a round of {algorithm.name!r}", metrics)
    return Updated(server, finished.state, transform_state, metrics)


def round_context(setup: Setup, start: RoundStart, collected: Collected) -> RoundContext:
    """Returns what the server knows about a round."""
    clients, aggregator, plan = setup.clients, start.aggregator, start.plan
    total_clients = clients if setup.total_clients is None else setup.total_clients
    participants = jnp.sum(collected.total.weights > 0, dtype=jnp.float32)
    if aggregator.every_round:
        participants = jnp.float32(setup.sampling_probability * total_clients)
    rank_mask = start.constants.rank_mask
    return RoundContext(
        round_index=start.present.round_index,
        participants=participants,
        total_clients=total_clients,
        metrics={n: _summed(pair, collected.accepted) for n, pair in collected.sums.items()},
        fixed=start.constants.fixed,
        key=start.server_key,
        sampling_probability=setup.sampling_probability,
        clients=jnp.where(plan.client < 0, clients, plan.client),
        sendable=sendable(aggregator, start.template, start.sent_leaves, rank_mask),
    )


def _measured(setup: Setup, start: RoundStart, update: PyTree, server: PyTree) -> dict[str, Array]:
    """Returns the measurements of the server's step: its own, the diagnosis, and the round's."""
    rules, old, fixed = setup.algorithm.server, start.state.server, start.constants.fixed
    metrics: dict[str, Array] = {}
    if rules.frozen_delta is not None and rules.measure is not None:
        names = rules.frozen_delta(old)
        after = rules.merge_into_frozen(server, start.constants.frozen)
        before, after = (
            {n: effective(x[n].astype(jnp.float32), setup.dtype) for n in names}
            for x in (start.frozen, after)
        )
        metrics = metrics | rules.measure(update, before, after, fixed)
    if rules.metrics is not None:
        metrics = metrics | rules.metrics(server)
    if setup.diagnosis is not None:
        metrics = metrics | setup.diagnosis(rules.model(old), rules.model(server), fixed)
    return metrics | start.metrics | setup.algorithm.round_metrics(start.present.round_index)


def _summed(pair: tuple[Any, Any], accepted: Array) -> tuple[Array, Array]:
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
