"""EVA: LoRA's A from the activations of the adapted layers (Paischer et al. 2025).

    x_1, ..., x_n   the inputs of a layer, of all real tokens of the examples
    C = Σ_i (x_i - x̄)(x_i - x̄)ᵀ = V Λ Vᵀ,   A = V_{:r},   B = 0

so that A reads the r directions of the most variance, and outputs do not change at the start.

In a federation ``Σ x xᵀ``, ``Σ x`` and n of all clients are summed, so the result is that of pooled
examples. The paper's incremental SVD would depend on the order of clients, and on how often they
are asked. It happens once, before the first round, and is not part of a run's traffic. A client
would send ``4 (in (in + 1) / 2 + in + 1)`` bytes for each adapted layer, once for layers with the
same input: 1.8 MB for MiniLM-L6, as much as 6 rounds of a LoRA of rank 8 without the head. It costs
a forward pass of each example, and one eigendecomposition of ``[in, in]`` for each layer. It has no
noise: a run with differential privacy needs public examples.

* The mean is taken away, as in the incremental PCA of Hugging Face PEFT; the paper's formulas do
  not say it.
* All layers keep their rank (the paper's ρ = 1). Redistribution of ranks is not here.
* Every real token counts, also those of a language model's prompt.
* Signs are canonical: the largest entry of each direction is positive.

Checked against NumPy's SVD of torch's activations, and the subspace against Hugging Face PEFT's.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Batch, Params
from fedjax_peft.models.base import Model
from fedjax_peft.models.blocks import Blocks
from fedjax_peft.models.modules import replace_module, submodules
from fedjax_peft.peft.lora import FusedLoRALinear, LoRALinear
from fedjax_peft.support.errors import InputError

Moments = Mapping[str, tuple[Any, Any, Any]]
"""Path of a layer -> (``Σ x xᵀ``, ``Σ x``, n)."""


class _Recording(nnx.Module):
    """A layer that tells its input."""

    def __init__(self, layer: nnx.Module, tell: Callable[[Array], None]):
        self.layer, self.tell = layer, tell

    def __call__(self, x: Array) -> Array:
        self.tell(x)
        y: Array = self.layer(x)
        return y


def activation_start(model: Model, batches: Iterable[Batch]) -> Model:
    """Returns the model with EVA's start, from the inputs of the adapted layers.

    Args:
      model: with ``lora(init="eva")`` attached.
      batches: examples, such as some of every client.

    Raises:
      InputError: the model has no such LoRA, there are no batches, or fewer tokens than a rank.
    """
    if model.method is None or model.method.options.get("init") != "eva":
        raise InputError('activation_start is for a model with fp.lora(init="eva") attached.')
    total: Moments = {}
    measure = jax.jit(partial(_moments, model))
    for batch in batches:
        found = jax.tree.map(lambda x: np.asarray(x, np.float64), measure(model.frozen, batch))
        total = jax.tree.map(np.add, total, found) if total else found
    if not total:
        raise InputError("activation_start needs at least one batch of examples.")
    trainable = dict(model.trainable)
    for name, a in model.trainable.items():
        if name.endswith(".lora_a"):
            path = next(path for path in total if name.startswith(f"{path}."))
            trainable[name] = _directions(path, total[path], a.shape[1])
    return model.replace(trainable=trainable)


def _moments(model: Model, frozen: Params, batch: Batch) -> Moments:
    module = model.replace(frozen=frozen).module()
    for _, blocks in submodules(module, Blocks):
        blocks.scan, blocks.remat = False, "none"
    found: dict[str, tuple[Array, Array, Array]] = {}

    def tell(path: str, x: Array) -> None:
        weights = _real(x, batch)
        x = x.astype(jnp.float32).reshape(-1, x.shape[-1])
        kept = x * weights[:, None]
        found[path] = (jnp.matmul(kept.T, x, precision="highest"), kept.sum(0), weights.sum())

    for path, layer in dict(submodules(module, (LoRALinear, FusedLoRALinear))).items():
        replace_module(module, path, _Recording(layer, partial(tell, path)))
    module(batch) if model.forward is None else model.forward(module, batch)
    return found


def _real(x: Array, batch: Batch) -> Array:
    """Returns 1 for inputs ``[batch, ..., in]`` of real tokens of real examples, else 0; flat."""
    real = jnp.asarray(batch.get("mask", jnp.ones(len(x))), jnp.float32)
    tokens = batch.get("attention_mask")
    if tokens is not None and x.shape[:-1] == tokens.shape:
        real = real[:, None] * tokens
    real = real.reshape(*real.shape, *(1,) * (x.ndim - 1 - real.ndim))
    return jnp.broadcast_to(real, x.shape[:-1]).reshape(-1)


def _directions(path: str, moments: tuple[Any, Any, Any], rank: int) -> Array:
    square, total, count = moments
    if count <= rank:
        raise InputError(
            f"EVA needs more tokens than the rank {rank}, and the inputs of {path!r} are"
            f" {int(count)}: give more examples."
        )
    _, vectors = np.linalg.eigh(square - np.outer(total, total) / count)
    chosen = vectors[:, ::-1][:, :rank]
    largest = np.take_along_axis(chosen, np.abs(chosen).argmax(axis=0)[None], axis=0)
    return jnp.asarray(chosen * np.sign(largest), jnp.float32)
