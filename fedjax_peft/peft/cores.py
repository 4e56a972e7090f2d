"""Layers with frozen bases and small trained cores between them: what LoRA-SB and RAVAN share.

The change of a layer is ``x L R``, where L ``[in, n]`` and R ``[n, out]`` are made from bases that
never change and cores that are trained. So every such adapter has the form of a LoRA of rank n,
which exports use.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.numerics.linalg import qr
from fedjax_peft.peft.base import Adapted, Defaults, Targets, find_linear
from fedjax_peft.peft.lora import frozen_output
from fedjax_peft.support.errors import InputError


class CoreLinear(Adapted):
    """A linear layer with an update through frozen bases. ``base`` is frozen."""

    def factors(self) -> tuple[Array, Array]:
        """Returns (L ``[in, n]``, R ``[n, out]``); ``LR`` is added to the kernel."""
        raise NotImplementedError

    def __call__(self, x: Array) -> Array:
        """Returns the layer's output for ``x`` ``[..., in]``."""
        y = frozen_output(self.base, x)
        left, right = (factor.astype(y.dtype) for factor in self.factors())
        return y + (x.astype(y.dtype) @ left) @ right

    def merged(self) -> nnx.Module:
        """Returns the linear layer with the update added to its kernel."""
        product = jnp.matmul(*self.factors(), precision="highest")
        return self.with_kernel(self.base.kernel[...] + product)


def core_sites(
    module: nnx.Module, targets: Targets, defaults: Defaults, head: Sequence[str], rank: int
) -> dict[str, nnx.Linear]:
    """Returns the linear layers to adapt: module path -> layer.

    Args:
      targets: the rule; None: the model family's targets of LoRA.
      rank: how many orthonormal columns each side of a kernel must have room for.
    """
    sites = find_linear(module, targets, defaults, head)
    for path, site in sites.items():
        n_in, n_out = site.kernel.shape
        if rank > min(n_in, n_out):
            raise InputError(
                f"{path!r} ({n_in}x{n_out}) has no room for {rank} orthogonal directions: choose a"
                " smaller rank, or fewer heads."
            )
    return sites


def orthonormal(key: Key, rows: int, columns: int) -> Array:
    """Returns random orthonormal columns, ``[rows, columns]``: Gram-Schmidt on normal numbers."""
    q, r = qr(jax.random.normal(key, (rows, columns)))
    return q * jnp.where(jnp.diagonal(r) < 0, -1.0, 1.0)[None]
