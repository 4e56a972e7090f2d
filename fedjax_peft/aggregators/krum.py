"""Krum and Multi-Krum (Blanchard et al. 2017).

    score_i = Σ ‖x_i - x_j‖² over the n - f - 2 changes x_j closest to x_i
    Krum:        x = the x_i of the smallest score
    Multi-Krum:  x = the mean of the m = n - f changes of the smallest scores

Of n clients f are hostile, and the paper needs n ≥ 2 f + 3: less than half of the clients. Two
clients may have equal scores, for example if each is the other's only neighbour. Then the one with
the smaller sum of all its squared distances is taken. Only distances are compared: an upload that
is as far from honest ones as they are from each other passes, in whatever entry it differs.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from fedjax_peft.aggregators.robust import (
    Changes,
    Combined,
    Space,
    enough_clients,
    robust,
    squared_distances,
    too_few,
    weighted_sum,
)
from fedjax_peft.contracts import Aggregator, PyTree, RoundContext
from fedjax_peft.contracts.arguments import Count, FromZero
from fedjax_peft.contracts.part import part


@part
def krum(hostile: FromZero | Array, *, space: Space = "factors") -> Aggregator:
    """Krum: the upload that is closest to its neighbours (Blanchard et al. 2017).

    A round has at least ``2 * hostile + 3`` clients. In a round with fewer uploads the metric
    ``too_few_clients`` is 1, and the scores use one neighbour at least.

    Args:
      hostile: f, the number of hostile clients in a round that it resists.
      space: whether distances are those of LoRA's ``factors`` or of their ``product``.

    Raises:
      InputError: on use, a round has too few clients, or ``product`` with a model without LoRA
        pairs.
    """
    return _krum("krum", hostile, 1, space)


@part
def multi_krum(
    hostile: FromZero | Array, keep: Count | Array | None = None, *, space: Space = "factors"
) -> Aggregator:
    """Multi-Krum: the mean of the uploads with the best Krum scores (Blanchard et al. 2017).

    A round has at least ``2 * hostile + 3`` clients; see :func:`krum`.

    Args:
      hostile: f, the number of hostile clients in a round that it resists.
      keep: m, how many uploads are averaged; by default n - f, as in the paper's experiments.
      space: whether distances are those of LoRA's ``factors`` or of their ``product``.

    Raises:
      InputError: as :func:`krum`.
    """
    return _krum("multi_krum", hostile, keep, space)


def _krum(name: str, hostile: Any, keep: Any, space: Space) -> Aggregator:

    def rule(changes: Changes, context: RoundContext, state: PyTree) -> Combined:
        here, count = changes.here, changes.number
        enough_clients(name, len(here), hostile, per=2)
        distances = squared_distances(changes)
        most = jnp.maximum(count - hostile if keep is None else keep, 1)
        chosen = here & (ranks(distances, here, hostile) < most)
        weights = chosen / jnp.maximum(jnp.sum(chosen), 1)
        return Combined(weighted_sum(changes, weights), too_few(count, hostile, per=2), state)

    return robust(name, rule, space)


def scores(distances: Array, here: Array, hostile: Any) -> Array:
    """Returns Krum's scores, ``[slots]``; infinite where a slot has no upload.

    Args:
      distances: squared, ``[slots, slots]``.
      here: bool ``[slots]``.
    """
    count = jnp.sum(here, dtype=jnp.int32)
    neighbours = jnp.minimum(jnp.maximum(count - hostile - 2, 1), count - 1)
    return _nearest(distances, here, neighbours)


def ranks(distances: Array, here: Array, hostile: Any) -> Array:
    """Returns the place of each slot in the order of Krum's scores, int32 ``[slots]`` from 0."""
    everyone = _nearest(distances, here, jnp.sum(here) - 1)
    order = jnp.lexsort((everyone, scores(distances, here, hostile)))
    return jnp.argsort(order)


def _nearest(distances: Array, here: Array, neighbours: Array) -> Array:
    """Returns the sum of each row's ``neighbours`` smallest distances to others, ``[slots]``."""
    slots = len(here)
    others = here[:, None] & here[None] & ~jnp.eye(slots, dtype=bool)
    ranked = jnp.sort(jnp.where(others, distances, jnp.inf), axis=1)
    total = jnp.sum(jnp.where(jnp.arange(slots)[None] < neighbours, ranked, 0.0), axis=1)
    return jnp.where(here, total, jnp.inf)
