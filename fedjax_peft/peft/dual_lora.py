"""FedDPA's pair of LoRAs: ``y = x W + (1 - α) s (x A_g) B_g + α s (x A_l) B_l`` (Yang et al. 2024).

A_g and B_g are the global adapter, A_l and B_l the local one. The names of their leaves contain
``.global_adapter.`` and ``.private_adapter.``, by which role rules tell them apart. α is the weight
of the local adapter: a constant, or one number for each example in evaluations
(:mod:`fedjax_peft.contracts.instance_weights`).
"""

from typing import Any, Unpack

import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.instance_weights import REFERENCE, InstanceWeighted
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterConst, Model
from fedjax_peft.peft.base import Method
from fedjax_peft.peft.lora import (
    LowRankOptions,
    frozen_output,
    low_rank_method,
    low_rank_options,
    takes_low_rank_options,
)
from fedjax_peft.peft.lora_sum import NamedLoRALinear
from fedjax_peft.support.errors import InputError

_WIDTHS = ("hidden_size", "n_embd", "dim")
"""Keys under which a ``config.json`` may have the width of the hidden states."""


class DualLoRALinear(NamedLoRALinear):
    """A linear layer with a global and a local low-rank update. ``base`` is frozen.

    ``adapter_weight`` is α: a scalar, 0 at first, or ``[batch]``.
    """

    def __init__(self, base: Any, a: Array, b: Array, scale: float, dropout: float):
        names = ("global_adapter", "private_adapter")
        super().__init__(base, a, b, scale, dropout, names=names)
        self.adapter_weight = AdapterConst(jnp.zeros(()))

    def __call__(self, x: Array) -> Array:
        """Returns the layer's output for ``x`` ``[batch, ..., in]``."""
        y = frozen_output(self.base, x)
        weight = self.adapter_weight[...].astype(y.dtype)
        if weight.ndim:
            weight = weight.reshape(-1, *(1,) * (y.ndim - 1))
        shared, own = self.updates(x, y.dtype)
        return y + (1 - weight) * shared + weight * own


@part
@takes_low_rank_options
def dual_lora(
    rank: Count = 8,
    *,
    width: Count | None = None,
    **options: Unpack[LowRankOptions],
) -> Method:
    """FedDPA's global and local LoRA at every site, with instance weights.

    Both have the same rank, start from the same A, and read the same dropped input; B is zero.
    ``Model.counts()["adapter"]`` includes ``width`` numbers of a client that are not trained, but
    computed from its examples. No file format holds the pair, and it cannot be merged: the weights
    depend on the example.

    The other arguments are those of :func:`fedjax_peft.lora`.

    Args:
      width: the width of the last hidden states; by default as the model's ``config.json`` says.
      init: ``kaiming`` or ``gaussian``, as for :func:`fedjax_peft.lora`.

    Raises:
      InputError: as :func:`fedjax_peft.lora`; when it is attached, an unknown width.
    """
    checked = {**low_rank_options(rank, **options), "width": width}

    def complete(model: Model) -> Model:
        size = width or next((model.config[k] for k in _WIDTHS if k in model.config), None)
        if size is None:
            raise InputError(
                "dual_lora compares last hidden states, and this model's config does not say how"
                " wide they are: give width, such as fp.peft.dual_lora(width=768)."
            )
        return model.replace(
            apply=InstanceWeighted(model.apply),
            trainable={**model.trainable, REFERENCE: jnp.zeros(size)},
            kinds={**model.kinds, REFERENCE: "adapter"},
        )

    return low_rank_method("dual_lora", checked, DualLoRALinear, complete=complete)
