"""HiRA: ``y = x (W + W ∘ (A B))``, a low-rank factor of every weight (Huang et al. 2025).

The Hadamard product with W has a high rank, though A ``[in, r]`` and B ``[r, out]`` are as small as
LoRA's.

* Hugging Face PEFT has no scale s, and neither has this file: A and B alone decide. A has LoRA's
  start (Kaiming or Gaussian), and B is 0.
* All layers have one rank: PEFT 0.21 has ``rank_pattern``, but does not use it.
* Averages of A and of B are not the average of the products, as with LoRA. Aggregators in the space
  of products (FRA, FedEx-LoRA, FLoRA) are for ``lora_a`` and ``lora_b``, whose product is added to
  W; here it is a factor, so they refuse it.
* The change is a matrix of the size of W, which a step forms for each lane.

Checked against Hugging Face PEFT 0.21: forward, backward, merged, and files in both directions.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts.arguments import Count, Fraction
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterParam
from fedjax_peft.models.layers import Dropout
from fedjax_peft.peft.base import Adapted, Layout, Method
from fedjax_peft.peft.lora import frozen_output, low_rank_method, low_rank_options

LAYOUT = Layout(
    "HIRA",
    {"hira_A": ("hira_a", "r in"), "hira_B": ("hira_b", "out r")},
    {"r": ("rank", 32), "hira_dropout": ("dropout", 0.0)},
    in_conv1d=True,
)


class HiRALinear(Adapted):
    """A linear layer whose kernel is ``W ∘ (1 + AB)``. ``base`` is frozen."""

    def __init__(self, base: Any, a: Array, b: Array, scale: float, dropout: float):
        """``scale`` is LoRA's, which HiRA does not have."""
        self.base = base
        self.hira_a = AdapterParam(a)
        self.hira_b = AdapterParam(b)
        self.dropout = Dropout(dropout)

    def __call__(self, x: Array) -> Array:
        """Returns the layer's output for ``x`` ``[..., in]``."""
        y = frozen_output(self.base, x)
        return y + self.dropout(x).astype(y.dtype) @ self.change().astype(y.dtype)

    def change(self) -> Array:
        """Returns ``W ∘ (AB)``, ``[in, out]``, in float32."""
        product = jnp.matmul(self.hira_a[...], self.hira_b[...], precision="highest")
        return self.base.kernel[...] * product

    def merged(self) -> nnx.Module:
        """Returns the linear layer of ``W ∘ (1 + AB)``."""
        return self.with_kernel(self.base.kernel[...] + self.change())


@part
def hira(
    rank: Count = 32,
    *,
    targets: str | Sequence[str] | None = None,
    init: Literal["kaiming", "gaussian"] = "kaiming",
    dropout: Fraction = 0.0,
) -> Method:
    """HiRA (Huang et al. 2025): LoRA's product as a factor of each weight, so of a high rank.

    The other arguments are those of :func:`fedjax_peft.lora`.

    Args:
      init: the start of A; B is 0.

    Raises:
      InputError: as :func:`fedjax_peft.lora`.
    """
    options = low_rank_options(rank, targets=targets, init=init, dropout=dropout)
    return low_rank_method("hira", options, HiRALinear)
