"""A sum of named LoRAs: ``y = x W + s Σ_n (x A_n) B_n``.

Each LoRA has its own leaves, ``PATH.NAME.lora_a`` and ``PATH.NAME.lora_b``, by which role rules
and algorithms tell them apart. HiLoRA (Peng et al. 2026) has three: ``root``, ``cluster`` and
``leaf``. Layers that weigh their LoRAs (:mod:`fedjax_peft.peft.dual_lora`,
:mod:`fedjax_peft.peft.mixed_lora`) are made of the same parts.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part
from fedjax_peft.models.layers import Dropout
from fedjax_peft.peft.base import Adapted, Method
from fedjax_peft.peft.lora import (
    LowRank,
    LowRankOptions,
    frozen_output,
    low_rank_method,
    low_rank_options,
    takes_low_rank_options,
)
from fedjax_peft.support.errors import InputError


class NamedLoRALinear(Adapted):
    """A linear layer with several low-rank updates, by name. ``base`` is frozen."""

    def __init__(
        self, base: Any, a: Array, b: Array, scale: float, dropout: float, *, names: Sequence[str]
    ):
        """All LoRAs start from the same factors; ``dropout`` is on their common input."""
        self.base = base
        self.names = tuple(names)
        for name in self.names:
            setattr(self, name, LowRank(a, b, scale, 0.0))
        self.dropout = Dropout(dropout)

    def loras(self) -> list[LowRank]:
        """Returns the LoRAs, in the order of their names."""
        return [getattr(self, name) for name in self.names]

    def updates(self, x: Array, dtype: Any) -> list[Array]:
        """Returns what each LoRA adds to the output; all read the same dropped input."""
        dropped = self.dropout(x)
        return [lora.update(dropped, dtype) for lora in self.loras()]


class LoRASumLinear(NamedLoRALinear):
    """A linear layer to which several LoRAs are added."""

    def __call__(self, x: Array) -> Array:
        """Returns the layer's output for ``x`` ``[..., in]``."""
        y = frozen_output(self.base, x)
        return sum(self.updates(x, y.dtype), start=y)

    def factors(self) -> tuple[Array, Array]:
        """Returns ``([A_1, A_2, ...], s [B_1; B_2; ...])``, whose product is added to W."""
        loras = self.loras()
        right = [lora.lora_scale[...][:, None] * lora.lora_b[...] for lora in loras]
        left = [lora.lora_a[...] for lora in loras]
        return jnp.concatenate(left, axis=1), jnp.concatenate(right, axis=0)

    def merged(self) -> nnx.Module:
        """Returns the linear layer of ``W + s Σ A_n B_n``."""
        product = jnp.matmul(*self.factors(), precision="highest")
        return self.with_kernel(self.base.kernel[...] + product)


@part
@takes_low_rank_options
def lora_sum(
    rank: Count = 8,
    *,
    names: Sequence[str] = ("root", "cluster", "leaf"),
    **options: Unpack[LowRankOptions],
) -> Method:
    """Several LoRAs at every site, which add up; by default the three of ``algorithms.hilora``.

    All have the same rank, start from the same A, and read the same dropped input; B is zero.
    Exports write their sum as one LoRA, or merged.

    The other arguments are those of :func:`fedjax_peft.lora`.

    Args:
      names: the names of the LoRAs; different Python names.
      init: ``kaiming`` or ``gaussian``, as for :func:`fedjax_peft.lora`.

    Raises:
      InputError: names that are no different Python names; as :func:`fedjax_peft.lora`.
    """
    names = tuple(names)
    checked = {**low_rank_options(rank, **options), "names": names}
    usable = all(n.isidentifier() and not hasattr(LoRASumLinear, n) for n in names)
    if not names or not usable or len({*names, "base", "names", "dropout"}) < len(names) + 3:
        raise InputError(f"names = {list(names)} must be different names such as 'root'.")
    layer = partial(LoRASumLinear, names=names)
    return low_rank_method("lora_sum", checked, layer)
