"""A sum of named LoRAs: formula, start, dropout, merging, names; the roles' names of its leaves."""

import jax.numpy as jnp
import numpy as np
import pytest
from closeness import ROUNDOFF, assert_close
from flax import nnx
from tiny import logits, tiny, trained

import fedjax_peft as fp
from fedjax_peft.peft.lora_sum import LoRASumLinear


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def layer(names, dropout=0.0):
    """Returns a layer whose LoRAs all differ, and the sum of their products."""
    rng, base = np.random.default_rng(0), nnx.Linear(8, 6, rngs=nnx.Rngs(0))
    made = LoRASumLinear(base, normal(rng, 8, 2), normal(rng, 2, 6), 1.5, dropout, names=names)
    product = np.zeros((8, 6))
    for name in names:
        one = getattr(made, name)
        one.lora_a.set_value(normal(rng, 8, 2))
        one.lora_b.set_value(normal(rng, 2, 6))
        product += 1.5 * np.asarray(one.lora_a[...], float) @ np.asarray(one.lora_b[...], float)
    return made, product


@pytest.mark.parametrize("names", [("one",), ("root", "cluster", "leaf")])
def test_output_is_the_formula_and_merged_is_factored(names):
    made, product = layer(names)
    x = np.random.default_rng(1).normal(size=(3, 5, 8)).astype(np.float32)
    expected = x @ (np.asarray(made.base.kernel[...]) + product)
    rounding = 16 * ROUNDOFF * np.abs(expected).max()  # sums of 8 products, and of up to 6
    assert_close(made(x), expected, rtol=0, atol=rounding)
    left, right = made.factors()
    assert left.shape == (8, 2 * len(names))
    assert_close(left @ right, product, rtol=0, atol=1e-5)
    assert_close(made.merged()(x), expected, rtol=0, atol=rounding)


def test_all_loras_read_the_same_dropped_input():
    made, _ = layer(("one", "other"), dropout=0.5)
    made.other.lora_a.set_value(made.one.lora_a[...])
    made.other.lora_b.set_value(-made.one.lora_b[...])
    x = np.random.default_rng(1).normal(size=(40, 8)).astype(np.float32)
    assert_close(made(x), made.base(x), rtol=0, atol=1e-5)
    made.other.lora_b.set_value(0 * made.one.lora_b[...])
    change = np.asarray(made(x) - made.base(x))
    whole = 1.5 * x @ np.asarray(made.one.lora_a[...]) @ np.asarray(made.one.lora_b[...])
    assert np.abs(change - whole).max() > 0.1


def test_each_alone_is_a_lora():
    model, plain = fp.attach(tiny(), fp.peft.lora_sum(2)), fp.attach(tiny(), fp.lora(2))
    assert model.counts()["adapter"] == 3 * plain.counts()["adapter"]
    params = trained(plain)
    for name in ("root", "cluster", "leaf"):
        leaves = dict(model.trainable)
        for n, x in params.items():
            leaves[n.replace(".lora_", f".{name}.lora_") if ".lora_" in n else n] = x
        assert_close(logits(model, leaves), logits(plain, params), rtol=0, atol=1e-5)
