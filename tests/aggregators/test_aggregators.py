"""Mean and FRA compared with dense float64 algebra: their results and their reported errors.

``template`` is the broadcast of the round. Exact average: ``ΔW̄ = Σ w_k s A_k B_k / Σ w_k``.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
from closeness import assert_close, assert_small
from combining import aggregate
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import dead_directions

import fedjax_peft as fp
from fedjax_peft.aggregators.fra import truncated_average

pytestmark = pytest.mark.slow

SHAPES = [  # clients, rank, in, out
    (1, 2, 6, 5),
    (3, 2, 9, 7),  # K r < both sides: decomposed by QR
    (4, 3, 8, 12),  # K r > a side: decomposed dense
]
A, B, HEAD, SCALE = "x.lora_a", "x.lora_b", "head.kernel", "x.lora_scale"


def context(shape, seed, s=1.5):
    """Returns random (uploads ``[clients, ...]``, weights, template, fixed)."""
    clients, r, n_in, n_out = shape
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    template = {A: draw(n_in, r), B: draw(r, n_out), HEAD: draw(n_in, 3)}
    uploads = {name: x[None] + draw(clients, *x.shape) for name, x in template.items()}
    weights = rng.uniform(0.1, 5, clients).astype(np.float32)
    return uploads, weights, template, {SCALE: np.full(r, s, np.float32)}


MEAN, FRA = fp.aggregators.mean(), fp.aggregators.fra()


def product(leaves, fixed):
    return float(fixed[SCALE].max()) * np.asarray(leaves[A], float) @ np.asarray(leaves[B], float)


def share(weights):
    return weights.astype(float) / weights.astype(float).sum()


def exact_average(uploads, weights, fixed):
    a, b = uploads[A].astype(float), uploads[B].astype(float)
    return float(fixed[SCALE].max()) * np.einsum("k,kir,kro->io", share(weights), a, b)


def norm(x):
    return np.linalg.norm(np.asarray(x, float))


# ------------------------------------------------------------------------------------ properties

seeds = st.integers(0, 2**32 - 1)
examples = settings(max_examples=12, deadline=None, derandomize=True)


@examples
@given(shape=st.sampled_from(SHAPES), seed=seeds, s=st.sampled_from([0.25, 1.0, 4.0]))
def test_fra_is_the_best_approximation_of_its_rank_and_knows_its_error(shape, seed, s):
    uploads, weights, template, fixed = context(shape, seed, s)
    update, metrics, _ = aggregate(FRA, uploads, weights, template, fixed)
    exact = exact_average(uploads, weights, fixed)
    tolerance = 1e-5 * norm(exact)
    # Eckart and Young: no factors of rank r come closer. (The error is compared, not the matrix:
    # where two singular values are equal there are many best ones.)
    tail = np.linalg.svd(exact, compute_uv=False)[shape[1] :]
    off = product(update, fixed) - exact
    assert norm(off) <= norm(tail) + tolerance
    assert_small(abs(metrics["aggregation_error"] - norm(off)), tolerance)
    assert_small(abs(metrics["aggregation_error/x"] - norm(off)), tolerance)
    assert_small(abs(metrics["aggregation_error_relative"] - norm(off) / norm(exact)), 1e-5)
    assert_small(abs(metrics["aggregation_error_max"] - np.abs(off).max()), tolerance)
    head = np.average(uploads[HEAD], axis=0, weights=weights)
    assert_close(update[HEAD], head, rtol=0, atol=1e-5)

    averaged, measured, _ = aggregate(MEAN, uploads, weights, template, fixed)
    assert norm(off) <= norm(product(averaged, fixed) - exact) + tolerance
    assert metrics["aggregation_error"] <= measured["aggregation_error"] + tolerance


@examples
@given(shape=st.sampled_from(SHAPES), seed=seeds, chunk=st.sampled_from([1, 2]))
def test_mean_knows_its_error(shape, seed, chunk):
    uploads, weights, template, fixed = context(shape, seed)
    update, metrics, _ = aggregate(MEAN, uploads, weights, template, fixed, chunk=chunk)
    for name, x in uploads.items():
        expected = np.tensordot(share(weights), x.astype(float), axes=1)
        assert_close(update[name], expected, rtol=0, atol=1e-5)
    exact = exact_average(uploads, weights, fixed)
    off = product(update, fixed) - exact
    tolerance = 1e-5 * norm(exact)
    assert_small(abs(metrics["aggregation_error"] - norm(off)), tolerance)
    assert_small(abs(metrics["aggregation_error_max"] - np.abs(off).max()), tolerance)
    assert_small(abs(metrics["aggregation_error_relative"] - norm(off) / norm(exact)), 1e-5)


def test_mean_measures_small_errors_without_cancellation():
    # Clients that hardly moved: the error is second order in how far they moved.
    uploads, weights, template, fixed = context(SHAPES[1], 0)
    moved = {
        name: template[name][None] + 1e-3 * (x - template[name]) for name, x in uploads.items()
    }
    update, metrics, _ = aggregate(MEAN, moved, weights, template, fixed)
    a, b = (np.tensordot(share(weights), moved[n].astype(float), 1) for n in (A, B))
    off = float(fixed[SCALE][0]) * a @ b - exact_average(moved, weights, fixed)
    assert_small(norm(off), 1e-4 * norm(product(update, fixed)))
    assert_close(metrics["aggregation_error"], norm(off), rtol=1e-2)


# -------------------------------------------------------------------------------- FRA in detail


@pytest.mark.parametrize("options", [{}, {"rank": 2, "split": "A"}, {"split": "B"}], ids=str)
def test_both_decompositions_agree_and_signs_are_canonical(options):
    rank = options.get("rank")
    rng = np.random.default_rng(6)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in [(2, 3, 20, 4), (2, 3, 4, 15)])
    weights, scales = np.array([0.5, 0.2, 0.3], np.float32), np.array([1.0, 2.0], np.float32)
    qr, dense = (
        [np.asarray(x) for x in truncated_average(a, b, weights, scales, **options, dense=dense)]
        for dense in (False, True)
    )
    kept = slice(rank)  # the other directions have B = 0 and any A
    # A singular vector is as exact as eps * (largest singular value) / (distance to the next one),
    # here up to 2.3e-5, times the root of the 80 numbers that a rotation touches; and B holds it
    # times a singular value of up to 11.
    assert_close(qr[0][:, :, kept], dense[0][:, :, kept], rtol=0, atol=3e-4)
    assert_close(qr[1], dense[1], rtol=0, atol=2e-3)
    for measured in (2, 3, 4):  # Frobenius and largest error, norm
        assert_close(qr[measured], dense[measured], rtol=1e-4)
    largest = np.take_along_axis(qr[0], np.abs(qr[0]).argmax(axis=1)[:, None], axis=1)
    assert (largest > 0).all()


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_fewer_directions_than_the_adapter_has(rank):
    shape = (3, 4, 20, 15)
    uploads, weights, template, fixed = context(shape, 7)
    update, metrics, _ = aggregate(fp.aggregators.fra(rank), uploads, weights, template, fixed)
    u, sigma, vt = np.linalg.svd(exact_average(uploads, weights, fixed))
    best = u[:, :rank] * sigma[:rank] @ vt[:rank]
    assert_close(product(update, fixed), best, rtol=0, atol=1e-4)
    assert_close(metrics["aggregation_error"], norm(sigma[rank:]), rtol=1e-4)
    # The directions that are not kept can be learned again.
    assert not np.asarray(update[B])[rank:].any()
    assert_close(np.linalg.norm(update[A], axis=0)[rank:], 1 / np.sqrt(3), rtol=1e-5)


def test_split_of_the_singular_values():
    uploads, weights, template, fixed = context(SHAPES[1], 8)
    updates = {
        split: aggregate(fp.aggregators.fra(split=split), uploads, weights, template, fixed)[0]
        for split in ("balanced", "A", "B")
    }
    products = [product(update, fixed) for update in updates.values()]
    assert_close(products[1], products[0], rtol=0, atol=1e-4)
    assert_close(products[2], products[0], rtol=0, atol=1e-4)
    lengths = {
        split: (np.linalg.norm(update[A], axis=0), np.linalg.norm(update[B], axis=1))
        for split, update in updates.items()
    }
    assert_close(*lengths["balanced"], rtol=1e-5)
    assert_close(lengths["A"][1], 1, rtol=1e-5)
    assert_close(lengths["B"][0], 1, rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 12, 9), (3, 4, 8, 10)], ids=["qr", "dense"])
def test_dead_directions_are_revived_without_changing_the_product(shape):
    uploads, weights, template, fixed = context(shape, 9)
    uploads[B][:] = uploads[B][:1, :1]  # every client's B has the same single direction
    one, *_ = aggregate(FRA, uploads, weights, template, fixed)
    expected = exact_average(uploads, weights, fixed)
    assert_close(product(one, fixed), expected, rtol=0, atol=1e-4)
    assert not np.asarray(one[B])[1:].any()
    assert_close(np.linalg.norm(one[A], axis=0)[1:], 1 / np.sqrt(3), rtol=1e-5)
    # They do not depend on rounding, and are orthogonal.
    backwards = [{n: x[::-1] for n, x in uploads.items()}, weights[::-1]]
    other, *_ = aggregate(FRA, *backwards, template, fixed)
    for name in (A, B):
        assert_close(one[name], other[name], atol=1e-5)
    assert_close(one[A].T @ one[A], np.diag(np.diag(one[A].T @ one[A])), atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 4), (40, 200), (1000, 30)])
def test_a_direction_is_dead_where_numpy_counts_it_not_in_the_rank(shape):
    rng = np.random.default_rng(0)
    for left in (1, min(shape) - 1, min(shape)):
        x = rng.normal(size=(shape[0], left)) @ rng.normal(size=(left, shape[1]))
        x = x.astype(np.float32)
        sigma = np.linalg.svd(x, compute_uv=False)
        alive = ~np.asarray(dead_directions(sigma, x.shape))
        assert alive.sum() == np.linalg.matrix_rank(x) == left


@pytest.mark.parametrize("shape", [(2, 3, 12, 9), (3, 4, 8, 10)], ids=["qr", "dense"])
def test_a_first_round_with_unchanged_uploads(shape):
    uploads, weights, template, fixed = context(shape, 10)
    uploads[B][:] = 0
    update, metrics, _ = aggregate(FRA, uploads, weights, template, fixed)
    assert not np.asarray(update[B]).any()
    assert_close(np.linalg.norm(update[A], axis=0), 1 / np.sqrt(3), rtol=1e-5)
    assert all(x == 0 for x in metrics.values())


def test_several_matrices_of_several_shapes():
    shapes = {"x": (3, 2, 9, 7), "y": (3, 2, 9, 7), "z": (3, 2, 5, 5)}  # z is decomposed dense
    parts = {name: context(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    weights = parts["x"][1]

    def join(i):
        return {
            leaf.replace("x.", f"{name}."): x
            for name, part in parts.items()
            for leaf, x in part[i].items()
        }

    for aggregator in (MEAN, FRA, fp.aggregators.hetlora()):
        update, metrics, _ = aggregate(aggregator, join(0), weights, join(2), join(3))
        squares = []
        for name, (uploads, _, template, fixed) in parts.items():
            alone, measured, _ = aggregate(aggregator, uploads, weights, template, fixed)
            for leaf in (A, B):
                own = leaf.replace("x.", f"{name}.")
                assert_close(update[own], alone[leaf], rtol=0, atol=1e-5)
            squares.append(measured["aggregation_error"] ** 2)
            assert_close(
                metrics[f"aggregation_error/{name}"], measured["aggregation_error"], rtol=1e-4
            )
        assert_close(metrics["aggregation_error"], np.sqrt(sum(squares)), rtol=1e-4)


def test_mean_needs_no_lora():
    uploads, weights, template, _ = context(SHAPES[1], 12)
    alone = {HEAD: uploads[HEAD]}
    update, metrics, _ = aggregate(MEAN, alone, weights, {HEAD: template[HEAD]}, {})
    assert update.keys() == {HEAD}
    assert metrics == {}


# ------------------------------------------------------------------------------- the CPU deadlock

SERVER_STEP = """
import jax, jax.numpy as jnp, optax
from fedjax_peft.numerics import summation
from fedjax_peft.aggregators import flexlora, fra, hetlora
from fedjax_peft.algorithms import fra_ffa
from fedjax_peft.contracts import RoundContext

# Two shapes that are decomposed by QR, and one dense.
shapes = {"q": (768, 768), "up": (768, 1536), "small": (96, 768)}
counts = {"q": 24, "up": 3, "small": 3}
uploads = {}
for name, (n_in, n_out) in shapes.items():
    for i in range(counts[name]):
        uploads[f"{name}.{i}.lora_a"] = jax.random.normal(jax.random.key(0), (10, n_in, 16))
        uploads[f"{name}.{i}.lora_b"] = jax.random.normal(jax.random.key(1), (10, 16, n_out))

def run(aggregator, uploads):
    @jax.jit
    def step(uploads, template):
        total = summation.empty(aggregator, template, {}, 10)
        weights, slots = jnp.ones(10), jnp.arange(10)
        total = summation.add(aggregator, total, uploads, weights, slots, template, {})
        facts = (jnp.int32(1), jnp.float32(10), 10, {}, {}, jax.random.key(0), 1.0, slots)
        context = RoundContext(*facts)
        return aggregator.finish(summation.summed(total), template, context, ())

    update, metrics, _ = step(uploads, jax.tree.map(lambda x: x[0], uploads))
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(update))
    print(aggregator.name, float(metrics["aggregation_error"]), flush=True)

for aggregator in (fra(), flexlora(), hetlora()):
    run(aggregator, uploads)
run(fra_ffa(optax.sgd(0.1)).aggregator, {"model": uploads, "switched": jnp.zeros(10)})
"""


@pytest.mark.long("decompositions of full size, in a process with a time limit")
@pytest.mark.exhaustive  # it guards against one fault of XLA
def test_server_steps_of_full_size_do_not_hang():
    # Independent batched LAPACK calls in one program deadlock XLA's thread pool on 2 cores, for
    # ever and at 0 % load. A process of its own can be given up; it has none of our settings.
    ours = ("OPENBLAS_NUM_THREADS", "XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    done = subprocess.run(
        [sys.executable, "-c", SERVER_STEP],
        env={**environment, "JAX_PLATFORMS": "cpu"},
        timeout=180,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    finished = [line.split()[0] for line in done.stdout.splitlines()]
    assert finished == ["fra", "flexlora", "hetlora", "fra_ffa"]
