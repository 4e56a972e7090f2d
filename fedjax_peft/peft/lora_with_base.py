"""LoRA on layers whose own weights are trained too: ``y = x W + b + s · (x A) B``, W and b trained.

This is pFedLoRA's form (Yi et al. 2023): W and b belong to a client's own model, and A and B are
the small adapter that clients share. The leaves of W and b are named as in
:func:`fedjax_peft.peft.lora`, ``PATH.base.kernel`` and ``PATH.base.bias``, but are trained.
"""

from typing import Unpack

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterParam
from fedjax_peft.models.quantized import QuantizedLinear
from fedjax_peft.peft.base import Method
from fedjax_peft.peft.lora import (
    LoRALinear,
    LowRankOptions,
    low_rank_method,
    low_rank_options,
    takes_low_rank_options,
)
from fedjax_peft.support.errors import InputError


@part
@takes_low_rank_options
def lora_with_base(
    rank: Count = 8,
    **options: Unpack[LowRankOptions],
) -> Method:
    """LoRA, and the weights and biases of the layers that it adapts (pFedLoRA's local models).

    A client that keeps these weights has its own copy of them, so the memory grows with the
    clients.

    The other arguments are those of :func:`fedjax_peft.lora`.

    Args:
      init: ``kaiming`` or ``gaussian``, as for :func:`fedjax_peft.lora`.

    Raises:
      InputError: as :func:`fedjax_peft.lora`; a quantised layer, when it is attached.
    """
    checked = low_rank_options(rank, **options)
    return low_rank_method("lora_with_base", checked, LoRALinear, _train_base)


def _train_base(path: str, site: LoRALinear, key: Key) -> None:
    if isinstance(site.base, QuantizedLinear):
        raise InputError(
            f"lora_with_base trains the weights of {path!r}, which are quantised, so they never"
            " change. Load the model without quantize, or attach lora."
        )
    for name in ("kernel", "bias"):
        parameter = getattr(site.base, name)
        if parameter is not None:
            setattr(site.base, name, AdapterParam(parameter[...]))
