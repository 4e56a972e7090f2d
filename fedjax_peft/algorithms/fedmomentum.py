"""FedMomentum (Yan et al. 2026): the largest directions of the average go on as LoRA's factors.

    client:  (A_k, B_k) ← optimizer steps on F_k from (A, B)
    server:  U Σ Vᵀ = svd(s Σ w_k A_k B_k)
             A ← U_{:r} √Σ_{:r} / √s,   B ← √Σ_{:r} V_{:r}ᵀ / √s       clients start from them
             W ← W + Σ_{r < j ≤ q} σ_j u_j v_jᵀ                                the residual
             q = the fewest directions that hold the share τ of the energy Σ_j σ_j²

The average is exact up to the share 1 - τ of its energy. FLoRA is exact too but restarts the
factors in every round, and FRA-LoRA keeps the factors but loses the residual; the paper calls what
this method keeps the momentum of training.

The paper's SVD is randomised, with a sketch of K r directions. The average has no more than that,
so the sketch loses nothing, and here the SVD is that of the stacked factors (see
:mod:`fedjax_peft.aggregators.fra`). Singular values are divided evenly. If q < r, all r directions
stay in the factors. A direction whose σ is zero gets B = 0 and an A that can train.

The residual reaches every client. Its factors and those of A and B have at most the rank of all
factors stacked, by which bytes are counted. Clients of different ranks are refused: the residual
would add directions to a client's frozen weight that the client does not own.

The authors published no code. This was written from the abstract and a public reimplementation
(github.com/boyi-liu/FedLLM-Factory, which has τ = 0.9999 and no LoRA scale in the residual; here it
has), and checked against a loop with a dense SVD.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.aggregators.fra import decomposed_sum, factored
from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.common import merge_into_frozen
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.contracts.arguments import PositiveShare
from fedjax_peft.numerics.lowrank import factors_apart, matmul, pairs, pairs_by_shape, scale
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def fedmomentum(
    optimizer: c.Optimizer,
    *,
    energy: PositiveShare = 0.9999,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """FedMomentum: LoRA factors of the average's largest directions; the residual is folded in.

    The metric ``residual`` is the Frobenius norm of what a round folds in.

    Args:
      energy: τ, the share of the average's squared norm that is kept; with 1 the average is exact.

    Raises:
      InputError: a kept optimizer; on use, a model without LoRA, or with more than LoRA;
        ``client_ranks``.
    """
    algorithm = averaging("fedmomentum", optimizer, head_roles(head), _splitting(energy))
    return algorithm._replace(
        server=merge_into_frozen(),
        weights=weights,
        traffic=c.Traffic(relayed_leaves=r"\.lora_[ab]$"),
        check=lora_model("fedmomentum", alone=True),
        incompatible={
            c.Feature.KEPT_OPTIMIZER: "FedMomentum factors LoRA's average product anew in every"
            " round, so gradients of earlier rounds belong to other factors. Use 'fedex' or"
            " 'fedavg'."
        },
    )


def _splitting(energy: float | Array) -> c.Aggregator:
    """Returns the aggregator of ``{"model": leaves, "fold": residuals, "lost": what is dropped}``.

    The last two are matrices by module path.
    """

    def lift(upload: c.Params, template: c.Params, fixed: c.Params) -> c.PyTree:
        rest, factors = factors_apart(upload, "fedmomentum")
        return {"rest": rest, "products": {p: c.Factors(*ab) for p, ab in factors.items()}}

    def finish(
        total: c.Total, template: c.Params, context: c.RoundContext, state: c.PyTree
    ) -> c.Aggregated:
        some = total.weight > 0
        by = jnp.where(some, total.weight, 1.0)
        weights = total.weights / by
        new = {n: x / by for n, x in total.value["rest"].items()}
        fold: c.Params = {}
        lost: c.Params = {}
        energies = jnp.zeros(3)  # of the factors, the residuals and the averages
        for paths in pairs_by_shape(template).values():
            products = [total.value["products"][p] for p in paths]
            s = jnp.stack([scale(context.fixed, p) for p in paths])
            left, right = (jnp.stack([p[i] for p in products]) for i in (0, 1))
            parts = _split(left, right, weights, s, energy)
            for i, path in enumerate(paths):
                a, b = pairs(template)[path]
                new[a], new[b], fold[path], lost[path] = (x[i] for x in parts[:4])
            energies += jnp.sum(parts[4], axis=0)
        kept, folded, every = energies
        every = jnp.where(every > 0, every, 1.0)
        metrics = {
            "residual": jnp.sqrt(folded),
            "residual_relative": jnp.sqrt(folded / every),
            "spectrum_kept": kept / every,
        }
        update = {n: jnp.where(some, new[n], x).astype(x.dtype) for n, x in template.items()}
        return c.Aggregated({"model": update, "fold": fold, "lost": lost}, metrics, state)

    return c.Aggregator(
        "fedmomentum", lift, finish, unmasked_policy="refused", truncates=True, refactors=True
    )


def _split(
    a: Array, b: Array, weights: Array, scales: Array, energy: float | Array
) -> tuple[Array, ...]:
    """Returns new A, new B, the residual, what is lost, and energies ``[matrices, 3]``.

    The energies are those of the new factors, of the residual and of the whole average.

    Args:
      a: ``[matrices, clients, in, r]``.
      b: ``[matrices, clients, r, out]``.
      weights: ``[clients]``, summing to 1, or all 0.
      scales: LoRA's s, ``[matrices]``.
    """
    r = a.shape[-1]

    def one(arguments: tuple[Array, ...]) -> tuple[Array, ...]:
        a, b, s = arguments
        _, (u, sigma, vt) = decomposed_sum(a, b, weights * s)
        squares = sigma**2
        before = jnp.cumsum(squares) - squares  # the energy of the directions before each one
        needed = (before < energy * jnp.sum(squares)) | (jnp.asarray(energy) >= 1)
        beyond = jnp.where(jnp.arange(len(sigma)) >= r, sigma, 0.0)  # the factors
        tail = jnp.where(needed, beyond, 0.0)
        parts = [matmul(u * x[None], vt) for x in (tail, beyond - tail)]
        new_a, new_b = factored(u[:, :r], sigma[:r], vt[:r], s, r, "balanced")
        energies = jnp.stack([jnp.sum(squares[:r]), jnp.sum(tail**2), jnp.sum(squares)])
        return new_a, new_b, *parts, energies

    # One matrix at a time, because concurrent batched LAPACK calls deadlock small CPU thread pools.
    return jax.lax.map(one, (a, b, scales))
