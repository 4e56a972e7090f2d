"""Bottleneck adapters: formulas, initial values, counts, sites and errors.

Parity with ``adapters`` in torch is in ``test_peft_io_adapterhub.py``.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx
from internals import Residual, attach_module, layer_norm

import fedjax_peft as fp
from fedjax_peft.peft.bottleneck import bottleneck_size, reduction_factor

pytestmark = pytest.mark.slow

KEY = jax.random.key(5)
GOLDEN = Path(__file__).parents[1] / "golden" / "adapters"
METHODS = {"houlsby": fp.peft.houlsby, "pfeiffer": fp.peft.pfeiffer, "opendelta": fp.peft.opendelta}


@functools.cache
def tiny(family="bert"):
    return fp.load_model(GOLDEN / family)


# ------------------------------------------------------------------ the formula, in numpy's words


class Block(nnx.Module):
    """A sublayer whose output joins its input, with the layer norm after it, if any."""

    def __init__(self, rngs, *, post_norm, place="feed_forward"):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm = layer_norm(8, 1e-5, jnp.float32)
        self.post_norm = post_norm
        self.residual = Residual(place, 8)

    def __call__(self, x):
        if not self.post_norm:
            return self.residual(self.dense(self.norm(x)), x)
        return self.norm(self.residual(self.dense(x), x, self.norm))


def norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


ACTIVATIONS = {
    "houlsby": lambda x: x / (1 + np.exp(-x)),
    "pfeiffer": lambda x: np.maximum(x, 0),
    "opendelta": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("post_norm", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_output_is_the_formula(name, post_norm):
    scaling = -2.5
    options = {"targets": ["dense"]} if name == "opendelta" else {}
    module = Block(nnx.Rngs(0), post_norm=post_norm)
    attach_module(module, METHODS[name](size=3, scaling=scaling, **options))
    site = module.dense if name == "opendelta" else module.residual
    rng = np.random.default_rng(0)
    leaves = [site.adapter.down.kernel, site.adapter.down.bias]
    leaves += [site.adapter.up.kernel, site.adapter.up.bias]
    values = [rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    for leaf, value in zip(leaves, values, strict=True):
        leaf.set_value(jnp.asarray(value))
    dense = module.dense.base if name == "opendelta" else module.dense
    w, b = np.asarray(dense.kernel[...], np.float64), rng.normal(size=8)
    dense.bias.set_value(jnp.asarray(b, jnp.float32))

    def f(x):
        d, db, u, ub = values
        return scaling * (ACTIVATIONS[name](x @ d + db) @ u + ub)

    x = rng.normal(size=(2, 5, 8))
    h = (x if post_norm else norm(x)) @ w + b
    read = h
    if name == "pfeiffer":
        read = norm(x + h) if post_norm else x + h
    expected = x + h + f(read)
    expected = norm(expected) if post_norm else expected
    assert_close(module(jnp.asarray(x, jnp.float32)), expected, rtol=0, atol=2e-5)


def test_output_is_computed_in_the_dtype_of_the_activations():
    module = nnx.Dict(dense=nnx.Linear(8, 8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    attach_module(module, fp.peft.houlsby(size=3, targets=["dense"]))
    adapter, x = module.dense.adapter, jax.random.normal(KEY, (5, 8))
    adapter.up.kernel.set_value(jax.random.normal(KEY, (3, 8)))
    adapter.down.kernel.set_value(jax.random.normal(KEY, (8, 3)))
    assert module.dense(x).dtype == jnp.bfloat16
    assert adapter.up.kernel.dtype == jnp.float32
    rough, exact = adapter(x.astype(jnp.bfloat16)), adapter(x)
    # bfloat16 keeps 8 bits: 0.4 % a rounding.
    assert_close(rough.astype("f4"), exact, rtol=0, atol=0.02 * abs(exact).max())


# ---------------------------------------------------------------------------------------- starts


def start(init, width=64, size=48, seed=0):
    module = nnx.Dict(dense=nnx.Linear(4, width, rngs=nnx.Rngs(0)))
    attach_module(module, fp.peft.houlsby(size=size, init=init, targets=["dense"]), seed=seed)
    adapter = module.dense.adapter
    assert not adapter.down.bias[...].any()
    assert not adapter.up.bias[...].any()
    return np.asarray(adapter.down.kernel[...]), np.asarray(adapter.up.kernel[...])


@pytest.mark.parametrize(("init", "deviation"), [("bert", 0.02), ("opendelta", 0.01)])
def test_normal_starts(init, deviation):
    for kernel in start(init):
        assert abs(kernel.std() / deviation - 1) < 0.05
        assert np.abs(kernel).max() > 3 * deviation


def test_houlsby_start_is_cut_off_at_two_deviations():
    for kernel in start("houlsby"):
        assert 0.0195 < np.abs(kernel).max() <= 0.02
        # A normal variable cut off at two deviations keeps 0.8796 of its deviation.
        assert abs(kernel.std() / 0.008796 - 1) < 0.05


def test_initial_mam_adapters_have_no_effect():
    down, up = start("mam_adapter")
    assert 0.99 / 8 < np.abs(down).max() <= 1 / 8  # ±1/sqrt(64)
    assert abs(down.std() * 8 * np.sqrt(3) - 1) < 0.05
    assert not up.any()
    module, x = Block(nnx.Rngs(0), post_norm=True), jax.random.normal(KEY, (5, 8))
    before = module(x)
    attach_module(module, fp.peft.houlsby(4, init="mam_adapter"))
    np.testing.assert_array_equal(module(x), before)


def test_start_follows_from_the_seed_and_the_path():
    np.testing.assert_array_equal(start("bert")[0], start("bert")[0])
    assert not np.array_equal(start("bert")[0], start("bert", seed=1)[0])
    both = fp.attach(tiny(), fp.peft.houlsby(4)).trainable
    kernels = [np.asarray(x) for name, x in both.items() if name.endswith("down.kernel")]
    assert len(np.unique(np.stack(kernels), axis=0)) == len(kernels) == 4
    # The same site gets the same start whatever else is adapted.
    some = fp.attach(tiny(), fp.peft.pfeiffer(4)).trainable
    shared = [name for name in some if ".adapter." in name]
    assert len(shared) == 8
    for name in shared:
        np.testing.assert_array_equal(some[name], both[name])


# ------------------------------------------------------------------------------- what is trained


@pytest.mark.parametrize(
    ("method", "places"),
    [
        (fp.peft.houlsby(8), ["attention.output.residual", "output.residual"]),
        (fp.peft.pfeiffer(8), ["output.residual"]),
        (fp.peft.opendelta(size=2), ["attention.output.dense", "output.dense"]),
        (fp.peft.bottleneck(8, places=["attention"]), ["attention.output.residual"]),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_only_the_adapters_and_the_head_are_trained(method, places):
    model = fp.attach(tiny("roberta"), method)
    sites = [f"roberta.encoder.layer.{i}.{place}" for i in (0, 1) for place in places]
    leaves = ["down.kernel", "down.bias", "up.kernel", "up.bias"]
    adapters = {name: x for name, x in model.trainable.items() if model.kinds[name] == "adapter"}
    assert adapters.keys() == {f"{site}.adapter.{leaf}" for site in sites for leaf in leaves}
    for name, x in adapters.items():
        shapes = {"down.kernel": (16, 2), "down.bias": (2,), "up.kernel": (2, 16), "up.bias": (16,)}
        assert x.shape == shapes[".".join(name.split(".")[-2:])]
    assert {n for n, kind in model.kinds.items() if kind == "head"} == tiny("roberta").kinds.keys()
    assert not model.frozen.keys() & model.trainable.keys()


def test_bottleneck_is_rounded_down_to_one_at_least():
    for factor, size in ((5, 3), (5.4, 2), (16, 1), (100, 1), (0.5, 32)):
        assert bottleneck_size(16, factor, None) == size
    assert bottleneck_size(16, None, 7) == 7


@pytest.mark.parametrize("width", [16, 96, 768, 1024])
def test_every_size_has_a_reduction_factor(width):
    for size in range(1, 2 * width):
        assert bottleneck_size(width, reduction_factor(width, size), None) == size
    assert reduction_factor(768, 48) == 16


# ------------------------------------------------------------------------ a user's own module


class Mixer(nnx.Module):
    """A module of a user: linear layers and residual slots."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs, post_norm=False) for _ in range(2)])
        self.hidden = nnx.Linear(8, 8, rngs=rngs)
        self.out = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, batch):
        x = jax.nn.relu(self.hidden(batch["x"]))
        for block in self.blocks:
            x = block(x)
        return fp.contracts.Outputs(self.out(x), x[:, None])


@pytest.mark.parametrize(
    ("method", "adapters"),
    [
        (fp.peft.houlsby(2), ["blocks.0.residual", "blocks.1.residual"]),
        (fp.peft.pfeiffer(2, targets=["hidden", "1.residual"]), ["blocks.1.residual", "hidden"]),
        (fp.peft.opendelta(size=4, targets="hid.*"), ["hidden"]),
    ],
    ids=["slots", "both kinds", "pattern"],
)
def test_own_module_is_adapted_and_trained(method, adapters):
    model = fp.attach(fp.bind(Mixer(nnx.Rngs(0)), head=("out",)), method)
    found = {n.partition(".adapter.")[0] for n, kind in model.kinds.items() if kind == "adapter"}
    assert found == {*adapters}
    batch = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}

    def loss(params):
        outputs = model.apply(model.frozen, params, batch, jax.random.key(0), True)
        return jnp.sum(jnp.sin(outputs.logits))

    for name, x in jax.jit(jax.grad(loss))(model.trainable).items():
        assert np.abs(x).max() > 0, name
