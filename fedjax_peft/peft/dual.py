"""FedMCP's pair of adapters at every site: ``h + ½ f_g(h) + ½ f_p(h)``.

The global adapter is shared, and the private one stays with its client. The names of their leaves
contain ``.global_adapter.`` and ``.private_adapter.``, by which role rules tell them apart.
"""

from collections.abc import Sequence
from typing import Literal

from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.arguments import Count, Positive
from fedjax_peft.contracts.part import part
from fedjax_peft.numerics.random import stream
from fedjax_peft.peft.base import Defaults, Method
from fedjax_peft.peft.bottleneck import (
    PLACEMENTS,
    Bottleneck,
    Init,
    attach_bottlenecks,
    bottleneck_options,
)


class DualBottleneck(nnx.Module):
    """The mean of two bottlenecks with the same input."""

    def __init__(self, global_adapter: Bottleneck, private_adapter: Bottleneck):
        self.global_adapter = global_adapter
        self.private_adapter = private_adapter

    def __call__(self, h: Array) -> Array:
        """Returns ``½ f_g(h) + ½ f_p(h)`` for ``h`` ``[..., width]``."""
        return 0.5 * (self.global_adapter(h) + self.private_adapter(h))


@part
def dual(
    reduction_factor: Positive | None = None,
    *,
    size: Count | None = None,
    placement: Literal["opendelta", "houlsby", "pfeiffer"] = "opendelta",
    targets: str | Sequence[str] | None = None,
    activation: str = "gelu_new",
    init: Init = "opendelta",
    scaling: float = 1.0,
) -> Method:
    """FedMCP's global and private adapters. The defaults are OpenDelta's, which FedMCP builds on.

    The other arguments are those of :func:`fedjax_peft.peft.houlsby`.

    Args:
      reduction_factor: the bottleneck is the width divided by this.
      size: the width of the bottleneck, instead of a factor; 16 by default as in FedMCP.
      placement: where the pair sits and what it reads; see :mod:`fedjax_peft.peft.bottleneck`. It
        does not set the activation or the initial values.
      init: ``bert``, ``houlsby``, ``mam_adapter`` or ``opendelta``, as for
        :func:`fedjax_peft.peft.houlsby`. The two adapters get different values.

    Raises:
      InputError: an impossible option here; a model without such places when it is attached.
    """
    options = {
        "placement": placement,
        **PLACEMENTS[placement]._asdict(),
        **bottleneck_options(
            reduction_factor, size, targets, activation, init, scaling, default_size=16
        ),
    }

    def make(width: int, size: int, key: Key) -> nnx.Module:
        def one(name: str) -> Bottleneck:
            return Bottleneck(
                width, size, stream(key, name), activation=activation, init=init, scaling=scaling
            )

        return DualBottleneck(one("global_adapter"), one("private_adapter"))

    def attach(module: nnx.Module, defaults: Defaults, key: Key, head: Sequence[str]) -> nnx.Module:
        return attach_bottlenecks(module, defaults, key, head, options, make)

    return Method("dual", options, attach)
