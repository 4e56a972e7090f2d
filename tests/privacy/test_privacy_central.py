"""Client-level central privacy: sensitivity, noise, and equality with a plain loop."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import protection
import pytest
import running
import toy
from closeness import assert_close, roughly
from combining import aggregate
from compiled import compilations
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import by_field, product_changes, summation
from options import run_options, session_options
from protection import (
    CLIENTS,
    FIXED,
    QN,
    RANK,
    SHAPES,
    draw,
    empty_rounds,
    federation,
    in_space,
    run,
    showing,
)

import fedjax_peft as fp
from fedjax_peft import aggregators, algorithms
from fedjax_peft.privacy.guarantees import client_guarantee
from fedjax_peft.privacy.lifted import product_norm

pytestmark = pytest.mark.slow


BASES = protection.BASES | {
    "product changes": lambda: product_changes(aggregators.fra()),
    "two fields": lambda: by_field(model=aggregators.mean(), control=aggregators.mean()),
}
SGD = optax.sgd(0.1)


def private(base, clip, noise_multiplier=0.0):
    """Returns a private aggregator."""
    return protection.private(fp.privacy.central(clip, noise_multiplier), base)


# ------------------------------------------------------------------------ equality with plain NumPy


def loop(name, uploads, template, clip):
    """Returns the average in the aggregator's space, by a loop over clients."""
    start = in_space(name, template)
    total, norms = {n: np.zeros_like(x) for n, x in start.items()}, []
    for k in range(CLIENTS):
        mine = in_space(name, {n: x[k] for n, x in uploads.items()})
        change = {n: mine[n] - start[n] for n in start}
        norms.append(np.sqrt(sum((x**2).sum() for x in change.values())))
        for n, x in change.items():
            total[n] += x * min(1.0, clip / norms[-1])
    return {n: start[n] + total[n] / QN for n in start}, norms


@pytest.mark.parametrize(("name", "clip"), [("mean", 8.0), ("fra", 30.0), ("fra", 1e6)])
def test_the_aggregate_equals_that_of_a_loop_with_dense_products(name, clip):
    uploads, template = draw(0)
    uploads["head.kernel"][1] = template["head.kernel"]
    for n in uploads:  # one client is not clipped, even at the smaller norms
        uploads[n][0] = template[n] + 0.1 * (uploads[n][0] - template[n])
    expected, norms = loop(name, uploads, template, clip)
    got = run(private(BASES[name](), clip), uploads, template)
    new = got.update
    assert_close(new["head.kernel"], expected["head.kernel"], atol=2e-5)
    if name == "mean":
        assert_close(new["x.lora_a"], expected["x.lora_a"], atol=2e-5)
        assert_close(new["x.lora_b"], expected["x.lora_b"], atol=2e-5)
    else:
        u, sigma, vt = np.linalg.svd(expected["x"])
        kept = (u[:, :RANK] * sigma[:RANK]) @ vt[:RANK]
        assert_close(new["x.lora_a"] @ new["x.lora_b"], kept, atol=2e-4)
    share = np.mean(np.array(norms) > clip)
    assert share in (0, 0.75)
    assert_close(got.metrics["privacy_clip_share"], share)
    assert_close(got.metrics["privacy_median_norm"], np.median(norms), rtol=1e-4)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.sample("fra", "two fields")
def test_the_split_of_clients_over_lanes_does_not_matter(name):
    uploads, template = draw(1)
    if name == "two fields":
        uploads, template = ({"model": x, "control": x} for x in (uploads, template))
    aggregator = private(BASES[name](), 5.0, 0.5)
    one, three = (run(aggregator, uploads, template, lanes) for lanes in (1, 3))
    assert ("snr" in one.metrics) == (name == "fra")
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(three), strict=True):
        assert_close(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", BASES)
def test_without_clipping_or_noise_it_is_the_mean_of_all_that_are_expected(name):
    """The fifth of the expected clients is not there, and counts as one that learned nothing."""
    uploads, template = draw(2)
    fifth = {n: np.concatenate([x, template[n][None]]) for n, x in uploads.items()}
    if name == "two fields":
        both = [{"model": x, "control": x} for x in (uploads, fifth, template)]
        uploads, fifth, template = both
    got = run(private(BASES[name](), 1e6), uploads, template).update
    inputs = (fifth, np.ones(QN, np.float32), template, FIXED)
    plain = aggregate(BASES[name](), *inputs).update
    if name == "fra":
        got, plain = ({"x": x["x.lora_a"] @ x["x.lora_b"]} for x in (got, plain))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------ noise


@pytest.mark.parametrize("name", BASES)
@pytest.mark.sample("fra", "two fields")
def test_the_noise_has_the_standard_deviation_that_is_claimed(name):
    """1,000 draws of every entry of the aggregated space, pooled for each leaf: at least 60,000
    numbers, so that 1 % is more than three standard errors of the measured value.
    """
    clip, noise_multiplier = 3.0, 0.7
    _, template = draw(3)
    template = {"model": template, "control": template} if name == "two fields" else template
    averages, metrics = empty_rounds(
        private(showing(BASES[name]()), clip, noise_multiplier), template
    )
    claimed = metrics["privacy_noise_std"]
    assert_close(claimed, clip * noise_multiplier / QN, rtol=1e-6)
    leaves = jax.tree.leaves(averages)
    assert len(leaves) == {"mean": 3, "fra": 2, "product changes": 2, "two fields": 6}[name]
    for x in leaves:
        centred = x - x.mean(axis=0)
        measured = np.sqrt((centred**2).sum() / (x.size - x[0].size))
        assert measured == roughly(claimed[0], rel=0.01)
    flat = [x.reshape(1000, -1)[:, 0] for x in leaves]
    for a, b in itertools.combinations(flat, 2):  # leaves have different noise
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.2


# ------------------------------------------------------------------------------------ sensitivity

KINDS = ("random", "same", "tiny", "huge", "largest", "nan", "infinite", "rescaled", "turned")


def hostile(kind, seed, size):
    """Returns (an upload that tries to move the sum too far, template)."""
    rng = np.random.default_rng(seed)
    template = {n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
    noise = {n: size * rng.normal(size=x.shape).astype(np.float32) for n, x in template.items()}
    upload = {n: x + noise[n] for n, x in template.items()}
    if kind in ("same", "tiny", "huge"):
        factor = {"same": 0.0, "tiny": 1e-30, "huge": 1e25}[kind]
        upload = {n: x + np.float32(factor) * noise[n] for n, x in template.items()}
    if kind in ("nan", "infinite", "largest"):
        value = {"nan": np.nan, "infinite": np.inf, "largest": 3.4e38}[kind]
        chosen = sorted(SHAPES)[seed % 3]
        upload[chosen].flat[seed % upload[chosen].size] = value
    if kind in ("rescaled", "turned"):
        # Other factors of the same product: large changes that cancel, plus a change of `size`.
        turn = np.diag(rng.uniform(0.1, 10, RANK))
        if kind == "turned":
            turn = np.linalg.qr(rng.normal(size=(RANK, RANK)))[0]
        change = min(size, 1.0) * 1e-3
        upload = {
            "x.lora_a": (template["x.lora_a"] @ turn).astype(np.float32),
            "x.lora_b": (np.linalg.inv(turn) @ template["x.lora_b"]).astype(np.float32),
            "head.kernel": template["head.kernel"],
        }
        upload["x.lora_b"] += np.float32(change) * noise["x.lora_b"]
    return upload, template


@functools.cache
def summed(name):
    """Returns the jitted (upload, template, clip) -> the sum that this one client moves."""

    @jax.jit
    def one(upload, template, clip):
        aggregator = private(BASES[name](), clip)
        nothing = summation.empty(aggregator, template, FIXED, 2)
        inputs = (jnp.ones(1), jnp.zeros(1, jnp.int32), template, FIXED)
        stacked = jax.tree.map(lambda x: x[None], upload)
        total = summation.add(aggregator, nothing, stacked, *inputs)
        return summation.summed(total).value["sum"]

    return one


def length(moved):
    return np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in jax.tree.leaves(moved)))


@pytest.mark.parametrize("name", ["mean", "fra", "product changes"])
@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**31 - 1),
    size=st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 10.0, 1e4]),
    clip=st.sampled_from([1e-3, 0.1, 1.0, 1e2]),
)
def test_no_upload_moves_the_sum_by_more_than_the_clip_norm(name, kind, seed, size, clip):
    upload, template = hostile(kind, seed, np.float32(size))
    moved = summed(name)(upload, template, np.float32(clip))
    assert length(moved) <= clip * (1 + 1e-5)
    if kind in ("nan", "infinite", "same"):
        assert length(moved) == 0


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0])
def test_small_changes_keep_their_digits(size):
    """The norm of a change of a millionth of the factors is as exact as that of a large one."""
    uploads, template = draw(4, size)
    for k in range(CLIENTS):
        upload = {n: x[k] for n, x in uploads.items()}
        inside, start = in_space("fra", upload), in_space("fra", template)
        exact = np.sqrt(sum(((inside[n] - start[n]) ** 2).sum() for n in start))
        moved = summed("fra")(upload, template, np.float32(exact / 2))
        assert_close(length(moved), exact / 2, rtol=3e-5)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    change=st.sampled_from([0.0, 1e-7, 1e-5, 1e-3, 1.0]),
    rank=st.sampled_from([1, 4, 16]),
)
def test_the_norm_of_a_product_that_cancels_is_not_underestimated(seed, change, rank):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(64, rank)), rng.normal(size=(rank, 48))
    left = np.concatenate([a, a], axis=1).astype(np.float32)
    right = np.concatenate([b, -b + change * rng.normal(size=b.shape)]).astype(np.float32)
    exact = np.linalg.norm(left.astype(np.float64) @ right.astype(np.float64))
    bound = float(jax.jit(product_norm)(left, right))
    terms = np.linalg.norm(left, axis=0) @ np.linalg.norm(right, axis=1)
    assert exact * (1 - 1e-5) <= bound <= exact * (1 + 1e-4) + 1.5e-3 * terms


# ----------------------------------------------------------------------------------- whole rounds


def protected(factory, clip=0.2, noise_multiplier=0.5, **options):
    algorithm = factory(optax.sgd(0.5), **options)
    return fp.privacy.central(clip, noise_multiplier).protect(algorithm, federation("all", 5))


def rig(factory=algorithms.fedavg, clip=0.2, **options):
    options |= {"per_round": 5, "lanes": 3, "bound": toy.lora_model(dropout=0)}
    return toy.Engine(protected(factory, clip), running.CLIENTS, **options)


def test_a_client_that_is_not_finite_is_one_that_learned_nothing():
    """The denominator stays, and so does the noise: its own contribution is all that is missing."""
    engine, bad = rig(clip=1e6), toy.poisoned(running.CLIENTS, 2)
    cohort = engine.schedule.cohort(1)
    poisoned = engine.run(cohort, columns=bad.data.columns)
    assert poisoned.finite.tolist() == [True, True, False, True, True]
    without = type(cohort)(*([x[k] for k in (0, 1, 3, 4)] for x in cohort))
    absent = engine.run(without)
    assert "aggregation_error" not in absent.aggregation, "it would say what single clients sent"
    for a, b in zip(jax.tree.leaves(poisoned.server), jax.tree.leaves(absent.server), strict=True):
        assert_close(a, b, rtol=0, atol=1e-6)


def test_leaves_that_rest_and_directions_that_nobody_owns_keep_every_bit():
    engine = rig(algorithms.rolora, ranks=(1,))
    start = engine.model_at_start()
    first = engine.run(engine.schedule.cohort(1))
    np.testing.assert_array_equal(first.server["layer.lora_a"], start["layer.lora_a"])
    moved = first.server["layer.lora_b"] != start["layer.lora_b"]
    assert moved[0].all()
    assert not moved[1].any(), "the ranks are 1"
    second = engine.run(engine.schedule.cohort(2), 2, jax.tree.map(jnp.asarray, first[:2]))
    np.testing.assert_array_equal(second.server["layer.lora_b"], first.server["layer.lora_b"])
    moved = second.server["layer.lora_a"] != first.server["layer.lora_a"]
    assert moved[:, 0].all()
    assert not moved[:, 1].any()


def test_a_round_without_clients_releases_noise_and_is_a_round_like_any_other():
    clients, model = toy.clients([4, 4, 4]), toy.lora_model(dropout=0)
    options = {"clients_per_round": 1, "sampling": "poisson", "rounds": 8}
    make, algorithm = {"privacy": fp.privacy.central(1.0, 0.5), **options}, algorithms.fedavgm(SGD)
    made = fp.simulate(model, algorithm, clients, **run_options(**make))
    empty = [row["round"] for row in made.metrics[1:] if not row["clients"]]
    assert empty, "the seed draws no empty round"
    for row in made.metrics[1:]:
        assert_close(row["privacy_noise_std"], 0.5)
        assert (row["privacy_clip_share"] is None) == (row["round"] in empty)
    session = fp.session(model, algorithm, clients, **session_options(**make))
    state = session.init(0)
    for _ in range(empty[0]):
        before = jax.device_get(state.server)
        state, _ = session.step(state)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state.server), strict=True):
        assert np.all(a != b)


def test_one_program_serves_every_clip_norm_and_noise_multiplier():
    clients, model = toy.clients([4, 4, 4]), toy.lora_model(dropout=0)
    values = {"clip": 0.5, "noise": 0.8}
    session = fp.session(
        *(model, algorithms.fedavg(SGD), clients),
        privacy=lambda p: fp.privacy.central(p["clip"], p["noise"]),
        values=values,
    )
    session.step(session.init(0))
    compilations.clear()
    stds = []
    for clip, noise in ((0.5, 0.8), (2.0, 0.8), (2.0, 0.1)):
        _, info = session.step(session.init(0, {"clip": clip, "noise": noise}))
        stds.append(float(info.aggregation["privacy_noise_std"]))
    assert_close(stds, np.array([0.4, 1.6, 0.2]) / 3, rtol=1e-6)
    assert not compilations


def test_weights_by_size_become_equal():
    assert protected(algorithms.fedavg, weights="size").weights == "uniform"


@pytest.mark.parametrize("make", [fp.privacy.central, fp.privacy.adaptive])
def test_the_guarantee_is_that_of_the_accountant(make):
    """That of adaptive clipping with its total noise."""
    privacy = make(1.0, 1.3, delta=1e-6)
    assert privacy.guarantee(federation(), 20) == client_guarantee(1.3, 1e-6, federation(), 20)
    assert "Poisson" in privacy.statement(federation())
    assert privacy.unit == "client"
    assert privacy.name in ("central", "adaptive")
