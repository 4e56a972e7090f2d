"""What every aggregator must hold: a new one is tested as soon as it is listed in ``aggregators``.

All tests of an aggregator share two compiled programs. "Meaning" is what an update stands for: the
products of LoRA pairs and the other leaves, because factors of equal products may differ.
"""

import functools

import combining
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closeness import assert_close
from combining import aggregate, program
from internals import as_received, by_field, pairs, product_changes, with_products

import fedjax_peft as fp
from fedjax_peft import aggregators, algorithms

CLIENTS, RANK, N_IN, N_OUT, SCALE = 4, 2, 9, 7, 1.5
SGD = optax.sgd(0.1)
FIXED = {"x.lora_scale": np.full(RANK, SCALE, np.float32)}


def momentum():
    """Returns the mean with momentum at the server: the smallest aggregator with a state."""
    mean = aggregators.mean(error=False)

    def init(template):
        return jax.tree.map(jnp.zeros_like, template)

    def finish(total, template, context, state):
        new = mean.finish(total, template, context, ()).update
        moved = {n: 0.5 * state[n] + new[n] - x for n, x in template.items()}
        some = total.weight > 0
        update = {n: jnp.where(some, x + moved[n], x) for n, x in template.items()}
        return fp.contracts.Aggregated(update, {"momentum": jnp.ones(())}, moved)

    return mean._replace(name="momentum", init=init, finish=finish, linear=False)


ROBUST = {
    "bulyan": {"hostile": 0},
    "centred_clipping": {},
    "fltrust": {"trusted": 0},
    "geometric_median": {},
    "krum": {"hostile": 0},
    "median": {},
    "multi_krum": {"hostile": 0, "keep": 2},
    "norm_bounding": {},
    "trimmed_mean": {"share": 0.25},
}
"""Robust aggregators and arguments for four clients."""


def _robust(name, **options):
    return getattr(aggregators, name)(**ROBUST[name], **options)


OTHERS = {
    "fedex": lambda: algorithms.fedex(SGD).aggregator,
    "flora": lambda: algorithms.flora(SGD).aggregator,
    "fra_ffa": lambda: algorithms.fra_ffa(SGD).aggregator,
    "fra of rank 1": lambda: aggregators.fra(1),
    "momentum": momentum,
    "product changes": lambda: product_changes(aggregators.fra()),
    "product changes of median": lambda: product_changes(_robust("median", space="product")),
    "two fields": lambda: by_field(model=momentum(), control=aggregators.median()),
    **{f"{n} of products": functools.partial(_robust, n, space="product") for n in ROBUST},
}
"""Aggregators of algorithms, and one of every kind that is not listed."""
NAMES = [*aggregators.__all__, *OTHERS]
ALIKE = [f"{n} of products" for n in ROBUST if n not in ("centred_clipping", "krum", "median")]
"""Rules whose space is that of the three others: test_aggregators_robust.py has all of them."""
PARTS = (1, 2, 1)


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=pytest.mark.exhaustive if n in ALIKE else ()) for n in NAMES],
)
def name(request):
    """Returns an aggregator. The scope keeps its tests together, so that few programs live."""
    return request.param


@functools.cache
def make(name):
    if name in ROBUST:
        return _robust(name)
    return OTHERS[name]() if name in OTHERS else getattr(aggregators, name)()


def wrapped(name, leaves, *, rows=False):
    """Returns leaves in the structure of the uploads that an aggregator combines."""
    if name == "two fields":
        return {"model": leaves, "control": leaves}
    if name == "fra_ffa":
        return {"model": leaves, "switched": np.zeros(CLIENTS if rows else (), np.float32)}
    return leaves


def draw(seed):
    """Returns (leaves of all clients, weights, leaves of the template), all random."""
    rng = np.random.default_rng(seed)
    shapes = {"x.lora_a": (N_IN, RANK), "x.lora_b": (RANK, N_OUT), "head.kernel": (N_IN, 3)}
    uploads, template = combining.draw(shapes, CLIENTS, rng)
    return uploads, rng.uniform(0.5, 5, CLIENTS).astype(np.float32), template


def run(name, uploads, weights, template, **options):
    inputs = (wrapped(name, uploads, rows=True), weights, wrapped(name, template), FIXED)
    return aggregate(make(name), *inputs, **options)


def meaning(update, template):
    """Returns the products ``s·AB`` and the other leaves that an update stands for."""
    if "switched" in update:
        return meaning(update["model"], template)
    if "control" in update:
        parts = {f: meaning(x, template) for f, x in update.items()}
        return {f"{f}.{n}": x for f, part in parts.items() for n, x in part.items()}
    if "change" in update:
        new = {n: x + update["change"][n] for n, x in with_products(template).items()}
    else:
        new = with_products(update.get("model", update))
    folded = update.get("fold", {})
    products = {p: SCALE * new.pop(f"{p}.product") for p in pairs(template)}
    return {**new, **{p: x + folded.get(p, 0) for p, x in products.items()}}


def same(got, expected, tolerance=1e-5):
    assert got.keys() == expected.keys()
    for n, x in expected.items():
        limit = tolerance * np.linalg.norm(x)
        assert_close(got[n], x, rtol=0, atol=limit, err_msg=n)


def reduced(name, leaves):
    """Returns the meaning of one client's leaves, as far as the aggregator keeps it."""
    kept = meaning(wrapped(name, leaves), leaves)
    if name == "fra of rank 1":
        u, sigma, vt = np.linalg.svd(kept["x"])
        kept["x"] = sigma[0] * np.outer(u[:, 0], vt[0])
    return kept


def needs_trust(name):
    """Returns whether a client alone changes nothing, because it must agree with a trusted one."""
    return name.startswith("fltrust")


def client(uploads, k):
    return {n: x[k] for n, x in uploads.items()}


@pytest.mark.sample("f*", "krum", "mean", "norm_bounding", "product changes", "krum of products")
def test_the_order_of_clients_does_not_matter(name):
    uploads, weights, template = draw(0)
    expected = run(name, uploads, weights, template)
    order = np.array([2, 0, 3, 1], np.int32)
    shuffled = {n: x[order] for n, x in uploads.items()}
    got = run(name, shuffled, weights[order], template, ids=order)
    same(meaning(got.update, template), meaning(expected.update, template))


def test_the_unit_of_weights_does_not_matter(name):
    uploads, weights, template = draw(1)
    expected = run(name, uploads, weights, template)
    got = run(name, uploads, 7 * weights, template)
    same(meaning(got.update, template), meaning(expected.update, template))


def test_the_weights_count_where_uploads_are_summed(name):
    uploads, weights, template = draw(2)
    one, other = (run(name, uploads, w, template) for w in (weights, weights[::-1].copy()))
    got, expected = (meaning(x.update, template) for x in (one, other))
    if make(name).needs_all_uploads:
        return  # a robust statistic may leave the weights out
    for n, x in expected.items():
        assert np.abs(got[n] - x).max() > 1e-3 or (n, name) == ("x", "hetlora")


def test_a_client_of_weight_zero_is_absent(name):
    uploads, weights, template = draw(3)
    weights[1] = 0
    expected = run(name, uploads, weights, template)
    other = {n: x.copy() for n, x in uploads.items()}
    for x in other.values():
        x[1] = 100
    got = run(name, other, weights, template)
    same(meaning(got.update, template), meaning(expected.update, template))
    for metric, value in expected.metrics.items():
        assert_close(got.metrics[metric], value, rtol=1e-4, atol=1e-5)


def test_a_single_client_gets_its_model_back(name):
    uploads, _, template = draw(4)
    got = run(name, uploads, np.array([0, 0, 3, 0], np.float32), template)
    expected = template if needs_trust(name) else client(uploads, 2)
    same(meaning(got.update, template), reduced(name, expected))


def test_clients_that_agree_get_their_model_back(name):
    uploads, weights, template = draw(5)
    agreed = {n: np.repeat(x[:1], CLIENTS, axis=0) for n, x in uploads.items()}
    got = run(name, agreed, weights, template)
    same(meaning(got.update, template), reduced(name, client(uploads, 0)))


def test_without_uploads_the_template_stays_bit_for_bit(name):
    uploads, weights, template = draw(6)
    nothing = {n: np.zeros_like(x) for n, x in uploads.items()}
    got = run(name, nothing, 0 * weights, template)
    for n, x in meaning(wrapped(name, template), template).items():
        np.testing.assert_array_equal(meaning(got.update, template)[n], x)
    assert all(np.isfinite(x) for x in got.metrics.values())


def test_a_client_of_a_smaller_rank_gets_its_product_back(name):
    uploads, _, template = draw(7)
    policy = make(name).unmasked_policy
    assert policy in ("received", "zero", "refused")
    if policy == "refused":
        return
    mask = np.arange(RANK) < 1
    masks = {"x.lora_a": mask[None], "x.lora_b": mask[:, None]}
    outside = template if policy == "received" else {n: 0 * x for n, x in template.items()}
    uploads = {n: np.asarray(x) for n, x in as_received(masks, uploads, outside).items()}
    got = run(name, uploads, np.array([0, 2, 0, 0], np.float32), template)
    expected = template if needs_trust(name) else client(uploads, 1)
    same(meaning(got.update, template), reduced(name, expected))


@pytest.mark.sample("f*", "m*", "product*", "two*", "bulyan", "krum of products", "trimmed*")
def test_lanes_and_slots_do_not_matter(name):
    uploads, weights, template = draw(8)
    expected = run(name, uploads, weights, template)
    slots = np.array([4, 1, 0, 2], np.int32)
    got = aggregate_in_parts(name, uploads, weights, template, slots)
    same(meaning(got.update, template), meaning(expected.update, template))
    for metric, value in expected.metrics.items():
        assert_close(got.metrics[metric], value, rtol=1e-4, atol=1e-5)


def aggregate_in_parts(name, uploads, weights, template, slots):
    """Returns the aggregate of one lane, then two, then one, in a cohort with room for more."""
    aggregator, template = make(name), wrapped(name, template)
    uploads, state = wrapped(name, uploads, rows=True), aggregator.init(template)
    ids = np.arange(CLIENTS, dtype=np.int32)
    made = program(aggregator, PARTS, spare=2)(uploads, weights, slots, ids, template, FIXED, state)
    return jax.device_get(made)


def test_the_second_round_compiles_nothing(name):
    uploads, weights, template = draw(9)
    first = run(name, uploads, weights, template)
    run(name, uploads, weights[::-1].copy(), template, state=first.state)
    assert program(make(name), (CLIENTS,))._cache_size() == 1


def test_the_state_goes_from_round_to_round(name):
    uploads, weights, template = draw(10)
    start = make(name).init(wrapped(name, template))
    first = run(name, uploads, weights, template, state=start)
    assert jax.tree.structure(first.state) == jax.tree.structure(start)
    for a, b in zip(jax.tree.leaves(first.state), jax.tree.leaves(start), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    second = run(name, uploads, weights, template, state=first.state)
    if not jax.tree.leaves(start):
        assert name != "momentum"
        return
    got, other = (meaning(x.update, template) for x in (first, second))
    assert any(np.abs(got[n] - other[n]).max() > 1e-3 for n in got), "the state has no effect"


# --------------------------------------------------------------------------- declared properties


def lifted(name):
    aggregator, template = make(name), wrapped(name, draw(0)[2])
    return jax.eval_shape(aggregator.lift, template, template, FIXED)


def test_who_needs_all_uploads_declares_it(name):
    found = jax.tree.leaves(lifted(name), is_leaf=lambda x: isinstance(x, fp.contracts.Stacked))
    stacks = any(isinstance(x, fp.contracts.Stacked) for x in found)
    assert make(name).needs_all_uploads == stacks


def test_a_linear_aggregator_returns_the_mean_change(name):
    if not make(name).linear or name == "two fields":
        return
    uploads, weights, template = draw(11)
    got = run(name, uploads, weights, template).update
    share = weights / weights.sum()
    for n, x in template.items():
        expected = x + np.tensordot(share, uploads[n] - x, axes=1)
        assert_close(got[n], expected, rtol=0, atol=1e-5)


def test_who_truncates_declares_it(name):
    uploads, weights, template = draw(12)
    got = run(name, uploads, weights, template)
    kept = "spectrum_kept" in got.metrics
    assert make(name).truncates == kept or name.startswith("product changes")


def test_factors_of_a_product_have_the_product(name):
    aggregator = make(name)
    if aggregator.refactor is None:
        return
    assert aggregator.refactors
    _, _, template = draw(13)
    products = {"x": template["x.lora_a"] @ template["x.lora_b"]}
    got = jax.jit(aggregator.refactor)(products, template, {"x": np.float32(SCALE)})
    new = {**template, **got.update}
    same(meaning(wrapped("mean", new), template), reduced(name, template))
