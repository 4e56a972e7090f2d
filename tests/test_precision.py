"""Weights wider than the compute dtype are split in two parts, and LoRA's layers use both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from internals import AdapterParam, LoRALinear, effective, frozen_output, is_wider, linear, split

RNG = np.random.default_rng(0)
NARROW = jnp.asarray(RNG.normal(size=(32, 16)), jnp.bfloat16).astype(jnp.float32)
SMALL = jnp.asarray(RNG.normal(size=(32, 16)) * 1e-4, jnp.float32)


def relative(x, y):
    x, y = (np.asarray(z, np.float64) for z in (x, y))
    return np.linalg.norm(x - y) / np.linalg.norm(y)


@pytest.mark.parametrize("compiled", [False, True])
def test_sums_below_a_bfloat16_step_are_not_lost(compiled):
    parts = (jax.jit(split, static_argnums=1) if compiled else split)(NARROW + SMALL, jnp.bfloat16)
    assert [x.dtype for x in parts] == [jnp.bfloat16] * 2
    high, low = (np.asarray(x, np.float64) for x in parts)
    assert relative(high - NARROW, SMALL) > 0.5, "plain rounding loses it"
    assert relative(high + low - NARROW, SMALL) < 0.005
    np.testing.assert_array_equal(effective(NARROW + SMALL, jnp.bfloat16), high + low)


def test_weights_in_the_compute_dtype_are_not_split():
    x = NARROW + SMALL
    assert effective(x, jnp.float32) is x
    assert not is_wider(x, jnp.float32)
    assert not is_wider(NARROW.astype(jnp.bfloat16), jnp.bfloat16)


def layer(dtype, kernel):
    base = linear(*kernel.shape, dtype)
    base.kernel.set_value(kernel)
    base.bias.set_value(jnp.arange(kernel.shape[1], dtype=jnp.float32))
    return base


@pytest.mark.parametrize("compiled", [False, True])
def test_a_frozen_layer_uses_all_of_a_wide_kernel(compiled):
    """The kernel's rows cancel for these inputs, so the small part is all of the output."""
    kernel = jnp.concatenate([NARROW[:16], -NARROW[:16]]) + SMALL
    base = layer(jnp.bfloat16, kernel)
    base.bias.set_value(jnp.zeros(16))
    x = jnp.asarray(np.tile(RNG.normal(size=(7, 16)), 2), jnp.bfloat16)
    graph, state = nnx.split(base)

    def run(function, x):
        return function(nnx.merge(graph, state), x)

    def of(function):
        return (jax.jit(run, static_argnums=0) if compiled else run)(function, x)

    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    y = of(frozen_output)
    assert y.dtype == jnp.bfloat16
    assert relative(y, exact) < 0.01
    if not compiled:  # XLA may drop the rounding of a compiled plain layer
        assert relative(of(lambda base, x: base(x)), exact) > 0.1


def test_split_kernels_equal_the_layer():
    x = jnp.asarray(RNG.normal(size=(2, 3, 32)), jnp.float32)
    for dtype, kernel in [(jnp.float32, NARROW), (jnp.bfloat16, NARROW.astype(jnp.bfloat16))]:
        base = layer(dtype, kernel)
        np.testing.assert_array_equal(frozen_output(base, x), base(x))


def test_a_trained_kernel_is_rounded():
    """So one product is enough, as in full fine-tuning."""
    base, x = layer(jnp.bfloat16, NARROW + SMALL), jnp.ones((7, 32), jnp.bfloat16)
    base.kernel = AdapterParam(base.kernel[...])
    np.testing.assert_array_equal(frozen_output(base, x), base(x))


def test_gradients_pass_through_a_wide_kernel_to_the_input():
    base = layer(jnp.bfloat16, NARROW + SMALL)
    adapted = LoRALinear(base, jnp.zeros((32, 2)), jnp.zeros((2, 16)), 1.0, 0.0)
    x = jnp.asarray(RNG.normal(size=(7, 32)), jnp.bfloat16)
    gradient = jax.grad(lambda x: jnp.sum(adapted(x).astype(jnp.float32)))(x)
    assert gradient.dtype == jnp.bfloat16
    assert relative(gradient, np.tile(np.asarray(NARROW).sum(axis=1), (7, 1))) < 0.02
