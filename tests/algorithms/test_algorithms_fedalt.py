"""FedALT equals a loop that holds every client's LoRA and averages those of the others.

The layer equals the authors' formula in NumPy, with factors and a mixer that are not zero.
"""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import slow_lora
import toy
from closeness import assert_close
from flax import nnx
from internals import Dropout, MixedLoRALinear, attach_module, export
from refusals import refused
from shallow import simple_encoder  # noqa: F401

import fedjax_peft as fp

pytestmark = pytest.mark.usefixtures("simple_encoder")

MODEL = toy.mixture_model()
RATE = 0.3
SGD = optax.sgd(RATE)
OWN = ("layer.individual.lora_a", "layer.individual.lora_b")
REST = ("layer.rest_of_world.lora_a", "layer.rest_of_world.lora_b")
PRIVATE = (*toy.HEAD, *OWN, "layer.mixer")


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def layer(x, w, pairs, mixer, s):
    """Returns the authors' formula; the pairs are in the order of the mixer's columns."""
    shares = softmax(x @ mixer)
    return x @ w + sum(s * shares[:, i : i + 1] * (x @ a @ b) for i, (a, b) in enumerate(pairs))


# ----------------------------------------------------------------------------------- the algorithm


def gradients(kernel, leaves, rest, x, labels):
    """Returns the gradient of the mean cross entropy by every private leaf, by hand."""
    (a, b), s = (leaves[n] for n in OWN), slow_lora.S
    shares = softmax(x @ leaves["layer.mixer"])
    updates = np.stack([s * x @ rest[0] @ rest[1], s * x @ a @ b], axis=1)
    hidden = np.tanh(x @ kernel + (shares[..., None] * updates).sum(axis=1))
    chances = softmax(hidden @ leaves["head.kernel"] + leaves["head.bias"])
    by_logits = (chances - np.eye(chances.shape[1])[labels]) / len(x)
    by_inner = (by_logits @ leaves["head.kernel"].T) * (1 - hidden**2)
    by_shares = np.einsum("no,nio->ni", by_inner, updates)
    by_scores = shares * (by_shares - (shares * by_shares).sum(axis=1, keepdims=True))
    by_own = shares[:, 1:] * by_inner * s
    return {
        "head.bias": by_logits.sum(axis=0),
        "head.kernel": hidden.T @ by_logits,
        OWN[0]: x.T @ by_own @ b.T,
        OWN[1]: (x @ a).T @ by_own,
        "layer.mixer": x.T @ by_scores,
    }


class SlowFedALT(slow_lora.Slow):
    """The authors' loop over all clients; a client that rests keeps its last LoRA."""

    model, private, optimizer = MODEL, PRIVATE, functools.partial(reference.Sgd, RATE)
    size_weights = False

    def __init__(self, head="private"):
        super().__init__(shared=toy.HEAD if head == "shared" else ())
        for leaves in self.own:
            leaves |= {own: self.leaves[rest] for own, rest in zip(OWN, REST, strict=True)}

    def gradient(self, leaves, batch, client, number):
        return gradients(self.kernel, leaves, self.rest(client), *batch[:2])

    def work(self, client, number):
        """What others average is what clients kept before the round."""
        return self.train(client, number), self.own[client]

    def aggregate(self, uploads, weights, number):
        for client, upload in zip(self.members, uploads, strict=True):
            self.own[client] = {n: upload[n] for n in PRIVATE}
        super().aggregate(uploads, weights, number)
        for leaves in self.own:
            leaves |= {n: self.leaves[n] for n in self.shared}

    def rest(self, client):
        """Returns the mean of A and of B of the other clients."""
        others = [leaves for c, leaves in enumerate(self.own) if c != client]
        return [np.mean([leaves[n] for leaves in others], axis=0) for n in OWN]


@functools.cache
def played(head):
    rig = slow_lora.engine(fp.algorithms.fedalt(SGD, head=head), bound=MODEL)
    return rig, slow_lora.rounds(rig)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["private", "shared"])
@pytest.mark.sample("private")
def test_rounds_equal_the_slow_reference(head):
    rig, results = played(head)
    slow = SlowFedALT(head).run()
    last, broadcast = results[-1], rig.algorithm.server.broadcast(results[-1].server)
    for c, expected in enumerate(slow.own):
        kept = {n: x[c] for n, x in last.client_state.items()}
        model = rig.algorithm.model(broadcast, kept)
        for n in PRIVATE:
            assert_close(model[n], expected[n], rtol=0, atol=1e-5)
        for n, x in zip(REST, slow.rest(c), strict=True):
            assert_close(model[n], x, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_model_before_the_aggregation_has_the_rest_of_the_world_of_the_local_work():
    rig, (first, second, _) = played("private")
    received = rig.algorithm.server.broadcast(first.server)
    old, new = ({n: x[2] for n, x in r.client_state.items()} for r in (first, second))
    upload = {
        rest: received["model"][rest] + new[own] - old[own]
        for own, rest in zip(OWN, REST, strict=True)
    }
    model = rig.algorithm.before_aggregation(received, upload, new)
    trained_with = rig.algorithm.model(received, old)
    for n in REST:
        assert_close(model[n], trained_with[n], rtol=0, atol=1e-6)
    for n in PRIVATE:
        np.testing.assert_array_equal(model[n], new[n])


def test_a_client_without_others_has_its_own_start_as_the_rest():
    algorithm = fp.algorithms.fedalt(optax.sgd(0.1))
    shared = {n: MODEL.trainable[n] for n in REST}
    state = {"model": shared, "clients": jnp.float32(1)}
    kept = algorithm.init_client_state(shared, {n: MODEL.trainable[n] for n in PRIVATE})
    model = algorithm.model(state, kept)
    for own, rest in zip(OWN, REST, strict=True):
        np.testing.assert_array_equal(model[rest], shared[rest])
        np.testing.assert_array_equal(model[own], shared[rest])


@pytest.mark.slow
def test_a_run_on_a_real_model_trains_and_the_mixer_never_leaves_its_client():
    model = fp.attach(fp.testing.tiny_model(classes=4), fp.peft.mixed_lora(rank=2))
    clients = fp.partition.iid(fp.testing.tiny_dataset(48), clients=3)
    run = fp.simulate(
        model, fp.algorithms.fedalt(optax.adam(1e-2)), clients, rounds=3, batch_size=8
    )
    assert run.metrics[-1]["train_loss"] < run.metrics[1]["train_loss"]
    sent = sum(x.nbytes for n, x in model.trainable.items() if ".rest_of_world.lora_" in n)
    scales = sum(x.nbytes for n, x in model.trainable.items() if n.endswith("_world.lora_scale"))
    assert run.metrics[-1]["bytes_up"] == 3 * (sent - scales)


# --------------------------------------------------------------------------------------- the layer


class Small(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(5, 4, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


def attached(**options):
    module = Small(nnx.Rngs(0))
    return attach_module(module, fp.peft.mixed_lora(rank=2, targets=["dense"], **options))


def test_the_layer_is_the_authors_formula():
    module, rng = attached(alpha=3.0), np.random.default_rng(0)
    site = module.dense
    assert isinstance(site, MixedLoRALinear)
    pairs = []
    for update in (site.rest_of_world, site.individual):
        pairs.append((rng.normal(size=(5, 2)), rng.normal(size=(2, 4))))
        update.lora_a.set_value(jnp.asarray(pairs[-1][0], jnp.float32))
        update.lora_b.set_value(jnp.asarray(pairs[-1][1], jnp.float32))
    mixer, x = rng.normal(size=(5, 2)), rng.normal(size=(3, 5))
    site.mixer.set_value(jnp.asarray(mixer, jnp.float32))
    expected = layer(x, np.asarray(site.base.kernel[...]), pairs, mixer, 1.5)
    got = module(jnp.asarray(x, jnp.float32))
    assert_close(got, expected, rtol=0, atol=1e-5)


def test_the_start_changes_no_output_and_both_loras_start_alike():
    module, plain, x = attached(), Small(nnx.Rngs(0)), jnp.ones((2, 5))
    np.testing.assert_array_equal(module(x), plain(x))
    site = module.dense
    np.testing.assert_array_equal(site.individual.lora_a[...], site.rest_of_world.lora_a[...])
    assert np.abs(site.individual.lora_a[...]).max() > 0
    assert not site.individual.lora_b[...].any()
    limit = 5**-0.5
    assert 0 < np.abs(site.mixer[...]).min() <= np.abs(site.mixer[...]).max() <= limit


def test_both_loras_read_the_same_dropped_input_and_the_mixer_the_whole_one():
    module = attached(dropout=0.5)
    site = module.dense
    for sign, update in ((1.0, site.rest_of_world), (-1.0, site.individual)):
        update.lora_b.set_value(jnp.full((2, 4), sign))
    drop = site.dropout
    assert isinstance(drop, Dropout)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(6, 5)), jnp.float32)
    dropped = np.asarray(drop(x))
    assert (dropped == 0).any()
    pairs = [
        (np.asarray(u.lora_a[...]), np.asarray(u.lora_b[...]))
        for u in (site.rest_of_world, site.individual)
    ]
    shares = softmax(np.asarray(x) @ np.asarray(site.mixer[...]))
    moved = sum(shares[:, i : i + 1] * (dropped @ a @ b) for i, (a, b) in enumerate(pairs))
    assert_close(module(x) - site.base(x), moved, rtol=0, atol=1e-5)


def test_it_cannot_be_merged_or_exported(tmp_path):
    model = fp.attach(fp.testing.tiny_model(classes=4), fp.peft.mixed_lora(rank=2))
    adapters = {n.rpartition(".")[2] for n, kind in model.kinds.items() if kind == "adapter"}
    assert adapters == {"lora_a", "lora_b", "mixer"}
    refused("MixedLoRALinear cannot be merged", fp.merge, model)
    for form in ("peft", "merged"):
        refused("mixed_lora", export, model, model.trainable, tmp_path / form, format=form)
