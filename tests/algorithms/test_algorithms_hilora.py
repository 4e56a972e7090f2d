"""HiLoRA equals a loop over rounds and clients in NumPy float64, through all three stages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import slow_lora
import toy
from closeness import approx, assert_close
from internals import Cohort, check_method
from refusals import refused

import fedjax_peft as fp

pytestmark = pytest.mark.slow

MODEL = toy.sum_model()
RATE, S, RANK = 0.3, slow_lora.S, toy.RANK
SGD = optax.sgd(RATE)
SIZES = slow_lora.SIZES
COHORTS = {1: (0, 2, 3), 2: (0, 1, 2), 3: (0, 1, 2, 3), 4: (0, 1, 4), 5: (1, 2, 3), 6: (0, 3, 4)}
"""Root in rounds 1 to 3, cluster in 4 and 5, leaf in 6. Client 4 comes after the clustering."""
OPTIONS = {
    "clients": 5,
    "root_rounds": 3,
    "cluster_rounds": 2,
    "root_penalty": 0.05,
    "cluster_penalty": 0.02,
    "decay": 0.6,
}
STAGES = {1: "root", 2: "root", 3: "root", 4: "cluster", 5: "cluster", 6: "leaf"}


def factors(tier):
    return f"layer.{tier}.lora_a", f"layer.{tier}.lora_b"


SHARED = (*toy.HEAD, *factors("root"), *factors("cluster"))


def gradients(kernel, leaves, x, labels):
    """Returns the gradient of the mean cross entropy by the head and by every factor."""
    products = [S * leaves[a] @ leaves[b] for a, b in map(factors, toy.TIERS)]
    g, by = reference.by_kernel(kernel + sum(products), leaves, x, labels)
    for a, b in map(factors, toy.TIERS):
        by |= {a: S * g @ leaves[b].T, b: S * leaves[a].T @ g}
    return by


class SlowHiLoRA(slow_lora.Slow):
    """The formulas of the file's head, with every matrix dense and clusters by brute force."""

    model, optimizer = MODEL, functools.partial(reference.Sgd, RATE)
    shared = (*toy.HEAD, *factors("root"))

    def __init__(self, head):
        own_head = toy.HEAD if head == "private" else ()
        super().__init__(head=head, private=(*factors("leaf"), *own_head))
        self.clusters, self.assignment, self.smooth = {}, None, {}

    def start(self, client, number):
        """Returns the leaves of a client, with those of its cluster."""
        cluster = self.clusters.get(self.assignment[client], {}) if self.assignment else {}
        return {**self.leaves, **cluster, **self.own[client]}

    def names(self, number):
        """Returns the leaves of the stage."""
        tier = STAGES[number]
        return [*factors(tier), *(toy.HEAD if self.head == "private" or tier != "leaf" else ())]

    def penalty(self, leaves, tier, own):
        """Returns the penalty on the tier's B, which is ``own`` in place of that of the leaves."""
        (b,) = own.values()
        root, cluster = leaves[factors("root")[1]], leaves[factors("cluster")[1]]
        total = OPTIONS["root_penalty"] * np.linalg.norm(b @ root.T) ** 2
        if tier == "leaf":
            total += OPTIONS["cluster_penalty"] * np.linalg.norm(b @ cluster.T) ** 2
        return total

    def gradient(self, leaves, batch, client, number):
        tier, by = STAGES[number], gradients(self.kernel, leaves, *batch[:2])
        if tier != "root":
            b, penalty = factors(tier)[1], functools.partial(self.penalty, leaves, tier)
            by[b] = by[b] + reference.slopes(penalty, {b: leaves[b]})[b]
        return {n: by[n] for n in self.names(number)}

    def average(self, tier, uploads, weights):
        """Returns the best factors of the average product, A with the singular values."""
        a, b = factors(tier)
        product = np.average([S * u[a] @ u[b] for u in uploads], axis=0, weights=weights)
        u, sigma, vt = reference.svd(product, RANK)
        return {a: u * sigma / S, b: vt}

    def group(self):
        """Clusters the clients that have been met; others join the largest cluster."""
        met = sorted(self.smooth)
        spaces = {c: np.linalg.svd(self.smooth[c])[2][:RANK] for c in met}
        cosines = [[np.sum((spaces[i] @ spaces[j].T) ** 2) for j in met] for i in met]
        d = 1 - np.array(cosines) / RANK
        labels, _ = reference.best_groups(d, 2, len(met) - 1)
        largest = max(set(labels), key=labels.count)
        self.assignment = [labels[met.index(c)] if c in met else largest for c in range(len(SIZES))]

    def aggregate(self, uploads, weights, number):
        tier, pairs = STAGES[number], list(zip(uploads, weights, strict=True))
        if tier != "leaf" and self.head == "shared":
            self.leaves |= {n: slow_lora.mean(uploads, weights, n) for n in toy.HEAD}
        if tier == "root":
            self.leaves |= self.average(tier, uploads, weights)
            for c, upload in zip(self.members, uploads, strict=True):
                unit = upload[factors("root")[1]] / np.linalg.norm(upload[factors("root")[1]])
                decay = OPTIONS["decay"] if c in self.smooth else 0
                self.smooth[c] = decay * self.smooth.get(c, 0) + (1 - decay) * unit
        if tier == "cluster":
            for j in {self.assignment[c] for c in self.members}:
                part = [
                    x for c, x in zip(self.members, pairs, strict=True) if self.assignment[c] == j
                ]
                self.clusters[j] = self.average(tier, *zip(*part, strict=True))
        if number == OPTIONS["root_rounds"]:
            self.group()


def groups(labels):
    return {frozenset(np.flatnonzero(np.asarray(labels) == j).tolist()) for j in set(labels)}


@functools.cache
def played(head):
    """Returns the engine, and the results of all rounds."""
    rig = slow_lora.engine(fp.algorithms.hilora(SGD, head=head, **OPTIONS), bound=MODEL)
    return rig, slow_lora.rounds(rig, COHORTS)


@pytest.mark.parametrize("head", ["shared", "private"])
@pytest.mark.sample("private")
def test_rounds_equal_the_slow_reference_in_every_stage(head):
    rig, results = played(head)
    for last in (3, 5, 6):
        result, slow = results[last - 1], SlowHiLoRA(head).run(dict(list(COHORTS.items())[:last]))
        broadcast = rig.algorithm.server.broadcast(result.server)
        labels = result.server["assignment"].tolist()
        assert groups(labels) == groups(slow.assignment)
        for c in range(len(SIZES)):
            kept = jax.tree.map(lambda x, c=c: x[c], result.client_state)
            model, expected = rig.algorithm.model(broadcast, kept), slow.start(c, last)
            assert model.keys() == {*SHARED, *factors("leaf")}
            for n, x in model.items():
                assert_close(x, expected[n], rtol=0, atol=1e-5, err_msg=f"{c} {n}")
    assert 1 < len(groups(labels)) < 4, "clusters of several clients, and several clusters"


def test_the_average_of_a_stage_is_measured():
    _, results = played("shared")
    slow = SlowHiLoRA("shared").run({1: COHORTS[1]})
    uploads = [SlowHiLoRA("shared").train(c, 1) for c in COHORTS[1]]
    a, b = factors("root")
    sizes = [SIZES[c] for c in COHORTS[1]]
    exact = np.average([S * u[a] @ u[b] for u in uploads], axis=0, weights=sizes)
    lost = np.linalg.norm(S * slow.leaves[a] @ slow.leaves[b] - exact)
    first, cluster, leaf = (results[i].aggregation for i in (0, 3, 5))
    assert first["aggregation_error"] == approx(lost, rel=1e-3)
    total = first["aggregation_error"]  # sqrt(x²) of the only matrix
    assert first["aggregation_error/layer"] == approx(total, rel=1e-6)
    kept = 1 - (lost / np.linalg.norm(exact)) ** 2
    assert first["spectrum_kept"] == approx(kept, rel=1e-4)
    assert cluster["aggregation_error"] > 0
    assert leaf["aggregation_error"] == leaf["spectrum_kept"] == 0
    found = len(set(results[2].server["assignment"][:4].tolist()))
    assert [r.aggregation["client_clusters"] for r in results] == [0, 0, *[found] * 4]


@functools.cache
def short():
    """Returns an engine whose first two stages have one round."""
    algorithm = fp.algorithms.hilora(SGD, clients=5, root_rounds=1, cluster_rounds=1)
    return slow_lora.engine(algorithm, bound=MODEL)


def test_a_stage_sends_and_trains_its_own_lora_and_waits_for_an_upload():
    rig, start = short(), MODEL.trainable
    state = rig.start()
    nobody = Cohort([], [], [])
    for stage, number in enumerate((1, 4, 7)):
        waited = rig.run(nobody, number, jax.tree.map(jnp.array, state))
        assert waited.server["stage"] == stage
        result = rig.run(rig.schedule.cohort(number), number, state)
        for tier, name in enumerate(toy.TIERS[:2]):
            assert [bool(result.sent_leaves[n]) for n in factors(name)] == [stage == tier] * 2
        assert [bool(result.sent_leaves[n]) for n in toy.HEAD] == [stage < 2] * 2
        assert result.server["stage"] == min(stage + 1, 2)
        kept = result.client_state["model"]
        moved = [np.any(kept[n] != np.asarray(start[n])) for n in factors("leaf")]
        assert moved == [stage == 2] * 2
        state = (result.server, result.client_state)
    before = jax.tree.map(np.copy, result.server)
    after = rig.run(rig.schedule.cohort(8), 8, state)
    jax.tree.map(np.testing.assert_array_equal, before, after.server)  # nothing is sent any more
    np.testing.assert_array_equal(after.norms, 0)
    assert np.any(after.client_state["model"][factors("leaf")[1]] != kept[factors("leaf")[1]])


def after_root(members=(0, 1, 2, 3, 4)):
    """Returns the engine and its result after the first stage, of one round."""
    return short(), slow_lora.rounds(short(), {1: members})[0]


def test_a_client_never_reads_the_lora_of_another_cluster():
    rig, first = after_root()
    own = int(first.server["assignment"][2])
    hidden = jax.tree.map(jnp.array, first.server)
    for n, x in hidden["clusters"].items():
        hidden["clusters"][n] = jnp.full_like(x, jnp.nan).at[own].set(x[own])
    cohort = slow_lora.cohort(rig, 2, (2,))
    plain = rig.run(cohort, 2, jax.tree.map(jnp.array, first[:2]))
    got = rig.run(cohort, 2, (hidden, jax.tree.map(jnp.array, first.client_state)))
    assert got.finite[0]
    for n, x in plain.server["clusters"].items():
        np.testing.assert_array_equal(got.server["clusters"][n][own], x[own])
        assert np.any(x[own] != first.server["clusters"][n][own])
    np.testing.assert_array_equal(got.norms, plain.norms)


def test_the_clusters_of_clients_that_rest_stay_as_they_are():
    rig, first = after_root()
    labels = first.server["assignment"]
    here = next(c for c in range(5) if labels[c] != labels[2])
    second = rig.run(slow_lora.cohort(rig, 2, (here,)), 2, jax.tree.map(jnp.array, first[:2]))
    for n, x in first.server["clusters"].items():
        np.testing.assert_array_equal(second.server["clusters"][n][labels[2]], x[labels[2]])
        assert np.any(second.server["clusters"][n][labels[here]] != x[labels[here]])


def test_a_newcomer_belongs_to_the_largest_cluster():
    rig, first = after_root((0, 2, 3))
    labels = first.server["assignment"].tolist()
    met = [labels[c] for c in (0, 2, 3)]
    assert sorted(map(met.count, set(met))) == [1, 2]
    largest = max(set(met), key=met.count)
    assert labels[1] == labels[4] == first.server["newcomers"] == largest
    assert first.client_state["client"].tolist() == [0, -1, 2, 3, -1]
    tagged = jax.tree.map(jnp.array, first.server)
    for n, x in tagged["clusters"].items():
        tagged["clusters"][n] = x + jnp.arange(len(x), dtype=jnp.float32).reshape(-1, 1, 1)
    broadcast = rig.algorithm.server.broadcast(tagged)
    for c, label in enumerate(labels):
        kept = jax.tree.map(lambda x, c=c: x[c], first.client_state)
        model = rig.algorithm.model(broadcast, kept)
        for n in factors("cluster"):
            np.testing.assert_array_equal(model[n], tagged["clusters"][n][label])
    other = (labels[0] + 1) % 5  # not the cluster of client 0
    model = rig.algorithm.model({**broadcast, "newcomers": jnp.int32(other)}, kept)
    for n in factors("cluster"):
        np.testing.assert_array_equal(model[n], tagged["clusters"][n][other])


def test_planted_subspaces_become_clusters():
    """The server is given uploads whose B span two subspaces; each client mixes its rows."""
    rng, server = (
        np.random.default_rng(0),
        fp.algorithms.hilora(SGD, **{**OPTIONS, "root_rounds": 1}).server,
    )
    a, b = factors("root")
    state = server.init({n: MODEL.trainable[n] for n in SHARED})
    spaces, groups_of = rng.normal(size=(2, RANK, toy.WIDTH)), [0, 1, 1, 0, 1]
    mixed = [rng.normal(size=(RANK, RANK)) @ spaces[g] for g in groups_of]
    noise = 1e-3 * rng.normal(size=(5, RANK, toy.WIDTH))
    changes = jnp.float32(np.array(mixed) + noise) - state["model"][b][None]
    new = {
        "rest": {n: MODEL.trainable[n] for n in toy.HEAD},
        "changes": {a: jnp.zeros((5, *state["model"][a].shape)), b: changes},
        "weights": jnp.full(5, 0.2),
    }
    fixed = {n: x for n, x in MODEL.trainable.items() if MODEL.kinds[n] == "fixed"}
    context = toy.context()._replace(fixed=fixed)
    after = jax.jit(server.update)(state, new, context)
    assert groups(after["assignment"].tolist()) == groups(groups_of)
    assert after["found"] == 2


def test_traffic_is_that_of_the_stage_and_of_one_cluster():
    model, clients = MODEL, toy.clients([8] * 4)
    algorithm = fp.algorithms.hilora(optax.adam(5e-2), clients=4, root_rounds=2, cluster_rounds=2)
    run = fp.simulate(model, algorithm, clients, rounds=6, batch_size=4)

    def size(part):
        return sum(
            x.nbytes for n, x in model.trainable.items() if part in n and "lora_scale" not in n
        )

    head = sum(x.nbytes for n, x in model.trainable.items() if model.kinds[n] == "head")
    root, cluster = size(".root."), size(".cluster.")
    rows = run.metrics[1:]
    up = [root + head, root + head, cluster + head, cluster + head, 0, 0]
    assert [row["bytes_up"] // 4 for row in rows] == up
    first = root + cluster + head + 4  # 4: the stage
    down = [row["bytes_down"] // 4 for row in rows]
    assert down == [first, root + head, root + head, cluster + head, cluster + head, 0]
    assert rows[0]["client_clusters"] == 0 < rows[1]["client_clusters"] < 4
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert run.client_params(0).keys() == model.trainable.keys()


def test_paths_of_modules_may_have_the_names_of_the_loras():
    algorithm = fp.algorithms.hilora(SGD, **OPTIONS)
    shared = {n.replace("layer.", "tree.root.leaf."): MODEL.trainable[n] for n in SHARED}
    state = algorithm.server.init(shared)
    assert {*state["clusters"]} == {f"tree.root.leaf.cluster.lora_{n}" for n in "ab"}
    assert {*algorithm.server.model(state)} == {*shared}
    sent = algorithm.traffic.sent_leaves(algorithm.server.broadcast(state), jnp.int32(1))
    assert sent["tree.root.leaf.root.lora_a"]
    assert not sent["tree.root.leaf.cluster.lora_a"]


def test_clients_of_different_ranks_are_refused():
    algorithm = fp.algorithms.hilora(SGD, clients=5, root_rounds=1, cluster_rounds=1)
    refused("clients of different LoRA ranks", check_method, MODEL, algorithm, 5, [1, 2], ())
