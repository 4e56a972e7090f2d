"""The tiny model that tests of PEFT methods share, and its outputs on one batch."""

import functools

import numpy as np

from fedjax_peft.testing import tiny_model

BATCH = {
    "input_ids": np.arange(52, dtype=np.int32).reshape(4, 13) + 5,
    "attention_mask": np.arange(13)[None] < np.array([13, 7, 1, 10])[:, None],
}
"""Of the shape of ``torch_reference.padded_batch``, so that both share what is compiled."""


@functools.cache
def tiny(family="bert"):
    """Returns a classifier of three classes."""
    return tiny_model(3, model_type=family)


def logits(model, trainable=None):
    """Returns the logits of the batch, with other trainable leaves if they are given.

    The operations are compiled one by one, and most models here have the same ones. So adapters
    that add zeros leave the very bits.
    """
    trainable = model.trainable if trainable is None else trainable
    return model.apply(model.frozen, trainable, BATCH, None, False).logits


def trained(model, seed=1):
    """Returns trainable leaves as after a run: all changed, except the fixed ones."""
    rng = np.random.default_rng(seed)
    return {
        name: x if model.kinds[name] == "fixed" else x + rng.normal(0, 0.2, x.shape).astype("f4")
        for name, x in sorted(model.trainable.items())
    }
