"""LoRA-FAIR (Bian et al. 2025): average the factors, then correct B towards the exact average.

    Ā = Σ w_k A_k,   B̄ = Σ w_k B_k,   ΔW = Σ w_k A_k B_k
    ΔB = argmin  1 - cos(ΔW, Ā (B̄ + ΔB)) + λ ‖ΔB‖                                  (Eq 8)
    A ← Ā,   B ← B̄ + ΔB                 clients start from these ("Avg-Initial"); W is not changed

The correction makes the product of the averages more like the average of the products. The term
with λ keeps B near the average from which clients go on; the authors find that it matters (77.1 %
with λ = 0.01 and 73.2 % with 0, DomainNet). Over :func:`fedjax_peft.algorithms.fedavg` this is
LoRA-FAIR; products and traffic are those of plain averaging.

The paper minimises by SGD and gives neither its rate nor its steps. Decided here: proximal
gradient descent from ΔB = 0 (a gradient step on the cosine, then the exact step on λ ‖ΔB‖, which
shortens ΔB), because ‖ΔB‖ has no derivative at 0 and plain steps would jump around it; a rate
relative to the size of B̄, η ‖B̄‖²_F, so that the result does not depend on the unit of B; ‖ΔB‖ is
the Frobenius norm, as printed, not its square; every adapted matrix has its own ΔB. Where B̄ is
right already, it stays bit for bit. With M = Āᵀ ΔW and G = ĀᵀĀ the objective needs r x out numbers
only:

    cos = <M, C> / (‖ΔW‖ sqrt(<C, G C>)),   C = B̄ + ΔB

``solver="least_squares"`` is ours: ‖ΔW - Ā (B̄ + ΔB)‖² + λ ‖ΔB‖², which also corrects the length,
has the closed form ΔB = (G + λ I)⁻¹ (M - G B̄).

This follows a description of the paper and a public reimplementation of its objective; the authors'
code could not be read. That reimplementation squares the norm.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.aggregators.mean import mean, product_errors
from fedjax_peft.contracts import Aggregated, Aggregator, Params, PyTree, RoundContext, Total
from fedjax_peft.contracts.arguments import Count, NotNegative
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.linalg import pinv
from fedjax_peft.numerics.lowrank import matmul, required_pairs, scale
from fedjax_peft.numerics.measures.aggregation_error import error_metrics


@part
def lora_fair(
    *,
    lam: NotNegative = 0.01,
    solver: Literal["gradient", "least_squares"] = "gradient",
    rate: NotNegative = 0.1,
    steps: Count = 100,
) -> Aggregator:
    """LoRA-FAIR: averaged LoRA factors, with B corrected towards the exact average product.

    Leaves outside of LoRA pairs (a head) are averaged. The exact average is one dense matrix for
    each adapted layer, made at the end. ``aggregation_error`` is what is left after the correction.

    Args:
      lam: λ, the weight of the correction's norm.
      solver: ``gradient`` (the paper's objective) or ``least_squares`` (in closed form; ours).
      rate: η, the relative rate of the gradient descent.
      steps: the number of steps of the gradient descent.

    Raises:
      InputError: on use, a model without LoRA pairs, or ``client_ranks``.
    """
    inner = mean(error=True)

    def corrected(a: Array, b: Array, exact: Array) -> Array:
        if solver == "least_squares":
            return _least_squares(a, b, exact, lam)
        return _descent(a, b, exact, lam, rate, steps)

    def lift(upload: Params, template: Params, fixed: Params) -> PyTree:
        required_pairs(template, "lora_fair")
        return inner.lift(upload, template, fixed)

    def finish(total: Total, template: Params, context: RoundContext, state: PyTree) -> Aggregated:
        new = dict(inner.finish(total, template, context, state).update)
        # Without scales: s is a factor of both products, and the objective's cosine ignores it.
        errors, averages = product_errors(total, new, template, {})
        left, norms = {}, {}
        for path, (a, b) in required_pairs(template, "lora_fair").items():
            better = corrected(new[a], new[b], averages[path])
            better = jnp.where(total.weight > 0, better, new[b])
            s = scale(context.fixed, path)
            left[path] = s * (errors[path] + matmul(new[a], better - new[b]))
            norms[path] = s * averages[path]
            new[b] = better.astype(new[b].dtype)
        return Aggregated(new, error_metrics(left, norms), state)

    return Aggregator("lora_fair", lift, finish, unmasked_policy="refused")


def _descent(a: Array, b: Array, exact: Array, lam: float, rate: float, steps: int) -> Array:
    """Returns ``B̄ + ΔB`` after proximal gradient descent on Eq 8 from ΔB = 0.

    Args:
      a: Ā, ``[in, r]``.
      b: B̄, ``[r, out]``.
      exact: ΔW, ``[in, out]``.
    """
    m, g = matmul(a.T, exact), matmul(a.T, a)
    size = _norm(exact)

    step = rate * jnp.sum(b**2)

    def descend(_: int, change: Array) -> Array:
        c = b + change
        gc = matmul(g, c)
        inner, length = jnp.sum(m * c), jnp.sqrt(jnp.maximum(jnp.sum(c * gc), 0.0))
        # d(-cos)/dC = -M / (‖ΔW‖ ‖ĀC‖) + <M, C> G C / (‖ΔW‖ ‖ĀC‖³); 0 where a product is 0.
        gradient = _over(inner * gc, size * length**3) - _over(m, size * length)
        moved = change - step * gradient
        return jnp.maximum(1 - _over(step * lam, _norm(moved)), 0.0) * moved

    return b + jax.lax.fori_loop(0, steps, descend, jnp.zeros_like(b))


def _least_squares(a: Array, b: Array, exact: Array, lam: float) -> Array:
    """Returns ``B̄ + ΔB`` that minimises ``‖ΔW - Ā (B̄ + ΔB)‖² + λ ‖ΔB‖²``; see :func:`_descent`."""
    m, g = matmul(a.T, exact), matmul(a.T, a)
    # The pseudo-inverse serves λ = 0 with an A of lower rank: ΔB is then the smallest one.
    inverse = pinv(g + lam * jnp.eye(len(g)), hermitian=True)
    return b + matmul(inverse, m - matmul(g, b))


def _norm(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(x**2))


def _over(x: Array, y: Array) -> Array:
    """Returns x / y, and 0 where y is 0."""
    return jnp.where(y > 0, x / jnp.where(y > 0, y, 1.0), 0.0)
