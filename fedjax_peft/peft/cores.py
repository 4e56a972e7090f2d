"""Layers with frozen bases: what LoRA-SB, LoRA-XS, RAVAN, VeRA and MiSS share.

The change of a layer is ``x L R``, where L ``[in, n]`` and R ``[n, out]`` are made from bases that
never change and from what is trained: small cores, vectors, or R alone. So every such adapter has
the form of a LoRA of rank n, which exports use.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.models.layers import Dropout
from fedjax_peft.numerics.linalg import qr
from fedjax_peft.peft.base import Adapted
from fedjax_peft.peft.lora import frozen_output
from fedjax_peft.support.errors import InputError


class CoreLinear(Adapted):
    """A linear layer with an update through frozen bases. ``base`` is frozen."""

    dropout: Dropout | None = None
    """On the input of the update."""

    def factors(self) -> tuple[Array, Array]:
        """Returns (L ``[in, n]``, R ``[n, out]``); ``LR`` is added to the kernel."""
        raise NotImplementedError

    def __call__(self, x: Array) -> Array:
        """Returns the layer's output for ``x`` ``[..., in]``."""
        y = frozen_output(self.base, x)
        left, right = (factor.astype(y.dtype) for factor in self.factors())
        return y + (self.dropped(x).astype(y.dtype) @ left) @ right

    def dropped(self, x: Array) -> Array:
        """Returns the input of the update."""
        return x if self.dropout is None else self.dropout(x)

    def merged(self) -> nnx.Module:
        """Returns the linear layer with the update added to its kernel."""
        product = jnp.matmul(*self.factors(), precision="highest")
        return self.with_kernel(self.base.kernel[...] + product)


def sides(path: str, site: nnx.Linear, rank: int) -> tuple[int, int]:
    """Returns the sides of a kernel, which must have room for orthogonal directions.

    Args:
      rank: how many there are.
    """
    n_in, n_out = site.kernel.shape
    if rank > min(n_in, n_out):
        raise InputError(
            f"{path!r} ({n_in}x{n_out}) has no room for {rank} orthogonal directions: choose a"
            " smaller rank, or fewer heads."
        )
    return n_in, n_out


def orthonormal(key: Key, rows: int, columns: int) -> Array:
    """Returns random orthonormal columns, ``[rows, columns]``: Gram-Schmidt on normal numbers."""
    q, r = qr(jax.random.normal(key, (rows, columns)))
    return q * jnp.where(jnp.diagonal(r) < 0, -1.0, 1.0)[None]
