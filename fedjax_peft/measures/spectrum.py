"""Singular values and effective rank of LoRA products."""

import jax
import jax.numpy as jnp

from fedjax_peft.contracts import Params
from fedjax_peft.numerics.linalg import qr, svd
from fedjax_peft.numerics.lowrank import pairs, scale

__all__ = ["spectrum"]


def spectrum(params: Params, fixed: Params) -> dict[str, jax.Array]:
    """Returns the largest singular value and the effective rank of every product ``s·AB``.

    The effective rank is ``exp(-Σ p log p)`` with ``p = σ / Σσ`` (Roy and Vetterli, 2007): how many
    directions the adapter uses, from 1 to its rank; 0 where the product is zero.
    """
    found = pairs(params)
    shapes = {path: (params[a].shape, params[b].shape) for path, (a, b) in found.items()}
    largest, ranks = {}, {}
    for shape in sorted(set(shapes.values())):
        paths = [path for path in found if shapes[path] == shape]
        a = jnp.stack([scale(fixed, p) * params[found[p][0]] for p in paths])
        b = jnp.stack([params[found[p][1]] for p in paths])
        # One matrix at a time: concurrent LAPACK calls can deadlock XLA's small CPU thread pools.
        sigma = jax.lax.map(_singular_values, (a, b))
        for path, values in zip(paths, sigma, strict=True):
            largest[f"singular_value/{path}"] = values[0]
            ranks[f"effective_rank/{path}"] = _effective_rank(values)
    if not ranks:
        return {}
    return {"effective_rank": jnp.mean(jnp.stack(list(ranks.values())))} | ranks | largest


def _singular_values(factors: tuple[jax.Array, jax.Array]) -> jax.Array:
    a, b = (x.astype(jnp.float32) for x in factors)
    r_a, r_b = qr(a, mode="r"), qr(b.T, mode="r")
    return svd(jnp.matmul(r_a, r_b.T, precision="highest"), compute_uv=False)


def _effective_rank(sigma: jax.Array) -> jax.Array:
    total = jnp.sum(sigma)
    share = sigma / jnp.where(total > 0, total, 1.0)
    # p log p is 0 at 0.
    entropy = -jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1.0)))
    return jnp.where(total > 0, jnp.exp(entropy), 0.0)
