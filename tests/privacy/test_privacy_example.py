"""Example-level privacy: gradients of single examples, clipped, summed and noised."""

import functools
import math

import dp_accounting
import jax
import jax.numpy as jnp
import linear
import numpy as np
import optax
import pytest
import running
import toy
from closeness import approx, assert_close, roughly
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import Program, accounting, guarantees, head_roles, replace_server
from protection import federation
from refusals import refused
from tiny import trained

import fedjax_peft as fp
from fedjax_peft import algorithms, peft
from fedjax_peft.privacy.example import clipped_sum, private_gradient

pytestmark = pytest.mark.slow

METHODS = {
    "lora": peft.lora(2),
    "bitfit": peft.bitfit(),
    "prompt": peft.prompt_tuning(3),
}
MORE_METHODS = {"bottleneck": peft.pfeiffer(size=4), "prefix": peft.prefix_tuning(3)}
model = functools.cache(toy.model)
FACTS = federation("all", 5, fewest_examples=1)
SIZES = (7, 4, 12, 1, 9)
DELTA = 1e-5


def problem(model, leaves, data, real):
    """Returns a loss, the trained leaves, and a batch of which ``real`` examples count."""
    fixed = {n: x for n, x in leaves.items() if model.kinds[n] == "fixed"}
    params = {n: x for n, x in leaves.items() if n not in fixed}
    count = {"step": jnp.int32(0), "steps": jnp.int32(1)}
    batch = {**data.columns, "mask": np.arange(len(data)) < real, **count}

    def apply(params, batch, key, train):
        return model.apply(model.frozen, {**fixed, **params}, batch, key, train)

    context = fp.contracts.ClientContext(apply, fp.tasks.classification(), fixed, jnp.int32(1))
    return context.objective, params, batch


@functools.cache
def toy_problem(real=8):
    return problem(model(), model().trainable, toy.dataset(8), real)


def norm(tree):
    squares = [np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)]
    return math.sqrt(sum(squares))


@pytest.mark.parametrize(
    "method",
    [
        *METHODS.values(),
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in MORE_METHODS.values()),
    ],
    ids=[*METHODS, *MORE_METHODS],
)
@pytest.mark.sample("lora")
def test_the_sum_is_that_of_a_python_loop_over_examples(method):
    """Each example alone, with dropout masks that do not depend on its neighbours."""
    model = fp.attach(fp.testing.tiny_model(3, num_hidden_layers=1), method)
    data = fp.testing.tiny_dataset(6, classes=3)
    loss, params, batch = problem(model, trained(model), data, real=5)
    key, derive = jax.random.key(3), jax.jit(jax.grad(loss, has_aux=True))
    alone, metrics = [], []
    for i in range(5):
        row = {n: x[i : i + 1] if np.ndim(x) else x for n, x in batch.items()}
        gradient, measured = derive(params, row, jax.random.fold_in(key, i))
        alone.append(jax.tree.map(lambda x: np.asarray(x, np.float64), gradient))
        metrics.append(measured)
    clip = float(np.median([norm(g) for g in alone]))  # some are clipped and some are not
    expected = {n: sum(g[n] * min(1, clip / norm(g)) for g in alone) for n in params}
    total, measured = jax.jit(lambda *a: clipped_sum(loss, *a))(params, batch, key, clip)
    assert set(total) == set(params)
    for name, x in total.items():
        assert_close(x, expected[name], rtol=0, atol=1e-6 * max(clip, 1))
    assert measured["loss"][1] == 5
    wanted = sum(float(m["loss"][0]) for m in metrics)
    assert_close(measured["loss"][0], wanted, rtol=1e-5)


@functools.cache
def toy_sum(microbatch=None):
    loss, _, _ = toy_problem()
    return jax.jit(lambda *a: clipped_sum(loss, *a, microbatch))


@pytest.mark.parametrize("microbatch", [1, 3, 4, 100])
@pytest.mark.parametrize("real", [8, 5, 0])
def test_microbatches_give_the_same_sum(microbatch, real):
    _, params, batch = toy_problem(real)
    inputs = (params, batch, jax.random.key(0), 0.3)
    whole, parts = toy_sum()(*inputs), toy_sum(microbatch)(*inputs)
    for a, b in zip(*map(jax.tree.leaves, (whole, parts)), strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-6)
    if not real:
        assert norm(whole[0]) == 0


NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(NUMBERS, min_size=toy.FEATURES, max_size=toy.FEATURES),
    st.integers(0, toy.CLASSES - 1),
    st.integers(0, 7),
    st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_an_example_moves_the_sum_by_no_more_than_the_clip_norm(x, label, place, clip):
    """Whatever the example is: against the batch in which it is empty."""
    _, params, batch = toy_problem()
    inputs, labels, mask = (np.array(batch[n]) for n in ("x", "labels", "mask"))
    inputs[place], labels[place] = x, label
    without = np.arange(len(mask)) != place
    key = jax.random.key(1)
    own = {**batch, "x": inputs, "labels": labels}
    with_it, _ = toy_sum()(params, own, key, clip)
    empty, _ = toy_sum()(params, {**own, "mask": without}, key, clip)
    moved = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), with_it, empty)
    assert norm(moved) <= clip * (1 + 1e-5) + 1e-5 * norm(empty)


def test_an_example_that_is_not_finite_counts_as_nothing():
    _, params, batch = toy_problem()
    x, key = np.array(batch["x"]), jax.random.key(1)
    x[2] = np.inf
    spoiled, _ = toy_sum()(params, {**batch, "x": x}, key, 1.0)
    without, _ = toy_sum()(params, {**batch, "mask": np.arange(8) != 2}, key, 1.0)
    for name, total in spoiled.items():
        np.testing.assert_array_equal(total, without[name])


def test_the_noise_has_the_standard_deviation_that_is_claimed():
    """In every leaf, over 1,000 draws and within 1 %; leaves and queries are independent."""
    loss, params, batch = toy_problem(0)  # nothing but noise
    wide = {n: jnp.zeros((12, *x.shape)) for n, x in params.items()}

    def first(params, *rest):
        return loss({n: x[0] for n, x in params.items()}, *rest)

    own = private_gradient(0.5, 3.0, 4)

    @jax.jit
    @jax.vmap
    def draw(key):
        return own(first, wide, batch, jax.random.key(0), key)[0]

    drawn = draw(jax.random.split(jax.random.key(5), 1000))
    for x in drawn.values():
        assert np.std(x) == roughly(0.5 * 3.0 / 4, rel=0.01)
    flat = np.concatenate([np.reshape(x, (1000, -1)) for x in drawn.values()], axis=1)
    correlations = np.corrcoef(flat[:, :60].T) - np.eye(60)
    assert np.abs(correlations).max() < 5 / math.sqrt(1000)


# ------------------------------------------------------------------------------------ in a round


def protected(algorithm, clip=0.5, noise=1.0, **options):
    return fp.privacy.example(clip, noise, **options).protect(algorithm, FACTS)


def apply(leaves, *rest):
    return model().apply(model().frozen, {**model().trainable, **leaves}, *rest)


def test_two_gradients_with_the_same_key_have_independent_noise():
    """Ditto steps on both of its models with one key. Equal noise would cancel in a difference."""
    algorithm = protected(algorithms.ditto(optax.sgd(1.0), lam=0.0), clip=1e-6, noise=1e6)
    _, params, batch = toy_problem()
    context = fp.contracts.ClientContext(apply, fp.tasks.classification(), {}, jnp.int32(1))
    update = algorithm.client(context)
    state = update.init(params, {"model": {}, "personal": params}, jax.random.key(0))
    state, _ = jax.jit(update.step)(state, batch, jax.random.key(1))
    ours = np.concatenate([np.ravel(state.model.shared[n] - x) for n, x in params.items()])
    other = np.concatenate([np.ravel(state.personal.private[n] - x) for n, x in params.items()])
    assert abs(np.corrcoef(ours, other)[0, 1]) < 0.5
    assert np.std(ours - other) > 1.1 * np.std(ours)


def test_a_large_clip_without_noise_is_plain_training():
    """The only other difference is the divisor: the batch size, also of a batch with padding."""
    federation = toy.clients((4, 8, 4))
    plain, private = (
        toy.Engine(a, federation, per_round=3, lanes=1, bound=toy.model(dropout=0))
        for a in (
            algorithms.fedprox(optax.sgd(0.1), mu=0.3),
            protected(algorithms.fedprox(optax.sgd(0.1), mu=0.3), clip=1e6, noise=0.0),
        )
    )
    first, second = (e.run(e.schedule.cohort(1), 1) for e in (plain, private))
    for a, b in zip(*map(jax.tree.leaves, (first[:3], second[:3])), strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_pull_towards_a_model_is_not_clipped():
    algorithm = protected(algorithms.fedprox(optax.sgd(0.1), mu=2.0), clip=1e-9, noise=0.0)
    _, params, batch = toy_problem()
    update = algorithm.client(
        fp.contracts.ClientContext(apply, fp.tasks.classification(), {}, jnp.int32(1))
    )
    received = {n: x + 1.0 for n, x in params.items()}
    state = update.init(received, {"model": {}}, jax.random.key(0))
    state = state._replace(shared=params)
    state, _ = jax.jit(update.step)(state, batch, jax.random.key(1))
    for name, x in state.shared.items():
        assert_close(x, params[name] + 0.1 * 2.0, atol=1e-6)


def test_clip_norm_and_noise_are_run_time_values(monkeypatch):
    counted = []
    compile_ = Program._compile
    monkeypatch.setattr(
        Program, "_compile", lambda self, *a: (counted.append(1), compile_(self, *a))[1]
    )
    session = fp.session(
        model(),
        algorithms.fedavg(optax.sgd(0.1)),
        toy.clients(SIZES),
        privacy=lambda p: fp.privacy.example(p["clip"], p["z"]),
        values={"clip": 1.0, "z": 1.0},
        placement=fp.Placement(lanes=1),
    )
    ends = []
    for values in ({"clip": 1.0, "z": 1.0}, {"clip": 0.1, "z": 1.0}, {"clip": 1.0, "z": 3.0}):
        state, _ = session.step(session.init(0, values))
        ends.append(np.asarray(state.server["head.kernel"]))
    assert len(counted) == 1
    for end in ends[1:]:
        assert np.abs(ends[0] - end).max() > 1e-4


@pytest.mark.parametrize("sampling", ["shuffled", "poisson"])
@pytest.mark.sample("poisson")
def test_a_run_states_its_guarantee(sampling):
    options = {"clients": toy.clients((8, 16)), "batch_sampling": sampling, "lanes": 1}
    run = running.run(model=linear.model(), privacy=fp.privacy.example(1.0, 2.0), **options)
    event = dp_accounting.GaussianDpEvent(2.0)
    if sampling == "shuffled":  # one pass in each round
        events = [(event, 2)]
    else:  # 2 steps with probability 1/2, or 4 with 1/4
        events = [
            (dp_accounting.PoissonSampledDpEvent(q, event), 2 * n) for q, n in ((0.5, 2), (0.25, 4))
        ]
    expected = []
    for one, count in events:
        relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
        accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
        expected.append(accountant.compose(one, count).get_epsilon(DELTA))
    assert run.metrics[-1]["epsilon"] == approx(max(expected), rel=1e-6)
    statement = run.metrics[0]["privacy"]["statement"]
    assert "zero-out" in statement
    assert sampling in statement.lower()


# ------------------------------------------------------------------------------------ accounting


def test_gradients_of_the_same_batch_are_composed():
    """Several sums with the noise multiplier z are one with z / sqrt(their number)."""
    several = FACTS._replace(gradients_per_step=3)
    assert guarantees.example_epsilon(2.0, DELTA, several, 5) == approx(
        accounting.epsilon(accounting.gaussian_event(2.0, 15), DELTA, neighbours="replace_special")
    )
    statement = fp.privacy.example(1.0, 2.0).statement(several)
    assert "shuffled passes" in statement
    assert "up to 3 gradients" in statement


def test_the_account_is_that_of_the_worst_client():
    facts = FACTS._replace(
        batch_sampling="poisson",
        workloads=((4, 3), (8, 2), (12, 3), (40, 10)),
        overflow_probability=1e-12,
    )
    each = [
        guarantees.example_epsilon(2.0, DELTA, facts._replace(workloads=(own,)), 5)
        for own in facts.workloads
    ]
    assert guarantees.example_epsilon(2.0, DELTA, facts, 5) == approx(max(each))
    unknown = facts._replace(workloads=(), fewest_examples=4, most_steps=10)
    assert guarantees.example_epsilon(2.0, DELTA, unknown, 5) >= max(each)


def test_a_batch_that_may_be_cut_costs_delta():
    facts = FACTS._replace(
        batch_sampling="poisson", workloads=((40, 2),), overflow_probability=1e-7
    )
    event = accounting.gaussian_event(1.0, 10, 0.1)
    assert guarantees.example_epsilon(1.0, DELTA, facts, 5) == approx(
        accounting.epsilon(event, DELTA - 1e-6, neighbours="replace_special")
    )
    assert guarantees.example_epsilon(1.0, DELTA, facts, 1000) == math.inf
    refused("larger delta", guarantees.example_noise_multiplier, 1.0, DELTA, facts, 1000)


@pytest.mark.parametrize("sampling", ["shuffled", "poisson"])
def test_the_noise_multiplier_is_solved_for(sampling):
    facts = FACTS._replace(
        batch_sampling=sampling,
        workloads=((8, 2), (40, 10)),
        overflow_probability=1e-12,
        gradients_per_step=2,
    )
    z = guarantees.example_noise_multiplier(2.0, DELTA, facts, 10)
    assert guarantees.example_epsilon(z, DELTA, facts, 10) == approx(2.0, rel=1e-4)


# -------------------------------------------------------------------------------------- refusals


def test_an_algorithm_that_takes_gradients_by_itself_is_refused():
    def client(context):
        def step(state, batch, key):
            gradient, metrics = jax.grad(lambda p: context.objective(p, batch, key), has_aux=True)(
                state
            )
            return jax.tree.map(lambda x, g: x - 0.1 * g, state, gradient), metrics

        return fp.contracts.ClientUpdate(lambda b, own, key: b, step, lambda state: (state, {}))

    own = fp.contracts.Algorithm(
        "own", head_roles("shared"), client, fp.aggregators.mean(), replace_server()
    )
    session = fp.session(
        toy.model(),
        own,
        toy.clients(SIZES),
        privacy=fp.privacy.example(1.0, 1.0),
        placement=fp.Placement(lanes=1),
    )
    refused(r"'own' takes no gradient by context\.gradient", session.step, session.init(0))


def test_a_step_with_several_gradients_says_so_and_pays_for_them():
    plain = algorithms.fedavg(optax.sgd(0.1))

    def client(context):
        update = plain.client(context)

        def step(state, batch, key):
            return update.step(update.step(state, batch, key)[0], batch, key)

        return update._replace(step=step)

    def run(algorithm):
        return running.run(
            algorithm, model=linear.model(), privacy=fp.privacy.example(1.0, 2.0), **options
        )

    options = {"rounds": 1, "lanes": 1, "local_steps": 1}
    own = plain._replace(client=client)
    refused("takes 2 gradients", run, own)
    event = accounting.gaussian_event(2.0, 2)
    paid = accounting.epsilon(event, DELTA, neighbours="replace_special")
    row = run(own._replace(gradients_per_step=2)).metrics[-1]
    assert row["epsilon"] == approx(paid, rel=1e-6)


def test_without_noise_there_is_no_guarantee():
    assert fp.privacy.example(1.0, 0.0).guarantee(FACTS, 1).epsilon == math.inf
