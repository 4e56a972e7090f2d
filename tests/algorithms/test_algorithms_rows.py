"""IFCA, HierFAVG and gossip against loops in NumPy float64, and what travels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import slow_lora
import toy
from closeness import approx, assert_close
from internals import Ledger
from test_algorithms_fair import HEADS, SGD, Slow

import fedjax_peft as fp
from fedjax_peft.algorithms import graphs

pytestmark = pytest.mark.slow

EDGES = (0, 1, 0, 1, 1)
PAIRS = ((0, 1), (1, 2), (2, 3), (3, 4), (0, 2))
MAKE = {
    "ifca": functools.partial(fp.algorithms.ifca, SGD, spread=0.5),
    "hierfavg": functools.partial(fp.algorithms.hierfavg, SGD, edges=EDGES),
    "gossip": functools.partial(fp.algorithms.gossip, SGD, clients=5, graph=PAIRS),
}
"""The models of IFCA differ so much that clients choose different ones."""


class SlowRows(Slow):
    """Several models; ``place`` is the row of each client."""

    def __init__(self, models, **options):
        super().__init__(**options)
        rows = len(models[self.shared[0]])
        self.models = [{n: np.float64(x[j]) for n, x in models.items()} for j in range(rows)]
        self.place = {}

    def start(self, client, number):
        return {**self.leaves, **self.models[self.place[client]], **self.own[client]}

    def work(self, client, number):
        self.locate(client)
        return reference.Slow.work(self, client, number)

    def mean_of_row(self, uploads, row):
        """Returns the average of the uploads of a row by size, and its weight."""
        pairs = zip(self.members, uploads, strict=True)
        own = [(u, self.federation.sizes[c]) for c, u in pairs if self.place[c] == row]
        if not own:
            return self.models[row], 0.0
        sizes = [size for _, size in own]
        return reference.average([{n: u[n] for n in self.shared} for u, _ in own], sizes), sum(
            sizes
        )


class SlowIFCA(SlowRows):
    def locate(self, client):
        everything = [{**self.leaves, **model, **self.own[client]} for model in self.models]
        self.place[client] = int(np.argmin([self.loss_of(x, client) for x in everything]))

    def aggregate(self, uploads, weights, number):
        self.models = [self.mean_of_row(uploads, j)[0] for j in range(len(self.models))]


class SlowEdges(SlowRows):
    """Edges average in each round, the cloud in each second one."""

    heard = (0.0, 0.0)

    def locate(self, client):
        self.place[client] = EDGES[client]

    def aggregate(self, uploads, weights, number):
        self.models, now = zip(*(self.mean_of_row(uploads, j) for j in (0, 1)), strict=True)
        self.heard = np.add(self.heard, now)
        self.cloud = reference.average(self.models, self.heard)
        if number % 2 == 0:
            self.models, self.heard = [self.cloud, self.cloud], (0.0, 0.0)


class SlowGossip(SlowRows):
    """x_i ← Σ_j W_ij x_j + Δ_i over the nodes that are there, node by node."""

    def locate(self, client):
        self.place[client] = client

    def aggregate(self, uploads, weights, number):
        degree = [sum(i in pair for pair in PAIRS) for i in range(5)]
        old, new = self.models, list(self.models)
        for i, upload in zip(self.members, uploads, strict=True):
            new[i] = {n: upload[n] for n in self.shared}  # x_i + Δ_i
            for j in self.members:
                if (i, j) in PAIRS or (j, i) in PAIRS:
                    w = 1 / (1 + max(degree[i], degree[j]))
                    new[i] = {n: x + w * (old[j][n] - old[i][n]) for n, x in new[i].items()}
        self.models = new


SLOW = {"ifca": SlowIFCA, "hierfavg": SlowEdges, "gossip": SlowGossip}


@functools.cache
def played(name, head):
    """Returns the engine, its results and the slow federations after each round."""
    shared, own = HEADS[head]
    rig = slow_lora.engine(MAKE[name](head=head))
    models = rig.algorithm.server.init(rig.shared)["models"]
    slow = []
    for last in slow_lora.COHORTS:
        cohorts = {t: who for t, who in slow_lora.COHORTS.items() if t <= last}
        slow.append(SLOW[name](models, shared=shared, private=own).run(cohorts))
    return rig, slow_lora.rounds(rig), slow


@pytest.mark.parametrize("head", ["shared", "private"])
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.sample("ifca-private", "hierfavg-shared", "gossip-shared")
def test_rounds_equal_the_slow_reference(name, head):
    _, results, slow = played(name, head)
    for result, expected in zip(results, slow, strict=True):
        for j, model in enumerate(expected.models):
            for n, x in model.items():
                assert_close(result.server["models"][n][j], x, rtol=0, atol=1e-5)
        for n in expected.private:
            kept = [leaves[n] for leaves in expected.own]
            assert_close(result.client_state["model"][n], kept, rtol=0, atol=1e-5)


def test_clients_of_ifca_keep_what_they_chose():
    rig, results, slow = played("ifca", "private")
    for result, expected in zip(results, slow, strict=True):
        kept = result.client_state["cluster"].tolist()
        assert kept == [expected.place.get(c, -1) for c in range(5)]
    assert len(set(kept)) == 2, "both models are chosen"
    received = rig.algorithm.server.broadcast(results[0].server)
    first = fp.tree.take(results[0].client_state, 1)  # it was not in round 1
    model = rig.algorithm.model(received, first)
    sizes = [sum(slow_lora.SIZES[c] for c in (0, 2, 3) if slow[0].place[c] == j) for j in (0, 1)]
    for n in toy.ADAPTER:
        np.testing.assert_array_equal(model[n], results[0].server["models"][n][np.argmax(sizes)])


def test_the_cloud_has_the_average_of_its_edges():
    rig, results, slow = played("hierfavg", "shared")
    size = sum(x.nbytes for x in rig.shared.values())
    for result, expected in zip(results, slow, strict=True):
        model = rig.algorithm.server.model(result.server)
        for n in rig.shared:
            assert_close(model[n], expected.cloud[n], rtol=0, atol=1e-5)
    for link in ("up", "down"):
        sent = [float(result.aggregation[f"edge_bytes_{link}"]) for result in results]
        assert sent == [0, 2 * size, 0]


def test_the_global_model_of_gossip_is_the_mean_of_the_nodes():
    rig, results, slow = played("gossip", "shared")
    model = rig.algorithm.server.model(results[-1].server)
    mean = reference.average(slow[-1].models)
    square = sum(((m[n] - mean[n]) ** 2).sum() for m in slow[-1].models for n in mean) / 5
    for n, x in mean.items():
        assert_close(model[n], x, rtol=0, atol=1e-5)
    assert results[-1].aggregation["consensus_distance"] == approx(np.sqrt(square), rel=1e-4)
    new = {"model": {}, "node": jnp.int32(-1)}
    unmet = rig.algorithm.model(rig.algorithm.server.broadcast(results[-1].server), new)
    for n, x in unmet.items():
        np.testing.assert_array_equal(x, rig.shared[n])


@pytest.mark.parametrize(
    ("name", "up", "down"), [("ifca", 1, 2), ("hierfavg", 1, 1), ("gossip", 3, 3)]
)
def test_what_travels(name, up, down):
    """Client 2 of the graph has three neighbours. IFCA's clients send the number of the model."""
    made, model = MAKE[name](), toy.lora_model()
    start = {n: model.trainable[n] for n in toy.SHARED}
    size = sum(x.nbytes for x in start.values())
    ledger = Ledger(model, made, made.server.init(start), 5)
    resting = made.traffic.sent_leaves({}, jnp.int32(1))
    sent = ledger.up(2, [n for n in resting if not resting[n]])
    assert (sent, ledger.down(2)) == (up * size + 4 * (name == "ifca"), down * size)
    assert ledger.whole(2, first=True, moved=False) == down * size


def test_the_models_of_ifca_begin_around_the_given_start():
    start = {"x": jnp.ones((50, 40))}
    models = fp.algorithms.ifca(SGD, clusters=3, spread=0.1).server.init(start)["models"]["x"]
    spread = np.asarray(models) - np.asarray(start["x"])
    assert np.abs(spread.std(axis=(1, 2)) - 0.1).max() < 0.01
    assert np.abs(spread[0] - spread[1]).max() > 0.1


GRAPHS = {
    "ring": (graphs.ring(5), [2] * 5),
    "two": (graphs.ring(2), [1] * 2),
    "torus": (graphs.torus(*graphs.sides(12)), [4] * 12),
    "flat torus": (graphs.torus(*graphs.sides(6)), [3] * 6),
}


@pytest.mark.parametrize(("links", "degrees"), GRAPHS.values(), ids=GRAPHS)
def test_graphs_and_their_weights(links, degrees):
    assert links.sum(axis=1).tolist() == degrees
    np.testing.assert_array_equal(links, links.T)
    weights = graphs.metropolis(links)
    np.testing.assert_array_equal(weights, weights.T)
    assert_close(weights.sum(axis=1), np.array(degrees) / (1 + np.array(degrees)), rtol=1e-12)
    graphs.check_connected(links, "")


def test_nodes_of_a_random_graph_have_the_given_degree_on_average():
    links = graphs.random(100, 30, seed=1)
    assert abs(links.sum() / 100 - 30) < 2
    assert np.any(links != graphs.random(100, 30, seed=2))


def test_all_models_agree_in_the_end_where_nobody_learns():
    """Nodes begin at different models, and only average."""
    made = fp.algorithms.gossip(SGD, clients=5, graph=PAIRS)
    models = {"x": jnp.arange(5.0)[:, None]}
    nothing = {"changes": {"x": jnp.zeros((5, 1))}, "weights": jnp.ones(5)}
    state = {"models": models, "start": {"x": jnp.zeros(1)}}
    step = jax.jit(lambda state: made.server.update(state, nothing, toy.context()))
    for _ in range(100):
        state = step(state)
    assert_close(state["models"]["x"], np.full((5, 1), 2.0), rtol=0, atol=1e-5)
