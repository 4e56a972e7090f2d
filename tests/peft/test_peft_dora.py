"""DoRA: formula, gradients, merging and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx
from internals import pairs
from tiny import tiny

import fedjax_peft as fp
from fedjax_peft.peft.dora import DoRALinear

pytestmark = pytest.mark.slow

KEY = jax.random.key(3)
S = 1.5


def layer(*, dropout=0.0, bias=True, **options):
    """Returns a layer whose leaves are all random, B and the magnitude too."""
    normal = nnx.initializers.normal(1.0)
    base = nnx.Linear(8, 6, use_bias=bias, bias_init=normal, rngs=nnx.Rngs(0), **options)
    a, b = jax.random.normal(KEY, (8, 3)), jax.random.normal(KEY, (3, 6))
    module = DoRALinear(base, a, b, S, dropout)
    module.lora_magnitude.set_value(jax.random.normal(KEY, (6,)))
    return module


def leaves(module):
    """Returns W, b, A, B and m as NumPy arrays."""
    base = module.base
    variables = (base.kernel, base.bias, module.lora_a, module.lora_b, module.lora_magnitude)
    return [np.asarray(v[...]) if v is not None else 0.0 for v in variables]


@pytest.mark.parametrize("bias", [True, False])
def test_output_is_the_formula_and_merged_is_the_same(bias):
    module = layer(bias=bias)
    w, offset, a, b, m = leaves(module)
    v = w + S * a @ b
    x = np.asarray(jax.random.normal(KEY, (2, 5, 8)))
    expected = x @ (m * v / np.linalg.norm(v, axis=0)) + offset
    assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
    assert_close(module.merged()(x), expected, rtol=1e-5, atol=1e-5)


def forward(module, batch):
    y = module(batch["x"])
    return fp.contracts.Outputs(y, y)


def test_no_gradient_passes_through_the_norm():
    module = layer()
    w, offset, a, b, _ = leaves(module)
    norm = np.linalg.norm(w + S * a @ b, axis=0)
    x = jax.random.normal(KEY, (5, 8))
    model = fp.bind(module, forward=forward)

    def constant_norm(p):
        v = w + S * p["lora_a"] @ p["lora_b"]
        return jnp.sum(jnp.sin(x @ (p["lora_magnitude"][None] * v / norm[None]) + offset[None]))

    def ours(p):
        return jnp.sum(jnp.sin(model.apply(model.frozen, p, {"x": x}, None, False).logits))

    expected, got = (jax.jit(jax.grad(f))(model.trainable) for f in (constant_norm, ours))
    for name in ("lora_a", "lora_b", "lora_magnitude"):
        assert_close(got[name], expected[name], rtol=1e-4, atol=1e-5)


def test_dropout_acts_on_all_that_is_added_to_the_frozen_layer():
    module = layer(dropout=0.5)
    w, offset, a, b, m = leaves(module)
    gain = m / np.linalg.norm(w + S * a @ b, axis=0)
    x = jax.random.normal(KEY, (20, 8))
    dropped = np.asarray(module.dropout(x))
    assert 0.3 < np.mean(dropped == 0) < 0.7
    added = (gain - 1) * (dropped @ w) + gain * (S * dropped @ a @ b)
    assert_close(module(x), np.asarray(x) @ w + offset + added, rtol=1e-4, atol=1e-4)
    module.eval()
    v = w + S * a @ b
    assert_close(module(x), np.asarray(x) @ (gain * v) + offset, rtol=1e-4, atol=1e-4)


def test_column_of_zeros_stays_finite():
    base = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    base.kernel.set_value(base.kernel[...].at[:, 1].set(0))
    module = DoRALinear(base, jnp.ones((4, 2)), jnp.zeros((2, 3)), 1.0, 0.0)
    model, x = fp.bind(module, forward=forward), jnp.ones((2, 4))

    def total(p):
        return jnp.sum(model.apply(model.frozen, p, {"x": x}, None, False).logits)

    value, slopes = jax.jit(jax.value_and_grad(total))(model.trainable)
    assert_close(value, jnp.sum(base(x)), rtol=1e-5)
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in slopes.values())


def test_compute_dtype_is_kept_and_close():
    x = jax.random.normal(KEY, (20, 8))
    rough = layer(dtype=jnp.bfloat16)(x.astype(jnp.bfloat16))
    assert rough.dtype == jnp.bfloat16
    assert_close(rough.astype(jnp.float32), layer()(x), rtol=0.05, atol=0.1)


def test_initial_magnitudes_are_the_norms_of_the_columns():
    model = fp.attach(tiny(), fp.peft.dora(4, alpha=6.0, init="gaussian"))
    site = "bert.encoder.layer.1.attention.self.value"
    norms = np.linalg.norm(tiny().frozen[f"{site}.kernel"], axis=0)
    assert_close(model.trainable[f"{site}.lora_magnitude"], norms, rtol=1e-6)
    assert model.trainable[f"{site}.lora_a"].std() > 0
    assert not model.trainable[f"{site}.lora_b"].any()


def test_trained_leaves_and_the_leaves_of_aggregators():
    model = fp.attach(tiny(), fp.peft.dora(4))
    sites = [
        f"bert.encoder.layer.{i}.attention.self.{n}" for i in (0, 1) for n in ("query", "value")
    ]
    adapters = {name for name, kind in model.kinds.items() if kind == "adapter"}
    assert adapters == {f"{s}.lora_{n}" for s in sites for n in ("a", "b", "magnitude")}
    assert list(pairs(model.trainable)) == sites
    assert model.counts()["adapter"] == len(sites) * (4 * 2 * 32 + 32)
