"""The blocks of a model, applied one after the other: in a scan or not, and recomputed or not."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
from flax import nnx
from jax import Array

from fedjax_peft.models.attention import FORMS, Attending, AttentionForm
from fedjax_peft.models.modules import submodules
from fedjax_peft.support.checks import check_choice
from fedjax_peft.support.errors import InputError

Remat: TypeAlias = Literal["none", "blocks", "dots"]
"""What a training step keeps of the blocks for its backward pass. ``none``: all that it needs.
``blocks``: only the input of each block; the block is computed a second time (Chen et al. 2016,
arXiv:1604.06174). ``dots``: also the results of products with weights; everything else, attention's
scores included, is computed a second time."""

_POLICIES: dict[str, Any] = {
    "blocks": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Blocks(nnx.List):
    """The blocks of a backbone; their paths are ``<name>.0``, ``<name>.1`` and so on.

    A family applies its blocks by these methods. In a model with ``scan_layers`` the first blocks
    of the list stand for many: their arrays have a leading axis of layers
    (:mod:`fedjax_peft.models.stacks`). A loop over all blocks, for passes without a gradient, goes
    over :meth:`each`.
    """

    remat: Remat = "none"
    scan: bool = False
    """Whether to stack the blocks when the module becomes a model."""
    period: int = 0
    """The number of blocks at the start of the list that are stacked; 0: none."""
    groups: int = 0
    """How many blocks each of them stands for."""
    below: int = 0
    """The number of first blocks that are not applied (:mod:`fedjax_peft.models.reuse`)."""
    given: Array | None = None
    """The hidden states after them."""

    @property
    def layers(self) -> int:
        """The number of blocks of the model."""
        return len(self) + self.period * (self.groups - 1)

    def each(self) -> list[Any]:
        """Returns all blocks of the model in order, the stacked ones as slices of their arrays."""
        parts = [nnx.split(block) for block in self[: self.period]]
        slices = [
            nnx.merge(graph, jax.tree.map(lambda x, i=i: x[i], state))
            for i in range(self.groups)
            for graph, state in parts
        ]
        return [*slices, *self[self.period :]]

    def states(self, x: Array, *arguments: Any) -> list[Array]:
        """Returns the hidden states before the first block and after each one.

        Args:
          x: ``[batch, length, width]``, the input of the first block.
        """
        states = self.states_before_last(x, *arguments)
        return [*states, self.last(states[-1], *arguments)]

    def states_before_last(self, x: Array, *arguments: Any) -> list[Array]:
        """Returns :meth:`states` without that of the last block, which :meth:`last` computes.

        The states before and inside the blocks that are not applied are left out.
        """
        begin = self.period
        if self.given is not None:
            x, begin = self.given, len(self) - (self.layers - self.below)
        states = [x]
        if self.period and self.given is None:
            states += self._scan(x, arguments)
        for block in self[begin:-1]:
            states.append(self._apply(block, states[-1], arguments))
        return states

    def last(self, x: Array, *arguments: Any) -> Array:
        """Returns the result of the last block, which some families compute for one token only."""
        return self._apply(self[-1], x, arguments)

    def _scan(self, x: Array, arguments: Sequence[Any]) -> list[Array]:
        """Returns the hidden states after each stacked block."""
        graphs, stacked = zip(*(nnx.split(block) for block in self[: self.period]), strict=True)

        def group(x: Array, states: Sequence[Any]) -> tuple[Array, list[Array]]:
            results = []
            for graph, state in zip(graphs, states, strict=True):
                x = self._apply(nnx.merge(graph, state), x, arguments)
                results.append(x)
            return x, results

        last, results = jax.lax.scan(group, x, stacked)
        states = [result[i] for i in range(self.groups) for result in results]
        # The carry, and not a slice: most heads read this state alone, and a slice would keep all
        # states and their gradients.
        return [*states[:-1], last]

    def _apply(self, block: Any, x: Array, arguments: Sequence[Any]) -> Array:
        def run(x: Array) -> Array:
            y: Array = block(x, *arguments)
            return y

        if self.remat == "none":
            return run(x)
        # A scan keeps the two computations apart by itself.
        checkpoint = jax.checkpoint(run, policy=_POLICIES[self.remat], prevent_cse=not self.period)
        kept: Array = checkpoint(x)
        return kept


def set_options(
    module: nnx.Module,
    remat: Remat = "none",
    scan_layers: bool = False,
    attention: AttentionForm = "auto",
) -> None:
    """Sets how a module's blocks and their attention are computed.

    Args:
      remat: what a training step keeps for its backward pass, see :data:`Remat`.
      scan_layers: whether to stack the blocks when the module becomes a model
        (:mod:`fedjax_peft.models.stacks`).
    """
    check_choice("remat", remat, ("none", *_POLICIES))
    check_choice("attention", attention, FORMS)
    found = [x for _, x in submodules(module, Blocks)]
    if not found and (remat != "none" or scan_layers):
        option = f"remat = {remat!r}" if remat != "none" else "scan_layers = True"
        raise InputError(f"{option} needs a transformer; {type(module).__name__} has no blocks.")
    for blocks in found:
        blocks.remat, blocks.scan = remat, scan_layers
    attending = [x for _, x in submodules(module, Attending)]
    if not attending and attention not in ("auto", "whole"):
        raise InputError(
            f"attention = {attention!r} is not implemented for {type(module).__name__}, whose"
            ' attention has one form only; leave it at "auto".'
        )
    for layer in attending:
        layer.form = attention


def unset_scan(module: nnx.Module) -> None:
    """Makes the blocks of a module ordinary ones, as in an export."""
    for _, blocks in submodules(module, Blocks):
        blocks.scan = False
