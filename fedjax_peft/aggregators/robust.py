"""What robust aggregators share: the uploads of a round as vectors, in one of two spaces.

A robust rule sees every client's **change** ``x_k``: its upload minus the model that it received.

    factors   x_k = the changes of all leaves; LoRA's A and B count as they are
    product   x_k = the changes s (A_k B_k - A B) of LoRA's products, and of the other leaves

A hostile client can send any factors of its product: ``(c A) (B / c)`` has the same product for all
c. The rules therefore differ in the two spaces. In ``product`` space the result is factored anew by
a truncated SVD, as in FRA-LoRA.

The rules treat clients alike, because a hostile client can claim any number of examples: a weight
only says whether a slot of the cohort has an upload. An upload whose change is longer than 1e9 is
ignored, so that no square overflows in float32; no honest client learns so much in a round.

Most rules return a weighted sum of the x_k whose weights depend on inner products only. These are
computed from the factors: ``A_k B_k - A B = [A_k - A, A] [B_k; B_k - B]``, whose terms are small
where the factors changed little. ``‖x_j‖² + ‖x_k‖² - 2 <x_j, x_k>`` loses all digits where the x_k
agree to the root of float32's rounding, 3e-4 of their length. So distances are those of the changes
minus one of them that is close to most (:func:`around_one`).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.aggregators.fra import fra
from fedjax_peft.aggregators.products import PRODUCT
from fedjax_peft.contracts.aggregator import Aggregated, Aggregator, Factors, Stacked, Total
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Params, PyTree
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.hyperparameters import is_traced
from fedjax_peft.numerics.linalg import qr
from fedjax_peft.numerics.lowrank import matmul, one_by_one, pairs, scale, weighted_product
from fedjax_peft.support.errors import InputError

Space = Literal["factors", "product"]
"""What a robust rule compares: LoRA's ``factors`` A and B, or their ``product`` A·B."""

_LONGEST = 1e9
"""Uploads that changed by more are ignored; its fourth power is still finite in float32."""


class Changes(NamedTuple):
    """The clients' changes x_k. Rows of slots without an upload are zeros."""

    leaves: Params
    """Leaf name -> float32 ``[slots, ...]``."""
    products: dict[str, Factors]
    """Module path -> factors ``[slots, in, 2 r]`` and ``[slots, 2 r, out]``; ``{}`` in factor
    space. They contain LoRA's s."""
    here: Array
    """bool ``[slots]``: which slots have an upload."""
    number: Array
    """How many, int32."""


class Combined(NamedTuple):
    """What a rule makes of the changes."""

    change: Params
    """Leaf name or module path -> the combined change, float32; of a product: ``[in, out]``."""
    metrics: dict[str, Array]
    """Float32 scalars."""
    state: PyTree = ()
    """The rule's state for the next round."""


class Rule(Protocol):
    """A robust rule."""

    def __call__(self, changes: Changes, context: RoundContext, state: PyTree) -> Combined:
        """Returns the combined change, metrics and the next state."""


def _no_state(start: Params) -> PyTree:
    return ()


def robust(
    name: str, rule: Rule, space: Space, init: Callable[[Params], PyTree] = _no_state
) -> Aggregator:
    """Returns the aggregator of a robust rule.

    Args:
      init: zeros in the structure of ``Combined.change`` -> the rule's state before the first
        round.
    """
    product = space == "product"

    def lift(upload: Params, template: Params, fixed: Params) -> PyTree:
        if product and not pairs(template):
            raise InputError(
                f"The aggregator {name!r} in space = 'product' needs LoRA factors A and B that are"
                " both shared, and this model and algorithm share none. Use space = 'factors'."
            )
        return Stacked(jax.tree.map(jnp.subtract, upload, template))

    def combine(
        total: Total, template: Params, context: RoundContext, state: PyTree
    ) -> tuple[Combined, Array]:
        """Returns what the rule makes of the uploads, and whether there is any."""
        sent = total.weights > 0
        usable = sent & (jax.vmap(tree.norm)(total.value.value) < _LONGEST)
        changes = _changes(total.value.value, usable, template, context.fixed, product)
        made, some = rule(changes, context, state), changes.number > 0
        ignored = jnp.sum(sent & ~usable, dtype=jnp.float32)
        metrics = made.metrics | {"uploads_ignored": ignored}
        return Combined(made.change, metrics, tree.where(some, made.state, state)), some

    def finish(total: Total, template: Params, context: RoundContext, state: PyTree) -> Aggregated:
        made, some = combine(total, template, context, state)
        new, metrics = _applied(made.change, template, context.fixed)
        update = {n: jnp.where(some, new[n], x).astype(x.dtype) for n, x in template.items()}
        return Aggregated(update, metrics | made.metrics, made.state)

    def finish_products(
        total: Total, template: Params, context: RoundContext, state: PyTree
    ) -> Aggregated:
        made, some = combine(total, template, context, state)
        scales = {path: scale(context.fixed, path) for path in pairs(template)}
        change = {
            n + PRODUCT if n in scales else n: jnp.where(some, x / scales.get(n, 1.0), 0.0)
            for n, x in made.change.items()
        }
        return Aggregated({"change": change, "scale": scales}, made.metrics, made.state)

    def start(template: Params) -> PyTree:
        return init(_zeros(template, product))

    return Aggregator(
        name,
        lift,
        finish,
        start,
        truncates=product,
        refactors=product,
        needs_all_uploads=True,
        robust=True,
        refactor=fra().refactor if product else None,
        finish_products=finish_products if product else None,
    )


def _changes(
    stacked: Params, here: Array, template: Params, fixed: Params, product: bool
) -> Changes:
    """Returns the changes in the rule's space from stacked changes of the leaves."""
    leaves = tree.where(here, stacked, jax.tree.map(jnp.zeros_like, stacked))
    slots, products = len(here), {}
    for path, (a, b) in pairs(template).items() if product else ():
        change_a, change_b = leaves.pop(a), leaves.pop(b)
        s = scale(fixed, path) * here[:, None, None]
        received = jnp.broadcast_to(template[a], (slots, *template[a].shape))
        left = jnp.concatenate([change_a, received], axis=2)
        right = jnp.concatenate([template[b][None] + change_b, change_b], axis=1)
        products[path] = Factors(s * left, right)
    return Changes(leaves, products, here, jnp.sum(here, dtype=jnp.int32))


def _applied(change: Params, template: Params, fixed: Params) -> tuple[Params, dict[str, Array]]:
    """Returns the leaves after the change, and the metrics of the truncation, if any."""
    found = {path: pair for path, pair in pairs(template).items() if path in change}
    scales = {path: scale(fixed, path) for path in found}
    products = {
        path: matmul(template[a], template[b]) + change[path] / scales[path]
        for path, (a, b) in found.items()
    }
    new = {n: x + change[n] for n, x in template.items() if n in change}
    if not products:
        return new, {}
    refactor = fra().refactor
    assert refactor is not None
    factors = {n: template[n] for pair in found.values() for n in pair}
    made = refactor(products, factors, scales)
    return new | made.update, made.metrics


def _zeros(template: Params, product: bool) -> Params:
    """Returns a combined change of zeros."""
    zeros = {n: jnp.zeros(x.shape, jnp.float32) for n, x in template.items()}
    for path, (a, b) in pairs(template).items() if product else ():
        zeros[path] = jnp.zeros((zeros.pop(a).shape[0], zeros.pop(b).shape[1]), jnp.float32)
    return zeros


# ------------------------------------------------------------------------- operations on changes


def squared_lengths(changes: Changes) -> Array:
    """Returns ``‖x_k‖²``, float32 ``[slots]``."""
    total = jnp.zeros(len(changes.here))
    for x in changes.leaves.values():
        total += jnp.sum(x.reshape(len(x), -1) ** 2, axis=1)
    for a, b in changes.products.values():
        total += jnp.sum(_gram("kir,kiq->krq", a, a) * _gram("kro,kqo->krq", b, b), axis=(1, 2))
    return jnp.maximum(total, 0.0)


def inner_products(changes: Changes) -> Array:
    """Returns ``<x_j, x_k>``, float32 ``[slots, slots]``, symmetric."""
    slots = len(changes.here)
    total = jnp.zeros((slots, slots))
    for x in changes.leaves.values():
        rows = x.reshape(slots, -1)
        total += matmul(rows, rows.T)
    for a, b in changes.products.values():
        both = _gram("jir,kiq->jrkq", a, a) * _gram("jro,kqo->jrkq", b, b)
        total += jnp.sum(both, axis=(1, 3))
    return (total + total.T) / 2


def _gram(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, precision="highest")


def around_one(changes: Changes) -> tuple[Changes, Array]:
    """Returns the changes minus one of them that is close to most, and which one that is.

    It is the upload with the smallest sum of distances and of bounds of their rounding: near the
    honest changes if most are honest, and without factors that are much longer than their product.
    Distances after the subtraction have an error of rounding's share of their own size.

    Returns:
      The differences, and float32 ``[slots]``: 1 for the upload that was subtracted, else 0.
    """
    here = changes.here
    between = jnp.sqrt(_between(inner_products(changes), here))
    sums = jnp.sum(jnp.where(here[None], between, 0.0), axis=1)
    one = jnp.argmin(sums + changes.number * _rounding(changes))
    leaves = jax.tree.map(lambda x: x - x[one][None], changes.leaves)
    products = one_by_one(lambda x: _minus_one(x, one), changes.products)
    zeros = jax.tree.map(jnp.zeros_like, (leaves, products))
    leaves, products = tree.where(here, (leaves, products), zeros)
    differences = changes._replace(leaves=leaves, products=products)
    return differences, jnp.zeros(len(here)).at[one].set(1.0)


def _rounding(changes: Changes) -> Array:
    """Returns how far rounding moves the distances of each upload, float32 ``[slots]``."""
    total = jnp.zeros(len(changes.here))
    for x in changes.leaves.values():
        total += jnp.sum(x.reshape(len(x), -1) ** 2, axis=1)
    for a, b in changes.products.values():
        total += jnp.sum(a**2, axis=(1, 2)) * jnp.sum(b**2, axis=(1, 2))
    return jnp.sqrt(jnp.finfo(total.dtype).eps * total)


def _minus_one(factors: Factors, one: Array) -> Factors:
    """Returns the products minus that of one slot: ``[A_k - A_m, A_m] [B_k; B_k - B_m]``.

    The left factor is made orthonormal. The right one is then as long as the product, however the
    client divided it between its factors: its inner products have no large terms that cancel.
    """
    (change_a, received), (b, change_b) = (
        jnp.split(x, 2, axis=axis) for x, axis in zip(factors, (2, 1), strict=True)
    )
    sent = jnp.broadcast_to((received + change_a)[one], received.shape)
    left = jnp.concatenate([change_a - change_a[one][None], sent], axis=2)
    right = jnp.concatenate([b, change_b - change_b[one][None]], axis=1)
    basis, triangle = jax.lax.map(qr, left)
    return Factors(basis, matmul(triangle, right))


def squared_distances(changes: Changes) -> Array:
    """Returns ``‖x_j - x_k‖²``, ``[slots, slots]``; infinite where a slot has no upload."""
    return _between(inner_products(around_one(changes)[0]), changes.here)


def _between(gram: Array, here: Array) -> Array:
    """Returns squared distances ``[slots, slots]`` from inner products of the same shape."""
    squares = jnp.diagonal(gram)
    distances = jnp.maximum(squares[:, None] + squares[None] - 2 * gram, 0.0)
    return jnp.where(here[:, None] & here[None], distances, jnp.inf)


def inner_products_around(changes: Changes, centre: Params) -> Array:
    """Returns the inner products of the changes and of one more vector, as the last row.

    All of them, the vector too, are those of :func:`around_one`: only differences mean something.

    Args:
      centre: in the structure of ``Combined.change``.

    Returns:
      float32 ``[slots + 1, slots + 1]``.
    """
    differences, one = around_one(changes)
    subtracted = weighted_sum(changes, one)
    centre = {n: x - subtracted[n] for n, x in centre.items()}
    gram = inner_products(differences)
    across = jnp.zeros(len(gram))
    for name, x in differences.leaves.items():
        across += matmul(x.reshape(len(x), -1), centre[name].reshape(-1))
    for path, (a, b) in differences.products.items():
        left = jnp.einsum("kir,io->kro", a, centre[path], precision="highest")
        across += jnp.sum(left * b, axis=(1, 2))
    square = sum((jnp.sum(x**2) for x in centre.values()), jnp.zeros(()))
    return jnp.block([[gram, across[:, None]], [across[None], square[None, None]]])


def distances_from(gram: Array, weights: Array) -> Array:
    """Returns ``‖x_k - Σ w_j x_j‖`` from the inner products of the x_k; both are ``[n]``."""
    mixed = matmul(gram, weights)
    square = jnp.diagonal(gram) - 2 * mixed + jnp.sum(weights * mixed)
    return jnp.sqrt(jnp.maximum(square, 0.0))


def weighted_sum(changes: Changes, weights: Array) -> Params:
    """Returns ``Σ w_k x_k`` in the structure of ``Combined.change``; ``weights`` is ``[slots]``."""
    summed = tree.weighted_sum(changes.leaves, weights)
    products = {p: weighted_product(x.a, x.b, weights) for p, x in changes.products.items()}
    return {**summed, **products}


def enough_clients(name: str, slots: int, hostile: Any, per: int) -> None:
    """Raises InputError if a round has too few clients for ``hostile`` hostile ones.

    Args:
      per: the rule needs ``per * f + 3`` uploads.
    """
    if is_traced(hostile):
        return
    needed = per * int(hostile) + 3
    if slots < needed:
        fewer = f", or set hostile to at most {(slots - 3) // per}" if slots >= 3 else ""
        raise InputError(
            f"{name!r} with hostile = {hostile} needs at least {per} * {hostile} + 3 = {needed}"
            f" clients in a round, and a round has {slots}. Draw more clients for a round{fewer}."
        )


def too_few(count: Array, hostile: Any, per: int) -> dict[str, Array]:
    """Returns the metric ``too_few_clients``: 1 in a round with fewer than ``per * f + 3`` uploads.

    The rule's guarantee does not hold in such a round.
    """
    return {"too_few_clients": (count < per * hostile + 3).astype(jnp.float32)}
