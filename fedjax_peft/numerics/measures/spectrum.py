"""Singular values and effective rank of LoRA products."""

import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Params
from fedjax_peft.numerics.linalg import qr, svd
from fedjax_peft.numerics.lowrank import one_by_one, pairs, scale


def spectrum(params: Params, fixed: Params) -> dict[str, Array]:
    """Returns the largest singular value and the effective rank of every product ``s·AB``.

    The effective rank is ``exp(-Σ p log p)`` with ``p = σ / Σσ`` (Roy and Vetterli, 2007): how many
    directions the adapter uses, from 1 to its rank; 0 where the product is zero.
    """
    found = pairs(params)
    factors = {p: (scale(fixed, p) * params[a], params[b]) for p, (a, b) in found.items()}
    sigma = one_by_one(_singular_values, factors)
    if not sigma:
        return {}
    largest = {f"singular_value/{path}": values[0] for path, values in sigma.items()}
    ranks = {f"effective_rank/{path}": _effective_rank(values) for path, values in sigma.items()}
    return {"effective_rank": jnp.mean(jnp.stack(list(ranks.values())))} | ranks | largest


def _singular_values(factors: tuple[Array, Array]) -> Array:
    a, b = (x.astype(jnp.float32) for x in factors)
    r_a, r_b = qr(a, mode="r"), qr(b.T, mode="r")
    return svd(jnp.matmul(r_a, r_b.T, precision="highest"), compute_uv=False)


def _effective_rank(sigma: Array) -> Array:
    total = jnp.sum(sigma)
    share = sigma / jnp.where(total > 0, total, 1.0)
    # p log p is 0 at 0.
    entropy = -jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1.0)))
    return jnp.where(total > 0, jnp.exp(entropy), 0.0)
