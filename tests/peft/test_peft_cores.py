"""LoRA-SB, RAVAN and SLoRA: formulas, starts, merging."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import ROUNDOFF, assert_close, roughly
from flax import nnx
from internals import attach_module, gradient_start
from refusals import refused
from tiny import tiny, trained

import fedjax_peft as fp
from fedjax_peft.peft.lora_sb import SBLinear
from fedjax_peft.peft.ravan import RavanLinear

pytestmark = pytest.mark.slow

BERT = {
    **{"model_type": "bert", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16},
}
ORTHONORMAL = 64 * ROUNDOFF
"""Of a QR decomposition in float32: the unit roundoff for each of up to 64 rows."""
METHODS = {
    "lora_sb": fp.peft.lora_sb(4),
    "ravan": fp.peft.ravan(4, heads=3),
    "slora": fp.peft.slora(4, density=0.1),
}


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def layers():
    """Returns each layer with its update as a sum of products, written out."""
    rng, base = np.random.default_rng(0), nnx.Linear(8, 6, rngs=nnx.Rngs(0))
    a, r, b = normal(rng, 8, 2), normal(rng, 2, 2), normal(rng, 2, 6)
    yield SBLinear(base, a, r, b), np.asarray(a) @ np.asarray(r) @ np.asarray(b)
    base = nnx.Linear(8, 6, rngs=nnx.Rngs(0))
    a, h, b, s = normal(rng, 3, 8, 2), normal(rng, 3, 2, 2), normal(rng, 3, 2, 6), normal(rng, 3)
    layer = RavanLinear(base, a, b)
    layer.ravan_h.set_value(h)
    layer.ravan_s.set_value(s)
    yield layer, sum(float(s[i]) * np.asarray(a[i]) @ np.asarray(h[i] @ b[i]) for i in range(3))


def test_output_is_the_formula_and_merged_is_the_same():
    x = np.random.default_rng(1).normal(size=(2, 5, 8)).astype(np.float32)
    for layer, change in layers():
        kernel, bias = (np.asarray(v[...]) for v in (layer.base.kernel, layer.base.bias))
        expected = x @ (kernel + change) + bias
        assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
        assert_close(layer.merged()(x), expected, rtol=1e-5, atol=1e-5)


def test_slora_adds_values_at_random_places_of_each_kernel():
    model = fp.attach(tiny(), METHODS["slora"])
    places = [n for n in model.trainable if n.endswith(".sparse_index")]
    drawn = []
    for name in places:
        path = name.removesuffix(".sparse_index")
        index = np.asarray(model.trainable[name])
        size = model.frozen[f"{path}.base.kernel"].size
        assert len(index) == len(set(index)) == round(0.1 * size)
        assert index.min() >= 0
        assert index.max() < size
        assert model.kinds[name] == "fixed"
        drawn.append(tuple(index))
    assert len(set(drawn)) == len(places)
    params = trained(model)
    merged, start = fp.merge(model, params), tiny().frozen
    for name in places:
        path = name.removesuffix(".sparse_index")
        a, b = (np.asarray(params[f"{path}.lora_{n}"]) for n in "ab")
        change = np.array(merged.frozen[f"{path}.kernel"] - start[f"{path}.kernel"]) - a @ b
        values = change.reshape(-1)[np.asarray(params[name])]
        assert_close(values, params[f"{path}.sparse_values"], rtol=0, atol=1e-6)
        change.reshape(-1)[np.asarray(params[name])] = 0
        assert_close(change, 0, rtol=0, atol=1e-6)


def test_compute_dtype_is_kept():
    base = nnx.Linear(8, 6, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer = RavanLinear(base, jnp.ones((1, 8, 2)), jnp.ones((1, 2, 6)))
    assert layer(jnp.ones((2, 8), jnp.bfloat16)).dtype == jnp.bfloat16


def test_bases_are_orthonormal_and_fixed_and_cores_are_counted():
    model = fp.attach(tiny(), METHODS["lora_sb"])
    sites = [n.removesuffix(".sb_r") for n in model.trainable if n.endswith(".sb_r")]
    assert model.counts()["adapter"] == len(sites) * 4 * 4
    for path in sites:
        a, b = (np.asarray(model.trainable[f"{path}.sb_{n}"]) for n in "ab")
        assert_close(a.T @ a, np.eye(4), rtol=0, atol=ORTHONORMAL)
        assert_close(b @ b.T, np.eye(4), rtol=0, atol=ORTHONORMAL)
        assert [model.kinds[f"{path}.sb_{n}"] for n in "arb"] == ["fixed", "adapter", "fixed"]
    model = fp.attach(tiny(), METHODS["ravan"])
    assert model.counts()["adapter"] == len(sites) * 3 * (4 * 4 + 1)
    for path in sites:
        a, b = (np.asarray(model.trainable[f"{path}.ravan_{n}"]) for n in "ab")
        across = np.concatenate(list(a), axis=1)  # all heads together
        assert_close(across.T @ across, np.eye(12), rtol=0, atol=ORTHONORMAL)
        across = np.concatenate(list(b), axis=0)
        assert_close(across @ across.T, np.eye(12), rtol=0, atol=ORTHONORMAL)
        assert model.kinds[f"{path}.ravan_a"] == model.kinds[f"{path}.ravan_b"] == "fixed"


def test_normal_bases_have_columns_of_length_one_on_average():
    layer = nnx.Linear(400, 300, rngs=nnx.Rngs(0))
    module = nnx.List([layer])
    attached = attach_module(module, fp.peft.ravan(5, heads=4, init="normal", targets=["0"]))[0]
    for base, axis in ((attached.ravan_a[...], 1), (attached.ravan_b[...], 2)):
        assert np.mean(np.sum(base**2, axis=axis)) == roughly(1, rel=0.05)


def batches():
    rng = np.random.default_rng(0)
    for size in (3, 3):
        yield {
            "input_ids": jnp.asarray(rng.integers(5, 40, (size, 7)), jnp.int32),
            "attention_mask": jnp.ones((size, 7), jnp.int32),
            "labels": jnp.asarray(rng.integers(0, 3, size), jnp.int32),
            "mask": jnp.ones(size, bool),
        }


def test_the_gradient_start_is_the_best_form_of_the_first_step_of_full_training():
    step, task, plain = (
        0.01,
        fp.tasks.classification(),
        fp.random_model(BERT, head=fp.heads.classification(3)),
    )
    whole = fp.attach(plain, fp.peft.full())

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        outputs = (whole.apply(whole.frozen, params, b, None, False) for b in batches())
        return sum(task.loss(o, b)[0] for o, b in zip(outputs, batches(), strict=True))

    before, gradient = loss(whole.trainable)
    model = fp.attach(plain, fp.peft.lora_sb(4))
    started = gradient_start(model, batches(), task, step=step)
    sites = [n.removesuffix(".sb_r") for n in model.trainable if n.endswith(".sb_r")]
    for path in sites:
        u, sigma, vt = np.linalg.svd(-step * np.sign(np.asarray(gradient[f"{path}.kernel"])))
        best = u[:, :4] * sigma[:4] @ vt[:4]
        a, r, b = (np.asarray(started.trainable[f"{path}.sb_{n}"]) for n in "arb")
        assert_close(a @ r @ b, best, rtol=0, atol=1e-5)
        assert_close(r, np.diag(sigma[:4]), rtol=0, atol=1e-6)
    assert started.frozen is model.frozen
    merged = fp.merge(started)
    after, _ = loss({**merged.frozen, **merged.trainable})
    assert after < before  # it is a step against the gradient


def test_the_gradient_start_reads_quantised_kernels():
    model = fp.attach(
        fp.random_model(BERT, head=fp.heads.classification(3), quantize="int8"), fp.peft.lora_sb(4)
    )
    started = gradient_start(model, batches(), fp.tasks.classification(), step=0.01)
    cores = [n for n in started.trainable if n.endswith(".sb_r")]
    assert cores
    assert all(started.trainable[n][0, 0] > 0 for n in cores)


def test_the_gradient_start_refuses_what_it_cannot_use():
    model, task = fp.attach(tiny(), fp.peft.lora_sb(4)), fp.tasks.classification()
    refused("lora_sb", gradient_start, tiny(), batches(), task, step=0.1)
    refused("at least one batch", gradient_start, model, [], task, step=0.1)
    refused("step = 0", gradient_start, model, batches(), task, step=0)
