"""FedMCP's pair of adapters: the mean of both, and each alone with coefficient 1."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx
from internals import MODES, Residual, assign_roles, attach_module, layer_norm, mode
from refusals import refused
from safetensors.numpy import load_file

import fedjax_peft as fp
from fedjax_peft.peft.bottleneck import PLACEMENTS

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "adapters"


class Sublayer(nnx.Module):
    def __init__(self, place, post_norm, rngs):
        self.dense = nnx.Linear(6, 6, rngs=rngs)
        self.norm = layer_norm(6, 1e-5, jnp.float32)
        self.residual = Residual(place, 6)
        self.post_norm = post_norm

    def __call__(self, x):
        if self.post_norm:
            return self.norm(self.residual(jnp.tanh(self.dense(x)), x, self.norm))
        return self.residual(jnp.tanh(self.dense(self.norm(x))), x)


class Own(nnx.Module):
    """A user's own module: two sublayers and a head."""

    def __init__(self, post_norm):
        rngs = nnx.Rngs(0)
        self.attention = Sublayer("attention", post_norm, rngs)
        self.feed_forward = Sublayer("feed_forward", post_norm, rngs)
        self.out = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, batch):
        x = self.feed_forward(self.attention(batch["x"]))
        return fp.contracts.Outputs(self.out(x), x[:, None])


@functools.cache
def base(name="post"):
    if name == "bert":
        return fp.load_model(GOLDEN / name)
    return fp.bind(Own(post_norm=name == "post"), head=("out",))


def inputs(name):
    if name == "bert":
        return load_file(GOLDEN / name / "inputs.safetensors")
    return {"x": jax.random.normal(jax.random.key(1), (4, 6))}


def targets(name, placement):
    """Returns the targets for the user's module, which has no defaults for OpenDelta."""
    return ["dense"] if placement == "opendelta" and name != "bert" else None


@functools.cache
def tiny(name="post", placement="opendelta"):
    """Returns a dual model, its trainable leaves with random adapters, and the forward pass."""
    model = fp.attach(
        base(name), fp.peft.dual(size=3, placement=placement, targets=targets(name, placement))
    )
    rng = np.random.default_rng(0)
    params = {
        leaf: jnp.asarray(rng.normal(0, 0.4, x.shape), jnp.float32)
        if model.kinds[leaf] == "adapter"
        else x
        for leaf, x in model.trainable.items()
    }
    return model, params, forward_pass(model, inputs(name))


def forward_pass(model, batch):
    """Returns the compiled function from trainable leaves to logits and last hidden states."""

    @jax.jit
    def forward(params):
        outputs = model.apply(model.frozen, params, batch, None, False)
        return outputs.logits, outputs.hidden

    return forward


def single(placement, **options):
    """Returns the method with one adapter at the places of ``dual``."""
    options |= {"activation": "gelu_new", "init": "opendelta"}
    if placement == "opendelta":
        return fp.peft.opendelta(**options)
    return fp.peft.bottleneck(**PLACEMENTS[placement]._asdict(), **options)


def alone(params, which):
    """Returns the leaves of a model that has only one of the two."""
    other = "private" if which == "global" else "global"
    kept = {n: x for n, x in params.items() if f".{other}_adapter." not in n}
    return {n.replace(f".{which}_adapter.", "."): x for n, x in kept.items()}


@pytest.mark.parametrize(
    ("name", "placement"),
    [("pre", "houlsby"), ("post", "pfeiffer"), ("post", "opendelta"), ("bert", "opendelta")],
)
def test_a_mode_with_one_adapter_is_a_model_with_one_adapter(name, placement):
    _, params, forward = tiny(name, placement)
    other = fp.attach(base(name), single(placement, size=3, targets=targets(name, placement)))
    expected = forward_pass(other, inputs(name))
    for which in ("global", "private"):
        values = alone(params, which)
        assert values.keys() == other.trainable.keys()
        for got, wanted in zip(forward(mode(params, which)), expected(values), strict=True):
            assert_close(got, wanted, rtol=0, atol=1e-5)


def test_dual_mode_is_the_mean_of_both():
    # Of the same two adapters the mean is either of them; of two different ones it is neither.
    _, params, forward = tiny("post", "pfeiffer")
    same = {n: params[n.replace(".private_adapter.", ".global_adapter.")] for n in params}
    assert_close(
        forward(mode(same, "dual"))[0], forward(mode(same, "global"))[0], rtol=0, atol=1e-5
    )
    np.testing.assert_array_equal(forward(mode(params, "dual"))[0], forward(params)[0])
    dual_, global_, private = (np.asarray(forward(mode(params, which))[0]) for which in MODES)
    for one, other in ((dual_, global_), (dual_, private), (global_, private)):
        assert np.abs(one - other).max() > 0.05


def test_output_is_the_formula():
    module = nnx.Dict(dense=nnx.Linear(4, 6, rngs=nnx.Rngs(0)))
    attach_module(module, fp.peft.dual(size=2, targets=["dense"], activation="tanh"))
    h = jax.random.normal(jax.random.key(0), (5, 4))
    pair, y = module.dense.adapter, module.dense.base(h)

    def f(adapter):
        down, up = adapter.down, adapter.up
        return np.tanh(y @ down.kernel[...] + 1) @ up.kernel[...] - 2

    for adapter in (pair.global_adapter, pair.private_adapter):
        adapter.down.bias.set_value(jnp.ones(2))
        adapter.up.bias.set_value(jnp.full(6, -2.0))
        adapter.up.kernel.set_value(100 * adapter.up.kernel[...])
        adapter.down.kernel.set_value(100 * adapter.down.kernel[...])
    expected = y + f(pair.global_adapter) / 2 + f(pair.private_adapter) / 2
    assert_close(module.dense(h), expected, rtol=0, atol=1e-5)


def test_the_adapter_that_is_off_gets_no_gradient_at_all():
    which, silent = "global", "private"
    _, params, forward = tiny()

    @jax.jit
    def gradient(params):
        return jax.grad(lambda p: jnp.square(forward(mode(p, which))[0]).sum())(params)

    for name, x in gradient(params).items():
        if f".{silent}_adapter." in name:
            np.testing.assert_array_equal(x, 0)
        else:
            assert jnp.abs(x).max() > 0, name


def test_the_inactive_adapter_has_no_effect():
    # Even one that has diverged must not spoil the other's pass.
    _, params, forward = tiny()
    broken = {
        n: jnp.full_like(x, jnp.nan) if ".private_adapter.up." in n else x
        for n, x in params.items()
    }
    np.testing.assert_array_equal(
        forward(mode(broken, "global"))[0], forward(mode(params, "global"))[0]
    )


def test_names_make_the_roles():
    model, *_ = tiny()
    roles = assign_roles(
        model.kinds,
        fp.contracts.Roles(
            shared=(r"^adapter:.*\.global_adapter\.",),
            private=(r"^adapter:.*\.private_adapter\.", "^head:"),
        ),
    )
    assert len(roles["shared"]) == 8  # two sites of four leaves
    twins = [name.replace(".global_adapter.", ".private_adapter.") for name in roles["shared"]]
    assert set(twins) < set(roles["private"])


def test_the_two_adapters_start_with_different_small_values():
    model = fp.attach(base("bert"), fp.peft.dual())
    for name, x in model.trainable.items():
        if ".global_adapter." in name and name.endswith("kernel"):
            twin = model.trainable[name.replace(".global_adapter.", ".private_adapter.")]
            assert jnp.abs(x - twin).max() > 0.01
            assert abs(float(jnp.std(x)) / 0.01 - 1) < 0.2


# -------------------------------------------------------------------------------------- refusals


def test_unknown_modes_and_leaves_without_a_pair():
    _, params, _ = tiny()
    refused(r"mode 'globl'.*'global'", mode, params, "globl")
    model = fp.attach(base("bert"), fp.peft.opendelta())
    refused(r"attach dual\(\)", mode, model.trainable, "global")
