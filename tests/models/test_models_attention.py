"""Attention: its forms are one function, with derivatives, masks, dropout and lanes."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from internals import TINY_BERT, TINY_LLAMA, Dropout, Layout, platform_of
from internals import attention as forms
from jax.extend.core import jaxprs_in_params
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.models.attention import attention, choose
from fedjax_peft.models.blocks import set_options

pytestmark = pytest.mark.slow

BATCH, HEADS, LENGTH, WIDTH = 5, 4, 6, 8
REAL = np.arange(LENGTH)[None] < np.array([6, 4, 1, 5, 2])[:, None]
LEFT = REAL[:, ::-1]
"""Padding on the left: with a causal mask, the first tokens see nothing."""
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
WINDOW = CAUSAL & ~np.tril(np.ones((LENGTH, LENGTH), bool), -3)
MASKS = {
    "none": None,
    "shared": CAUSAL[None, None],
    "padding": REAL[:, None, None],
    "causal and padding": (CAUSAL & REAL[:, None])[:, None],
    "rows that see nothing": (CAUSAL & LEFT[:, None])[:, None],
    "window": (WINDOW & REAL[:, None])[:, None],
}


def dropout(rate=0.0):
    made = Dropout(rate)
    made.key[...] = jax.random.key(3)
    return made


def values(key_heads=HEADS, dtype=jnp.float32, seed=0):
    """Returns queries, keys and values."""
    keys = jax.random.split(jax.random.key(seed), 3)
    heads = (HEADS, key_heads, key_heads)
    return tuple(
        jax.random.normal(key, (BATCH, LENGTH, n, WIDTH), dtype)
        for key, n in zip(keys, heads, strict=True)
    )


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Blocks of two examples: the batch of five is then cut unevenly."""
    monkeypatch.setattr(forms, "_AT_ONCE", 2 * HEADS * LENGTH * LENGTH)


def both(key_heads, mask, rate, **options):
    """Returns the two forms as functions of queries, keys and values."""
    mask = None if mask is None else jnp.asarray(mask)

    def run(q, k, v, *, form):
        return attention(q, k, v, mask, dropout(rate), form=form, **options)

    return (
        values(key_heads),
        functools.partial(run, form="whole"),
        functools.partial(run, form="blocks"),
    )


CASES = [
    *((kind, 4, 0.0, {}) for kind in MASKS),
    ("causal and padding", 2, 0.0, {}),
    ("window", 1, 0.0, {"softcap": 2.0, "scale": 0.3}),
    ("none", 4, 0.25, {}),
    ("rows that see nothing", 2, 0.25, {}),
]


@pytest.mark.parametrize(("kind", "key_heads", "rate", "options"), CASES)
@pytest.mark.sample("rows that see nothing-2*", "window-1*")
def test_blocks_are_the_whole(kind, key_heads, rate, options):
    """With the same dropout mask, and with first and second derivatives."""
    given, *runs = both(key_heads, MASKS[kind], rate, **options)
    derivative = functools.partial(jax.grad, argnums=(0, 1, 2), has_aux=True)

    def orders(run):
        """Returns the function (q, k, v) -> (second derivatives, (the value, first ones))."""

        def wave(q, k, v):
            y = run(q, k, v)
            return jnp.sum(jnp.sin(y)), y

        def length(q, k, v):
            gradient, y = derivative(wave)(q, k, v)
            return sum(jnp.sum(x**2) for x in gradient), (y, *gradient)

        return jax.jit(derivative(length))

    (second, found), (seconds, expected) = (orders(run)(*given) for run in runs)
    for x, y, atol in zip(found, expected, (2e-6, 2e-5, 2e-5, 2e-5), strict=True):
        assert_close(x, y, atol=atol)
    for x, y in zip(second, seconds, strict=True):
        assert_close(x, y, atol=1e-4)


def test_the_fused_form_of_lanes_is_the_whole(monkeypatch):
    """With JAX's own kernel in the place of cuDNN's, and a mask that lanes share or own."""
    monkeypatch.setattr(forms, "_IMPLEMENTATION", "xla")
    mask = jnp.asarray(MASKS["causal and padding"])
    masks = jnp.stack([mask, mask[::-1], mask])
    lanes = tuple(map(jnp.stack, zip(*[values(2, seed=seed) for seed in range(3)], strict=True)))

    def gradient(run):
        def one(q, k, v, mask):
            return jax.value_and_grad(lambda *x: jnp.sum(run(*x, mask) ** 2), (0, 1, 2))(q, k, v)

        return jax.jit(jax.vmap(one))(*lanes, masks)

    found = gradient(lambda q, k, v, mask: forms._fused(q, k, v, mask, 0.3))
    expected = gradient(lambda *x: attention(*x, dropout(), scale=0.3))
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert_close(x, y, rtol=1e-5, atol=1e-5)
    shared = jax.vmap(lambda q: forms._fused(q, lanes[1][0], lanes[2][0], mask, 0.3))(lanes[0])
    alone = attention(lanes[0][1], lanes[1][0], lanes[2][0], mask, dropout(), scale=0.3)
    assert_close(shared[1], alone, atol=1e-6)


def test_blocks_keep_no_scores(monkeypatch):
    """Neither for the backward pass, nor at any time those of all examples."""
    length = 64
    scores = BATCH * HEADS * length * length
    monkeypatch.setattr(forms, "_AT_ONCE", scores // 2)
    x = jnp.ones((BATCH, length, HEADS, WIDTH))

    def arrays(jaxpr):
        for equation in jaxpr.eqns:
            yield from (v.aval.size for v in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                yield from arrays(inner)

    def largest(form):
        def gradient(x):
            y, pull = jax.vjp(lambda x: attention(x, x, x, None, dropout(0.25), form=form), x)
            return pull(y)

        return max(arrays(jax.make_jaxpr(gradient)(x).jaxpr))

    assert largest("whole") >= scores
    assert largest("blocks") < scores


@pytest.mark.parametrize(("kind", "key_heads"), [*zip(MASKS, [4, 2, 1, 4, 2, 1], strict=True)])
def test_attention_is_that_of_jax(kind, key_heads):
    """In the form that cuDNN gets: the mask in full. cuDNN itself needs a GPU, and is not run."""
    mask = MASKS[kind]
    full = (BATCH, HEADS, LENGTH, LENGTH)
    q, k, v = values(key_heads)
    found = attention(q, k, v, None if mask is None else jnp.asarray(mask), dropout(), scale=0.3)
    given = None if mask is None else jnp.broadcast_to(mask, full)
    expected = jax.nn.dot_product_attention(q, k, v, mask=given, scale=0.3, implementation="xla")
    # Scores up to 10, of 8 products each: their rounding is relative in the weights.
    assert_close(found, expected, atol=4e-6)


FACTS = {
    "platform": fp.contracts.Platform("cpu"),
    "dtype": jnp.dtype("float32"),
    "shape": (16, 12, 197, 197),
    "width": 64,
    "plain": True,
}
GPU = {
    "platform": fp.contracts.Platform("gpu", 8.0),
    "dtype": jnp.dtype("bfloat16"),
    "shape": (16, 12, 128, 256),
}


LONG = {"shape": (3, 12, 4096, 4096)}


@pytest.mark.parametrize(
    ("form", "changes", "chosen"),
    [
        ("whole", GPU, "whole"),
        ("blocks", {**GPU, "plain": False}, "blocks"),
        ("blocks", {"shape": (16, 12, 64, 64)}, "whole"),
        ("blocks", {"shape": (2, 12, 4096, 4096)}, "whole"),
        ("blocks", LONG, "blocks"),
        ("cudnn", {}, "whole"),
        ("cudnn", {**GPU, "dtype": jnp.dtype("float16")}, "cudnn"),
        ("cudnn", {**GPU, "dtype": jnp.dtype("float32")}, "whole"),
        ("cudnn", {**GPU, "platform": fp.contracts.Platform("tpu")}, "whole"),
        ("auto", {}, "whole"),
        ("auto", GPU, "cudnn"),
        ("auto", {**GPU, "platform": fp.contracts.Platform("gpu", 7.5)}, "whole"),
        ("auto", {**GPU, "plain": False}, "whole"),
        ("cudnn", {**GPU, "width": 60}, "whole"),
        ("cudnn", {**GPU, "width": 256}, "whole"),
        ("cudnn", {**GPU, "shape": (16, 12, 1, 128)}, "whole"),
        ("cudnn", {**GPU, "shape": (16, 12, 128, 255)}, "whole"),
    ],
)
def test_the_form_follows_from_facts(form, changes, chosen, monkeypatch):
    monkeypatch.undo()  # the blocks of this file
    assert choose(form, **{**FACTS, **changes}) == chosen


def test_a_model_in_a_scan_may_choose_the_form(monkeypatch):
    monkeypatch.setattr(forms, "_AT_ONCE", 1)
    ids = jax.random.randint(jax.random.key(3), (3, 9), 3, 40)
    real = jnp.arange(9)[None] < jnp.array([[9], [5], [7]])
    batch = {"input_ids": ids, "attention_mask": real}
    config, head = {**TINY_LLAMA, "num_hidden_layers": 3}, fp.heads.classification(3)

    def gradient(form):
        """Returns the gradient of a model, lowered, and its trained leaves."""
        model = fp.random_model(config, head=head, scan_layers=True, attention=form)
        model = fp.attach(model, fp.lora(2))
        assert model.recipe["attention"] == form

        def loss(trainable):
            key = jax.random.key(7)
            return jnp.sum(model.apply(model.frozen, trainable, batch, key, True).logits ** 2)

        return jax.jit(jax.grad(loss)).lower(model.trainable), model.trainable

    (whole, trainable), (blocks, _) = gradient("whole"), gradient("blocks")
    assert gradient("auto")[0].as_text() == whole.as_text()  # there is no GPU
    assert blocks.as_text().count("while") > whole.as_text().count("while")
    found, expected = (lowered.compile()(trainable) for lowered in (blocks, whole))
    for name, x in expected.items():
        assert_close(found[name], x, atol=1e-5 * max(np.abs(x).max(), 1))


def test_unknown_forms_are_refused():
    head = fp.heads.classification(2)
    refused("'blocks'", fp.random_model, TINY_BERT, head=head, attention="block")
    deberta = {**TINY_BERT, "model_type": "deberta-v2"}
    refused("one form only", fp.random_model, deberta, head=head, attention="cudnn")
    set_options(fp.random_model(deberta, head=head).module(), attention="whole")


@pytest.mark.parametrize(("scan", "method"), [(True, None), (False, fp.peft.dual_lora(rank=2))])
def test_the_platform_of_a_layout_reaches_the_layers(scan, method, monkeypatch):
    """A program for a GPU is fused on a machine without one, and no other program is.

    ``dual_lora`` wraps the forward pass, and runs it twice in evaluations.
    """
    called = []
    monkeypatch.setattr(
        forms, "_fused", lambda q, *_: called.append(q.shape) or jnp.zeros(q.shape, q.dtype)
    )
    config = {**TINY_LLAMA, "num_hidden_layers": 3}
    options = {"head": fp.heads.classification(3), "dtype": "bfloat16", "scan_layers": scan}
    model = fp.random_model(config, **options)
    model = model if method is None else fp.attach(model, method)
    batch = {"input_ids": jnp.ones((2, 8), jnp.int32), "attention_mask": jnp.ones((2, 8), bool)}

    def calls(platform):
        called.clear()
        run = Layout(platform=platform).forward(model.apply)
        jax.eval_shape(lambda: run(model.frozen, model.trainable, batch, None, False))
        return len(called)

    found = [
        calls(x)
        for x in (
            fp.contracts.Platform("gpu", 9.0),
            fp.contracts.Platform("gpu", 7.5),
            fp.contracts.Platform("tpu"),
        )
    ]
    passes = 1 if method is None else 2
    assert found == [(2 if scan else 3) * passes, 0, 0]


def test_the_platform_of_a_device():
    def device(platform, **facts):
        return types.SimpleNamespace(platform=platform, **facts)

    assert platform_of(jax.devices()[0]) == fp.contracts.Platform("cpu") == Layout().platform
    assert platform_of(device("cuda", compute_capability="8.9")) == fp.contracts.Platform(
        "gpu", 8.9
    )
    assert platform_of(device("gpu", compute_capability="gfx90a")) == fp.contracts.Platform("gpu")
    assert platform_of(device("tpu")) == fp.contracts.Platform("tpu")
