"""FedALT's pair of LoRAs with a mixer (Bian et al. 2026):

    y = x W + s (g_0(x) · (x A_r) B_r + g_1(x) · (x A_i) B_i),    g(x) = softmax(x M)

A_r and B_r are the rest-of-world LoRA, A_i and B_i the individual one, and M ``[in, 2]`` is the
mixer: every token of every layer has its own two weights, which sum to 1. The names of the leaves
contain ``.rest_of_world.`` and ``.individual.``, by which role rules tell them apart.

As in the authors' code (github.com/jmbian/FedALT) the mixer has no bias, starts uniform in
±1/sqrt(in), reads its input without dropout and is computed in float32, and both LoRAs read the
same dropped input. Here both start from the same A; B is zero, so this changes no output.
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterParam
from fedjax_peft.numerics.random import stream
from fedjax_peft.peft.base import Method
from fedjax_peft.peft.lora import (
    LowRankOptions,
    frozen_output,
    low_rank_method,
    low_rank_options,
    takes_low_rank_options,
)
from fedjax_peft.peft.lora_sum import NamedLoRALinear


class MixedLoRALinear(NamedLoRALinear):
    """A linear layer with two low-rank updates, weighted by a mixer. ``base`` is frozen."""

    def __init__(self, base: Any, a: Array, b: Array, scale: float, dropout: float):
        super().__init__(base, a, b, scale, dropout, names=("rest_of_world", "individual"))
        self.mixer = AdapterParam(jnp.zeros((a.shape[0], 2)))

    def __call__(self, x: Array) -> Array:
        """Returns the layer's output for ``x`` ``[..., in]``."""
        y = frozen_output(self.base, x)
        logits = x.astype(jnp.float32) @ self.mixer[...]
        shares = jax.nn.softmax(logits, axis=-1).astype(y.dtype)
        rest, own = self.updates(x, y.dtype)
        return y + shares[..., :1] * rest + shares[..., 1:] * own


@part
@takes_low_rank_options
def mixed_lora(
    rank: Count = 8,
    **options: Unpack[LowRankOptions],
) -> Method:
    """FedALT's individual and rest-of-world LoRA at every site, with a mixer of the two.

    Both LoRAs have the same rank. No format of Hugging Face PEFT holds the pair, and its weights
    cannot be merged: the mixer depends on the input.

    The other arguments are those of :func:`fedjax_peft.lora`.

    Args:
      init: ``kaiming`` or ``gaussian``, as for :func:`fedjax_peft.lora`.
    """
    checked = low_rank_options(rank, **options)

    def start_mixer(path: str, site: MixedLoRALinear, key: Key) -> None:
        shape, own = site.mixer[...].shape, stream(key, f"{path}.mixer")
        bound = shape[0] ** -0.5
        site.mixer.set_value(jax.random.uniform(own, shape, minval=-bound, maxval=bound))

    return low_rank_method("mixed_lora", checked, MixedLoRALinear, start_mixer)
