"""LoRA: ``y = x W + s · (x A) B`` with frozen ``W`` (Hu et al. 2021), and FeDeRA's SVD start.

Flax orientation: ``lora_a`` is ``[in, rank]`` and ``lora_b`` is ``[rank, out]``, the transposes of
Hugging Face PEFT's ``lora_A`` and ``lora_B``.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from fedjax_peft.errors import InputError
from fedjax_peft.linalg import canonical
from fedjax_peft.models.base import AdapterConst, AdapterParam
from fedjax_peft.models.layers import Dropout
from fedjax_peft.peft.base import Method, Targets, find, replace_module
from fedjax_peft.random import stream
from fedjax_peft.typing import Key

__all__ = ["LoRALinear", "lora", "scaling"]


class LoRALinear(nnx.Module):
    """A linear layer and its low-rank update. ``base`` is frozen.

    ``lora_scale`` holds ``s`` once for every direction (``[rank]``), so that a client may own fewer
    directions than another in one stacked pytree.
    """

    def __init__(self, base: Any, a: jax.Array, b: jax.Array, scale: float, dropout: float):
        self.base = base
        self.lora_a = AdapterParam(a)
        self.lora_b = AdapterParam(b)
        self.lora_scale = AdapterConst(jnp.full((a.shape[1],), scale, jnp.float32))
        self.dropout = Dropout(dropout)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the layer's output for ``x`` ``[..., in]``."""
        y = self.base(x)
        a, b = self.lora_a[...].astype(y.dtype), self.lora_b[...].astype(y.dtype)
        # s goes on B: it is small and outside the loop over tokens.
        b = b * self.lora_scale[...].astype(y.dtype)[:, None]
        return y + (self.dropout(x).astype(y.dtype) @ a) @ b


def lora(
    rank: int = 8,
    *,
    alpha: float | None = None,
    targets: str | Sequence[str] | None = None,
    init: Literal["kaiming", "gaussian", "svd"] = "kaiming",
    dropout: float = 0.0,
    rslora: bool = False,
) -> Method:
    """Low-rank adapters (LoRA, Hu et al. 2021); with ``init="svd"`` FeDeRA's.

    Args:
      rank: the number of directions r.
      alpha: the scale is s = alpha / r (``rslora``: alpha / sqrt(r)); by default alpha = r, s = 1.
      targets: which linear layers, as in Hugging Face PEFT; by default query and value.
      init: ``kaiming`` (PEFT's default: A uniform in ±1/sqrt(in), B zero), ``gaussian``
        (A ~ N(0, 1/r²), B zero), or ``svd`` (FeDeRA, Eq 6-10: the r largest singular directions of
        W split evenly between A and B, the residual W - s·AB frozen; the forward is unchanged).
      dropout: on the input of the low-rank branch only.
      rslora: rank-stabilised scale (Kalajdzievski 2023).

    Raises:
      InputError: an impossible option here; a target that matches nothing, or a rank above a
        matrix's side, when it is attached.
    """
    if rank < 1:
        raise InputError(f"rank = {rank} must be at least 1.")
    if alpha is not None and alpha <= 0:
        raise InputError(f"alpha = {alpha} must be positive.")
    if not 0 <= dropout < 1:
        raise InputError(f"LoRA dropout = {dropout} is not in [0, 1).")
    if init not in ("kaiming", "gaussian", "svd"):
        raise InputError(f"init = {init!r} is not one of kaiming, gaussian, svd.")
    alpha = float(rank if alpha is None else alpha)
    scale = scaling(rank, alpha, rslora)
    chosen: Targets = targets if targets is None or isinstance(targets, str) else tuple(targets)

    def attach(
        module: nnx.Module, default_targets: Targets, key: Key, head: Sequence[str]
    ) -> nnx.Module:
        where = default_targets if chosen is None else chosen
        sites = find(module, where, (nnx.Linear, LoRALinear), head)
        for path, site in sites.items():
            if isinstance(site, LoRALinear) or ".base" in path:
                raise InputError(f"The submodule {path!r} already has LoRA attached.")
            if rank > min(site.kernel.shape):
                n_in, n_out = site.kernel.shape
                raise InputError(
                    f"rank = {rank} is above the smaller side of {path!r} ({n_in}x{n_out})."
                )
        kernels = {path: site.kernel[...] for path, site in sites.items()}
        if init == "svd":
            factors, residuals = principal_factors(kernels, rank, scale)
            for path, site in sites.items():
                site.kernel.set_value(residuals[path])
        else:
            factors = {p: _random(init, k.shape, rank, stream(key, p)) for p, k in kernels.items()}
        for path, site in sites.items():
            replace_module(module, path, LoRALinear(site, *factors[path], scale, dropout))
        return module

    options = {
        "rank": rank,
        "alpha": alpha,
        "targets": chosen,
        "init": init,
        "dropout": dropout,
        "rslora": rslora,
    }
    return Method("lora", options, attach, start_shapes_frozen=init == "svd")


def scaling(rank: int, alpha: float, rslora: bool) -> float:
    """Returns LoRA's scale s."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def principal_factors(
    kernels: dict[str, jax.Array], rank: int, scale: float
) -> tuple[dict[str, tuple[jax.Array, jax.Array]], dict[str, jax.Array]]:
    """Returns FeDeRA's (A, B) of every kernel ``[in, out]``, and the residual kernels.

    ``A = U_r sqrt(S_r / s)``, ``B = sqrt(S_r / s) V_rᵀ``, residual ``W - s·AB``: FeDeRA Eq 6-10
    with corrected indices; dividing by s makes the start exact for any alpha. Signs are canonical,
    so that the start is the same on every backend.
    """
    factors, residuals = {}, {}
    shapes = {k.shape for k in kernels.values()}
    for shape in sorted(shapes):
        paths = [p for p, k in kernels.items() if k.shape == shape]
        stacked = jnp.stack([kernels[p].astype(jnp.float32) for p in paths])
        a, b, rest = _principal(stacked, rank, scale)
        for i, path in enumerate(paths):
            factors[path] = (a[i], b[i])
            residuals[path] = rest[i].astype(kernels[path].dtype)
    return factors, residuals


@jax.jit(static_argnums=(1, 2))
def _principal(kernels: jax.Array, rank: int, scale: float) -> tuple[jax.Array, ...]:
    def one(kernel: jax.Array) -> tuple[jax.Array, ...]:
        u, s, vt = jnp.linalg.svd(kernel, full_matrices=False)
        u, s, vt = canonical(u[:, :rank], s[:rank], vt[:rank])
        root = jnp.sqrt(s / scale)
        a, b = u * root[None], root[:, None] * vt
        return a, b, kernel - scale * jnp.matmul(a, b, precision="highest")

    # One matrix at a time: concurrent batched LAPACK calls deadlock XLA's small CPU thread pools.
    return jax.lax.map(one, kernels)


def _random(init: str, shape: tuple[int, int], rank: int, key: Key) -> tuple[jax.Array, jax.Array]:
    n_in, n_out = shape
    if init == "kaiming":
        bound = 1 / math.sqrt(n_in)
        a = jax.random.uniform(key, (n_in, rank), minval=-bound, maxval=bound)
    else:
        a = jax.random.normal(key, (n_in, rank)) / rank
    return a, jnp.zeros((rank, n_out))
