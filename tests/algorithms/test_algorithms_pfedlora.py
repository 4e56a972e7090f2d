"""pFedLoRA equals a loop over clients in NumPy float64; its layer is LoRA over trained weights."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import slow_lora
import toy
from closeness import assert_close
from flax import nnx
from internals import AdapterParam, export
from refusals import refused
from shallow import simple_encoder  # noqa: F401
from slow_lora import KERNEL, A, B, S

import fedjax_peft as fp

pytestmark = pytest.mark.usefixtures("simple_encoder")

RATE = 0.3
SGD = optax.sgd(RATE)
MODEL = toy.own_kernel_model()
PRIVATE = (*toy.HEAD, KERNEL)


class SlowPFedLoRA(slow_lora.Slow):
    """A client's steps on its own weights and head come first, then those on the shared LoRA."""

    model, shared, private = MODEL, (A, B), PRIVATE

    def __init__(self, model_epochs, adapter_epochs):
        super().__init__(epochs=(model_epochs, adapter_epochs))

    def train(self, client, number):
        leaves = self.start(client, number)
        batches = [*slow_lora.batches(client, number)]
        share = -(-len(batches) * self.epochs[0] // sum(self.epochs))
        first = min(max(share, 1), max(len(batches) - 1, 1))
        for i, (x, labels, _) in enumerate(batches):
            a, b = leaves[A], leaves[B]
            g, by = reference.by_kernel(leaves[KERNEL] + S * a @ b, leaves, x, labels)
            by |= {KERNEL: g, A: S * g @ b.T, B: S * a.T @ g}
            names = PRIVATE if i < first else (A, B)
            leaves = {**leaves, **{n: leaves[n] - RATE * by[n] for n in names}}
        return leaves


@pytest.mark.slow
def test_rounds_equal_the_slow_reference():
    algorithm = fp.algorithms.pfedlora(SGD, model_epochs=3, adapter_epochs=1)
    slow_lora.check(slow_lora.engine(algorithm, bound=MODEL), SlowPFedLoRA(3, 1).run())


def test_a_quantised_model_is_refused():
    quantised = fp.quantize(fp.testing.tiny_model(classes=4), "int8")
    refused("quantised, so they never change", fp.attach, quantised, fp.peft.lora_with_base(rank=2))


@pytest.mark.slow
def test_a_run_on_a_real_model_trains_the_clients_own_weights():
    model = fp.attach(fp.testing.tiny_model(classes=4), fp.peft.lora_with_base(rank=2))
    clients = fp.partition.iid(fp.testing.tiny_dataset(48), clients=3)
    run = fp.simulate(
        model, fp.algorithms.pfedlora(optax.adam(1e-2)), clients, rounds=3, epochs=2, batch_size=8
    )
    assert run.metrics[-1]["train_loss"] < run.metrics[1]["train_loss"]
    sent = sum(x.nbytes for n, x in model.trainable.items() if n.endswith((".lora_a", ".lora_b")))
    assert run.metrics[-1]["bytes_up"] == 3 * sent


def small():
    return fp.testing.tiny_model(classes=4)


def test_the_layers_own_weights_are_trained_leaves_with_the_names_of_lora():
    plain, model = (
        fp.attach(small(), fp.lora(rank=2)),
        fp.attach(small(), fp.peft.lora_with_base(rank=2)),
    )
    moved = set(model.trainable) - set(plain.trainable)
    assert moved
    assert moved == {n for n in plain.frozen if n.endswith((".base.kernel", ".base.bias"))}
    assert {model.kinds[n] for n in moved} == {"adapter"}
    for n in plain.trainable:
        np.testing.assert_array_equal(model.trainable[n], plain.trainable[n])
    for n in moved:
        np.testing.assert_array_equal(model.trainable[n], plain.frozen[n])


@pytest.mark.slow
def test_merged_weights_predict_the_same(tmp_path):
    model, rng = fp.attach(small(), fp.peft.lora_with_base(rank=2)), np.random.default_rng(0)
    params = {
        n: x + jnp.asarray(0.1 * rng.normal(size=x.shape), x.dtype)
        if model.kinds[n] != "fixed"
        else x
        for n, x in model.trainable.items()
    }
    merged = fp.merge(model, params)
    assert not len(nnx.to_flat_state(nnx.state(merged.module(), AdapterParam)))
    columns = fp.testing.tiny_dataset(4).columns
    batch = {n: jnp.asarray(x) for n, x in columns.items()}
    batch["mask"] = jnp.ones(4, bool)
    one = model.apply(model.frozen, params, batch, None, False).logits
    other = merged.apply(merged.frozen, merged.trainable, batch, None, False).logits
    assert_close(one, other, rtol=0, atol=1e-5)
    export(model, params, tmp_path / "merged", format="merged")
    refused("lora_with_base", export, model, params, tmp_path / "peft", format="peft")
