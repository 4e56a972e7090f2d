"""FedDPA equals a loop over clients in NumPy float64, written from the paper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import slow_lora
import toy
import toy_cores
from closeness import assert_close
from internals import REFERENCE
from slow_lora import FEDERATION
from test_algorithms_cores import COHORTS, RATE, SGD, rounds_of

import fedjax_peft as fp

pytestmark = pytest.mark.slow

MODEL = toy_cores.pair_model()
EPOCHS, MIX, W = 2, 0.3, 0.8
G, L = "layer.global_adapter", "layer.private_adapter"


def product(p, path):
    return 1.5 * p[f"{path}.lora_a"] @ p[f"{path}.lora_b"]


class Slow(slow_lora.Slow):
    """FedDPA-T; both adapters are trained one after the other, as in the authors' code."""

    model, trains_local, size_weights = MODEL, True, False
    shared = (f"{G}.lora_a", f"{G}.lora_b", *toy.HEAD)
    private = (f"{L}.lora_a", f"{L}.lora_b", REFERENCE)

    def adapter_step(self, p, path, share, kernel, batch):
        g, head = reference.by_kernel(kernel, p, *batch)
        a, b = f"{path}.lora_a", f"{path}.lora_b"
        return {a: share * 1.5 * g @ p[b].T, b: share * 1.5 * p[a].T @ g, **head}

    def trained(self, p, path, weight, names, client, number):
        """Returns the leaves after the local steps of one adapter, and the last batch."""
        batches = reference.local_batches(FEDERATION, client, number, batch_size=4, epochs=EPOCHS)
        share = {G: 1 - weight, L: weight}[path]
        for batch in batches:
            kernel = self.kernel + (1 - weight) * product(p, G) + weight * product(p, L)
            by = self.adapter_step(p, path, share, kernel, batch)
            p = {**p, **{n: p[n] - RATE * by[n] for n in names}}
        return p, batch[0]

    def hidden(self, p, x):
        states = np.tanh(x @ (self.kernel + product(p, L)))
        return states / np.linalg.norm(states, axis=1, keepdims=True)

    def train(self, client, number):
        received = self.start(client, number)
        leaves = self.trained(received, G, 0.0, self.shared, client, number)[0]
        if self.trains_local:
            own, x = self.trained(received, L, MIX, self.private[:2], client, number)
            leaves |= {n: own[n] for n in self.private[:2]}
            leaves[REFERENCE] = W * self.hidden(own, x[:5]).mean(axis=0)
        return leaves


class SlowF(Slow):
    trains_local = False


CASES = {
    "feddpa_t": (lambda: fp.algorithms.feddpa_t(SGD, mix=MIX, max_weight=W), Slow),
    "feddpa_f": (lambda: fp.algorithms.feddpa_f(SGD, max_weight=W), SlowF),
}


@functools.cache
def played(method):
    """Returns the last result of the rounds, the engine, and the slow federation."""
    make, slow = CASES[method]
    results, rig = rounds_of(make(), MODEL)
    return results[-1], rig, slow().run(COHORTS)


@pytest.mark.parametrize("method", CASES)
def test_rounds_equal_the_slow_reference(method):
    result, rig, slow = played(method)
    slow_lora.compare(rig, result, slow)


def logits_of(algorithm, server, own, client, x):
    """Returns the logits with which a client predicts."""
    mine = jax.tree.map(lambda leaf: jnp.asarray(leaf[client]), own)
    fixed = {n: leaf for n, leaf in MODEL.trainable.items() if MODEL.kinds[n] == "fixed"}
    leaves = {**fixed, **algorithm.model(algorithm.server.broadcast(server), mine)}
    return MODEL.apply(MODEL.frozen, leaves, {"x": jnp.float32(x)}, None, False).logits


def by_hand(slow, p, ref, x):
    """Returns the logits of every example, one at a time."""
    rows = []
    for one in x:
        weight = max(0.0, float(slow.hidden(p, one[None])[0] @ ref))
        kernel = slow.kernel + (1 - weight) * product(p, G) + weight * product(p, L)
        rows.append(np.tanh(one @ kernel) @ p["head.kernel"] + p["head.bias"])
    return np.array(rows)


def test_predictions_weight_the_local_adapter_by_the_similarity_of_each_example():
    result, rig, slow = played("feddpa_t")
    x = FEDERATION.data.columns["x"][:9]
    for client in (0, 3):
        p = {**slow.leaves, **slow.own[client]}
        got = logits_of(rig.algorithm, result.server, result.client_state, client, x)
        expected = by_hand(slow, p, slow.own[client][REFERENCE], x)
        assert_close(got, expected, rtol=0, atol=1e-4)
    weights = slow.hidden(p, x) @ slow.own[3][REFERENCE]
    assert weights.min() < 0 < weights.max()  # examples of both kinds


def test_a_client_without_a_local_adapter_predicts_with_the_global_one():
    _, rig, _ = played("feddpa_t")
    server, own = rig.start()
    slow, x = Slow(), FEDERATION.data.columns["x"][:4]
    got = logits_of(rig.algorithm, server, own, 0, x)
    expected = by_hand(slow, slow.leaves, np.zeros(toy.WIDTH), x)
    assert_close(got, expected, rtol=0, atol=1e-5)


def test_the_fine_tuning_of_feddpa_f_starts_from_the_global_adapter():
    algorithm = fp.algorithms.feddpa_f(SGD, max_weight=W)
    fixed = {n: x for n, x in MODEL.trainable.items() if MODEL.kinds[n] == "fixed"}

    def apply(params, batch, key, train):
        return MODEL.apply(MODEL.frozen, {**fixed, **params}, batch, key, train)

    context = fp.contracts.ClientContext(apply, fp.tasks.classification(), fixed, jnp.int32(1))
    update = algorithm.tuning.client(context)
    shared, private = (
        {n: MODEL.trainable[n] for n in names} for names in (Slow.shared, Slow.private)
    )
    state = update.init(shared, private, jax.random.key(0))
    columns = {n: jnp.asarray(x[:6]) for n, x in FEDERATION.data.columns.items()}
    batch = {**columns, "mask": jnp.arange(6) != 1, "step": jnp.int32(0), "steps": jnp.int32(1)}
    state, _ = jax.jit(update.step)(state, batch, jax.random.key(1))
    upload, after = update.final(state)
    assert upload == {}
    slow = Slow()
    start = {n.replace(".global_", ".private_"): slow.leaves[n] for n in shared if "lora" in n}
    p = {**slow.leaves, **start}
    kept = np.asarray(jax.random.bernoulli(jax.random.key(1), 0.8, (6, toy.WIDTH)))
    real = np.asarray(batch["mask"])
    x, labels = (np.asarray(columns[n])[real] for n in ("x", "labels"))
    one = (x.astype(float), labels, kept[real])
    by = slow.adapter_step(p, L, 1.0, slow.kernel + product(p, L), one)
    for n, x in start.items():
        assert_close(after[n], x - RATE * by[n], rtol=0, atol=1e-5)
    p |= {n: np.asarray(after[n], float) for n in start}
    states = slow.hidden(p, np.asarray(columns["x"])[[0, 2, 3, 4]])  # of the first five, the real
    assert_close(after[REFERENCE], W * states.mean(axis=0), rtol=0, atol=1e-5)
