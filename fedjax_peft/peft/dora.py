"""DoRA (Liu et al. 2024): LoRA for the direction of a weight, and a separate learned magnitude.

    W' = m ∘ (W + s·AB) / ‖W + s·AB‖        norms of the columns, one for each output

Gradients do not pass through the norm (the paper's section 4.3).
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterParam
from fedjax_peft.peft.base import Method
from fedjax_peft.peft.lora import (
    LoRALinear,
    LowRankOptions,
    low_rank_method,
    low_rank_options,
    takes_low_rank_options,
)


class DoRALinear(LoRALinear):
    """A linear layer whose kernel is ``m ∘ (W + s·AB) / ‖W + s·AB‖``. ``base`` is frozen.

    ``lora_magnitude`` (m, ``[out]``) starts as the norm, so that the start changes nothing. The
    bias is not rescaled.
    """

    def __init__(self, base: Any, a: Array, b: Array, scale: float, dropout: float):
        super().__init__(base, a, b, scale, dropout)
        self.lora_magnitude = AdapterParam(self.norm())

    def __call__(self, x: Array) -> Array:
        """Returns the layer's output for ``x`` ``[..., in]``.

        With dropout D it is ``x W + b + (g - 1) ∘ D(x) W + g ∘ s·D(x) AB``, where ``g`` is ``m``
        divided by the norm. The frozen kernel is applied twice, as in Hugging Face PEFT.
        """
        y = self.base(x)
        dropped = self.dropout(x)
        product = y if dropped is x else self.base(dropped)
        if self.base.bias is not None:
            product = product - self._over(self.base.bias[...], product)
        gain = self.lora_magnitude[...] / jax.lax.stop_gradient(self.norm())
        low_rank = self.update(x, y.dtype)  # with the same dropout mask
        return y + self._over(gain - 1, y) * product + self._over(gain, y) * low_rank

    def merged(self) -> nnx.Module:
        """Returns the linear layer of ``m ∘ (W + s·AB) / ‖W + s·AB‖``."""
        gain = self.lora_magnitude[...] / self.norm()
        return self.with_kernel((self.base.kernel[...] + self.product()) * gain[None])

    def norm(self) -> Array:
        """Returns the norms of the columns of ``W + s·AB``, ``[out]``, in float32.

        They are computed from the dense sum. Expanding the square would need no ``[in, out]``
        array, but it loses digits where an update cancels its column (2e-5 where a tenth of it is
        left; the square may even become negative). It was no faster, because both are small beside
        the products over tokens.
        """
        kernel = self.base.kernel[...].astype(jnp.float32)
        norm = jnp.linalg.norm(kernel + self.product(), axis=0)
        return jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)  # for a column of zeros

    def _over(self, x: Array, y: Array) -> Array:
        return jnp.broadcast_to(x, y.shape).astype(y.dtype)


@part
@takes_low_rank_options
def dora(
    rank: Count = 8,
    **options: Unpack[LowRankOptions],
) -> Method:
    """Weight-decomposed low-rank adapters (DoRA, Liu et al. 2024), as in Hugging Face PEFT.

    Aggregators treat A and B as LoRA's and average the magnitudes. Dropout is on the input of every
    term that is added to the frozen layer's output.

    The other arguments are those of :func:`fedjax_peft.lora`.

    Args:
      init: ``kaiming`` or ``gaussian``, as for :func:`fedjax_peft.lora`.

    Raises:
      InputError: an impossible option here; a target or pattern that matches nothing, or a rank
        above a matrix's side, when it is attached.
    """
    return low_rank_method("dora", low_rank_options(rank, **options), DoRALinear)
