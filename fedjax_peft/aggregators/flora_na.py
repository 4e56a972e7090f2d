"""FLoRA-NA (Nguyen et al. 2025): combine A and B with coefficients that fit the exact average.

    W̄ = Σ w_k A_k B_k
    P, Q = argmin ‖ (Σ p_k A_k) (Σ q_k B_k) - W̄ ‖_F²                           (Eq 6; P, Q ∈ R^K)
    A ← Σ p_k A_k,   B ← Σ q_k B_k

The plain mean has p = q = w. Traffic is that of plain averaging: P and Q stay at the server. Over
:func:`fedjax_peft.algorithms.fedavg` this is FLoRA-NA.

The paper does not say how it minimises, nor whether matrices share P and Q (its reviewers ask for
both). Decided here: each matrix has its own, not constrained, and the minimisation is alternating
least squares from p = q = w. A step solves for one of the two with the other one fixed,

    (M + ε I) (p - p_old) = -g,   M_{uv} = <A_u B, A_v B>,   g_u = <A_u B, A B - W̄>

and likewise for q. ε = 1e-5 tr(M)/K, for K uploads, keeps coefficients where clients are alike;
with it every step lowers the objective. The paper's average is unweighted (``weights="uniform"``);
here w is that of the algorithm. Leaves outside of LoRA pairs (a head) are averaged with w.

No m x n matrix is formed in the minimisation: with the changes a_k = A_k - A_0 and b_k = B_k - B_0
since the broadcast, the difference A B - W̄ is a product of factors with 4 r + K r columns, in which
no large terms cancel.

This was written from the abstract and the public reviews of the paper (OpenReview 7n5eoDZdZ5), as
its full text could not be read, and checked against a loop in NumPy over dense matrices.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts.aggregator import Aggregated, Aggregator, Stacked, Total
from fedjax_peft.contracts.arguments import FromZero
from fedjax_peft.contracts.part import part
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Params, PyTree
from fedjax_peft.numerics.linalg import solve
from fedjax_peft.numerics.lowrank import factors_apart, matmul, one_by_one, pairs, scale
from fedjax_peft.numerics.measures.aggregation_error import error_metrics

_RIDGE = 1e-5
"""ε, relative to the mean diagonal entry of M."""


@part
def flora_na(*, steps: FromZero = 20, error: bool = True) -> Aggregator:
    """FLoRA-NA: A and B are combined with coefficients that fit the exact average product.

    All uploads of a cohort are held in memory at once.

    Args:
      steps: steps of the alternating least squares, for P and for Q; 0 is the plain mean.
      error: measure the aggregation error that is left; it needs one dense matrix for each adapted
        layer.

    Raises:
      InputError: on use, a model without LoRA pairs.
    """

    def lift(upload: Params, template: Params, fixed: Params) -> PyTree:
        changes = {n: x - template[n] for n, x in upload.items()}
        rest, factors = factors_apart(changes, "flora_na")
        return {"rest": rest, "factors": Stacked(factors)}

    def finish(total: Total, template: Params, context: RoundContext, state: PyTree) -> Aggregated:
        some = total.weight > 0
        by = jnp.where(some, total.weight, 1.0)
        weights = total.weights / by
        change = {n: x / by for n, x in total.value["rest"].items()}
        errors, exact, found = {}, {}, pairs(template)
        uploads = total.value["factors"].value
        parts = {p: (template[a], template[b], *uploads[p]) for p, (a, b) in found.items()}
        made = one_by_one(lambda matrix: _combined(matrix, weights, steps), parts)
        for path, (a, b) in found.items():
            change[a], change[b], left, right = made[path]
            if error:
                s, off = scale(context.fixed, path), matmul(left, right)
                used = matmul(template[a] + change[a], template[b] + change[b])
                errors[path], exact[path] = s * off, s * (used - off)
        new = {n: jnp.where(some, x + change[n], x).astype(x.dtype) for n, x in template.items()}
        if not error:
            return Aggregated(new, {}, state)
        errors = {path: jnp.where(some, x, 0.0) for path, x in errors.items()}
        return Aggregated(new, error_metrics(errors, exact), state)

    return Aggregator("flora_na", lift, finish, needs_all_uploads=True)


def _combined(matrix: tuple[Array, ...], weights: Array, steps: int) -> tuple[Array, ...]:
    """Returns the changes of A and B, and factors of the difference ``A B - W̄``.

    Args:
      matrix: the received A ``[in, r]`` and B ``[r, out]``, and the clients' changes of them,
        ``[slots, in, r]`` and ``[slots, r, out]``.
      weights: w, ``[slots]``, summing to 1; 0 for a slot without an upload.
    """
    a0, b0, a, b = matrix
    here = (weights > 0)[:, None, None]
    number = jnp.maximum(jnp.sum(here), 1)
    whole_a, whole_b = jnp.where(here, a0[None] + a, 0.0), jnp.where(here, b0[None] + b, 0.0)
    mean_a, mean_b = _sum(weights, a), _sum(weights, b)
    columns = (weights[:, None, None] * a).transpose(1, 0, 2).reshape(a0.shape[0], -1)
    rows = b.reshape(-1, b0.shape[1])
    grams_a = jnp.einsum("uir,vis->uvrs", whole_a, whole_a, precision="highest")
    grams_b = jnp.einsum("uro,vso->uvrs", whole_b, whole_b, precision="highest")

    def difference(p: Array, q: Array) -> tuple[Array, Array]:
        """Returns factors of ``A B - W̄``, where A = P A_0 + α and B = Q B_0 + β:

        (PQ - 1) A_0 B_0 + A_0 (P β - b̄) + (Q α - ā) B_0 + α β - Σ w_k a_k b_k
        """
        total_p, total_q, alpha, beta = jnp.sum(p), jnp.sum(q), _sum(p, a), _sum(q, b)
        left = [(total_p * total_q - 1) * a0, a0, total_q * alpha - mean_a, alpha, -columns]
        right = [b0, total_p * beta - mean_b, b0, beta, rows]
        return jnp.concatenate(left, axis=1), jnp.concatenate(right, axis=0)

    def step(_: int, pq: tuple[Array, Array]) -> tuple[Array, Array]:
        p, q = pq
        left, right = difference(p, q)
        now = _sum(q, whole_b)
        inner = jnp.einsum("uir,ic->urc", whole_a, left, precision="highest")
        g = jnp.einsum("urc,rc->u", inner, matmul(now, right.T), precision="highest")
        p = p - _solve(jnp.einsum("uvrs,rs->uv", grams_a, matmul(now, now.T)), g, number)
        left, right = difference(p, q)
        now = _sum(p, whole_a)
        inner = jnp.einsum("uro,co->urc", whole_b, right, precision="highest")
        g = jnp.einsum("urc,rc->u", inner, matmul(now.T, left), precision="highest")
        q = q - _solve(jnp.einsum("uvrs,rs->uv", grams_b, matmul(now.T, now)), g, number)
        return p, q

    p, q = jax.lax.fori_loop(0, steps, step, (weights, weights))
    change_a = (jnp.sum(p) - 1) * a0 + _sum(p, a)
    change_b = (jnp.sum(q) - 1) * b0 + _sum(q, b)
    return change_a, change_b, *difference(p, q)


def _sum(coefficients: Array, stacked: Array) -> Array:
    return jnp.einsum("u,uij->ij", coefficients, stacked, precision="highest")


def _solve(m: Array, g: Array, number: Array) -> Array:
    """Returns ``(M + ε I)⁻¹ g``; 0 where M is 0. Slots without an upload do not count."""
    ridge = _RIDGE * jnp.trace(m) / number
    ridge = jnp.where(ridge > 0, ridge, 1.0)
    return solve(m + ridge * jnp.eye(len(m)), g[:, None])[:, 0]
