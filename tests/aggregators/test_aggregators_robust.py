"""Robust aggregators: equal to the papers in NumPy, and bounded whatever hostile clients send.

The reference works in float64 on one vector for each client, in either space.
"""

import functools

import combining
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from combining import aggregate
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import fedjax_peft as fp
from fedjax_peft import aggregators
from fedjax_peft.aggregators.ranking import each_entry, middle, ranked
from fedjax_peft.aggregators.robust import Changes, enough_clients

pytestmark = pytest.mark.slow

SLOTS, RANK, N_IN, N_OUT, SCALE = 9, 2, 6, 5, 1.5
A, B, HEAD = "x.lora_a", "x.lora_b", "head.kernel"
FIXED = {"x.lora_scale": np.full(RANK, SCALE, np.float32)}
SHAPES = {A: (N_IN, RANK), B: (RANK, N_OUT), HEAD: (3, 2)}
OPTIONS = {
    "bulyan": {"hostile": 1},
    "centred_clipping": {"radius": 1.0, "steps": 3},
    "fltrust": {"trusted": 8},
    "geometric_median": {"steps": 40},
    "krum": {"hostile": 3},
    "median": {},
    "multi_krum": {"hostile": 3},
    "norm_bounding": {"norm": 2.0},
    "trimmed_mean": {"share": 0.34},
}
"""Name -> arguments with which it resists 3 of 9 hostile clients; Bulyan 1."""
SPACES = ("factors", "product")
each = pytest.mark.parametrize("name", OPTIONS)
in_each_space = pytest.mark.parametrize("space", SPACES)
draw = functools.partial(combining.draw, SHAPES, SLOTS)


@functools.cache
def make(name, space="factors", **options):
    return getattr(aggregators, name)(**{**OPTIONS.get(name, {}), **options}, space=space)


def run(aggregator, uploads, here, template, state=None):
    """Returns the aggregate; slots that are not here hold numbers that must not matter."""
    weights = np.where(here, np.linspace(1, 4, SLOTS), 0).astype(np.float32)
    return aggregate(aggregator, uploads, weights, template, FIXED, state=state)


def vector(leaves, space):
    """Returns what a model stands for in a space, a float64 vector."""
    x = {n: np.asarray(v, np.float64) for n, v in leaves.items()}
    if space == "product":
        product = SCALE * x.pop(A) @ x.pop(B)
        return np.concatenate([product.ravel(), x[HEAD].ravel()])
    return np.concatenate([x[n].ravel() for n in SHAPES])


def changes(uploads, here, template, space):
    """Returns the clients' changes ``[clients that are here, d]``."""
    rows = [vector({n: x[k] for n, x in uploads.items()}, space) for k in np.flatnonzero(here)]
    return np.stack(rows) - vector(template, space)


def truncated(full, space):
    """Returns a vector as the aggregator can express it: the product cut to the rank."""
    if space == "factors":
        return full
    size = N_IN * N_OUT
    u, sigma, vt = np.linalg.svd(full[:size].reshape(N_IN, N_OUT))
    return np.concatenate([(u[:, :RANK] * sigma[:RANK] @ vt[:RANK]).ravel(), full[size:]])


# ---------------------------------------------------------------------------- the papers in NumPy


def by_krum(x, f):
    """Returns the order of the changes by Krum's score, then by the sum of all distances."""
    n = len(x)
    scores, sums = [], []
    for i in range(n):
        others = sorted(np.sum((x[i] - x[j]) ** 2) for j in range(n) if j != i)
        scores.append(sum(others[: max(n - f - 2, 1)]))
        sums.append(sum(others))
    return np.lexsort((sums, scores))


def weiszfeld(x, steps):
    """Returns the geometric median, from the mean, as in Algorithm 2 of the paper."""
    z = x.mean(0)
    for _ in range(steps):
        beta = 1 / np.maximum(np.linalg.norm(x - z, axis=1), 1e-6)
        z = beta @ x / beta.sum()
    return z


def cut(x, share):
    """Returns the trimmed mean: scipy.stats.trim_mean, written out."""
    m = int(share * len(x) + 1e-9)
    return np.sort(x, axis=0)[m : len(x) - m].mean(0)


def bounded(x, norm):
    """Returns the mean of changes of at most this norm."""
    return np.mean([v * min(1, norm / np.linalg.norm(v)) for v in x], axis=0)


def by_bulyan(x, f):
    """Returns the mean of the values around the median of repeated Krum's choices."""
    rest, chosen = list(range(len(x))), []
    theta = len(x) - 2 * f
    while len(chosen) < theta:
        chosen.append(rest.pop(by_krum(x[rest], f)[0]))
    kept, middle = x[chosen], np.median(x[chosen], axis=0)
    order = np.argsort(np.abs(kept - middle), axis=0, kind="stable")
    return np.take_along_axis(kept, order, axis=0)[: theta - 2 * f].mean(0)


def clipped(x, v, radius, steps):
    """Returns the centre after some steps."""
    for _ in range(steps):
        pulls = [(d := one - v) * min(1, radius / np.linalg.norm(d)) for one in x]
        v = v + np.mean(pulls, axis=0)
    return v


def trusting(x):
    """Returns FLTrust's update; the last client is the trusted one."""
    own, norm = x[-1], np.linalg.norm
    scores = [max(0, one @ own / norm(one) / norm(own)) for one in x[:-1]]
    parts = [s * norm(own) / norm(one) * one for s, one in zip(scores, x[:-1], strict=True)]
    return np.sum(parts, axis=0) / np.sum(scores)


REFERENCES = {
    "bulyan": lambda x: by_bulyan(x, 1),
    "centred_clipping": lambda x: clipped(x, 0, 1.0, 3),
    "fltrust": trusting,
    "geometric_median": lambda x: weiszfeld(x, 2000),
    "krum": lambda x: x[by_krum(x, 3)[0]],
    "median": lambda x: np.median(x, axis=0),
    "multi_krum": lambda x: x[by_krum(x, 3)[: len(x) - 3]].mean(0),
    "norm_bounding": lambda x: bounded(x, 2.0),
    "trimmed_mean": lambda x: cut(x, 0.34),
}
EVERYONE = np.ones(SLOTS, bool)
TWO_ABSENT = np.array([1, 1, 0, 1, 1, 1, 1, 0, 1], bool)
ONE_ABSENT = np.arange(SLOTS) != 4


@each
@in_each_space
@pytest.mark.parametrize("here", [EVERYONE, TWO_ABSENT, ONE_ABSENT], ids=["odd", "absent", "even"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.sample("0-*", "1-odd-*")
def test_equals_the_paper(name, space, here, seed):
    uploads, template = draw(seed)
    got = run(make(name, space), uploads, here, template)
    x = changes(uploads, here, template, space)
    expected = truncated(vector(template, space) + REFERENCES[name](x), space)
    tolerance = 1e-3 if name == "geometric_median" else 2e-5
    found = vector(got.update, space)
    assert_close(found, expected, atol=tolerance * np.linalg.norm(expected))


sorted_rows = jax.jit(ranked)


@jax.jit
def medians(columns, here):
    """Returns the median of each entry over the clients who are here."""
    return each_entry(Changes(columns, {}, here, jnp.sum(here)), lambda x: middle(x, here))


@pytest.mark.parametrize("slots", [1, 2, 5, 8, 17])
@pytest.mark.sample("1", "2", "5", "8")
def test_rows_are_sorted_and_entries_come_back_to_their_places(slots):
    """In one piece, and in several of which the last is not full."""
    rng = np.random.default_rng(slots)
    here = rng.random(slots) < 0.7
    here[0] = True
    for shape in [(3, 2), (5, 1000)]:
        rows = rng.integers(-4, 4, (slots, *shape)).astype(np.float32)
        expected = np.sort(rows[here], axis=0)
        got = np.asarray(sorted_rows(rows, here))
        np.testing.assert_array_equal(got[: here.sum()], expected)
        assert np.all(np.isinf(got[here.sum() :]))
        found = medians({"x": rows, "y": rows[..., 0]}, here)
        np.testing.assert_array_equal(found["x"], np.median(rows[here], axis=0))
        np.testing.assert_array_equal(found["y"], np.median(rows[here], axis=0)[..., 0])


def alike(seed, spread, scale=1.0):
    """Returns (uploads, template): all within a share ``spread`` of their length; slot 2 at 20.

    Slot 2 multiplies its A by ``scale`` and divides its B by it, which changes no product.
    """
    uploads, template = draw(seed)
    rng = np.random.default_rng(seed)
    for n, x in uploads.items():
        away = rng.normal(size=x.shape)
        away[2] *= 20
        uploads[n] = x[:1] + spread * away
        uploads[n][2] *= {A: scale, B: 1 / scale}.get(n, 1.0)
    return {n: x.astype(np.float32) for n, x in uploads.items()}, template


@pytest.mark.parametrize("spread", [1e-5, 3e-5])
@in_each_space
@pytest.mark.parametrize(
    "name", ["krum", "multi_krum", "bulyan", "geometric_median", "centred_clipping"]
)
def test_uploads_that_agree_to_few_digits_are_told_apart(name, space, spread):
    """``‖x‖² + ‖y‖² - 2 <x, y>`` in float32 has no digit of their distances."""
    for seed, scale in zip(range(6), (1, 1, 1, 8, 64, 512), strict=True):
        uploads, template = alike(seed, spread, scale if space == "product" else 1)
        x = changes(uploads, EVERYONE, template, space)
        aggregator, state, reference = make(name, space), None, REFERENCES[name]
        if name == "centred_clipping":
            aggregator = make(name, space, radius=None)
            state = run(aggregator, alike(seed, 0)[0], EVERYONE, template).state
            centre = np.concatenate([state[n].ravel() for n in (A, B, "x", HEAD) if n in state])
            radius = np.median(np.linalg.norm(x - centre, axis=1))
            reference = functools.partial(clipped, v=centre, radius=radius, steps=3)
        got = run(aggregator, uploads, EVERYONE, template, state).update
        expected = truncated(vector(template, space) + reference(x), space)
        apart = np.linalg.norm(vector(got, space) - expected)
        assert apart < 0.3 * np.median(np.linalg.norm(x - x.mean(0), axis=1))


# --------------------------------------------------------------------------------- breakdown points


def attacked(seed, hostile, kind, size, space):
    """Returns (uploads, template, honest changes) with the first ``hostile`` clients hostile.

    ``kind`` says what they send, in multiples of ``size``.
    """
    uploads, template = draw(seed, spread=0.3)
    rng = np.random.default_rng(seed + 1)
    honest = np.arange(SLOTS) >= hostile
    for n, x in uploads.items():
        for k in range(hostile):
            noise = rng.normal(size=x.shape[1:])
            away = {
                "noise": size * noise,
                "together": size * np.ones(x.shape[1:]),
                "against": -size * (x[hostile:].mean(0) - template[n]),
                "copies": x[hostile] - template[n],
            }[kind]
            x[k] = template[n] + away
    return uploads, template, changes(uploads, honest, template, space)


def diameter(x):
    return max(np.linalg.norm(a - b) for a in x for b in x)


def within_bound(name, got, x, hostile):
    """Returns whether a combined change is as close to the honest ones as its theorem says."""
    n = SLOTS
    slack = 1e-4 * (1 + np.abs(x).max())
    if name in ("median", "trimmed_mean"):
        return np.all(got >= x.min(0) - slack) and np.all(got <= x.max(0) + slack)
    if name == "bulyan":
        width = np.ptp(x, axis=0) + slack
        return np.all(got >= x.min(0) - width) and np.all(got <= x.max(0) + width)
    if name in ("norm_bounding", "centred_clipping"):
        return np.linalg.norm(got) <= {"norm_bounding": 2.0, "centred_clipping": 3.0}[name] + slack
    if name == "fltrust":
        return np.linalg.norm(got) <= np.linalg.norm(x[-1]) + slack and got @ x[-1] >= -slack
    if name == "geometric_median":
        share = hostile / n
        center = x.mean(0)
        radius = np.linalg.norm(x - center, axis=1).max()
        factor = (2 - 2 * share) / (1 - 2 * share)
        return np.linalg.norm(got - center) <= factor * radius + slack
    # Krum, with f = 3: every chosen change has at least n - 2 f - 1 honest neighbours, and a score
    # of at most (n - f - 2) squared diameters.
    near = np.sqrt((n - 3 - 2) / (n - 2 * 3 - 1)) * diameter(x)
    far = 0 if name == "krum" else diameter(x)
    return np.linalg.norm(x - got, axis=1).min() <= near + far + slack


hostile_rounds = given(
    seed=st.integers(0, 2**31),
    hostile=st.integers(1, 3),
    kind=st.sampled_from(["noise", "together", "against", "copies"]),
    size=st.sampled_from([0.5, 3.0, 100.0, 1e6, 1e12, 1e30]),
)


@each
@settings(max_examples=25, deadline=None, derandomize=True)
@hostile_rounds
def test_hostile_clients_cannot_move_it_far(name, seed, hostile, kind, size):
    hostile = min(hostile, OPTIONS[name].get("hostile", hostile))
    uploads, template, x = attacked(seed, hostile, kind, size, "factors")
    got = run(make(name), uploads, EVERYONE, template).update
    assert within_bound(name, vector(got, "factors") - vector(template, "factors"), x, hostile)


def test_few_steps_to_the_geometric_median_are_enough_for_far_uploads():
    """From the mean of the uploads eight steps would not come back."""
    uploads, template, x = attacked(0, 3, "together", 1e6, "factors")
    got = run(make("geometric_median", steps=8), uploads, EVERYONE, template).update
    moved = vector(got, "factors") - vector(template, "factors")
    assert within_bound("geometric_median", moved, x, 3)


@each
@settings(max_examples=12, deadline=None, derandomize=True)
@hostile_rounds
def test_hostile_factors_cannot_make_a_product_that_is_not_finite(name, seed, hostile, kind, size):
    hostile = min(hostile, OPTIONS[name].get("hostile", hostile))
    uploads, template, x = attacked(seed, hostile, kind, size, "product")
    got = run(make(name, "product"), uploads, EVERYONE, template)
    assert all(np.all(np.isfinite(v)) for v in got.update.values())
    # The best approximation of rank r is at most twice as far from a model of rank r.
    moved = vector(got.update, "product") - vector(template, "product")
    largest = np.linalg.norm(np.abs(x).max(0))
    reach = {"median": largest, "trimmed_mean": largest, "bulyan": 3 * largest}
    reach |= {"norm_bounding": 2.0, "centred_clipping": 3.0}
    furthest = np.linalg.norm(x, axis=1).max()
    assert np.linalg.norm(moved) <= 2.001 * reach.get(name, 8 * furthest) + 1e-3


@each
def test_the_mean_does_break(name):
    uploads, template, x = attacked(0, 1, "together", 1e6, "factors")
    got = run(aggregators.mean(error=False), uploads, EVERYONE, template).update
    assert not within_bound(name, vector(got, "factors") - vector(template, "factors"), x, 1)


@in_each_space
def test_uploads_that_are_too_long_are_ignored_and_counted(space):
    uploads, template = draw(3)
    expected = run(make("krum", space), uploads, np.arange(SLOTS) > 1, template)
    uploads[A][0], uploads[B][1] = 1e20, -1e30
    got = run(make("krum", space), uploads, EVERYONE, template)
    assert (expected.metrics["uploads_ignored"], got.metrics["uploads_ignored"]) == (0, 2)
    for n, x in expected.update.items():
        np.testing.assert_array_equal(got.update[n], x)


# -------------------------------------------------------------------------------------- symmetries


@each
def test_moves_and_grows_with_the_uploads(name):
    """Equivariance: a common shift of all models, and twice the change."""
    uploads, template = draw(4)
    base = vector(run(make(name), uploads, TWO_ABSENT, template).update, "factors")
    start = vector(template, "factors")
    shift = {n: np.float32(0.5) for n in SHAPES}
    moved = run(
        make(name),
        {n: x + shift[n] for n, x in uploads.items()},
        TWO_ABSENT,
        {n: x + shift[n] for n, x in template.items()},
    )
    assert_close(vector(moved.update, "factors"), base + 0.5, atol=1e-3)
    if name in ("norm_bounding", "centred_clipping"):
        return  # the norm has a unit
    twice = {n: template[n] + 2 * (x - template[n]) for n, x in uploads.items()}
    got = vector(run(make(name), twice, TWO_ABSENT, template).update, "factors")
    assert_close(got - start, 2 * (base - start), atol=2e-3)


def test_scales_of_the_factors_matter_only_in_factor_space():
    """``(4 A)(B / 4)`` is the same product."""
    uploads, template = draw(5)
    scaled = {**uploads, A: uploads[A].copy(), B: uploads[B].copy()}
    scaled[A][0] *= 4
    scaled[B][0] /= 4
    for space in SPACES:
        one, other = (
            vector(run(make("median", space), u, EVERYONE, template).update, "product")
            for u in (uploads, scaled)
        )
        if space == "product":
            assert_close(one, other, atol=1e-4)
        else:
            assert np.abs(one - other).max() > 1e-2


# ---------------------------------------------------------------------------------------- arguments


def test_norm_bounding_takes_the_median_norm_by_default():
    uploads, template = draw(6)
    got = run(aggregators.norm_bounding(), uploads, EVERYONE, template)
    x = changes(uploads, EVERYONE, template, "factors")
    middle = np.median(np.linalg.norm(x, axis=1))
    assert_close(got.metrics["norm_bound"], middle, rtol=1e-5)
    expected = vector(template, "factors") + bounded(x, middle)
    assert_close(vector(got.update, "factors"), expected, atol=1e-5)


@in_each_space
def test_centred_clipping_remembers_its_centre(space):
    uploads, template = draw(9)
    aggregator = make("centred_clipping", space)
    first = run(aggregator, uploads, EVERYONE, template)
    later, _ = draw(10)
    second = run(aggregator, later, TWO_ABSENT, template, state=first.state)
    x = changes(uploads, EVERYONE, template, space)
    centre = clipped(x, 0, 1.0, 3)
    expected = clipped(changes(later, TWO_ABSENT, template, space), centre, 1.0, 3)
    got = vector(second.update, space)
    wanted = truncated(vector(template, space) + expected, space)
    assert_close(got, wanted, atol=1e-4 * np.linalg.norm(wanted))
    one = run(aggregators.centred_clipping(), uploads, EVERYONE, template)
    lengths = np.linalg.norm(changes(uploads, EVERYONE, template, "factors"), axis=1)
    assert_close(one.metrics["clipping_radius"], np.median(lengths), rtol=1e-5)


def test_nothing_changes_without_the_trusted_upload_or_anyone_who_agrees():
    uploads, template = draw(11)
    trusted = np.arange(SLOTS) == 8
    opposed = {
        n: np.where(trusted[:, None, None], x, 2 * template[n] - x[-1]) for n, x in uploads.items()
    }
    opposed = {n: x.astype(np.float32) for n, x in opposed.items()}
    absent = run(make("fltrust"), uploads, ~trusted, template)
    against = run(make("fltrust"), opposed, EVERYONE, template)
    assert (absent.metrics["trusted"], against.metrics["trusted"]) == (0, 1)
    assert absent.metrics["trust_score"] == against.metrics["trust_score"] == 0
    for got in (absent, against):
        for n, x in template.items():
            np.testing.assert_array_equal(got.update[n], x)
    one = run(make("fltrust"), uploads, EVERYONE, template)
    x = changes(uploads, EVERYONE, template, "factors")
    cosines = x[:-1] @ x[-1] / np.linalg.norm(x[:-1], axis=1) / np.linalg.norm(x[-1])
    assert_close(one.metrics["trust_score"], np.maximum(cosines, 0).mean(), rtol=1e-4)


def test_too_few_clients_are_refused_or_counted():
    uploads, template = draw(7)
    with pytest.raises(fp.InputError, match=r"2 \* 4 \+ 3 = 11 clients.*at most 3"):
        run(aggregators.krum(4), uploads, EVERYONE, template)
    with pytest.raises(fp.InputError, match=r"4 \* 2 \+ 3 = 11 clients.*at most 1"):
        run(aggregators.bulyan(2), uploads, EVERYONE, template)
    for name in ("krum", "multi_krum"):
        full, less = (run(make(name), uploads, h, template) for h in (EVERYONE, TWO_ABSENT))
        assert (full.metrics["too_few_clients"], less.metrics["too_few_clients"]) == (0, 1)


def test_product_space_needs_pairs():
    uploads, template = draw(8)
    with pytest.raises(fp.InputError, match="space = 'factors'"):
        run(make("median", "product"), {HEAD: uploads[HEAD]}, EVERYONE, {HEAD: template[HEAD]})


@pytest.mark.parametrize(
    ("slots", "advice"),
    [(4, "for a round, or set hostile to at most 0."), (2, "Draw more clients for a round.")],
)
def test_too_few_clients_are_told_what_is_possible(slots, advice):
    refused(f"a round has {slots}.*{advice}$", enough_clients, "krum", slots, 1, per=2)
