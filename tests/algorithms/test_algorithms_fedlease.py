"""FedLEASE equals a loop over rounds and clients in NumPy float64: warm-up, clusters, experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import slow_lora
import toy
from closeness import assert_close
from internals import Ledger
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import pairwise_distances, silhouette_score

import fedjax_peft as fp

pytestmark = pytest.mark.slow

MODEL = toy.experts_model()
RATE, S, ROOM = 0.3, slow_lora.S, len(toy.EXPERTS)
SGD = optax.sgd(RATE)
SIZES = slow_lora.SIZES
COHORTS = {1: (0, 1, 2), 2: (0, 2, 3), 3: (0, 1, 4), 4: (1, 2, 3), 5: (0, 3, 4)}
"""Warm-up in rounds 1 and 2, experts from 3 on. Client 4 comes after the clustering."""
OPTIONS = {"clients": 5, "warmup_rounds": 2, "max_experts": ROOM}
A, B, ROUTER = "layer.own.lora_a", "layer.own.lora_b", "layer.router"
TRAINED = (*toy.HEAD, A, B, ROUTER)
OTHERS = [tuple(f"layer.other_{i}.lora_{n}" for n in "ab") for i in range(1, ROOM)]


def outputs(kernel, leaves, others, x):
    """Returns the logits of examples, one by one, as the authors' code routes them.

    Args:
      others: the factors of the other experts that there are; M is one more.
    """
    experts, found = [(leaves[A], leaves[B]), *others], len(others) + 1
    router = np.delete(
        leaves[ROUTER], [*range(found, ROOM), *range(ROOM + found - 1, 2 * ROOM - 1)], 1
    )
    logits = []
    for row in x:
        chances = np.exp(row @ router) / np.exp(row @ router).sum()
        largest = np.argsort(-chances)[:found]
        weights = chances[largest] / chances[largest].sum()
        inner = row @ kernel
        for place, weight in zip(largest, weights, strict=True):
            a, b = experts[0 if place < found else place - found + 1]
            inner = inner + weight * S * (row @ a) @ b
        logits.append(np.tanh(inner) @ leaves["head.kernel"] + leaves["head.bias"])
    return np.array(logits)


def loss(kernel, others, x, labels, leaves):
    """Returns the mean cross entropy."""
    logits = outputs(kernel, leaves, others, x)
    log = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -log[np.arange(len(x)), labels].mean()


class SlowFedLEASE(slow_lora.Slow):
    """The formulas of the file's head, with gradients as differences of the loss."""

    model, optimizer, size_weights = MODEL, functools.partial(reference.Sgd, RATE), False

    def __init__(self, head="shared"):
        own_head = toy.HEAD if head == "private" else ()
        super().__init__(private=own_head)
        self.travel = [n for n in TRAINED if n not in own_head]
        begin = {n: self.leaves[n] for n in self.travel}
        self.alone, self.met = [dict(begin) for _ in SIZES], set()
        self.experts, self.cluster = [], None

    def others(self, client):
        """Returns the factors of the other experts."""
        if self.cluster is None:
            return []
        return [(e[A], e[B]) for j, e in enumerate(self.experts) if j != self.cluster[client]]

    def start(self, client, number):
        mine = self.alone[client]
        if self.cluster is not None:
            mine = self.experts[self.cluster[client]]
        return {**mine, **self.own[client]}

    def gradient(self, leaves, batch, client, number):
        names = [n for n in TRAINED if n != ROUTER or self.cluster is not None]
        of = functools.partial(loss, self.kernel, self.others(client), *batch[:2])
        by = reference.slopes(lambda some: of({**leaves, **some}), {n: leaves[n] for n in names})
        return {n: by[n] for n in names}

    def aggregate(self, uploads, weights, number):
        sent = {
            c: {n: u[n] for n in self.travel} for c, u in zip(self.members, uploads, strict=True)
        }
        if self.cluster is None:
            self.met |= sent.keys()
            for c, leaves in sent.items():
                self.alone[c] = leaves
            if number == OPTIONS["warmup_rounds"]:
                self.allocate()
            return
        for j in {self.cluster[c] for c in sent}:
            mine = [leaves for c, leaves in sent.items() if self.cluster[c] == j]
            self.experts[j] = reference.average(mine)

    def allocate(self):
        """Finds the clusters of the clients that have been met; others join the largest one."""
        met = sorted(self.met)
        d = pairwise_distances([self.alone[c][B].ravel() for c in met], metric="cosine")
        np.fill_diagonal(d, 0)
        choices = []
        for k in range(2, min(ROOM, len(met) - 1) + 1):
            made = AgglomerativeClustering(n_clusters=k, metric="precomputed", linkage="average")
            labels = made.fit_predict(d)
            choices.append((silhouette_score(d, labels, metric="precomputed"), -k, labels.tolist()))
        labels = max(choices)[2]
        firsts = sorted(set(labels), key=labels.index)
        labels = [firsts.index(j) for j in labels]
        largest = max(range(len(firsts)), key=labels.count)
        self.cluster = [labels[met.index(c)] if c in met else largest for c in range(len(SIZES))]
        for j in range(len(firsts)):
            mine = [self.alone[c] for c in met if self.cluster[c] == j]
            self.experts.append(reference.average(mine))


@functools.cache
def played(head):
    """Returns the engine, and the results of all rounds."""
    rig = slow_lora.engine(fp.algorithms.fedlease(SGD, head=head, **OPTIONS), bound=MODEL)
    return rig, slow_lora.rounds(rig, COHORTS)


@functools.cache
def slow(head):
    """Returns the slow federation after each round."""
    federation, after = SlowFedLEASE(head), []
    for number, members in COHORTS.items():
        federation.run({number: members})
        after.append(
            (federation.cluster, [*federation.experts], [*federation.alone], [*federation.own])
        )
    return after


@pytest.mark.parametrize("head", ["shared", pytest.param("private", marks=pytest.mark.exhaustive)])
def test_rounds_equal_the_slow_reference(head):
    """The models of all clients, other experts included, in each round."""
    rig, results = played(head)
    met = set()
    for (number, members), result, state in zip(COHORTS.items(), results, slow(head), strict=True):
        cluster, experts, alone, own = state
        met |= set(members)
        broadcast = rig.algorithm.server.broadcast(result.server)
        assert result.aggregation["client_clusters"] == len(experts)
        for c in range(len(SIZES)):
            kept = fp.tree.take(result.client_state, c)
            assert kept["client"] == (c if c in met else -1)
            model = rig.algorithm.model(broadcast, kept)
            expected = {**(alone[c] if cluster is None else experts[cluster[c]]), **own[c]}
            for n in TRAINED:
                assert_close(model[n], expected[n], rtol=0, atol=1e-5, err_msg=f"{number} {c} {n}")
            others = (
                [] if cluster is None else [e for j, e in enumerate(experts) if j != cluster[c]]
            )
            for i, names in enumerate(OTHERS):
                for n, like in zip(names, (A, B), strict=True):
                    x = others[i][like] if i < len(others) else np.zeros_like(model[n])
                    assert_close(model[n], x, rtol=0, atol=1e-5, err_msg=f"{number} {c} {n}")
    assert 1 < len(experts) < ROOM, "there is a place without an expert"


def test_the_model_before_the_aggregation_is_the_one_that_was_trained():
    rig, results = played("shared")
    received = rig.algorithm.server.broadcast(results[2].server)
    kept = fp.tree.take(results[2].client_state, 1)
    row = len(SIZES) + results[2].server["assignment"][1]
    change = {n: jnp.full_like(x[0], 0.5) for n, x in received["models"].items()}
    upload = {"model": change, "place": {"row": jnp.float32(row)}}
    before = rig.algorithm.model(received, kept)
    after = rig.algorithm.before_aggregation(received, upload, kept)
    assert after.keys() == before.keys()
    for n, x in before.items():
        assert_close(after[n], x + 0.5 * (n in TRAINED), rtol=0, atol=1e-6)


def test_the_warm_up_waits_for_an_upload_and_routers_rest_in_it():
    rig, results = played("shared")
    state = jax.tree.map(jnp.array, results[0].state)
    waited = rig.run(slow_lora.cohort(rig, 2, ()), 2, state)
    assert waited.server["found"] == 0
    for result in results[:2]:
        np.testing.assert_array_equal(
            result.server["models"][ROUTER],
            np.broadcast_to(MODEL.trainable[ROUTER], result.server["models"][ROUTER].shape),
        )
        assert not result.sent_leaves[ROUTER]
    assert results[2].sent_leaves[ROUTER]
    first = results[2].server["models"][ROUTER][len(SIZES)]
    assert np.any(first != np.asarray(MODEL.trainable[ROUTER]))


def planted(most):
    """Returns the server's state after uploads whose B are near to one of two matrices."""
    server = fp.algorithms.fedlease(SGD, **{**OPTIONS, "warmup_rounds": 1}).server
    rng, groups = np.random.default_rng(0), [0, 1, 1, 0, 1]
    start = {n: x for n, x in MODEL.trainable.items() if MODEL.kinds[n] != "fixed"}
    state = server.init(start)
    shape = (toy.RANK, toy.WIDTH)
    centres, noise = rng.normal(size=(2, *shape)), 0.1 * rng.normal(size=(5, *shape))
    changes = {n: np.zeros(x.shape, np.float32) for n, x in state["models"].items()}
    changes[B][:5] = np.array([centres[g] for g in groups]) + noise - state["models"][B][:5]
    weights = jnp.zeros(5 + ROOM).at[:5].set(most)
    new = {"changes": changes, "weights": weights}
    return jax.jit(server.update)(state, new, toy.context()), groups


def test_planted_clusters_are_found_and_averaged_by_weight():
    weights = jnp.array([1.0, 2.0, 3.0, 4.0, 5.0])
    state, groups = planted(weights)
    assert state["assignment"].tolist() == groups
    assert (state["found"], state["newcomers"]) == (2, 1)
    b = np.asarray(state["models"][B])
    for j in (0, 1):
        mine = [c for c in range(5) if groups[c] == j]
        assert_close(
            b[5 + j], np.average(b[mine], axis=0, weights=weights[np.array(mine)]), atol=1e-5
        )
    np.testing.assert_array_equal(b[7], MODEL.trainable[B])


def test_bytes_are_those_of_the_own_expert_up_and_of_all_down():
    clients = toy.clients([8] * 4)
    made = fp.algorithms.fedlease(SGD, clients=4, warmup_rounds=2, max_experts=ROOM)
    run = fp.simulate(MODEL, made, clients, rounds=5, batch_size=4)
    size = {n: x.nbytes for n, x in MODEL.trainable.items()}
    head, lora = sum(size[n] for n in toy.HEAD), size[A] + size[B]
    rows = run.metrics[1:]
    found = int(rows[-1]["client_clusters"])
    assert [row["client_clusters"] for row in rows] == [0, found, found, found, found]
    router = size[ROUTER]
    up = [lora + head] * 2 + [lora + head + router] * 3
    assert [row["bytes_up"] / 4 for row in rows] == up
    first = ROOM * lora + head + router + 4  # 4: M
    down = [first, lora + head, ROOM * lora + head, *[found * lora + head + router] * 2]
    assert [row["bytes_down"] / 4 for row in rows] == down
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]


def test_a_client_receives_a_model_of_its_own_and_the_other_experts():
    rig, results = played("shared")
    ledger = Ledger(MODEL, rig.algorithm, results[-1].server, 5)
    size = {n: x.nbytes for n, x in MODEL.trainable.items() if MODEL.kinds[n] != "fixed"}
    assert ledger.down(0) == sum(size.values()) + 4
    assert ledger.up(0, ["row"]) == sum(size[n] for n in TRAINED)
