"""Dropout: uniform random bytes that depend only on the coordinates of an element."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from flax import nnx
from internals import Dropout
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.models import layers
from fedjax_peft.models.layers import dropout

KEY = jax.random.key(7)
random_bytes = jax.jit(layers.random_bytes, static_argnums=1)
SHAPES = [(24,), (5, 20), (3, 5, 20), (2, 3, 5, 20), (2, 2, 2, 3, 20), (70_000, 8)]
"""The last has more rows than a coordinate can count."""


@pytest.mark.parametrize("shape", SHAPES)
def test_random_bytes_have_the_shape_and_no_repeated_block(shape):
    shape = (*shape[:-1], 64)
    octets = np.asarray(random_bytes(KEY, shape))
    assert octets.shape == shape
    assert octets.dtype == np.uint8
    # Eight bytes come from one counter: two equal blocks would mean a counter used twice.
    blocks = octets.reshape(-1, 8)
    assert len(np.unique(blocks, axis=0)) == len(blocks)


@pytest.mark.parametrize("shape", [(1 << 18,), (64, 4096), (8, 4, 32, 256)])
def test_random_bytes_are_uniform(shape):
    octets = np.asarray(random_bytes(KEY, shape)).reshape(-1, 8)
    for place in range(8):  # of a byte in its block
        counts = np.bincount(octets[:, place], minlength=256)
        expected = counts.sum() / 256
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - 255) < 6 * np.sqrt(2 * 255)  # 255 degrees of freedom
    for other in (np.roll(octets, 1, axis=0), np.roll(octets, 1, axis=1)):
        assert abs((octets == other).mean() - 1 / 256) < 6 * np.sqrt(1 / 256 / octets.size)


@pytest.mark.parametrize("shape", SHAPES[1:4])
def test_a_larger_array_has_the_smaller_one_at_its_place(shape):
    larger = np.asarray(random_bytes(KEY, tuple(n + 9 for n in shape)))
    np.testing.assert_array_equal(larger[tuple(map(slice, shape))], random_bytes(KEY, shape))
    np.testing.assert_array_equal(random_bytes(KEY, larger.shape, 3)[:-3], larger[3:])


def test_vmap_over_keys_is_the_loop():
    shape = SHAPES[2]
    keys = jax.random.split(KEY, 3)
    np.testing.assert_array_equal(
        jax.vmap(lambda key: random_bytes(key, shape))(keys),
        jnp.stack([random_bytes(key, shape) for key in keys]),
    )


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_dropout_has_its_rate_and_keeps_the_mean(rate):
    n = 256 * 1024
    rounded = round(rate * 256) / 256
    y = np.asarray(dropout(jnp.ones((256, 1024)), rate, KEY))
    deviation = np.sqrt(rounded * (1 - rounded) / n)
    assert abs((y == 0).mean() - rounded) < 5 * deviation
    assert abs(y.mean() - 1) < 5 * deviation / (1 - rounded)
    # The scale is that of the rounded rate, so the expectation is exact.
    assert_close(y[y > 0], 1 / (1 - rounded), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropout_keeps_the_dtype_and_multiplies_by_its_mask(dtype):
    x = jax.random.normal(KEY, (8, 33), dtype)
    mask = dropout(jnp.ones((8, 33), dtype), 0.3, KEY)
    y, pull = jax.vjp(lambda x: dropout(x, 0.3, KEY), x)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, x * mask)
    np.testing.assert_array_equal(pull(jnp.ones_like(x))[0], mask)


def test_dropout_at_the_ends_of_its_range():
    x = jnp.ones((4, 256))
    assert dropout(x, 0.0, KEY) is x
    almost_all = dropout(x, 0.999, KEY)
    assert jnp.all(jnp.isfinite(almost_all))
    assert 0 < jnp.mean(almost_all > 0) < 0.05


class TwoMasks(nnx.Module):
    def __init__(self):
        self.first, self.second = Dropout(0.5), Dropout(0.5)
        self.head = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def __call__(self, batch):
        return fp.contracts.Outputs(self.first(batch["x"]), self.second(batch["x"]))


def test_modules_and_steps_have_their_own_masks():
    model = fp.bind(TwoMasks(), head=("head",))
    batch = {"x": jnp.ones((16, 64))}

    def masks(key, train=True):
        return model.apply(model.frozen, model.trainable, batch, key, train)

    one, other = masks(KEY), masks(jax.random.key(8))
    for a, b in [(one.logits, one.hidden), (one.logits, other.logits), (one.hidden, other.hidden)]:
        assert abs(jnp.mean(a == b) - 0.5) < 0.1
    np.testing.assert_array_equal(one.logits, masks(KEY).logits)
    np.testing.assert_array_equal(masks(None, train=False).logits, batch["x"])


def test_a_model_of_functions_is_printed_and_has_no_module():
    head = {"a": jnp.zeros(2)}
    model = fp.Model(lambda *given: given[1]["a"], {}, head, {"a": "head"}, None)
    assert repr(model) == "Model('functions': 0 adapter, 2 head, 0 frozen)"
    refused(r"made of functions.* fp\.bind\(module\)", fp.attach, model, fp.lora(2))


class Normed(nnx.Module):
    def __init__(self, **options):
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0), **options)

    def __call__(self, batch):
        return self.norm(batch["x"])


@pytest.mark.parametrize("head", [(), ("norm",)])
def test_running_statistics_are_refused_or_stay_as_they_are(head):
    refused(r"'norm' \(BatchNorm\) keeps running statistics", fp.bind, Normed(), head=head)
    model, x = fp.bind(Normed(use_running_average=True), head=head), jnp.array([[3.0, 4.0]])
    assert {"norm.mean", "norm.var"} <= model.frozen.keys()
    for train in (True, False):
        y = model.apply(model.frozen, model.trainable, {"x": x}, KEY, train).logits
        assert_close(y, x, rtol=1e-4)  # the mean 0 and the variance 1 of its start


def test_what_is_trained_is_float32_in_a_module_of_bfloat16():
    net = nnx.Linear(3, 2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    tops = nnx.Sequential(nnx.Linear(2, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(1)), net)
    model = fp.bind(
        tops,
        head=("layers.1",),
        forward=lambda module, batch: fp.contracts.Outputs(module(batch["x"])),
    )
    assert {x.dtype for x in model.trainable.values()} == {jnp.dtype("float32")}
    assert {x.dtype for x in model.frozen.values()} == {jnp.dtype("bfloat16")}
    gradient = jax.grad(
        lambda own: jnp.sum(
            model.apply(model.frozen, own, {"x": jnp.ones((4, 2))}, None, True).logits
        )
    )(dict(model.trainable))
    assert {x.dtype for x in gradient.values()} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 2e-2)])
def test_gelu_is_that_of_its_definition(dtype, tolerance):
    """By ``math.erfc`` in double precision; the derivative by differences."""
    points = np.concatenate([np.linspace(-12, 12, 481), [-60.0, 60.0]])
    points = np.asarray(jnp.asarray(points, dtype), float)  # what the narrower type holds

    def exact(x):
        return np.array([y * 0.5 * math.erfc(-y / math.sqrt(2)) for y in x])

    gelu = layers.activation("gelu")
    found, slope = jax.vmap(jax.value_and_grad(gelu))(jnp.asarray(points, dtype))
    assert found.dtype == slope.dtype == dtype
    assert_close(np.asarray(found, float), exact(points), atol=tolerance, rtol=tolerance)
    difference = (exact(points + 1e-5) - exact(points - 1e-5)) / 2e-5
    assert_close(np.asarray(slope, float), difference, atol=10 * tolerance)
