"""The initial factors of LoRA: random ones, and those of FeDeRA, MiLoRA and OLoRA from the weights.

Starts from the weights cost one decomposition of each kernel, once for all clients, and nothing to
send: every client has the weights. An adapter that fits the original checkpoint has twice the rank.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft.contracts import Key, Params
from fedjax_peft.numerics.linalg import (
    FRESH,
    canonical,
    dead_directions,
    orthonormal_rows,
    revived,
    svd,
)


def principal_factors(
    kernels: Mapping[str, Array], ranks: Mapping[str, int], scales: Mapping[str, float]
) -> tuple[dict[str, tuple[Array, Array]], dict[str, Array]]:
    """Returns FeDeRA's and PiSSA's (A, B) of every kernel ``[in, out]``, and the residual kernels.

    ``A = U_r sqrt(S_r / s)``, ``B = sqrt(S_r / s) V_rᵀ``, residual ``W - s·AB``: FeDeRA Eq 6-10
    with corrected indices; dividing by s makes the start exact for any alpha. Signs are canonical,
    so that the start is the same on every backend. A direction whose singular value is zero gets
    B = 0 and an A of the length of a Kaiming start, so that it can train; the residual keeps the
    rounding noise in that direction.
    """
    return _each_alike(partial(_singular, smallest=False), kernels, ranks, scales)


def minor_factors(
    kernels: Mapping[str, Array], ranks: Mapping[str, int], scales: Mapping[str, float]
) -> tuple[dict[str, tuple[Array, Array]], dict[str, Array]]:
    """Returns MiLoRA's (A, B) of every kernel, and the residual kernels.

    They are :func:`principal_factors` with the r smallest of the ``min(in, out)`` singular values
    in the place of the largest; the authors' code divides by s too. Where a kernel has directions
    of value zero, these are chosen. The authors' A and B are zero there and never train; here A has
    the length of a Kaiming start.
    """
    return _each_alike(partial(_singular, smallest=True), kernels, ranks, scales)


def orthonormal_factors(
    kernels: Mapping[str, Array], ranks: Mapping[str, int], scales: Mapping[str, float]
) -> tuple[dict[str, tuple[Array, Array]], dict[str, Array]]:
    """Returns OLoRA's and ILoRA's (A, B) of every kernel ``[in, out]``, and the residual kernels.

    With ``Wᵀ = Q R``: ``B = (Q_{:, :r})ᵀ``, ``A = (R_{:r, :})ᵀ / s``, residual ``W - s·AB``. R's
    diagonal is not negative. Hugging Face PEFT (``init_lora_weights="olora"``) does not divide by
    s; the start is the same for s = 1. Without pivoting, the first r columns of Q span the weights
    of the first r **input features**: the factors hold these weights whole, and the residual has
    zeros there. The first columns of Q need those of Wᵀ only.
    """
    return _each_alike(_orthonormal, kernels, ranks, scales)


def _each_alike(
    decompose: Callable[[Array, int, float], tuple[Array, ...]],
    kernels: Mapping[str, Array],
    ranks: Mapping[str, int],
    scales: Mapping[str, float],
) -> tuple[dict[str, tuple[Array, Array]], dict[str, Array]]:
    """Returns factors and residuals by name; kernels of one shape, rank and scale go together."""
    factors, residuals = {}, {}
    alike = {name: (k.shape, ranks[name], scales[name]) for name, k in kernels.items()}
    for shape, rank, scale in sorted(set(alike.values())):
        names = [n for n, what in alike.items() if what == (shape, rank, scale)]
        stacked = jnp.stack([kernels[n].astype(jnp.float32) for n in names])
        a, b, rest = decompose(stacked, rank, scale)
        for i, name in enumerate(names):
            factors[name] = (a[i], b[i])
            residuals[name] = rest[i].astype(kernels[name].dtype)
    return factors, residuals


@jax.jit(static_argnums=(1, 2), static_argnames=("smallest",))
def _singular(kernels: Array, rank: int, scale: float, *, smallest: bool) -> tuple[Array, ...]:
    def one(kernel: Array) -> tuple[Array, ...]:
        u, s, vt = svd(kernel, full_matrices=False)
        chosen = slice(len(s) - rank, None) if smallest else slice(rank)
        dead = dead_directions(s, kernel.shape)[chosen]
        u, s, vt = canonical(u[:, chosen], s[chosen], vt[chosen])
        root = jnp.sqrt(s / scale)
        a = revived(u, dead) * jnp.where(dead, FRESH, root)[None]
        b = jnp.where(dead, 0.0, root)[:, None] * vt
        return a, b, kernel - scale * jnp.matmul(a, b, precision="highest")

    # One matrix at a time, because concurrent batched LAPACK calls deadlock small CPU thread pools.
    return jax.lax.map(one, kernels)


@jax.jit(static_argnums=(1, 2))
def _orthonormal(kernels: Array, rank: int, scale: float) -> tuple[Array, ...]:
    def one(kernel: Array) -> tuple[Array, ...]:
        b = orthonormal_rows(kernel[:rank])
        # R is upper triangular; the product has rounding errors below its diagonal.
        r = jnp.triu(jnp.matmul(b, kernel.T, precision="highest"))
        a = r.T / scale
        return a, b, kernel - scale * jnp.matmul(a, b, precision="highest")

    return jax.lax.map(one, kernels)  # one at a time, as in _singular


def activations_missing(trainable: Params) -> str | None:
    """Returns that the start of ``init="eva"`` is random if no A is orthonormal, else None."""
    for name, a in trainable.items():
        if name.endswith(".lora_a") and np.allclose(a.T @ a, np.eye(a.shape[1]), atol=1e-3):
            return None
    return (
        "The A of lora(init='eva') are random, so this is not EVA, whose A come from activations:"
        " model = fp.peft.activation_start(model, clients.sample(200, 16)), or in a config"
        " peft.init = 'eva'."
    )


def random_factors(init: str, shape: tuple[int, ...], rank: int, key: Key) -> tuple[Array, Array]:
    """Returns (A, B) with a random A and B = 0; ``init``: ``gaussian``, or Kaiming's for others."""
    n_in, n_out = shape
    if init == "gaussian":
        a = jax.random.normal(key, (n_in, rank)) / rank
    else:
        bound = 1 / math.sqrt(n_in)
        a = jax.random.uniform(key, (n_in, rank), minval=-bound, maxval=bound)
    return a, jnp.zeros((rank, n_out))
