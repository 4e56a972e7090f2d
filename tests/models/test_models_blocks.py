"""Recomputation in the backward pass frees memory.

``test_models_stacks.py`` shows that it changes no number.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from internals import abstract_module
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.models.blocks import set_options

pytestmark = pytest.mark.slow


def with_remat(made, remat):
    module = made.module()
    set_options(module, remat)
    return fp.bind(module, head=made.head, method=made.method)


def test_what_the_backward_pass_keeps():
    """By the residuals of ``jax.vjp``, which no compiler has changed yet."""
    config = {"vocab_size": 40, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
    made = fp.random_model({"model_type": "gpt2", **config}, head=fp.heads.causal_lm(), dropout=0.0)
    made = fp.attach(made, fp.lora(rank=2))
    columns = {"input_ids": jnp.zeros((8, 128), int), "attention_mask": jnp.ones((8, 128), bool)}

    def held(remat):
        own = with_remat(made, remat)

        def residuals(trainable):
            apply = functools.partial(own.apply, own.frozen)
            return jax.vjp(lambda t: apply(t, columns, None, False).hidden, trainable)[1]

        arrays = jax.tree.leaves(jax.eval_shape(residuals, own.trainable))
        return sum(x.size for x in arrays if x.shape[:1] == (8,)) / (8 * 128 * 64)

    # In numbers of hidden states, of which an array of scores has eight (4 heads x 128 keys).
    everything, dots, blocks = held("none"), held("dots"), held("blocks")
    assert 3 <= blocks < 3 + 6
    # Queries, keys and values (3), outputs (1), feed-forward (4 and 1), the block's input and sums.
    assert 3 * 9 < dots < 3 * 14
    assert everything > 3 * 28


def test_remat_is_refused_where_there_are_no_blocks():
    lstm = abstract_module({"model_type": "lstm", "vocab_size": 20}, fp.heads.causal_lm())
    refused("no blocks", set_options, lstm, "blocks")
    refused("no blocks", set_options, lstm, scan_layers=True)
    gpt2 = abstract_module({"model_type": "gpt2", "vocab_size": 20}, fp.heads.causal_lm())
    refused("'blocks'", set_options, gpt2, "block")
