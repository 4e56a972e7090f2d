"""(IA)³: formula, scaled activations, merging and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx
from internals import FusedLinear, attach_module
from tiny import tiny

import fedjax_peft as fp
from fedjax_peft.peft.ia3 import IA3Linear

KEY = jax.random.key(3)


def scales(model):
    return {n: x.size for n, x in model.trainable.items() if model.kinds[n] == "adapter"}


def layer(feed_forward, base=None):
    base = base or nnx.Linear(8, 6, bias_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(0))
    module = IA3Linear(base, feed_forward)
    module.ia3_l.set_value(jax.random.normal(KEY, module.ia3_l.shape))
    return module


@pytest.mark.parametrize("feed_forward", [False, True])
def test_output_is_the_formula_and_merged_is_the_same(feed_forward):
    module = layer(feed_forward)
    x = np.asarray(jax.random.normal(KEY, (2, 5, 8)))
    scale, kernel, bias = (
        np.asarray(v[...]) for v in (module.ia3_l, module.base.kernel, module.base.bias)
    )
    expected = (x * scale) @ kernel + bias if feed_forward else (x @ kernel + bias) * scale
    assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
    assert_close(module.merged()(x), expected, rtol=1e-5, atol=1e-5)


def test_fused_projection_is_scaled_whole():
    base = FusedLinear(4, 12, ("q", "k", "v"), jnp.float32)
    module = layer(False, base)
    assert module.ia3_l.shape == (12,)
    x = jax.random.normal(KEY, (3, 4))
    assert_close(module(x), base(x) * module.ia3_l[...][None], rtol=1e-5, atol=1e-5)


def test_compute_dtype_is_kept():
    base = nnx.Linear(8, 6, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for feed_forward in (False, True):
        assert layer(feed_forward, base)(jnp.ones((2, 8), jnp.bfloat16)).dtype == jnp.bfloat16


def test_default_targets_are_those_of_peft():
    # Keys, values, and the input of both layers whose name ends in output.dense.
    leaves = {
        f"bert.encoder.layer.{i}.{path}.ia3_l": size
        for i in (0, 1)
        for path, size in {
            "attention.self.key": 32,
            "attention.self.value": 32,
            "attention.output.dense": 32,
            "output.dense": 64,
        }.items()
    }
    assert scales(fp.attach(tiny(), fp.peft.ia3())) == leaves


@pytest.mark.parametrize(
    ("feed_forward", "count"),
    [
        (None, 4),  # the attention's output.dense is meant by the name too
        (["intermediate.dense"], 2),
        (r".*layer\.1\.intermediate.*", 1),
        ([], 0),
    ],
)
def test_feed_forward_layers(feed_forward, count):
    method = fp.peft.ia3(["key", "dense"], feed_forward)
    module = attach_module(
        tiny().module(), method, {"ia3_feed_forward": ("output.dense",)}, head=tiny().head
    )
    made = [m for _, m in nnx.iter_modules(module) if isinstance(m, IA3Linear)]
    assert len(made) == 8
    assert sum(m.feed_forward for m in made) == count
