"""FedMCP's pair of adapters at every site: ``h + ½ f_g(h) + ½ f_p(h)``.

The global adapter is shared and the private one stays with its client: their leaves' names contain
``.global_adapter.`` and ``.private_adapter.``, which is a rule for each role.
"""

import re
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from fedjax_peft.errors import InputError, nearest
from fedjax_peft.peft.base import Defaults, Method
from fedjax_peft.peft.bottleneck import (
    PLACEMENTS,
    Bottleneck,
    Init,
    attach_bottlenecks,
    bottleneck_options,
)
from fedjax_peft.random import stream
from fedjax_peft.typing import Key, Params

__all__ = ["MODES", "DualBottleneck", "dual", "mode"]

MODES = {
    "dual": {"global": 1, "private": 1},
    "global": {"global": 2, "private": 0},
    "private": {"global": 0, "private": 2},
}
"""Mode of the encoder -> factor on what each adapter adds, beside the ½ of the mean."""


class DualBottleneck(nnx.Module):
    """The mean of two bottlenecks that read the same."""

    def __init__(self, global_adapter: Bottleneck, private_adapter: Bottleneck):
        self.global_adapter = global_adapter
        self.private_adapter = private_adapter

    def __call__(self, h: jax.Array) -> jax.Array:
        """Returns ``½ f_g(h) + ½ f_p(h)`` for ``h`` ``[..., width]``."""
        return 0.5 * (self.global_adapter(h) + self.private_adapter(h))


def dual(
    reduction_factor: float | None = None,
    *,
    size: int | None = None,
    placement: Literal["opendelta", "houlsby", "pfeiffer"] = "opendelta",
    targets: str | Sequence[str] | None = None,
    activation: str = "gelu_new",
    init: Init = "opendelta",
    scaling: float = 1.0,
) -> Method:
    """FedMCP's global and private adapters. The defaults are OpenDelta's, which FedMCP builds on.

    Args:
      reduction_factor: the bottleneck is the width divided by this.
      size: or the bottleneck itself, 16 by default as in FedMCP.
      placement: where the pair sits and what it reads; see :mod:`fedjax_peft.peft.bottleneck`.
        Activation and start are independent of it.
      targets: other places; see :func:`fedjax_peft.peft.bottleneck.houlsby`.
      activation: by its Hugging Face name.
      init: see :func:`fedjax_peft.peft.bottleneck.houlsby`. The two start at different values.
      scaling: a factor on both.

    Raises:
      InputError: an impossible option here; a model without such places when it is attached.
    """
    if placement not in PLACEMENTS:
        raise InputError(f"There is no placement {placement!r}. {nearest(placement, PLACEMENTS)}")
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


def mode(params: Params, which: Literal["dual", "global", "private"]) -> Params:
    """Returns leaves with which the encoder runs with both adapters or as if it had one alone.

    One alone has the coefficient 1 (FedMCP Eq 2), not ½. The other's up-projection is zero, so it
    adds nothing and all its leaves get a gradient of exactly zero. Only that projection is scaled:
    the trees may be stacked, and ``which`` is fixed when a function is compiled.

    Args:
      params: trainable leaves of a model with :func:`dual` attached.
      which: ``dual`` (h + ½ f_g + ½ f_p), ``global`` (h + f_g) or ``private`` (h + f_p).

    Raises:
      InputError: an unknown mode, or leaves without a pair of adapters.
    """
    if which not in MODES:
        raise InputError(f"There is no mode {which!r}. {nearest(which, MODES)}")
    rule = re.compile(r"\.(global|private)_adapter\.up\.")
    ups = {name: found[1] for name in params if (found := rule.search(name))}
    if not ups:
        raise InputError("These parameters have no global and private adapters: attach dual().")
    scaled = {}
    for name, x in params.items():
        factor = MODES[which][ups[name]] if name in ups else 1
        scaled[name] = factor * x if factor else jnp.zeros_like(x)
    return scaled
