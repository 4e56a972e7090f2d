"""SLoRA's layer: ``y = x (W + S) + s · (x A) B`` with a sparse change S (Babakniya et al. 2023).

S has values at random places of the kernel, a share ``density`` of all, which never change and are
the same for all clients (``sparse_index``, flat places in ``[in, out]``). In the first stage of
:func:`fedjax_peft.algorithms.slora` only the values are trained; then their SVD becomes LoRA's
start, and they are 0. The paper draws one mask with the same density for every layer. Here only the
layers that LoRA adapts have one: what other layers learned could not become a part of a LoRA.

The simulation forms ``W + S`` for each lane, one dense matrix at a time for each adapted layer.
"""

from typing import Any, Unpack

import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.arguments import Count, PositiveShare
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterConst, AdapterParam
from fedjax_peft.numerics.random import stream
from fedjax_peft.peft.base import Method
from fedjax_peft.peft.lora import (
    LoRALinear,
    LowRankOptions,
    low_rank_method,
    low_rank_options,
    takes_low_rank_options,
)
from fedjax_peft.peft.shira import random_places


class SparseLoRALinear(LoRALinear):
    """A linear layer with a sparse and a low-rank change. ``base`` is frozen."""

    def __init__(self, base: Any, a: Array, b: Array, scale: float, dropout: float):
        super().__init__(base, a, b, scale, dropout)
        self.sparse_index = AdapterConst(jnp.zeros(0, jnp.int32))
        self.sparse_values = AdapterParam(jnp.zeros(0))

    def __call__(self, x: Array) -> Array:
        """Returns the layer's output for ``x`` ``[..., in]``."""
        y = super().__call__(x)
        return y + self.dropout(x).astype(y.dtype) @ self.sparse().astype(y.dtype)

    def product(self) -> Array:
        """Returns ``S + s · AB``, ``[in, out]``, in float32."""
        return super().product() + self.sparse()

    def sparse(self) -> Array:
        """Returns S, ``[in, out]``, in float32."""
        shape = self.base.kernel.shape
        flat = jnp.zeros(shape[0] * shape[1])
        places = self.sparse_index[...]
        return flat.at[places].set(self.sparse_values[...], unique_indices=True).reshape(shape)


@part
@takes_low_rank_options
def slora(
    rank: Count = 8,
    *,
    density: PositiveShare = 0.01,
    **options: Unpack[LowRankOptions],
) -> Method:
    """SLoRA's sparse values beside a LoRA, for ``algorithms.slora``.

    Dropout is on the input of both changes.

    The other arguments are those of :func:`fedjax_peft.lora`.

    Args:
      density: the share of each kernel's entries that the first stage trains; the paper uses about
        1 %.
      init: ``kaiming`` or ``gaussian``, as for :func:`fedjax_peft.lora`.

    Raises:
      InputError: a density outside of 0 to 1; as :func:`fedjax_peft.lora`.
    """
    checked = {**low_rank_options(rank, **options), "density": density}

    def draw_places(path: str, site: SparseLoRALinear, key: Key) -> None:
        n_in, n_out = site.base.kernel.shape
        count = max(1, round(density * n_in * n_out))
        places = random_places(stream(key, path, "places"), (n_in, n_out), count)
        site.sparse_index.set_value(places)
        site.sparse_values.set_value(jnp.zeros(count))

    return low_rank_method("slora", checked, SparseLoRALinear, draw_places)
