"""MiSS: ``y = x W + s(x) D``, one trained shard for all shards of the weight (Kang and Yin 2024).

    W = [W_1; W_2; ...; W_n]    shards of r inputs each      s(x) = Σ_i x_i    the sum of x's shards
    W' = [W_1 + D; W_2 + D; ...]    D is [r, out] and starts at 0

So it is a LoRA whose A is a column of identity matrices, which costs additions alone.

* The last shard is shorter if r does not divide the inputs: it gets the first rows of D. The paper
  leaves this open; this is what Hugging Face PEFT does.
* Of PEFT's variants this is the default. ``bat`` (the change depends on W) and ``mini`` (D is a row
  of equal parts) are refused when a file has them.
* Averages of D are averages of W', so aggregation is exact, as of LoRA with a fixed A (FFA).

Checked against Hugging Face PEFT 0.21: forward, backward, merged, and files in both directions.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.arguments import Count, Fraction
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterParam
from fedjax_peft.models.layers import Dropout
from fedjax_peft.peft.base import Layout, Method, layer_method, listed
from fedjax_peft.peft.cores import CoreLinear
from fedjax_peft.peft.lora import frozen_output
from fedjax_peft.support.errors import InputError

LAYOUT = Layout(
    "MISS",
    {"miss_block": ("miss_block", "r out")},
    {"r": ("rank", 64), "miss_dropout": ("dropout", 0.0)},
    {"init_weights": True},
)


class MiSSLinear(CoreLinear):
    """A linear layer whose shards of r inputs share one change. ``base`` is frozen.

    ``miss_block`` is Dᵀ, ``[out, r]``.
    """

    def __init__(self, base: Any, rank: int, dropout: float):
        self.base = base
        self.miss_block = AdapterParam(jnp.zeros((base.kernel.shape[1], rank)))
        self.dropout = Dropout(dropout)

    def factors(self) -> tuple[Array, Array]:
        """Returns (the column of identity matrices ``[in, r]``, D)."""
        n_in, rank = self.base.kernel.shape[0], self.miss_block.shape[1]
        return jnp.tile(jnp.eye(rank), (-(-n_in // rank), 1))[:n_in], self.miss_block[...].T

    def __call__(self, x: Array) -> Array:
        """Returns the layer's output for ``x`` ``[..., in]``."""
        y = frozen_output(self.base, x)
        rank = self.miss_block.shape[1]
        x = self.dropped(x).astype(y.dtype)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % rank)])
        shards = x.reshape(*x.shape[:-1], -1, rank)
        return y + shards.sum(axis=-2) @ self.miss_block[...].T.astype(y.dtype)


@part
def miss(
    rank: Count = 64,
    *,
    targets: str | Sequence[str] | None = None,
    dropout: Fraction = 0.0,
) -> Method:
    """MiSS (Kang and Yin 2024): all shards of a weight share one trained change; exact averages.

    The other arguments are those of :func:`fedjax_peft.lora`.

    Args:
      rank: r, the inputs of a shard; a layer trains r numbers for each output, about half of a
        LoRA of the same rank.
      dropout: the dropout rate on the input of the change.

    Raises:
      InputError: when it is attached, a target that matches nothing, or a rank above a layer's
        inputs.
    """

    def layer(path: str, site: nnx.Linear, key: Key) -> MiSSLinear:
        if rank > site.kernel.shape[0]:
            raise InputError(
                f"rank = {rank} is above the {site.kernel.shape[0]} inputs of {path!r}."
            )
        return MiSSLinear(site, rank, dropout)

    options = {"rank": rank, "targets": listed(targets), "dropout": dropout}
    return layer_method("miss", options, layer)
