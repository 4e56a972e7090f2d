"""FedDPA's instance weights: how much of a text's prediction comes from the local adapter.

    α(x) = <h(x) / ‖h(x)‖, reference>,    reference = w · mean over examples of h_j / ‖h_j‖

h(x) is the last hidden state of the text's last token (the first token in BERT), computed with the
local adapter alone. So α is w times the mean cosine between a text and a few training examples of
its client. A model with a reference of zeros uses its constant weight instead.

This module is separate from the adapters (:mod:`fedjax_peft.peft.dual_lora`), because algorithms
use it and must not import flax.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import ApplyFn, Batch, Key, Outputs, Params, Platform, on_platform
from fedjax_peft.support.errors import InputError

REFERENCE = "instance.private_adapter.reference"
"""The leaf with the reference, float32 ``[width]``; an empty array switches the weights off. It
belongs to a client like its local adapter, by the same role rules, and is never derived."""

_WEIGHT = ".adapter_weight"


def with_weight(leaves: Params, weight: Array | float) -> Params:
    """Returns the leaves with a weight of the local adapter at every site.

    Args:
      leaves: of a model with ``dual_lora``.
      weight: a scalar, or one number for each example, ``[batch]``.
    """
    end = ".private_adapter.lora_a"
    sites = [name.removesuffix(end) for name in leaves if name.endswith(end)]
    return {**leaves, **{f"{path}{_WEIGHT}": jnp.asarray(weight, jnp.float32) for path in sites}}


def embedding(outputs: Outputs) -> Array:
    """Returns the hidden state of the token that represents each text, of length 1, float32."""
    hidden = outputs.hidden
    if hidden is None:
        raise InputError(
            "FedDPA compares the last hidden states of texts, and this model returns none: return"
            " fp.contracts.Outputs(logits, hidden)."
        )
    if outputs.last is None:
        chosen = hidden[:, 0]
    else:
        chosen = jnp.take_along_axis(hidden, outputs.last[:, None, None], axis=1)[:, 0]
    chosen = chosen.astype(jnp.float32)
    length = jnp.linalg.norm(chosen, axis=-1, keepdims=True)
    return chosen / jnp.where(length > 0, length, 1.0)


@dataclass(frozen=True, eq=False)
class InstanceWeighted:
    """The forward pass that computes instance weights in evaluations.

    It runs the model twice: with the local adapter alone, and with the weights. In training, with a
    key-value cache (generation), and without a reference, constant weights are used.
    """

    apply: ApplyFn

    def __call__(
        self, frozen: Params, trainable: Params, batch: Batch, key: Key | None, train: bool
    ) -> Outputs:
        """Returns the outputs for ``batch``; see :class:`fedjax_peft.contracts.ApplyFn`."""
        reference = trainable[REFERENCE]
        if train or "cache" in batch or not reference.size:
            return self.apply(frozen, trainable, batch, key, train)
        alone = self.apply(frozen, with_weight(trainable, 1.0), batch, key, train)
        similar = jnp.sum(embedding(alone) * reference[None], axis=-1)
        constant = next(x for n, x in trainable.items() if n.endswith(_WEIGHT))
        weight = jnp.where(jnp.any(reference != 0), jnp.clip(similar, 0.0, 1.0), constant)
        return self.apply(frozen, with_weight(trainable, weight), batch, key, train)

    def on(self, platform: Platform) -> ApplyFn:
        """Returns the forward pass for a platform."""
        return replace(self, apply=on_platform(self.apply, platform))
