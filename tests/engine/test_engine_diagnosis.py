"""Drift of the global factors and spectrum of their product equal NumPy and numbers by hand."""

import numpy as np
from closeness import approx
from internals import diagnosis, spectrum, variation

A, B, SCALE = "x.lora_a", "x.lora_b", "x.lora_scale"
RNG = np.random.default_rng(0)


def factors(n_in=7, n_out=9, rank=3):
    return {
        A: RNG.normal(size=(n_in, rank)).astype(np.float32),
        B: RNG.normal(size=(rank, n_out)).astype(np.float32),
    }


def paper(before, after):
    """FeDeRA's Eq 11-14 on the columns of its A ``[r, in]`` and B ``[out, r]``, float64."""
    old, new = before.T.astype(float), after.T.astype(float)
    m_old, m_new = np.linalg.norm(old, axis=0), np.linalg.norm(new, axis=0)
    cosines = [c @ d / (m * n) for c, d, m, n in zip(old.T, new.T, m_old, m_new, strict=True)]
    return np.mean(np.abs(m_new - m_old)), np.mean(1 - np.array(cosines))


def test_variation_is_the_papers():
    before, after = factors(), factors()
    found = variation(before, after)
    for kind, name in (("a", A), ("b", B)):
        magnitude, direction = paper(before[name], after[name])
        assert found[f"variation_magnitude_{kind}/x"] == approx(magnitude, rel=1e-5)
        assert found[f"variation_direction_{kind}/x"] == approx(direction, rel=1e-5)
        assert found[f"variation_direction_{kind}"] == found[f"variation_direction_{kind}/x"]


def test_variation_of_scaled_turned_and_zero_columns_by_hand():
    before, after = factors(rank=2), factors(rank=2)
    before[B] = np.zeros((2, 9), np.float32)
    after[B] = np.stack([np.ones(9), np.zeros(9)]).astype(np.float32)
    after[A] = -3 * before[A]
    found = variation(before, after)
    lengths = np.linalg.norm(before[A], axis=1)
    assert found["variation_magnitude_a"] == approx(2 * lengths.mean(), rel=1e-5)
    assert found["variation_direction_a"] == approx(2)
    assert found["variation_magnitude_b"] == approx(1.5)  # 3 and 0
    assert found["variation_direction_b"] == approx(0.5)  # 1 by convention, and 0


def test_spectrum_is_the_dense_products():
    params = factors() | {n.replace("x", "y"): x for n, x in factors(12, 4, 3).items()}
    found = spectrum(params, {SCALE: np.full(3, 2.0, np.float32)})
    for path, s in (("x", 2.0), ("y", 1.0)):
        dense = s * params[f"{path}.lora_a"].astype(float) @ params[f"{path}.lora_b"]
        sigma = np.linalg.svd(dense, compute_uv=False)[:3]
        p = sigma / sigma.sum()
        assert found[f"singular_value/{path}"] == approx(sigma[0], rel=1e-5)
        expected = np.exp(-(p * np.log(p)).sum())
        assert found[f"effective_rank/{path}"] == approx(expected, rel=1e-5)


def test_the_effective_rank_counts_directions():
    a = np.eye(6, 3, dtype=np.float32)
    for used, expected in ((3, 3), (1, 1), (0, 0)):
        b = np.eye(3, 8, dtype=np.float32) * (np.arange(3) < used)[:, None]
        rank = spectrum({A: a, B: b.astype(np.float32)}, {})["effective_rank"]
        assert rank == approx(expected, abs=1e-5)


def test_without_lora_there_are_no_measures():
    params = {"head.kernel": np.ones((2, 2), np.float32)}
    assert diagnosis([]) is None
    assert diagnosis(["variation", "spectrum"])(params, params, {}) == {}
