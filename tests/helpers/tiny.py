"""The tiny model that tests of PEFT methods share, and its outputs on one batch."""

import functools

import jax
import numpy as np

import fedjax_peft as fp

BATCH = {
    "input_ids": np.arange(52, dtype=np.int32).reshape(4, 13) + 5,
    "attention_mask": np.arange(13)[None] < np.array([13, 7, 1, 10])[:, None],
}
"""Of the shape of ``torch_reference.padded_batch``, so that both share what is compiled."""


@functools.cache
def tiny(family="bert"):
    """Returns a classifier of three classes."""
    return fp.testing.tiny_model(3, model_type=family)


def forward(model, batch, trainable=None):
    """Returns the outputs for a batch, with other trainable leaves if they are given.

    The operations of BERT are compiled one by one, for most tests share them; so adapters that add
    zeros leave the very bits. A model of another family is one program; so is one with a prompt,
    whose longer texts no other test has.
    """
    trainable = model.trainable if trainable is None else trainable
    apply, prompt = model.apply, getattr(model.method, "name", "") == "prompt_tuning"
    if prompt or model.config.get("model_type") != "bert":
        apply = jax.jit(apply, static_argnums=4)
    return apply(model.frozen, trainable, batch, None, False)


def logits(model, trainable=None):
    """Returns the logits of the batch of these tests."""
    return forward(model, BATCH, trainable).logits


def trained(model, seed=1):
    """Returns trainable leaves as after a run: all changed, except the fixed ones."""
    rng = np.random.default_rng(seed)
    return {
        name: x if model.kinds[name] == "fixed" else x + rng.normal(0, 0.2, x.shape).astype("f4")
        for name, x in sorted(model.trainable.items())
    }
