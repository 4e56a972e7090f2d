"""Parts that attacks share: who is hostile, and the places where an algorithm is attacked.

Hostile clients are the first ``round(share * clients)`` of a random order of all clients, which
follows from the attack's seed. So a larger share adds clients, and the share can be a run-time
value. They may attack in three places:

* the examples of a local step (:func:`on_batches`);
* their own uploads, each for itself (:func:`on_uploads`);
* their uploads together, with knowledge of the others' (:func:`on_cohorts`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft.contracts.aggregator import Aggregated, Aggregator, Stacked, Total
from fedjax_peft.contracts.algorithm import Algorithm
from fedjax_peft.contracts.client import ClientContext, ClientUpdate
from fedjax_peft.contracts.compatibility import check_compatible
from fedjax_peft.contracts.feature import Feature
from fedjax_peft.contracts.privacy import Attack, Federation, Wrapped
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Batch, Key, Metrics, Params, PyTree
from fedjax_peft.contracts.upload import Stages, Upload
from fedjax_peft.numerics import summation, tree
from fedjax_peft.numerics.hyperparameters import maybe_nonzero
from fedjax_peft.numerics.random import attack_key, host_rng
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError


def check_labels(attack: str, federation: Federation) -> None:
    """Raises InputError for examples without labels."""
    if "labels" not in dict(federation.columns) or not federation.classes:
        columns = ", ".join(name for name, _ in federation.columns) or "none"
        raise InputError(
            f"The attack {attack!r} changes the labels of examples, and these have no column"
            f" 'labels' with named classes. Their columns: {columns}."
        )


def check_class(attack: str, name: str, value: Any, federation: Federation) -> None:
    """Raises InputError for a class that does not exist."""
    known = federation.classes
    if not 0 <= value < known:
        raise InputError(
            f"{name} = {show(value)} of {attack} must be a class of the data, a whole number from 0"
            f" to {known - 1}."
        )


def make_attack(
    name: str,
    share: float,
    seed: int,
    wrap: Callable[[Algorithm, Federation, Array], Wrapped],
    triggered: Callable[[Any], Any] | None = None,
    least_length: int = 0,
) -> Attack:
    """Returns an attack; rounds under attack have the metric ``hostile``.

    Args:
      wrap: (algorithm, facts, bool ``[clients + 1]``) -> the algorithm under attack. The array says
        who is hostile; its last entry, for a slot without a client, is False.
    """

    def hostile(clients: int) -> Array:
        order = host_rng(seed, "hostile clients").permutation(clients)
        rank = jnp.asarray(np.append(np.argsort(order), clients))
        return rank < jnp.round(jnp.float32(share) * clients)

    def apply(algorithm: Algorithm, federation: Federation) -> Wrapped:
        who = hostile(federation.clients)
        attacked = wrap(algorithm, federation, who)
        # Without hostile clients, the program is the one without an attack.
        chosen, stages = attacked if maybe_nonzero(share) else Wrapped(algorithm)
        return Wrapped(chosen._replace(aggregator=_counting(chosen.aggregator, who)), stages)

    def numbers(clients: int) -> tuple[int, ...]:
        return tuple(np.flatnonzero(hostile(clients)[:clients]).tolist())

    return Attack(name, apply, numbers, triggered, least_length)


def _counting(aggregator: Aggregator, who: Array) -> Aggregator:
    """Returns the aggregator with the metric ``hostile``: hostile clients in the round.

    It is NaN where the server does not know who took part, as under differential privacy.
    """

    def finish(total: Total, template: PyTree, context: RoundContext, state: PyTree) -> Aggregated:
        result = aggregator.finish(total, template, context, state)
        known = jnp.any(context.clients < who.shape[0] - 1)
        count = jnp.where(known, jnp.sum(who[context.clients], dtype=jnp.float32), jnp.nan)
        return result._replace(metrics={**result.metrics, "hostile": count})

    inner = aggregator.unmeasured
    return aggregator._replace(
        finish=finish, unmeasured=None if inner is None else _counting(inner, who)
    )


def on_batches(
    algorithm: Algorithm, who: Array, change: Callable[[Batch, Array], Batch]
) -> Wrapped:
    """Returns the algorithm with other batches for hostile clients.

    Args:
      who: bool ``[clients + 1]``: who is hostile.
      change: (batch, whether the client is hostile) -> the batch that the client trains on.
    """

    def client(context: ClientContext) -> ClientUpdate:
        inner = algorithm.client(context)

        def step(state: PyTree, batch: Batch, key: Key) -> tuple[PyTree, Metrics]:
            return inner.step(state, change(batch, who[context.client]), key)

        return inner._replace(step=step)

    return Wrapped(algorithm._replace(client=client))


def on_uploads(
    attack: str, algorithm: Algorithm, who: Array, change: Callable[[PyTree, Key], PyTree]
) -> Wrapped:
    """Returns the algorithm with hostile clients that send another change of their leaves.

    Args:
      who: bool ``[clients + 1]``: who is hostile.
      change: (upload minus template, key) -> what is sent instead of this difference, for the part
        of an upload that ``Traffic.change_field`` names.

    Raises:
      InputError: the uploads of the algorithm are not leaves.
    """
    _check_uploads(attack, algorithm)

    def tamper(upload: Upload) -> Upload:
        client = upload.client
        start, learned = map(algorithm.change_part, (client.source.template, upload.value))
        key = attack_key(client.key, client.source.round_index, client.number)
        made = change(jax.tree.map(jnp.subtract, learned, start), key)
        sent = jax.tree.map(lambda x, y: (x + y).astype(x.dtype), start, made)
        sent = tree.where(who[client.number], sent, learned)
        return upload._replace(value=algorithm.with_change(upload.value, sent))

    return Wrapped(algorithm, Stages(sent=(tamper,)))


def on_cohorts(
    attack: str, algorithm: Algorithm, who: Array, craft: Callable[[Array, Array, Array], Array]
) -> Wrapped:
    """Returns the algorithm with hostile clients that all send one change, made from the others'.

    The aggregator receives all uploads together. It replaces those of hostile clients, and then
    lifts, sums and finishes as it did before. Upload transforms have already seen the honest form
    of these uploads; what replaces them is not transformed.

    Args:
      who: bool ``[clients + 1]``: who is hostile.
      craft: (changes float32 ``[slots, entries]``, honest bool ``[slots]``, hostile bool
        ``[slots]``) -> the change that every hostile client sends, ``[entries]``. There is at least
        one honest client; entries of slots that are neither mean nothing.

    Raises:
      InputError: the uploads of the algorithm are not leaves.
    """
    _check_uploads(attack, algorithm)
    base = algorithm.aggregator

    def lift(upload: PyTree, template: PyTree, fixed: Params) -> PyTree:
        jax.eval_shape(lambda *x: base.lift(*x), upload, template, fixed)  # the aggregator's checks
        return Stacked(upload)

    def finish(total: Total, template: PyTree, context: RoundContext, state: PyTree) -> Aggregated:
        weights, uploads = total.weights, total.value.value
        slots = weights.shape[0]
        hostile = who[context.clients] & (weights > 0)
        honest = ~who[context.clients] & (weights > 0)
        start = algorithm.change_part(template)
        rows = algorithm.change_part(uploads)
        changes = _flat(jax.tree.map(lambda x, y: x - y[None], rows, start), slots)
        crafted = _unflat(craft(changes, honest, hostile), start)
        sent = jax.tree.map(lambda x, y: x + y, start, crafted)
        replaced = hostile & jnp.any(honest)
        rows = tree.where(replaced, tree.broadcast(sent, slots), rows)
        uploads = jax.tree.map(
            lambda x, y: x.astype(y.dtype), algorithm.with_change(uploads, rows), template
        )
        # Rows without an upload stay zeros: their slot is out of range.
        places = jnp.where(weights > 0, jnp.arange(slots), slots)
        none = summation.empty(base, template, context.fixed, slots)
        inputs = (uploads, weights, places, template, context.fixed)
        total = summation.summed(summation.add(base, none, *inputs))
        return base.finish(total, template, context, state)

    aggregator = base._replace(
        name=f"{base.name} under {attack}",
        lift=lift,
        finish=finish,
        needs_all_uploads=True,
        unmasked_policy="refused",
        # These would bypass the attack.
        unmeasured=None,
        finish_products=None,
    )
    return Wrapped(algorithm._replace(aggregator=aggregator))


def moments(changes: Array, honest: Array) -> tuple[Array, Array]:
    """Returns mean and standard deviation of each entry over honest clients, ``[entries]`` each.

    Args:
      changes: float32 ``[slots, entries]``.
      honest: bool ``[slots]``.
    """
    own, count = honest[:, None], jnp.maximum(jnp.sum(honest), 1)
    mean = jnp.sum(jnp.where(own, changes, 0.0), axis=0) / count
    squares = jnp.where(own, changes - mean[None], 0.0) ** 2
    return mean, jnp.sqrt(jnp.sum(squares, axis=0) / count)


def _check_uploads(attack: str, algorithm: Algorithm) -> None:
    """Raises InputError for an algorithm whose uploads minus the template mean nothing."""
    what = f"the attack {attack!r}, which changes uploads"
    check_compatible(algorithm, {Feature.ATTACKS: what, Feature.TRANSFORMS: what})


def _flat(rows: PyTree, slots: int) -> Array:
    """Returns stacked leaves as a matrix, float32 ``[slots, entries]``."""
    leaves = [x.astype(jnp.float32).reshape(slots, -1) for x in jax.tree.leaves(rows)]
    return jnp.concatenate(leaves, axis=1)


def _unflat(vector: Array, template: PyTree) -> PyTree:
    """Returns a vector ``[entries]`` in the structure and the shapes of ``template``."""
    leaves, structure = jax.tree.flatten(template)
    ends = np.cumsum([x.size for x in leaves])[:-1]
    parts = jnp.split(vector, ends.tolist())
    return jax.tree.unflatten(
        structure, [part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)]
    )
