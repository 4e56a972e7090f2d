"""The tiny model that tests of PEFT methods share, and its outputs on one batch."""

import functools

import numpy as np

from fedjax_peft.testing import tiny_model

BATCH = {
    "input_ids": np.arange(20, dtype=np.int32).reshape(4, 5) + 5,
    "attention_mask": np.arange(5)[None] < np.array([5, 3, 4, 2])[:, None],
}


@functools.cache
def tiny():
    """Returns a BERT classifier of three classes."""
    return tiny_model(3)


def logits(model, trainable=None):
    """Returns the logits of the batch, with other trainable leaves if they are given."""
    trainable = model.trainable if trainable is None else trainable
    return model.apply(model.frozen, trainable, BATCH, None, False).logits


def trained(model, seed=1):
    """Returns trainable leaves as after a run: all changed, except the fixed ones."""
    rng = np.random.default_rng(seed)
    return {
        name: x if model.kinds[name] == "fixed" else x + rng.normal(0, 0.2, x.shape).astype("f4")
        for name, x in sorted(model.trainable.items())
    }
