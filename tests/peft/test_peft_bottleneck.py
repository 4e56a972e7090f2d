"""Bottleneck adapters: formulas, initial values, counts, sites and errors.

Parity with ``adapters`` in torch is in ``test_peft_io_adapterhub.py``.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closeness import assert_close
from flax import nnx

from fedjax_peft.contracts import Outputs
from fedjax_peft.models.base import bind
from fedjax_peft.models.heads import classification
from fedjax_peft.models.hub import load_model
from fedjax_peft.models.layers import Residual, layer_norm
from fedjax_peft.peft import bottleneck, houlsby, lora, opendelta, pfeiffer
from fedjax_peft.peft.base import attach, attach_module, count
from fedjax_peft.peft.bottleneck import bottleneck_size, reduction_factor
from fedjax_peft.support.errors import InputError

pytestmark = pytest.mark.slow

KEY = jax.random.key(5)
GOLDEN = Path(__file__).parents[1] / "golden" / "adapters"
METHODS = {"houlsby": houlsby, "pfeiffer": pfeiffer, "opendelta": opendelta}


@functools.cache
def tiny(family="bert"):
    return load_model(GOLDEN / family)


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
@pytest.mark.parametrize("scaling", [1.0, -2.5])
def test_output_is_the_formula(name, post_norm, scaling):
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
    attach_module(module, houlsby(size=3, targets=["dense"]))
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
    attach_module(module, houlsby(size=size, init=init, targets=["dense"]), seed=seed)
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
    attach_module(module, houlsby(4, init="mam_adapter"))
    np.testing.assert_array_equal(module(x), before)


def test_start_follows_from_the_seed_and_the_path():
    np.testing.assert_array_equal(start("bert")[0], start("bert")[0])
    assert not np.array_equal(start("bert")[0], start("bert", seed=1)[0])
    both = attach(tiny(), houlsby(4)).trainable
    kernels = [np.asarray(x) for name, x in both.items() if name.endswith("down.kernel")]
    assert len(np.unique(np.stack(kernels), axis=0)) == len(kernels) == 4
    # The same site gets the same start whatever else is adapted.
    some = attach(tiny(), pfeiffer(4)).trainable
    shared = [name for name in some if ".adapter." in name]
    assert len(shared) == 8
    for name in shared:
        np.testing.assert_array_equal(some[name], both[name])


# ------------------------------------------------------------------------------- what is trained


@pytest.mark.parametrize(
    ("method", "places"),
    [
        (houlsby(8), ["attention.output.residual", "output.residual"]),
        (pfeiffer(8), ["output.residual"]),
        (opendelta(size=2), ["attention.output.dense", "output.dense"]),
        (bottleneck(8, places=["attention"]), ["attention.output.residual"]),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_only_the_adapters_and_the_head_are_trained(method, places):
    model = attach(tiny("roberta"), method)
    sites = [f"roberta.encoder.layer.{i}.{place}" for i in (0, 1) for place in places]
    leaves = ["down.kernel", "down.bias", "up.kernel", "up.bias"]
    adapters = {name: x for name, x in model.trainable.items() if model.kinds[name] == "adapter"}
    assert adapters.keys() == {f"{site}.adapter.{leaf}" for site in sites for leaf in leaves}
    for name, x in adapters.items():
        shapes = {"down.kernel": (16, 2), "down.bias": (2,), "up.kernel": (2, 16), "up.bias": (16,)}
        assert x.shape == shapes[".".join(name.split(".")[-2:])]
    assert {n for n, kind in model.kinds.items() if kind == "head"} == tiny("roberta").kinds.keys()
    assert not model.frozen.keys() & model.trainable.keys()


def test_published_count_of_distilbert():
    """More are in ``test_peft_counts.py``; here there are six layers."""
    counts = count({"model_type": "distilbert"}, houlsby(), head=classification(2))
    assert counts["adapter"] == 894_528


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
    """A module of a user: linear layers and optional residual slots."""

    def __init__(self, rngs, *, slots):
        self.blocks = nnx.List([Block(rngs, post_norm=False) for _ in range(2)]) if slots else None
        self.hidden = nnx.Linear(8, 8, rngs=rngs)
        self.out = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, batch):
        x = jax.nn.relu(self.hidden(batch["x"]))
        for block in self.blocks or ():
            x = block(x)
        return Outputs(self.out(x), x[:, None])


@pytest.mark.parametrize(
    ("slots", "method", "adapters"),
    [
        (True, houlsby(2), ["blocks.0.residual", "blocks.1.residual"]),
        (True, pfeiffer(2, targets=["blocks.1.residual"]), ["blocks.1.residual"]),
        (True, pfeiffer(2, targets=["hidden", "residual"]), ["blocks.0.residual", "hidden"]),
        (False, houlsby(2, targets=["hidden"]), ["hidden"]),
        (False, opendelta(size=4, targets="hid.*"), ["hidden"]),
    ],
    ids=["slots", "one slot", "both kinds", "linear", "pattern"],
)
def test_own_module_is_adapted_and_trained(slots, method, adapters):
    model = attach(bind(Mixer(nnx.Rngs(0), slots=slots), head=("out",)), method)
    assert {"out.bias", "out.kernel"} <= model.kinds.keys()
    for path in adapters:
        assert model.kinds[f"{path}.adapter.up.kernel"] == "adapter"
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype(np.float32)
    batch = {"x": x, "labels": (x[:, 0] * x[:, 1] > 0).astype(np.int32)}

    def loss(params):
        outputs = model.apply(model.frozen, params, batch, jax.random.key(0), True)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs.logits, batch["labels"])
        return losses.mean()

    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    params, state, losses = model.trainable, optimizer.init(model.trainable), []
    for _ in range(30):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < losses[0] - 0.02
    for name, x in params.items():
        assert np.abs(x - model.trainable[name]).max() > 0, name


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction_factor": 8, "size": 4}, "Both reduction_factor = 8 and size = 4"),
        ({"size": 0}, "size = 0"),
        ({"reduction_factor": 0}, "reduction_factor = 0"),
        ({"reduction_factor": float("inf")}, "reduction_factor = inf"),
        ({"init": "zeros"}, "'zeros' is not one of bert"),
        ({"activation": "gelu_neww"}, "'gelu_new'"),
        ({"scaling": 0.0}, "scaling = 0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [*METHODS.values(), bottleneck])
def test_impossible_options(make, options, message):
    with pytest.raises(InputError, match=message):
        make(**options)


@pytest.mark.parametrize(("places", "message"), [(["atention"], "'attention'"), ([], "empty")])
def test_impossible_places(places, message):
    with pytest.raises(InputError, match=message):
        bottleneck(places=places)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (houlsby(2), r"attention or feed_forward.* has none.* targets=\[...\]"),
        (opendelta(), r"targets=\[...\].*'?hidden"),
        (houlsby(2, targets=["hiden"]), "'hidden'"),
        (houlsby(2, targets=["out"]), "'out' matches no submodule"),
    ],
    ids=["no slots", "no defaults", "typo", "head"],
)
def test_places_that_a_module_does_not_have(method, message):
    model = bind(Mixer(nnx.Rngs(0), slots=False), head=("out",))
    with pytest.raises(InputError, match=message):
        attach(model, method)


def test_slots_of_other_places_are_named():
    module = Block(nnx.Rngs(0), post_norm=True, place="attention")
    with pytest.raises(InputError, match=r"\(feed_forward\) and this model has attention"):
        attach_module(module, pfeiffer(2))


def test_beside_lora():
    # Different submodules: both can be attached to one module.
    module = attach_module(tiny().module(), lora(2, targets=["query"]))
    attach_module(module, houlsby(4))
    layer = module.bert.encoder.layer[0]
    assert hasattr(layer.attention.self.query, "lora_a")
    assert hasattr(layer.output.residual, "adapter")
