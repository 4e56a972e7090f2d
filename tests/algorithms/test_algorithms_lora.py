"""LoRA aggregation methods equal a loop over clients in NumPy float64, written from the papers.

The frozen kernel of the toy model has the name that LoRA gives it in real models.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import slow_lora
import toy
from closeness import ROUNDOFF, approx, assert_close, assert_small, roughly
from internals import client_key, stream
from options import run_options
from refusals import refused
from shallow import simple_encoder  # noqa: F401
from slow_lora import (
    ADAM,
    BATCH,
    EPOCHS,
    FEDERATION,
    KERNEL,
    MODEL,
    RATE,
    SCALE,
    SIZES,
    A,
    B,
    S,
    Slow,
    average,
    engine,
    mean,
    product,
)

import fedjax_peft as fp
from fedjax_peft.algorithms.common import freeze_where
from fedjax_peft.algorithms.flora import _restarted

pytestmark = pytest.mark.slow

COHORTS = {n: slow_lora.COHORTS[n] for n in (1, 2)}  # partial, then full
RATE_OF_BERT = optax.sgd(0.5)
DECAY = optax.adamw(RATE, weight_decay=0.3)


# ------------------------------------------------------------------------------ the slow reference


class SlowFFA(Slow):
    shared = (*toy.HEAD, B)


class SlowFedSA(Slow):
    shared, private = (A,), (*toy.HEAD, B)


class SlowRoLoRA(Slow):
    def names(self, number):
        return [*toy.HEAD, B if number % 2 else A]


class SlowFLoRA(Slow):
    initial = np.asarray(MODEL.trainable[A], float)

    def start(self, client, number):
        leaves = super().start(client, number)
        if number > 1:
            key = jax.random.fold_in(client_key(stream(0, "clients"), number, client), 0)
            rows = jax.random.randint(stream(key, A), (toy.FEATURES, toy.RANK), 0, toy.FEATURES)
            columns = [self.initial[row, i] for i, row in enumerate(np.asarray(rows).T)]
            leaves |= {A: np.stack(columns, axis=1), B: 0 * leaves[B]}
        return leaves

    def aggregate(self, uploads, weights, number):
        stack_a = np.concatenate([w * u[A] for w, u in zip(weights, uploads, strict=True)], axis=1)
        stack_b = np.concatenate([u[B] for u in uploads])
        self.kernel = self.kernel + S * stack_a @ stack_b
        self.leaves |= {n: mean(uploads, weights, n) for n in toy.HEAD}
        self.leaves[B] = 0 * self.leaves[B]


class SlowFedEx(Slow):
    size_weights = False

    def aggregate(self, uploads, weights, number):
        super().aggregate(uploads, weights, number)
        self.kernel = self.kernel + average(uploads, weights) - product(self.leaves)


class SlowFlexLoRA(Slow):
    def aggregate(self, uploads, weights, number):
        self.leaves |= {n: mean(uploads, weights, n) for n in toy.HEAD}
        u, sigma, vt = reference.svd(average(uploads, weights), toy.RANK)
        self.leaves |= {A: u, B: sigma[:, None] / S * vt}


class SlowSwitch(SlowFlexLoRA):
    """FRA in the first round, then FFA with an orthonormal A: the first round ends in split B."""

    def names(self, number):
        return self.shared if number == 1 else [*toy.HEAD, B]

    def aggregate(self, uploads, weights, number):
        (super() if number == 1 else super(SlowFlexLoRA, self)).aggregate(uploads, weights, number)


class SlowHetLoRA(Slow):
    def aggregate(self, uploads, weights, number):
        super().aggregate(uploads, weights, number)
        norms = [np.linalg.norm(u[A] @ u[B]) for u in uploads]
        self.leaves |= {n: mean(uploads, norms, n) for n in (A, B)}


CASES = {
    "ffa": (fp.algorithms.ffa(ADAM), SlowFFA),
    "fedsa": (fp.algorithms.fedsa(ADAM), SlowFedSA),
    "rolora": (fp.algorithms.rolora(ADAM), SlowRoLoRA),
    "flora": (fp.algorithms.flora(ADAM), SlowFLoRA),
    "fedex": (fp.algorithms.fedex(ADAM), SlowFedEx),
    "flexlora": (fp.algorithms.fedavg(ADAM, aggregator=fp.aggregators.flexlora()), SlowFlexLoRA),
    "fra_ffa": (fp.algorithms.fra_ffa(ADAM, at=1), SlowSwitch),
    "hetlora": (fp.algorithms.hetlora(ADAM), SlowHetLoRA),
}


@functools.cache
def fast(method):
    """Returns the results of the rounds, and the engine."""
    rig = engine(CASES[method][0])
    return slow_lora.rounds(rig, COHORTS), rig


@pytest.mark.parametrize("method", CASES)
def test_rounds_equal_the_slow_reference(method):
    results, rig = fast(method)
    expected = CASES[method][1]().run(COHORTS)
    slow_lora.compare(rig, results[-1], expected)
    assert set(results[-1].client_state) == set(expected.private)
    kernel = rig.algorithm.server.merge_into_frozen(results[-1].server, MODEL.frozen)[KERNEL]
    assert_close(kernel, expected.kernel, rtol=0, atol=1e-5)
    assert np.array_equal(kernel, MODEL.frozen[KERNEL]) != (method in ("flora", "fedex"))
    # A round without uploads changes no state.
    start = jax.device_get(rig.start()[0])
    nobody = rig.run(slow_lora.cohort(rig, 1, ()))
    jax.tree.map(np.testing.assert_array_equal, nobody.server, start)
    assert all(np.isfinite(x) for x in nobody.aggregation.values())


# --------------------------------------------------------------------- what is exact, what is still


EXACT = ("ffa", "rolora", "flora", "fedex")


@pytest.mark.parametrize("method", EXACT)
def test_exact_methods_report_no_error(method):
    for result in fast(method)[0]:
        for name in ("", "_relative", "_max", "/layer"):
            # FLoRA and FedEx measure it on sums with the kernel, in float32: the norm of 30 numbers
            # that each carry the rounding of five clients' products, of size 3.
            assert_small(result.aggregation[f"aggregation_error{name}"], 30**0.5 * 5 * 3 * ROUNDOFF)


def test_fedex_reports_the_merged_residual():
    results, rig = fast("fedex")
    fold = rig.algorithm.server.frozen_delta(results[0].server)[KERNEL]
    assert results[0].aggregation["residual"] == approx(np.linalg.norm(fold), rel=1e-5)
    assert results[0].aggregation["residual_relative"] > 1e-4


def test_rolora_trains_and_sends_one_factor_at_a_time():
    before = MODEL.trainable
    for result, moves, rests in zip(fast("rolora")[0], (B, A), (A, B), strict=True):
        np.testing.assert_array_equal(result.server[rests], before[rests])
        assert np.abs(result.server[moves] - before[moves]).min() > 0
        assert result.sent_leaves == {moves: True, rests: False}
        before = result.server


@pytest.mark.parametrize("resting", [A, B])
def test_optimizer_states_of_frozen_leaves_do_not_change(resting):
    params = {A: jnp.ones(3), B: jnp.full(3, 2.0)}
    gradient = {A: jnp.full(3, 0.5), B: jnp.full(3, -1.0)}
    optimizer = freeze_where(DECAY, lambda name: jnp.array(name != resting))
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(gradient, state, params)
        np.testing.assert_array_equal(updates[resting], 0)
        assert np.abs(updates[{A: B, B: A}[resting]]).min() > 0
    for moments in (state[0].mu, state[0].nu):
        assert not moments[resting].any()


# -------------------------------------------------------------------------------- FRA, then FFA


def test_after_the_switch_a_rests_and_is_not_sent():
    first, second = fast("fra_ffa")[0]
    assert [bool(r.sent_leaves[A]) for r in (first, second)] == [True, False]
    assert [float(r.server["switched"]) for r in (first, second)] == [1, 1]
    a, b = (first.server["model"][n] for n in (A, B))
    assert_close(a.T @ a, np.eye(toy.RANK), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(second.server["model"][A], a)
    assert np.abs(second.server["model"][B] - b).min() > 0
    assert 0 < first.aggregation["spectrum_kept"] < 1
    assert first.aggregation["aggregation_error"] > 0
    assert second.aggregation["spectrum_kept"] == 1
    assert second.aggregation["aggregation_error"] == 0


def watched(algorithm, models, losses):
    """Returns the server's states over rounds that end in the given models and losses."""
    server, states = algorithm.server, []
    state = server.init(models[0])
    for number, (model, loss) in enumerate(zip(models, losses, strict=True), 1):
        metrics = {"loss": (jnp.float32(3 * loss), jnp.float32(3))}
        context = toy.context(number, metrics)
        state = server.update(state, {"model": model, "switched": state["switched"]}, context)
        states.append(state)
    return states


def switched(states):
    return [int(state["switched"]) for state in states]


def orthogonal(*angles):
    """Returns models whose A spans planes turned by the given angles, with unequal columns."""
    return [
        {
            A: jnp.array([[2 * np.cos(t), 0], [2 * np.sin(t), 0], [0, 0.5]], jnp.float32),
            B: jnp.ones((2, 4)),
        }
        for t in angles
    ]


def test_a_number_of_rounds_brings_the_switch_and_no_product_changes():
    models = orthogonal(0.1, 0.2, 0.3, 0.4)
    states = watched(fp.algorithms.fra_ffa(ADAM, at=2), models, [1.0] * 4)
    assert switched(states) == [0, 1, 1, 1]
    a, b = states[1]["model"][A], states[1]["model"][B]
    assert_close(a @ b, models[1][A] @ models[1][B], rtol=0, atol=1e-6)
    assert_close(a.T @ a, np.eye(2), rtol=0, atol=1e-6)
    for i in (0, 2, 3):  # before it and after it the aggregate is taken as it is
        np.testing.assert_array_equal(states[i]["model"][A], models[i][A])


def test_a_loss_that_stays_as_it_is_brings_the_switch():
    losses = [1.0, 0.8, 0.795, 0.793, 0.5, 0.499]
    for patience, expected in {1: [0, 0, 1, 1, 1, 1], 2: [0, 0, 0, 1, 1, 1], 3: [0] * 6}.items():
        algorithm = fp.algorithms.fra_ffa(
            ADAM, trigger="plateau", patience=patience, tolerance=0.01
        )
        assert switched(watched(algorithm, orthogonal(*[0.1] * 6), losses)) == expected


def test_a_round_without_a_finite_loss_neither_brings_the_switch_nor_is_the_best():
    algorithm = fp.algorithms.fra_ffa(ADAM, trigger="plateau", patience=1)
    states = watched(algorithm, orthogonal(*[0.1] * 5), [1.0, np.nan, np.inf, 0.5, 0.5])
    assert switched(states) == [0, 0, 0, 0, 1]
    assert_close([state["best"] for state in states], [1, 1, 1, 0.5, 0.5])


def test_a_plateau_needs_a_loss():
    algorithm = fp.algorithms.fra_ffa(ADAM, trigger="plateau")
    state = algorithm.server.init(orthogonal(0.1)[0])
    context = toy.context(1, {"error": (jnp.float32(3), jnp.float32(3))})
    refused(r"metric 'loss', .* task has error", algorithm.server.update, state, state, context)


def test_the_loss_is_the_cohorts():
    rig = engine(fp.algorithms.fra_ffa(optax.sgd(0.1), trigger="plateau"), epochs=1)
    (result,) = slow_lora.rounds(rig, {1: (0, 2)})
    total, count = (part.sum() for part in result.sums["loss"])
    assert count == SIZES[0] + SIZES[2]
    assert float(result.server["best"]) == approx(total / count, rel=1e-5)


def test_a_subspace_that_hardly_turns_brings_the_switch():
    # One of two principal angles is the difference of the given ones, the other is 0. The first
    # model stands for the start, which FRA has not made.
    sines = np.sin([0.3, 0.1, 0.05]) / np.sqrt(2)
    for angle, expected in {1.1: [0, 1], 0.9: [0, 0]}.items():
        for sine, (one, other) in zip(sines, [(0.0, 0.3), (0.3, 0.4), (0.4, 0.45)], strict=True):
            tolerance = float(sine * angle)
            algorithm = fp.algorithms.fra_ffa(
                ADAM, trigger="subspace", patience=1, tolerance=tolerance
            )
            states = watched(algorithm, orthogonal(one, other), [1.0] * 2)
            assert switched(states) == expected


# ------------------------------------------------------------------------------ HetLoRA's pruning


def pruned(leaves, client, penalty, rate=0.3):
    """Returns (a client's leaves after a round of SGD, its rank), computed as in the paper."""
    frozen = reference.leaves64(toy.model().frozen)

    def tail(x):
        return np.linalg.norm(x[A][:, 1]) * np.linalg.norm(x[B][1])

    start = tail(leaves)
    options = {**slow_lora.LOCAL, "epochs": 1}
    for x, labels, kept in reference.local_batches(FEDERATION, client, 1, **options):
        by = reference.gradients(frozen, leaves, x, labels, kept)
        long_a, long_b = np.linalg.norm(leaves[A][:, 1]), np.linalg.norm(leaves[B][1])
        by[A][:, 1] += penalty * long_b * leaves[A][:, 1] / long_a
        by[B][1] += penalty * long_a * leaves[B][1] / long_b
        leaves = {n: x - rate * by[n] if n in by else x for n, x in leaves.items()}
    rank = 1 if tail(leaves) < start else 2
    leaves[A][:, rank:], leaves[B][rank:] = 0, 0
    return leaves, rank


def test_clients_prune_tails_that_have_shrunk():
    rig = engine(fp.algorithms.hetlora(optax.sgd(0.3), prune=0.5, penalty=0.1), epochs=1)
    first, second = slow_lora.rounds(rig, {1: None, 2: None})
    start = reference.leaves64(MODEL.trainable)
    outcomes = [pruned(start, c, 0.1) for c in range(len(SIZES))]
    ranks = [rank for _, rank in outcomes]
    assert set(ranks) == {1, 2}, "some do and some do not"
    assert first.client_state["ranks"]["layer"].tolist() == ranks
    uploads = [leaves for leaves, _ in outcomes]
    norms = [np.linalg.norm(u[A] @ u[B]) for u in uploads]
    for name in toy.SHARED:
        weights = SIZES if name in toy.HEAD else norms
        assert_close(first.server[name], mean(uploads, weights, name), rtol=0, atol=1e-5)
    after = second.client_state["ranks"]["layer"].tolist()
    assert all(x <= y for x, y in zip(after, ranks, strict=True)), "what was pruned stays away"
    for name in (A, B):  # what is counted as traffic
        assert first.shares[name].tolist() == [rank / 2 for rank in ranks]
    # A client's own model has its own rank.
    one = jax.tree.map(lambda x: x[ranks.index(1)], first.client_state)
    own = rig.algorithm.model(rig.algorithm.server.broadcast(first.server), one)
    assert own[B][0].any()
    assert not own[B][1:].any()


# --------------------------------------------------------------------------------- through simulate


def run(model, algorithm):
    clients = fp.Clients(
        fp.testing.tiny_dataset(24), tuple(np.split(np.arange(24, dtype=np.int32), [5, 14]))
    )
    options = {"rounds": 1, "clients_per_round": 3, "batch_size": 4}
    return fp.simulate(model, algorithm, clients, **options)


def test_parts_of_a_projection_and_several_loras_cannot_be_folded():
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    config = {"model_type": "gpt2", **sizes, "eos_token_id": 1, "pad_token_id": 0}
    plain = fp.random_model(config, head=fp.heads.classification(4))
    for make in (fp.algorithms.flora, fp.algorithms.fedex):
        refused("without parts", run, fp.attach(plain, fp.lora(2, parts=["q", "v"])), make(ADAM))
        with pytest.raises(fp.InputError, match=r"several LoRAs on one layer \(lora_sum\)"):
            run(fp.attach(plain, fp.peft.lora_sum(2)), make(ADAM))
    whole = fp.attach(plain, fp.lora(2))
    server = fp.algorithms.flora(ADAM).server
    shared = {n: x for n, x in whole.trainable.items() if ".lora_" in n}
    assert server.merge_into_frozen(server.init(shared), whole.frozen).keys() == whole.frozen.keys()


RANKED = {
    "flexlora": CASES["flexlora"][0],
    "hetlora": CASES["hetlora"][0],
    "pruned": fp.algorithms.hetlora(ADAM, prune=0.5, penalty=0.01),
}


@pytest.mark.parametrize("method", RANKED)
def test_clients_upload_zeros_in_masked_rows(method):
    model, algorithm = toy.lora_model(dropout=0), RANKED[method]

    def simulated(ranks):
        options = {"clients_per_round": 5, "batch_size": 4, "client_ranks": ranks, "lanes": 3}
        return fp.simulate(model, algorithm, FEDERATION, rounds=2, **run_options(**options))

    low, mixed = simulated([1]), simulated([1, 2])
    assert low.metrics[1]["bytes_up"] < mixed.metrics[1]["bytes_up"]
    own = sum(MODEL.trainable[n].nbytes // (1 + (n in (A, B))) for n in toy.SHARED)
    assert low.metrics[1]["bytes_up"] == len(SIZES) * own
    a, b = (np.asarray(low.params[n], float) for n in (A, B))
    if method == "flexlora":  # the average of five rank-1 products is cut to the adapter's rank
        assert np.linalg.matrix_rank(a @ b, tol=1e-5) == 2
    else:
        assert not a[:, 1:].any()
        assert not b[1:].any()
        assert np.asarray(mixed.params[B])[1:].any()


@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
def test_flora_restarts_as_the_adapter_started(init):
    model = fp.attach(fp.testing.tiny_model(4), fp.lora(4, init=init), seed=0)
    name = next(n for n in model.trainable if n.endswith("query.lora_a"))
    broadcast = {n: x for n, x in model.trainable.items() if n.startswith(name[:-1])}
    initial, (one, other) = (
        broadcast[name],
        (_restarted(broadcast, stream(i, "x"))[name] for i in (0, 1)),
    )
    assert np.any(one != other)
    for new in (one, other):
        assert float(new.std()) == roughly(float(initial.std()), rel=0.2)
        assert abs(float(new.mean())) < 0.3 * float(initial.std())


def test_flora_sums_products_of_any_ranks():
    ranks, slow = [1, 2, 2, 1, 2], Slow()
    options = {"clients_per_round": 5, "batch_size": BATCH, "epochs": EPOCHS}
    options["client_ranks"] = ranks
    result = fp.simulate(
        MODEL, fp.algorithms.flora(ADAM), FEDERATION, rounds=1, **run_options(**options)
    )
    leaves, expected = slow.leaves, slow.kernel
    for c, rank in enumerate(ranks):
        slow.leaves = leaves | {SCALE: np.where(np.arange(toy.RANK) < rank, S, 0.0)}
        after = slow.train(c, 1)
        share = SIZES[c] / sum(SIZES) * S
        expected = expected + share * after[A][:, :rank] @ after[B][:rank]
    assert_close(result.trained.frozen[KERNEL], expected, rtol=0, atol=1e-5)
