"""Weighted sums of lifted uploads: one implementation for all aggregators.

An aggregator lifts every upload into a vector space (``Aggregator.lift``). This module computes the
weighted sum of the lifted uploads. The sum starts at :func:`empty`; :func:`add` adds the uploads of
some lanes, in any order. So the sum can be streamed over clients and summed over devices. The sum
of products is held in the smaller of two forms, a matrix or the factors of all uploads;
:func:`summed` makes it a matrix.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts.aggregator import (
    Aggregated,
    Aggregator,
    Factors,
    Integers,
    Product,
    Segmented,
    Stacked,
    Total,
    Weighted,
)
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Key, Params, PyTree
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.forms import check_form, check_type
from fedjax_peft.numerics.lowrank import weighted_product
from fedjax_peft.numerics.random import stream

_FAINT = 1e-20
"""The share of a client's plain weight that is added to its weight of :class:`Weighted`. It matters
only where the weights of :class:`Weighted` are 0 for all clients."""


def empty(aggregator: Aggregator, template: PyTree, fixed: Params, slots: int) -> Total:
    """Returns the sum of no uploads.

    Raises:
      InputError: the aggregator does not fit the shared leaves.
    """
    lifted = lifted_shapes(aggregator, template, fixed)
    weight = jnp.zeros((), jnp.float32)
    return Total(_zeros(lifted, slots), weight, jnp.zeros(slots, jnp.float32))


def lifted_shapes(aggregator: Aggregator, template: PyTree, fixed: Params) -> PyTree:
    """Returns the shapes of one lifted upload, as it is summed.

    Raises:
      InputError: the aggregator does not fit the shared leaves.
    """

    def lifted(upload: PyTree, fixed: Params, key: Key, round_index: Array) -> PyTree:
        made = aggregator.lift(upload, upload, fixed)
        if aggregator.randomise is None:
            return made
        return aggregator.randomise(made, key, round_index)

    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(lifted, template, fixed, key, jax.ShapeDtypeStruct((), jnp.int32))


def add(
    aggregator: Aggregator,
    total: Total,
    uploads: PyTree,
    weights: Array,
    slots: Array,
    template: PyTree,
    fixed: Params,
    keys: Key | None = None,
    round_index: Array | None = None,
) -> Total:
    """Returns a sum with more uploads in it.

    Args:
      uploads: stacked ``[lanes, ...]``.
      weights: float32 ``[lanes]``; 0 for a lane that has nothing to add. The upload of that
        lane must still be finite.
      slots: int32 ``[lanes]``, the place of each upload in the cohort; out of range for a lane that
        has nothing to add.
      keys: ``[lanes]``, for ``Aggregator.randomise``; None for an aggregator without it.
    """
    # The slots are mapped too, because an upload may have no leaves.
    lifted = jax.vmap(lambda upload, _: aggregator.lift(upload, template, fixed))(uploads, slots)
    if aggregator.randomise is not None:
        send = aggregator.randomise
        assert keys is not None, "this aggregator needs keys"
        assert round_index is not None
        lifted = jax.vmap(lambda one, key: send(one, key, round_index))(lifted, keys)
    return Total(
        _added(total.value, lifted, weights, slots),
        total.weight + jnp.sum(weights),
        tree.put(total.weights, slots, weights),
    )


def finish(
    aggregator: Aggregator, total: Total, template: PyTree, context: RoundContext, state: PyTree
) -> Aggregated:
    """Returns the update, metrics and next state that an aggregator computes from a sum.

    In a round without uploads the state stays as it is, unless the sum contains noise
    (:attr:`Aggregator.every_round`, by which ``context.participants`` is never 0). The aggregator's
    random numbers come from the named stream ``"aggregation"``.
    """
    own = context._replace(key=stream(context.key, "aggregation"))
    result = aggregator.finish(summed(total), template, own, state)
    what = f"The function `finish` of {aggregator.name!r}"
    check_type(what, result, Aggregated)
    what += " must return a state of the form that `init` returns"
    check_form(what, result.state, state, dtypes=True)
    return result._replace(state=tree.where(context.participants > 0, result.state, state))


def summed(total: Total) -> Total:
    """Returns the sum with a matrix for every :class:`Product`."""
    return _as_matrices(total, Product, jnp.ones_like(total.weights))  # weighted already


def dense(total: Total) -> Total:
    """Returns the sum with a matrix for every :class:`Factors`.

    Operations on the entries of the sum, such as adding noise, need this form.
    """
    return _as_matrices(total, Factors, total.weights)


def _as_matrices(total: Total, kind: type[Product | Factors], weights: Array) -> Total:
    """Returns the sum with a matrix for every entry of a kind that holds factors."""

    def one(x: Any) -> Any:
        return weighted_product(x.a, x.b, weights) if isinstance(x, kind) else x

    value = jax.tree.map(one, total.value, is_leaf=lambda x: isinstance(x, kind))
    return total._replace(value=value)


def _is_entry(x: Any) -> bool:
    return isinstance(x, Product | Factors | Weighted | Stacked | Segmented | Integers)


def _zeros(lifted: PyTree, slots: int) -> PyTree:
    """Returns a sum of zeros for the shapes of one lifted upload."""

    def rows(x: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), jnp.float32), x)

    def one(x: Any) -> Any:
        match x:
            case Product(a, b):
                # The factors of small cohorts are smaller than the matrix, and one product at the
                # end is faster than one for each client.
                small = slots * (a.size + b.size) < a.shape[0] * b.shape[1]
                return rows(x) if small else jnp.zeros((a.shape[0], b.shape[1]), jnp.float32)
            case Factors() | Stacked():
                return rows(x)
            case Weighted(_, value):
                return Weighted(jnp.zeros((), jnp.float32), _zeros(value, slots))
            case Segmented(place, value):
                sums = jax.tree.map(lambda x: jnp.zeros((*place.shape, *x.shape)), value)
                return Segmented(jnp.zeros(place.shape), sums)
            case Integers(value):
                return Integers(jnp.zeros(value.shape, jnp.int32))
        return jnp.zeros(x.shape, jnp.float32)

    return jax.tree.map(one, lifted, is_leaf=_is_entry)


def _added(total: PyTree, lifted: PyTree, weights: Array, slots: Array) -> PyTree:
    """Returns a sum with stacked lifted uploads added."""

    def one(x: Any, so_far: Any) -> Any:
        match x:
            case Product(a, b) if isinstance(so_far, Product):
                # The weights are those of this part of the upload (:class:`Weighted`).
                return tree.put(so_far, slots, Product(a * weights[:, None, None], b))
            case Product(a, b):
                return so_far + weighted_product(a, b, weights)
            case Factors() | Stacked():
                return tree.put(so_far, slots, x)
            case Weighted(weight, value):
                own = jnp.where(weights > 0, weight, 0.0) + _FAINT * weights
                return Weighted(
                    so_far.weight + jnp.sum(own), _added(so_far.value, value, own, slots)
                )
            case Segmented(place, value):
                by = (place * weights[:, None]).T  # [rows, lanes]
                sums = jax.tree.map(jnp.add, so_far.value, tree.weighted_sum(value, by))
                return Segmented(so_far.place + jnp.sum(by, axis=1), sums)
            case Integers(value):
                there = jnp.reshape(weights > 0, (-1,) + (1,) * (value.ndim - 1))
                own = jnp.sum(jnp.where(there, value, 0), axis=0, dtype=jnp.int32)
                return Integers(so_far.value + own)
        return so_far + tree.weighted_sum(x, weights)

    return jax.tree.map(one, lifted, total, is_leaf=_is_entry)
