"""Robust aggregators in rounds: both engines, lanes, run-time numbers, algorithms around them."""

import functools

import jax
import linear
import numpy as np
import optax
import pytest
import toy
from closeness import assert_close
from combining import combine
from internals import fedopt, pairs

import fedjax_peft as fp
from fedjax_peft import aggregators

pytestmark = pytest.mark.slow

SGD = optax.sgd(0.3)
FEDERATION, FEW = toy.clients((7, 4, 12, 1, 9)), toy.clients((4, 3, 1))
RULES = {
    "bulyan": functools.partial(aggregators.bulyan, 0),
    "centred_clipping": functools.partial(aggregators.centred_clipping, steps=2),
    "fltrust": aggregators.fltrust,
}


def engine(algorithm, federation=FEDERATION, **options):
    return toy.Engine(algorithm, federation, per_round=len(federation), **options)


def two_rounds(engine):
    """Returns the server's states after one and after two rounds."""
    states, state = [], engine.session.init(0)
    for _ in range(2):
        state, _ = engine.session.step(state)
        states.append(jax.device_get((state.server, state.aggregator_state)))
    return states


def same(one, other, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert_close(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("space", ["factors", "product"])
@pytest.mark.parametrize("name", ["bulyan", "centred_clipping", "fltrust"])
@pytest.mark.sample("centred_clipping-factors", "fltrust-factors")
def test_engines_agree(name, space):
    bound = linear.model() if space == "factors" else None
    algorithm = fp.algorithms.fedavg(SGD, aggregator=RULES[name](space=space))
    expected = two_rounds(engine(algorithm, FEW, lanes=2, engine="reference", bound=bound))
    same(two_rounds(engine(algorithm, FEW, lanes=2, bound=bound)), expected, 2e-4)


def meaning(leaves):
    """Returns products and other leaves, on the host."""
    leaves = dict(leaves)
    for path, (a, b) in pairs(leaves).items():
        leaves[path] = leaves.pop(a) @ leaves.pop(b)
    return leaves


def test_a_server_optimizer_steps_on_the_robust_change_of_products():
    """A step of 1 along it is the aggregator's own step."""
    robust = aggregators.geometric_median(space="product")
    options = {"bound": toy.model(dropout=0), "lanes": 1}
    stepping = fedopt(SGD, server=optax.sgd(1.0), aggregator=robust, space="product")
    stepped, plain = (
        engine(x, **options) for x in (stepping, fp.algorithms.fedavg(SGD, aggregator=robust))
    )
    (one, _), _ = two_rounds(stepped)
    (other, _), _ = two_rounds(plain)
    same(meaning(one.model), meaning(other))


def test_a_server_optimizer_on_products_needs_a_rule_of_products():
    with pytest.raises(fp.InputError, match=r"median.*Give the aggregator space = 'product' too"):
        fp.algorithms.fedadam(SGD, aggregator=aggregators.median(), space="product")


def test_scaffold_combines_control_variates_robustly_too():
    algorithm = fp.algorithms.scaffold(SGD, learning_rate=0.3, aggregator=aggregators.median())
    template = {f: {"x": np.zeros(2, np.float32)} for f in ("model", "control")}
    rows = np.array([[1, 1], [2, 2], [1e6, -1e6]], np.float32)
    uploads = {f: {"x": rows} for f in template}
    slots, weights = np.arange(3, dtype=np.int32), np.ones(3, np.float32)
    inputs = (uploads, weights, slots, slots, template, {}, ())
    got = combine(algorithm.aggregator, *inputs, parts=(3,)).update
    for field in template:
        np.testing.assert_array_equal(got[field]["x"], [2, 1])


@pytest.mark.parametrize(
    ("make", "values"),
    [
        pytest.param(aggregators.bulyan, (0, 1), marks=pytest.mark.exhaustive),
        (aggregators.centred_clipping, (0.5, 2.0)),
        (aggregators.krum, (0, 2)),
        (functools.partial(aggregators.multi_krum, 1), (1, 3)),
        (aggregators.norm_bounding, (0.5, 2.0)),
        (aggregators.trimmed_mean, (0.15, 0.3)),
    ],
)
def test_numbers_can_be_run_time_values(make, values):
    rng = np.random.default_rng(0)
    template = {"x": np.zeros(4, np.float32)}
    uploads = {"x": rng.normal(size=(7, 4)).astype(np.float32)}
    slots, weights = np.arange(7, dtype=np.int32), np.ones(7, np.float32)

    traces = []

    def run(value):
        traces.append(value)
        aggregator = make(value)
        state = aggregator.init(template)
        inputs = (uploads, weights, slots, slots, template, {}, state)
        return combine(aggregator, *inputs, parts=(7,)).update["x"]

    traced = jax.jit(run)
    results = [traced(np.float32(value)) for value in values]
    assert len(traces) == 1
    constant = jax.jit(run, static_argnums=0)(values[1])  # the program was traced with another
    assert_close(results[1], constant, atol=1e-6)
    assert np.abs(results[0] - results[1]).max() > 1e-3
