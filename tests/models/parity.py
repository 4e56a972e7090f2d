"""Our models beside the torch models of ``torch_reference.py``."""

import functools

import jax
import numpy as np
import tiny
from closeness import assert_close
from torch_reference import torch_outputs, torch_states

from fedjax_peft.models.cache import empty


@functools.cache
def _program(apply):
    return jax.jit(apply, static_argnums=4)


def forward(model, batch, trainable=None, key=None):
    """Returns the outputs; with a key, those in training.

    The operations of BERT are compiled one by one, for many tests share them (see ``tiny.py``).
    """
    values = model.trainable if trainable is None else trainable
    if key is None and model.config.get("model_type") == "bert":
        return tiny.forward(model, batch, values)
    return _program(model.apply)(model.frozen, values, batch, key, key is not None)


def assert_equal(model, reference, batch, trainable=None, everywhere=False):
    """Checks logits and all hidden states: on real tokens, or ``everywhere``."""
    assert_equal_outputs(forward(model, batch, trainable), reference, batch, everywhere)


def assert_equal_outputs(outputs, reference, batch, everywhere=False):
    """Likewise, for outputs that are there already."""
    logits, states = torch_states(reference, batch)
    assert np.abs(logits).max() > 0.5
    _, last = torch_outputs(reference, batch)
    mask = batch.get("attention_mask")
    everywhere = everywhere or mask is None
    ours = (outputs.logits, outputs.hidden, *outputs.states)
    for got, expected in zip(ours, (logits, last, *states), strict=True):
        rows = slice(None) if everywhere or expected.ndim < 3 else mask.astype(bool)
        # Rounding grows with the largest values, which reach 12 after six layers; sums of 64 terms
        # are off by up to 64 * 6e-8 of them.
        atol = 5e-6 * max(np.abs(expected[rows]).max(), 5)
        assert_close(np.asarray(got)[rows], expected[rows], rtol=0, atol=atol)


def flipped(batch):
    """Returns a right-padded batch as a left-padded one."""
    return {name: np.ascontiguousarray(x[:, ::-1]) for name, x in batch.items()}


def one_at_a_time(model, ids, mask, first):
    """Returns the logits of texts that are read with a cache: ``first`` tokens, then each alone."""
    cache, logits = empty(len(ids), 12), []
    for columns in (slice(first), *(slice(i, i + 1) for i in range(first, ids.shape[1]))):
        batch = {"input_ids": ids[:, columns], "attention_mask": mask[:, columns], "cache": cache}
        outputs = forward(model, batch)
        logits, cache = [*logits, outputs.logits], outputs.cache
    return np.concatenate(logits, axis=1)


def assert_same_leaves(got, expected):
    """Checks two dicts of leaves: names, types and bits."""
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert got[name].dtype == x.dtype
        np.testing.assert_array_equal(got[name], x, name)
