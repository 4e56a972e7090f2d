"""BitFit, layer-norm tuning, full fine-tuning, head only: exactly these leaves are trained."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closeness import assert_close
from flax import nnx
from internals import TINY_BERT
from tiny import logits, tiny

import fedjax_peft as fp
from fedjax_peft import peft

pytestmark = pytest.mark.slow

KEY = jax.random.key(3)


def adapters(model):
    return {name for name, kind in model.kinds.items() if kind == "adapter"}


@pytest.mark.parametrize(
    ("method", "ends"),
    [
        (peft.bitfit(), (".bias",)),
        (peft.bitfit(["query", "intermediate.dense"]), ("query.bias", "intermediate.dense.bias")),
        (peft.layer_norm(), ("LayerNorm.scale", "LayerNorm.bias")),
        (peft.full(), ("",)),
        (peft.head_only(), ()),
    ],
)
def test_marked_leaves_are_trained_beside_the_head_and_no_others(method, ends):
    plain, model = tiny(), fp.attach(tiny(), method)
    expected = {name for name in plain.frozen if name.endswith(ends)}
    assert adapters(model) == expected
    assert set(model.trainable) == expected | set(plain.trainable)
    assert set(model.frozen) == set(plain.frozen) - expected
    values = {**model.frozen, **model.trainable}
    for name, x in {**plain.frozen, **plain.trainable}.items():
        np.testing.assert_array_equal(values[name], x)


def test_all_trained_leaves_have_a_gradient():
    model = fp.attach(fp.testing.tiny_model(3, num_hidden_layers=1), peft.full())

    @jax.jit
    def slope(trainable):
        return jax.grad(lambda p: jnp.sum(jnp.sin(logits(model, p))))(trainable)

    for name, gradient in slope(model.trainable).items():
        # A bias of the keys adds a constant to a query's scores.
        least = 0 if name.endswith("key.bias") else 1e-5
        assert jnp.max(jnp.abs(gradient)) >= least, name


def test_small_steps_move_a_bfloat16_model_that_is_trained_whole():
    config = {**TINY_BERT, "num_hidden_layers": 1}
    plain = fp.random_model(config, head=fp.heads.classification(4), dtype="bfloat16")
    model, data = fp.attach(plain, peft.full()), fp.testing.tiny_dataset(32)
    run = fp.simulate(
        model,
        fp.algorithms.fedavg(optax.adam(1e-5)),
        fp.partition.iid(data, 2),
        rounds=1,
        clients_per_round=2,
        batch_size=8,
    )
    kernels = [name for name in run.params if name.endswith("kernel")]
    moved = [np.mean(run.params[name] != model.trainable[name]) for name in kernels]
    assert np.mean(moved) > 0.5


def test_tied_head_of_gpt2_is_counted_once():
    counts = fp.count({"model_type": "gpt2"}, peft.full(), head=fp.heads.causal_lm())
    assert counts == {"adapter": 124_439_808, "head": 0, "frozen": 0}


class Tied(nnx.Module):
    """The output's table is the input's, once by ``attend`` and once as a parameter of its own."""

    def __init__(self, rngs):
        self.table = nnx.Embed(7, 4, rngs=rngs)
        self.rows = nnx.List([self.table.embedding])

    def __call__(self, batch):
        x = self.table(batch["ids"])
        return fp.contracts.Outputs(self.table.attend(x) + x @ self.rows[0][...].T, x)


def test_tied_table_is_trained_once_and_stays_tied():
    model = fp.attach(fp.bind(Tied(nnx.Rngs(0))), peft.full())
    assert len(model.trainable) == 1
    (name,) = model.trainable
    batch = {"ids": jnp.arange(3)[None]}
    trained = {name: jax.random.normal(KEY, (7, 4))}
    x = trained[name][:3]
    y = model.apply({}, trained, batch, None, False).logits[0]
    assert_close(y, 2 * x @ trained[name].T, rtol=1e-5, atol=1e-5)
