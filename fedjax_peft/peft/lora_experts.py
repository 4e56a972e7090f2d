"""FedLEASE's experts: several LoRAs at each site, and a router with an adaptive top-M.

    y = x W + s Σ_j g_j(x) (x A_j) B_j,     j = 0: the client's own expert; 1 ... M-1: the others
    h = x R,   R [in, 2M-1]: the first M entries belong to the own expert, one to each other expert
    g_j: the softmax over the M largest entries of h, summed over those of expert j

(Wang et al. 2025.) The others have M-1 entries, so the own expert is always among the M largest.
It may take one of the M places or all, and so each token has from 1 to M experts. The names of the
leaves are ``.own.`` and ``.other_1.``, ``.other_2.`` ..., by which role rules tell them apart.

As in the authors' code (github.com/lei-wang-link/FedLEASE), the router has no bias, starts uniform
in ±1/sqrt(in), reads its input without dropout and is computed in float32; all LoRAs read the same
dropped input. There the weights are a softmax over all 2M-1 entries, of which the M largest are
divided by their sum: this is the softmax over the M largest. Its own expert has the entries of
its number and the last M-1; the order of the entries of R is another one here.

Decided here:

* A layer has room for a fixed number of experts, because programs have fixed shapes. An other
  expert whose A is zero is none: its entry and one of the own ones are closed, and M is the number
  of experts that there are. With none but the own one the layer is LoRA. (LoRA's A is never zero.)
* All experts start from the same A; B is zero, so the start changes no output.
"""

from functools import partial
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


class LoRAExpertsLinear(NamedLoRALinear):
    """A linear layer with several low-rank updates, weighted by a router. ``base`` is frozen."""

    def __init__(self, base: Any, a: Array, b: Array, scale: float, dropout: float, experts: int):
        names = ("own", *(f"other_{i}" for i in range(1, experts)))
        super().__init__(base, a, b, scale, dropout, names=names)
        self.router = AdapterParam(jnp.zeros((a.shape[0], 2 * experts - 1)))

    def __call__(self, x: Array) -> Array:
        """Returns the layer's output for ``x`` ``[..., in]``."""
        y = frozen_output(self.base, x)
        loras, dtype = self.loras(), y.dtype
        a = jnp.concatenate([lora.lora_a[...] for lora in loras], axis=1)
        scaled = [lora.lora_scale[...][:, None] * lora.lora_b[...] for lora in loras]
        b = jnp.concatenate(scaled, axis=0)
        # The experts as one LoRA, in whose middle each token weighs them: no expert's output is
        # formed, or kept for the gradient.
        low = self.dropout(x).astype(dtype) @ a.astype(dtype)
        low = low.reshape(*low.shape[:-1], len(loras), -1)
        low = low * self.shares(x).astype(dtype)[..., None]
        return y + low.reshape(*low.shape[:-2], -1) @ b.astype(dtype)

    def shares(self, x: Array) -> Array:
        """Returns g for ``x`` ``[..., in]``: float32 ``[..., experts]``, whose sum is 1."""
        _, *others = self.loras()
        room = len(others) + 1
        there = jnp.array([jnp.any(lora.lora_a[...] != 0) for lora in others], bool)
        count = 1 + jnp.sum(there)
        logits = x.astype(jnp.float32) @ self.router[...]
        may = jnp.concatenate([jnp.arange(room) < count, there])
        may = jnp.broadcast_to(may, logits.shape)
        logits = jnp.where(may, logits, -jnp.inf)
        chosen = may & (_places(logits) < count)
        weights = jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf), axis=-1)
        own = jnp.sum(weights[..., :room], axis=-1, keepdims=True)
        return jnp.concatenate([own, weights[..., room:]], axis=-1)


def _places(x: Array) -> Array:
    """Returns the place of each entry of ``x`` ``[..., n]``, from the largest, 0. No two are equal.

    It compares all pairs: n is small, and a sort of each token's entries is slower.
    """
    one, other = x[..., :, None], x[..., None, :]
    earlier = jnp.tri(x.shape[-1], k=-1, dtype=bool)
    first = jnp.broadcast_to(earlier, (*x.shape, x.shape[-1]))
    return jnp.sum((other > one) | ((other == one) & first), axis=-1)


@part
@takes_low_rank_options
def lora_experts(
    rank: Count = 8,
    *,
    experts: Count = 4,
    **options: Unpack[LowRankOptions],
) -> Method:
    """FedLEASE's LoRA experts at every site, with a router that chooses how many each token has.

    All experts have the same rank. No format of Hugging Face PEFT holds them, and their weights
    cannot be merged: the router depends on the input.

    The other arguments are those of :func:`fedjax_peft.lora`.

    Args:
      experts: M, the most experts; for ``algorithms.fedlease`` as many as its ``max_experts``.
      init: ``kaiming`` or ``gaussian``, as for :func:`fedjax_peft.lora`.
    """
    checked = {**low_rank_options(rank, **options), "experts": experts}

    def start_router(path: str, site: LoRAExpertsLinear, key: Key) -> None:
        shape, own = site.router[...].shape, stream(key, f"{path}.router")
        bound = shape[0] ** -0.5
        site.router.set_value(jax.random.uniform(own, shape, minval=-bound, maxval=bound))

    layer = partial(LoRAExpertsLinear, experts=experts)
    return low_rank_method("lora_experts", checked, layer, start_router)
