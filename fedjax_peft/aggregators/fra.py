"""FRA-LoRA: average the full-rank products, truncate by SVD (the paper's Eq 4-6, corrected).

The target is ``ΔW̄ = Σ w_k s A_k B_k`` (flax orientation). Both factors get the
square root of the weights: ``A_cat = [√(w_1 s) A_1 … √(w_K s) A_K]``, and ``B_cat`` likewise. Then
``ΔW̄ = A_cat B_cat`` has a rank R ≤ Σ r_k, so its SVD needs no dense matrix:

    Q_A R_A = qr(A_cat)     Q_B R_B = qr(B_catᵀ)     P Σ Zᵀ = svd(R_A R_Bᵀ)
    ΔW̄ = (Q_A P) Σ (Q_B Z)ᵀ

(The paper's ½·concat on both factors would halve the update; its sums keep one term too many.)
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts.aggregator import Aggregated, Aggregator, Factors, Total
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Params, PyTree
from fedjax_peft.numerics.linalg import FRESH, canonical, dead_directions, qr, revived, svd
from fedjax_peft.numerics.lowrank import matmul, pairs, pairs_by_shape, required_pairs, scale
from fedjax_peft.numerics.measures.aggregation_error import truncation_metrics
from fedjax_peft.support.errors import InputError

Truncated: TypeAlias = tuple[Array, Array, Array, Array, Array]
"""New A, new B, Frobenius error, largest absolute error, Frobenius norm of the exact average; each
``[matrices, ...]``."""


class Truncation(NamedTuple):
    """How the average of LoRA products becomes two factors, in one place for all matrices.

    Both functions take several matrices of one shape.
    """

    factors: Callable[[Array, Array, Array, Array], Truncated]
    """(A ``[matrices, clients, in, r]``, B ``[matrices, clients, r, out]``, weights ``[clients]``
    that sum to 1 or are all 0, LoRA's s ``[matrices]``) -> the factors of ``Σ w_k s A_k B_k``."""
    products: Callable[[Array, Array, int], Truncated]
    """(A·B ``[matrices, in, out]``, LoRA's s ``[matrices]``, r) -> the factors of ``s·AB``."""


@part
def fra(
    rank: Count | None = None,
    *,
    split: Literal["balanced", "B", "A"] = "balanced",
    error: bool = True,
) -> Aggregator:
    """Best rank-r approximation of the averaged LoRA products (FRA-LoRA).

    Leaves outside of LoRA pairs (a head) are averaged. The factors of all uploads of a cohort are
    held in memory at once.

    Args:
      rank: directions kept; by default the adapter's own rank.
      split: which factor gets the singular values: ``balanced`` (√Σ in both, as FeDeRA starts),
        ``B`` (as in FlexLoRA) or ``A``. The paper does not specify this.
      error: measure the aggregation error (its Frobenius norm ``sqrt(Σ_{j>r} σ_j²)`` and others)
        and the share of the spectrum that is kept.

    Raises:
      InputError: on use, a model without LoRA pairs, or a rank above the adapter's.
    """
    return by_svd("fra", rank, split, error)


def by_svd(name: str, rank: int | None, split: str, error: bool) -> Aggregator:
    """Returns FRA under another name; see :func:`fra`."""
    truncation = Truncation(
        partial(truncated_average, rank=rank, split=split, error=error),
        partial(truncated_products, rank=rank, split=split),
    )
    return truncating(name, truncation, rank=rank, error=error)


def truncating(
    name: str, truncation: Truncation, *, rank: int | None = None, error: bool = True
) -> Aggregator:
    """Returns the aggregator that cuts the average of LoRA products to the adapters' rank.

    Args:
      rank: directions that it keeps; None: the adapters' rank.
    """

    def lift(upload: Params, template: Params, fixed: Params) -> PyTree:
        found = required_pairs(template, name)
        least = min(template[a].shape[1] for a, _ in found.values())
        if rank is not None and rank > least:
            raise InputError(f"{name!r} cannot keep rank {rank}: the adapters have rank {least}.")
        rest = dict(upload)
        products = {path: Factors(rest.pop(a), rest.pop(b)) for path, (a, b) in found.items()}
        return {"rest": rest, "products": products}

    def finish(total: Total, template: Params, context: RoundContext, state: PyTree) -> Aggregated:
        weight = jnp.sum(total.weights)
        by = jnp.where(weight > 0, weight, 1.0)
        products = total.value["products"]

        def truncated(paths: list[str], r: int) -> Truncated:
            s = jnp.stack([scale(context.fixed, p) for p in paths])
            if isinstance(products[paths[0]], Factors):
                a = jnp.stack([products[p].a for p in paths])
                b = jnp.stack([products[p].b for p in paths])
                return truncation.factors(a, b, total.weights / by, s)
            # The dense form of the sum (``summation.dense``), to which noise may have been added.
            exact = jnp.stack([products[p] / by for p in paths])
            return truncation.products(exact, s, r)

        factors, metrics = _each_shape(template, truncated)
        new = {n: x / by for n, x in total.value["rest"].items()} | factors
        update = {n: jnp.where(weight > 0, new[n], x).astype(x.dtype) for n, x in template.items()}
        return Aggregated(update, metrics if error else {}, state)

    def refactor(products: Params, template: Params, scales: Params) -> Aggregated:
        def truncated(paths: list[str], r: int) -> Truncated:
            exact = jnp.stack([products[p] for p in paths])
            s = jnp.stack([scales[p] for p in paths])
            return truncation.products(exact, s, r)

        factors, metrics = _each_shape(template, truncated)
        new = {n: x.astype(template[n].dtype) for n, x in factors.items()}
        return Aggregated(new, metrics if error else {})

    return Aggregator(name, lift, finish, truncates=True, refactors=True, refactor=refactor)


def _each_shape(
    template: Params, truncated: Callable[[list[str], int], Truncated]
) -> tuple[Params, dict[str, Array]]:
    """Returns the factors by leaf name, and the metrics of the truncation.

    Args:
      truncated: (module paths of pairs of one shape, their rank) -> the truncated average.
    """
    found = pairs(template)
    factors: Params = {}
    frobenius, largest, norms = {}, {}, {}
    for (shape, _), paths in sorted(pairs_by_shape(template).items()):
        new_a, new_b, *sizes = truncated(paths, shape[1])
        for i, path in enumerate(paths):
            name_a, name_b = found[path]
            factors[name_a], factors[name_b] = new_a[i], new_b[i]
            frobenius[path], largest[path], norms[path] = (m[i] for m in sizes)
    return factors, truncation_metrics(frobenius, largest, norms)


def truncated_average(
    a: Array,
    b: Array,
    weights: Array,
    scales: Array,
    *,
    rank: int | None = None,
    split: str = "balanced",
    error: bool = True,
    dense: bool | None = None,
) -> Truncated:
    """Returns the truncated average of LoRA products of several matrices of one shape.

    Args:
      a: ``[matrices, clients, in, r]``.
      b: ``[matrices, clients, r, out]``.
      weights: ``[clients]``, non-negative, summing to 1.
      scales: LoRA's s, ``[matrices]``.
      rank: directions kept, by default r.
      split: see :func:`fra`.
      error: compute the largest absolute error too (it needs the dense matrix); else 0.
      dense: form ``ΔW̄`` and decompose it; by default where that is smaller than the factors.

    Returns:
      A ``[matrices, in, r]`` and B ``[matrices, r, out]``; then, per matrix, the Frobenius error,
      the largest absolute error and the Frobenius norm of the exact average.
    """
    r = a.shape[-1]
    keep = r if rank is None else rank

    def one(arguments: tuple[Array, ...]) -> tuple[Array, ...]:
        a, b, s = arguments
        (a_cat, b_cat), (u, sigma, vt) = decomposed_sum(a, b, weights * s, r, dense)
        new_a, new_b, tail, norm = _truncate(u, sigma, vt, s, r, keep, split)
        largest = jnp.zeros(())
        if error:
            off = s * matmul(new_a, new_b) - matmul(a_cat, b_cat)
            largest = jnp.max(jnp.abs(off))
        return new_a, new_b, tail, largest, norm

    # One matrix at a time: concurrent batched LAPACK calls deadlock XLA's small CPU thread pools.
    # It also means that only one dense matrix (for the error) exists at a time.
    return jax.lax.map(one, (a, b, scales))


def decomposed_sum(
    a: Array, b: Array, weights: Array, most: int | None = None, dense: bool | None = None
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    """Returns (A_cat, B_cat) and the SVD of their product ``Σ w_k A_k B_k``, of one matrix.

    Args:
      a: ``[clients, in, r]``.
      b: ``[clients, r, out]``.
      weights: ``[clients]``, LoRA's s included.
      most: how many singular vectors are needed; None: all. There may be more.
      dense: form the product and decompose it; by default where that is smaller than the factors.
    """
    clients, n_in, r = a.shape
    root = jnp.sqrt(weights)[:, None, None]
    a_cat = (a * root).transpose(1, 0, 2).reshape(n_in, clients * r)
    b_cat = (b * root).reshape(clients * r, -1)
    if dense is None:
        dense = clients * r >= min(n_in, b_cat.shape[1])
    if dense:
        return (a_cat, b_cat), svd(matmul(a_cat, b_cat), full_matrices=False)
    q_a, r_a = qr(a_cat)
    q_b, r_b = qr(b_cat.T)
    p, sigma, zt = svd(matmul(r_a, r_b.T))
    return (a_cat, b_cat), (matmul(q_a, p[:, :most]), sigma, matmul(zt[:most], q_b.T))


def truncated_products(
    products: Array, scales: Array, r: int, *, rank: int | None = None, split: str = "balanced"
) -> Truncated:
    """Returns the factors of several matrices of one shape, by a dense SVD.

    Args:
      products: ``[matrices, in, out]``, A·B without LoRA's scale.
      scales: LoRA's s, ``[matrices]``.
      rank: directions kept, by default r.
      split: see :func:`fra`.

    Returns:
      As :func:`truncated_average`; the error and the norm are those of ``s·AB``.
    """
    keep = r if rank is None else rank

    def one(arguments: tuple[Array, Array]) -> tuple[Array, ...]:
        product, s = arguments
        u, sigma, vt = svd(s * product, full_matrices=False)
        new_a, new_b, tail, norm = _truncate(u, sigma, vt, s, r, keep, split)
        largest = jnp.max(jnp.abs(s * (matmul(new_a, new_b) - product)))
        return new_a, new_b, tail, largest, norm

    return jax.lax.map(one, (products, scales))  # one at a time, as in truncated_average


def _truncate(
    u: Array, sigma: Array, vt: Array, s: Array, r: int, keep: int, split: str
) -> tuple[Array, Array, Array, Array]:
    """Returns A and B of rank r with ``keep`` directions, the Frobenius error, and the norm."""
    a, b = factored(u[:, :r], sigma[:r], vt[:r], s, keep, split)
    return a, b, jnp.sqrt(jnp.sum(sigma[keep:] ** 2)), jnp.sqrt(jnp.sum(sigma**2))


def factored(
    u: Array, sigma: Array, vt: Array, s: Array, keep: int, split: str
) -> tuple[Array, Array]:
    """Returns (A, B) with ``s A B = u Σ vt`` of rank ``keep``, dead directions revived.

    A direction with σ = 0 would have A = B = 0 and never get a gradient again. Here it gets B = 0,
    which keeps the product, and an A with the length of a Kaiming initialisation (1/√3).
    """
    u, sigma, vt = canonical(u, sigma, vt)
    index = jnp.arange(sigma.shape[0])
    dead = (index >= keep) | dead_directions(sigma, (len(u), vt.shape[1]))
    value = jnp.where(dead, 0.0, sigma / s)
    to_a, to_b = {
        "balanced": (jnp.sqrt(value), jnp.sqrt(value)),
        "A": (value, jnp.ones_like(value)),
        "B": (jnp.ones_like(value), value),
    }[split]
    a = revived(u, dead) * jnp.where(dead, FRESH, to_a)[None]
    b = jnp.where(dead, 0.0, to_b)[:, None] * vt
    return a, b
