"""(IA)³: learned vectors that rescale activations (Liu et al. 2022), with PEFT's conventions."""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterParam
from fedjax_peft.peft.base import (
    Adapted,
    Defaults,
    Method,
    find,
    find_linear,
    listed,
    replace_module,
)
from fedjax_peft.support.errors import InputError, nearest


class IA3Linear(Adapted):
    """``l ∘ (x W + b)``, or ``(l ∘ x) W + b`` in a feed-forward layer. ``base`` is frozen.

    ``ia3_l`` is ``[out]`` (``[in]`` in a feed-forward layer) and starts at one. In other layers the
    bias is scaled too, as in Hugging Face PEFT.
    """

    def __init__(self, base: nnx.Linear, feed_forward: bool):
        n_in, n_out = base.kernel.shape
        self.base = base
        self.feed_forward = feed_forward
        self.ia3_l = AdapterParam(jnp.ones(n_in if feed_forward else n_out))

    def __call__(self, x: Array) -> Array:
        """Returns the layer's output for ``x`` ``[..., in]``."""
        return self.base(self._scaled(x)) if self.feed_forward else self._scaled(self.base(x))

    def merged(self) -> nnx.Module:
        """Returns the linear layer of ``W ∘ l`` and ``b ∘ l``, or of ``diag(l) W`` and ``b``."""
        scale, kernel, bias = self.ia3_l[...], self.base.kernel, self.base.bias
        rows = scale[:, None] if self.feed_forward else scale[None]
        kernel.set_value((kernel[...] * rows).astype(kernel[...].dtype))
        if bias is not None and not self.feed_forward:
            bias.set_value((bias[...] * scale).astype(bias[...].dtype))
        return self.base

    def _scaled(self, x: Array) -> Array:
        return (x * jnp.broadcast_to(self.ia3_l[...], x.shape)).astype(x.dtype)


@part
def ia3(
    targets: str | Sequence[str] | None = None, feed_forward: str | Sequence[str] | None = None
) -> Method:
    """(IA)³ (Liu et al. 2022): one learned factor for every feature of the adapted layers.

    Args:
      targets: which linear layers, as in Hugging Face PEFT; by default PEFT's choice for the model
        family (keys, values and the feed-forward layers). All parts of a fused projection are
        scaled.
      feed_forward: the targets whose input is scaled instead of their output; by default PEFT's
        choice for the model family, and none in a module of your own. ``[]`` means none.

    Raises:
      InputError: when it is attached, a target that matches nothing, a feed-forward layer that is
        no target, or a layer that is already adapted.
    """

    def attach(module: nnx.Module, defaults: Defaults, key: Key, head: Sequence[str]) -> nnx.Module:
        sites = find_linear(module, targets, defaults, head, "ia3")
        inner = _feed_forward(module, sites, defaults, head)
        for path, site in sites.items():
            replace_module(module, path, IA3Linear(site, path in inner))
        return module

    def _feed_forward(
        module: nnx.Module, sites: dict[str, nnx.Linear], defaults: Defaults, head: Sequence[str]
    ) -> set[str]:
        if feed_forward is None:
            names = defaults.get("ia3_feed_forward", ())
            return {p for p in sites if any(p == n or p.endswith(f".{n}") for n in names)}
        if not feed_forward:
            return set()
        found = find(module, feed_forward, (nnx.Linear, Adapted), head).keys() & sites.keys()
        if not found:
            raise InputError(
                f"feed_forward = {feed_forward!r} names none of the targets."
                f" {nearest(str(feed_forward), sites)}"
            )
        return found

    options = {"targets": listed(targets), "feed_forward": listed(feed_forward, "feed_forward")}
    return Method("ia3", options, attach)
