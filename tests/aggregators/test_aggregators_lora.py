"""Aggregators of LoRA factors compared with dense float64 algebra: identities from the papers."""

import numpy as np
import optax
import pytest
from closeness import approx, assert_close
from combining import aggregate
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import dense, empty
from refusals import refused
from test_aggregators import HEAD, SCALE, A, B, context, exact_average, share

import fedjax_peft as fp

pytestmark = pytest.mark.slow

SHAPES = [(3, 2, 9, 7), (4, 3, 8, 12)]  # clients, rank, in, out: decomposed by QR, and dense
SGD = optax.sgd(0.1)
STACKING, RESIDUAL = fp.algorithms.flora(SGD).aggregator, fp.algorithms.fedex(SGD).aggregator
MEAN, FRA, FLEX, HET, ILORA, RA = (
    fp.aggregators.mean(),
    fp.aggregators.fra(),
    fp.aggregators.flexlora(),
    fp.aggregators.hetlora(),
    fp.aggregators.ilora(),
    fp.aggregators.raflora(),
)
BY_NAME = {a.name: a for a in (MEAN, FRA, FLEX, HET, ILORA, RA, STACKING, RESIDUAL)}
FIRST = (fp.aggregators.flexlora(1),)  # FRA's program but for the split of σ
S = 1.5

seeds = st.integers(0, 2**32 - 1)
shapes = st.sampled_from(SHAPES)
examples = settings(max_examples=8, deadline=None, derandomize=True)


def average(uploads, weights):
    """Returns the exact average of the products, float64."""
    return exact_average(uploads, weights, {SCALE: np.float32(S)})


def product(leaves):
    return S * np.asarray(leaves[A], float) @ np.asarray(leaves[B], float)


def used(update):
    """Returns the total change of a matrix: the merged part plus the product of the factors."""
    if "fold" in update:
        return np.asarray(update["fold"]["x"], float) + product(update["model"])
    return product(update)


def close(got, expected, tolerance=1e-5):
    assert_close(got, expected, rtol=0, atol=tolerance * np.linalg.norm(expected))


# ------------------------------------------------------------------------------------ properties


@examples
@given(shape=shapes, seed=seeds)
def test_the_mean_is_off_by_how_clients_differ(shape, seed):
    """``-Σ w_k (A_k - Ā)(B_k - B̄)``, which is ``-½ ΣΣ w_k w_l (A_k - A_l)(B_k - B_l)``."""
    uploads, weights, template, fixed = context(shape, seed)
    update, metrics, _ = aggregate(MEAN, uploads, weights, template, fixed)
    off = used(update) - average(uploads, weights)
    w, a, b = share(weights), uploads[A].astype(float), uploads[B].astype(float)
    da, db = (x - np.tensordot(w, x, axes=1)[None] for x in (a, b))
    from_mean = -S * np.einsum("k,kir,kro->io", w, da, db)
    between_a, between_b = a[:, None] - a[None], b[:, None] - b[None]
    in_pairs = -S / 2 * np.einsum("k,l,klir,klro->io", w, w, between_a, between_b)
    close(from_mean, off, 1e-4)
    close(in_pairs, from_mean, 1e-10)
    assert metrics["aggregation_error"] == approx(np.linalg.norm(in_pairs), rel=1e-4)


@examples
@given(shape=shapes, seed=seeds, common=st.sampled_from([A, B]))
def test_the_mean_of_one_factor_is_exact_where_the_other_is_common(shape, seed, common):
    uploads, weights, template, fixed = context(shape, seed)
    uploads[common] = np.repeat(template[common][None], shape[0], axis=0)
    expected = average(uploads, weights)
    # Sent along, as by RoLoRA.
    update, metrics, _ = aggregate(MEAN, uploads, weights, template, fixed)
    close(used(update), expected)
    assert metrics["aggregation_error"] == 0
    # Fixed, as by FFA-LoRA.
    fixed = {**fixed, common: template.pop(common)}
    del uploads[common]
    update, metrics, _ = aggregate(MEAN, uploads, weights, template, fixed)
    close(used({**fixed, **update}), expected)
    assert metrics["aggregation_error"] == metrics["aggregation_error/x"] == 0
    assert (
        aggregate(fp.aggregators.mean(error=False), uploads, weights, template, fixed).metrics == {}
    )


@examples
@given(shape=shapes, seed=seeds)
def test_folding_makes_the_average_exact(shape, seed):
    uploads, weights, template, fixed = context(shape, seed)
    expected = average(uploads, weights)
    averaged, measured, _ = aggregate(MEAN, uploads, weights, template, fixed)
    for aggregator in (STACKING, RESIDUAL):
        update, metrics, _ = aggregate(aggregator, uploads, weights, template, fixed)
        close(used(update), expected)
        assert_close(update["model"][HEAD], averaged[HEAD], rtol=0, atol=1e-5)
    close(product(update["model"]), product(averaged))
    assert metrics["residual"] == approx(measured["aggregation_error"], rel=1e-4)
    stacked = aggregate(STACKING, uploads, weights, template, fixed).update
    assert not np.asarray(stacked["model"][B]).any()
    np.testing.assert_array_equal(stacked["model"][A], template[A])


@examples
@given(shape=shapes, seed=seeds, rank=st.sampled_from([None, 1]))
def test_truncation_reports_the_kept_share_of_the_spectrum(shape, seed, rank):
    uploads, weights, template, fixed = context(shape, seed)
    sigma = np.linalg.svd(average(uploads, weights), compute_uv=False)
    keep = rank or shape[1]
    share_kept = np.sum(sigma[:keep] ** 2) / np.sum(sigma**2)
    for aggregator in FIRST if rank else (FRA, FLEX):
        update, metrics, _ = aggregate(aggregator, uploads, weights, template, fixed)
        assert metrics["spectrum_kept"] == approx(share_kept, abs=1e-5)
        error = np.linalg.norm(used(update) - average(uploads, weights))
        assert metrics["aggregation_error"] == approx(error, rel=1e-4)


# -------------------------------------------------------------------------- FlexLoRA and HetLoRA


@examples
@given(shape=shapes, seed=seeds)
def test_flexlora_gives_every_rank_the_best_of_its_size(shape, seed):
    uploads, weights, template, fixed = context(shape, seed)
    ranks = np.arange(shape[0]) % shape[1] + 1
    for k, rank in enumerate(ranks):
        uploads[A][k][:, rank:], uploads[B][k][rank:] = 0, 0
    update, *_ = aggregate(FLEX, uploads, weights, template, fixed)
    a, b = (np.asarray(update[n], float) for n in (A, B))
    sigma = np.linalg.svd(average(uploads, weights), compute_uv=False)
    for rank in range(1, shape[1] + 1):
        off = np.linalg.norm(S * a[:, :rank] @ b[:rank] - average(uploads, weights))
        assert off == approx(np.linalg.norm(sigma[rank:]), abs=1e-4 * np.linalg.norm(sigma))
    assert_close(a.T @ a, np.eye(shape[1]), rtol=0, atol=1e-5)


@examples
@given(shape=shapes, seed=seeds)
def test_hetlora_weighs_factors_by_the_norms_of_their_products(shape, seed):
    uploads, weights, template, fixed = context(shape, seed)
    uploads[A][0][:, 1:], uploads[B][0][1:] = 0, 0  # a client of rank 1
    update, metrics, _ = aggregate(HET, uploads, weights, template, fixed)
    a, b = uploads[A].astype(float), uploads[B].astype(float)
    norms = np.linalg.norm(np.einsum("kir,kro->kio", a, b), axis=(1, 2))
    close(update[A], np.average(a, axis=0, weights=norms))
    close(update[B], np.average(b, axis=0, weights=norms))
    close(update[HEAD], np.average(uploads[HEAD], axis=0, weights=weights))
    off = used(update) - average(uploads, norms)
    assert metrics["aggregation_error"] == approx(np.linalg.norm(off), rel=1e-4)
    assert metrics["aggregation_error_max"] == approx(np.abs(off).max(), rel=1e-4)


def test_hetlora_averages_zero_products_by_size():
    uploads, weights, template, fixed = context(SHAPES[0], 3)
    uploads[B][:] = 0
    update, metrics, _ = aggregate(HET, uploads, weights, template, fixed)
    close(update[A], np.average(uploads[A], axis=0, weights=weights))
    assert not np.asarray(update[B]).any()
    assert all(x == 0 for x in metrics.values())


# ----------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"mean"}))
def test_both_factors_must_be_shared(name):
    template = context(SHAPES[0], 0)[2]
    for names in [(HEAD,), (HEAD, A), (HEAD, B)]:
        refused(f"{name}.*Use 'mean'", empty, BY_NAME[name], {n: template[n] for n in names}, {}, 3)


@pytest.mark.parametrize("make", [fp.aggregators.fra, fp.aggregators.flexlora])
def test_no_more_can_be_kept_than_the_adapter_has(make):
    with pytest.raises(fp.InputError, match="cannot keep rank 3: the adapters have rank 2"):
        empty(make(3), context(SHAPES[0], 0)[2], {}, 3)


@pytest.mark.parametrize(
    "make",
    [
        fp.aggregators.mean,
        fp.aggregators.fra,
        fp.aggregators.flexlora,
        fp.aggregators.hetlora,
        fp.aggregators.ilora,
        fp.aggregators.raflora,
    ],
)
def test_without_error_there_are_no_metrics_and_the_update_is_the_same(make):
    uploads, weights, template, fixed = context(SHAPES[1], 0)
    measured = aggregate(make(), uploads, weights, template, fixed)
    plain = aggregate(make(error=False), uploads, weights, template, fixed)
    assert measured.metrics
    assert plain.metrics == {}
    for name, x in plain.update.items():
        # Two programs: rounding times the largest singular value over the distance to the next.
        assert_close(x, measured.update[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("aggregator", [FRA, FLEX, ILORA, RA], ids=lambda x: x.name)
def test_products_of_zero_keep_no_spectrum_and_have_no_error(aggregator):
    uploads, weights, template, fixed = context(SHAPES[1], 0)
    uploads = {**uploads, B: np.zeros_like(uploads[B])}
    update, metrics, _ = aggregate(aggregator, uploads, weights, template, fixed)
    assert not np.any(update[A] @ update[B])
    assert metrics["spectrum_kept"] == 0
    assert metrics["aggregation_error"] == metrics["aggregation_error_relative"] == 0


@examples
@given(shape=shapes, seed=seeds)
def test_ilora_is_the_beginning_of_a_dense_qr_decomposition(shape, seed):
    uploads, weights, template, fixed = context(shape, seed)
    exact, r = average(uploads, weights), shape[1]
    q, upper = np.linalg.qr(exact.T)  # the paper's matrices are [out, in]
    sign = np.sign(np.diagonal(upper))
    q, upper = q * sign, sign[:, None] * upper
    update, metrics, _ = aggregate(ILORA, uploads, weights, template, fixed)
    close(update[B], q[:, :r].T)
    close(S * update[A], upper[:r].T, 1e-4)
    close(update[HEAD], np.average(uploads[HEAD], axis=0, weights=weights))
    lost = np.linalg.norm(upper[r:])
    assert metrics["aggregation_error"] == approx(lost, rel=1e-4)
    assert metrics["aggregation_error_max"] == approx(
        np.abs(exact - product(update)).max(), rel=1e-3
    )
    kept = 1 - (lost / np.linalg.norm(exact)) ** 2
    assert metrics["spectrum_kept"] == approx(kept, abs=1e-5)


def test_ilora_keeps_the_first_input_features_and_not_the_largest_changes():
    """Two clients that change one feature each, by 1 and by 10, and factors of rank 1."""
    a = np.array([[1.0, 0, 0], [0, 10, 0]], np.float32)[:, :, None]
    b = np.array([[1.0, 0], [0, 1]], np.float32)[:, None]
    template = {A: np.ones((3, 1), np.float32), B: np.ones((1, 2), np.float32)}
    sets = {A: a, B: b}, np.ones(2, np.float32), template, {SCALE: np.ones(1, np.float32)}
    first, largest = (aggregate(x, *sets) for x in (ILORA, FRA))
    assert_close(first.update[A] @ first.update[B], [[0.5, 0], [0, 0], [0, 0]])
    assert first.metrics["aggregation_error"] == approx(5)
    assert_close(largest.update[A] @ largest.update[B], [[0, 0], [0, 5], [0, 0]], atol=1e-6)


@examples
@given(shape=shapes, seed=seeds)
def test_ilora_gives_every_rank_the_decomposition_of_its_size(shape, seed):
    uploads, weights, template, fixed = context(shape, seed)
    ranks = np.arange(shape[0]) % shape[1] + 1
    for k, rank in enumerate(ranks):
        uploads[A][k][:, rank:], uploads[B][k][rank:] = 0, 0
    update, *_ = aggregate(ILORA, uploads, weights, template, fixed)
    a, b = (np.asarray(update[n], float) for n in (A, B))
    exact = average(uploads, weights)
    for rank in range(1, shape[1] + 1):
        q, _ = np.linalg.qr(exact[:rank].T)
        close(S * a[:, :rank] @ b[:rank], exact @ q @ q.T, 1e-4)


@examples
@given(shape=shapes, seed=seeds)
def test_raflora_averages_each_partition_over_its_clients(shape, seed):
    uploads, weights, template, fixed = context(shape, seed)
    ranks = np.arange(shape[0]) % shape[1] + 1
    for k, rank in enumerate(ranks):
        uploads[A][k][:, rank:], uploads[B][k][rank:] = 0, 0
    update, metrics, _ = aggregate(RA, uploads, weights, template, fixed)
    a, b = uploads[A].astype(float), uploads[B].astype(float)
    expected, low = np.zeros((shape[2], shape[3])), 0
    for high in sorted(set(ranks.tolist())):  # Algorithm 1: from one client rank to the next
        owners = [k for k, rank in enumerate(ranks) if rank >= high]
        whole = sum(float(weights[k]) for k in owners)
        for k in owners:
            share_k = float(weights[k]) / whole
            expected += share_k * S * a[k][:, low:high] @ b[k][low:high]
        low = high
    u, sigma, vt = np.linalg.svd(expected, full_matrices=False)
    a, b = (np.asarray(update[n], float) for n in (A, B))
    for rank in range(1, shape[1] + 1):
        best = (u[:, :rank] * sigma[:rank]) @ vt[:rank]
        off = np.linalg.norm(S * a[:, :rank] @ b[:rank] - expected)
        assert off == approx(np.linalg.norm(best - expected), abs=1e-4 * np.linalg.norm(sigma))
    assert_close(a.T @ a, S**-1 * np.diag(sigma[: shape[1]]), rtol=0, atol=1e-4 * sigma[0])
    close(update[HEAD], np.average(uploads[HEAD], axis=0, weights=weights))
    lost = np.linalg.norm(sigma[shape[1] :])
    assert metrics["aggregation_error"] == approx(lost, rel=1e-3, abs=1e-5 * sigma[0])


def test_raflora_is_fra_where_ranks_are_equal():
    uploads, weights, template, fixed = context(SHAPES[0], 5)
    one, other = (aggregate(x, uploads, weights, template, fixed).update for x in (RA, FRA))
    for name, x in other.items():
        assert_close(one[name], x, rtol=0, atol=2e-5)  # Two programs, as above.


@pytest.mark.parametrize("aggregator", [FLEX, RA], ids=lambda x: x.name)
def test_raflora_keeps_the_directions_that_few_clients_have(aggregator):
    """Two clients of rank 1 and one of rank 2 return what they received, five times.

    The second singular value shrinks to a third in each round, or stays as it is.
    """
    template = {A: np.diag([2.0, 1.0]).astype(np.float32), B: np.eye(2, dtype=np.float32)}
    fixed, weights = {SCALE: np.ones(2, np.float32)}, np.ones(3, np.float32)
    model = template
    for _ in range(5):
        uploads = {n: np.stack([model[n]] * 3) for n in (A, B)}
        uploads[A][:2, :, 1], uploads[B][:2, 1] = 0, 0
        model = aggregate(aggregator, uploads, weights, template, fixed).update
    sigma = np.linalg.svd(np.asarray(model[A], float) @ model[B], compute_uv=False)
    assert_close(sigma, [2, 1 if aggregator is RA else 3.0**-5], rtol=1e-5)


@pytest.mark.parametrize("aggregator", [FRA, ILORA], ids=lambda x: x.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_dense_form_of_a_sum_gives_the_same_factors(shape, aggregator):
    uploads, weights, template, fixed = context(shape, 0)
    finish = aggregator.finish
    of_dense = aggregator._replace(finish=lambda total, *rest: finish(dense(total), *rest))
    factored = aggregate(aggregator, uploads, weights, template, fixed).update
    summed = aggregate(of_dense, uploads, weights, template, fixed).update
    # Float32: the two forms sum in different orders before the SVD.
    assert_close(summed[A] @ summed[B], factored[A] @ factored[B], atol=2e-5)
    assert_close(summed[HEAD], factored[HEAD], atol=1e-6)
