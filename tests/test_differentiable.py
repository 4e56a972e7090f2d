"""Rounds as a differentiable function: the same numbers as a session, and exact gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from closeness import approx, assert_close
from compiled import compilations
from internals import measured_apart
from options import session_options
from refusals import refusals, refused

import fedjax_peft as fp
from fedjax_peft import aggregators, algorithms, privacy

pytestmark = pytest.mark.slow

CLIENTS = toy.clients((7, 4, 12, 1, 9))
TEST = toy.dataset(50, seed=3)
N = 2


@functools.cache
def session(name="fedavg", dropout=0, **options):
    """Returns a session of three of five unequal clients."""
    makers = {
        "fedavg": lambda p: algorithms.fedavg(optax.sgd(p["rate"])),
        "adam": lambda p: algorithms.fedavg(optax.adam(p["rate"], eps_root=1e-4)),
        "fra": lambda p: algorithms.fedavg(optax.sgd(p["rate"]), aggregator=aggregators.fra()),
        "fedadam": lambda p: algorithms.fedadam(optax.sgd(p["rate"])),
        "ditto": lambda p: algorithms.ditto(optax.sgd(p["rate"]), weights="uniform"),
        "scaffold": lambda p: algorithms.scaffold(optax.sgd(p["rate"]), learning_rate=p["rate"]),
    }
    model, values = toy.lora_model(dropout=dropout), {"rate": 0.1}
    facts = {"clients_per_round": 3, "batch_size": 4, "lanes": 1, "rounds": 4, "values": values}
    return fp.session(model, makers[name], CLIENTS, **session_options(**{**facts, **options}))


def draw(like, seed=0):
    """Returns a random direction of the structure of a tree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), like)


def dot(x, y):
    return sum(np.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True))


def stepped(made, rounds=N):
    state = made.init(0)
    for _ in range(rounds):
        state, info = made.step(state)
    return state, info


@pytest.mark.parametrize(
    "name",
    [
        "fra",
        "ditto",
        "scaffold",
        pytest.param("fedadam", marks=pytest.mark.exhaustive),
        # The gradients of these are also computed by hand below.
        pytest.param("fedavg", marks=pytest.mark.exhaustive),
        pytest.param("adam", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.sample("fra")
def test_rounds_are_those_of_the_session_and_gradients_are_the_slopes(name):
    made = session(name, 0.2, lanes=2)
    run, loss = fp.differentiable.rounds(made, N), fp.differentiable.loss(made, TEST)

    def after(leaves, constants, values, weights):
        state = run({**leaves, **constants}, values=values, weights=weights)
        return loss(state, constants), state

    constants = {
        "layer.lora_scale": made.setup.fixed["layer.lora_scale"],
        "layer.base.kernel": made.setup.frozen["layer.base.kernel"],
    }
    arguments = (run.leaves, constants, run.values, run.weights)
    function = jax.jit(jax.value_and_grad(after, argnums=(0, 1, 2, 3), has_aux=True))
    (value, state), found = function(*arguments)
    expected, _ = stepped(made)
    assert (int(state.round_index), int(state.seed)) == (N, 0)
    for x, y in zip(
        jax.tree.leaves(expected.on_device()), jax.tree.leaves(state.on_device()), strict=True
    ):
        # Rounds of two programs, each with its own order of sums; FRA's SVD divides by gaps.
        assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert float(value) == approx(made.evaluate(expected, TEST)["loss"], abs=2e-6)
    # Steps at which Richardson's error and float32's rounding are both about 1e-4 of a slope of 1.
    for i, step in enumerate((0.003, 0.003, 0.01, 0.1)):
        direction = draw(arguments[i])
        slope = fp.differentiable.directional(
            lambda x, i=i: function(*arguments[:i], x, *arguments[i + 1 :])[0][0],
            *(arguments[i], direction, step),
        )
        assert dot(found[i], direction) == approx(slope, rel=5e-3, abs=3e-4), i
    for part in found:  # a slope of 0 would agree with a function that ignores its argument
        assert any(np.abs(x).max() > 1e-5 for x in jax.tree.leaves(part))


def by_hand(session, optimizer, theta, rate, weights):
    """Returns the leaves after N rounds of FedAvg and the loss; NumPy, float64 or complex128."""
    model = session.setup
    kernel = np.asarray(model.frozen["layer.base.kernel"], np.float64)
    scale = np.asarray(model.fixed["layer.lora_scale"], np.float64)[None]
    plans = fp.differentiable.rounds(session, N).plans().plan

    def forward(p, data, rows):
        x, labels = (np.asarray(data.columns[n])[rows] for n in ("x", "labels"))
        x = x.astype(np.float64)
        low = x @ p["layer.lora_a"] * scale
        hidden = np.tanh(x @ kernel + low @ p["layer.lora_b"])
        logits = hidden @ p["head.kernel"] + p["head.bias"]
        shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        loss = -np.log(shares[np.arange(len(rows)), labels]).mean()
        error = (shares - np.eye(toy.CLASSES)[labels]) / len(rows)
        back = error @ p["head.kernel"].T * (1 - hidden**2)
        return loss, {
            "head.bias": error.sum(0),
            "head.kernel": hidden.T @ error,
            "layer.lora_a": x.T @ (back @ p["layer.lora_b"].T * scale),
            "layer.lora_b": low.T @ back,
        }

    def train(p, batches):
        m, v = ({n: 0 * x for n, x in p.items()} for _ in range(2))
        for t, rows in enumerate(batches, 1):
            _, g = forward(p, CLIENTS.data, rows[rows >= 0])
            if optimizer == "adam":
                m = {n: 0.9 * m[n] + 0.1 * g[n] for n in p}
                v = {n: 0.999 * v[n] + 0.001 * g[n] ** 2 for n in p}
                root = {n: np.sqrt(v[n] / (1 - 0.999**t) + 1e-4) + 1e-8 for n in p}
                g = {n: m[n] / (1 - 0.9**t) / root[n] for n in p}
            p = {n: x - rate * g[n] for n, x in p.items()}
        return p

    for r in range(N):
        ends = []
        for slot in range(len(plans.client[r])):
            places = np.argwhere(plans.slot[r] == slot)
            ends.append(train(theta, [plans.examples[r][tuple(place)] for place in places]))
        share = weights[r] / weights[r].sum()
        theta = {n: sum(w * end[n] for w, end in zip(share, ends, strict=True)) for n in theta}
    return theta, forward(theta, TEST, np.arange(len(TEST)))[0]


@pytest.mark.parametrize(
    "optimizer", ["adam", pytest.param("fedavg", marks=pytest.mark.exhaustive)]
)
def test_gradients_equal_a_complex_step_through_rounds_by_hand(optimizer):
    """The imaginary part of f(x + i h d) / h is the slope to float64 precision, without noise."""
    made = session(optimizer, dropout=0)
    run, loss = fp.differentiable.rounds(made, N), fp.differentiable.loss(made, TEST)

    def after(leaves, values, weights):
        return loss(run(leaves, values=values, weights=weights))

    arguments = (run.leaves, run.values, run.weights)
    value, found = jax.jit(jax.value_and_grad(after, argnums=(0, 1, 2)))(*arguments)
    plain = jax.tree.map(lambda x: np.asarray(x, np.float64), arguments)
    for i in range(3):
        direction = draw(arguments[i], seed=5)
        moved = list(plain)
        moved[i] = jax.tree.map(lambda x, d: x + 1e-30j * np.asarray(d), plain[i], direction)
        leaves, values, weights = moved
        _, reached = by_hand(made, optimizer, leaves, values["rate"], weights)
        assert float(value) == approx(reached.real, rel=1e-5)
        slope = reached.imag / 1e-30
        assert dot(found[i], direction) == approx(slope, rel=1e-3, abs=2e-6), i


def test_plans_of_later_rounds_and_a_given_state():
    made = session()
    run = fp.differentiable.rounds(made, N)
    middle, _ = stepped(made)
    expected, info = middle.copy(), None
    for _ in range(N):
        expected, info = made.step(expected)
    jitted = jax.jit(
        lambda server, plans: run.with_info(state=middle._replace(server=server), plans=plans)
    )
    state, found = jitted(middle.server, run.plans(after=N))
    assert int(state.round_index) == 2 * N
    for name, x in expected.server.items():
        assert_close(state.server[name], x, rtol=2e-6, atol=1e-7)
    np.testing.assert_array_equal(found.plan.client[-1], info.plan.client)
    for name, pair in info.sums.items():
        assert_close(found.sums[name][0][-1], pair[0], rtol=1e-5)
    assert_close(found.norms[-1], info.norms, rtol=1e-5)
    before = len(compilations)
    jitted(middle.server, run.plans(after=0))
    assert len(compilations) == before, "plans are arguments"


def test_the_noise_of_privacy_is_that_of_the_session():
    made = session(privacy=privacy.central(clip=1.0, noise_multiplier=1.0))
    run = fp.differentiable.rounds(made, 1)
    expected, _ = stepped(made, 1)
    for name, x in jax.jit(run)().server.items():
        assert_close(x, expected.server[name], rtol=1e-5, atol=1e-6)
    slower = run.start(values={"rate": 0.01})
    np.testing.assert_array_equal(slower.salt, expected.salt)


def test_a_weight_of_zero_leaves_a_client_out_and_only_ratios_count():
    run = fp.differentiable.rounds(session(), N)
    after = jax.jit(lambda weights: run(weights=weights).server["head.kernel"])
    plain = after(run.weights)
    assert_close(after(3 * run.weights), plain, rtol=1e-5)
    first = run.weights.at[:, 1:].set(0.0)
    assert_close(after(first), after(7 * first), rtol=1e-5)
    assert np.abs(after(first) - plain).max() > 1e-3


def test_rounds_in_which_nothing_is_learned_have_the_gradient_of_the_start():
    """The norm of a change of 0 has no derivative, and must not reach the gradient."""
    made = session()
    run, loss = fp.differentiable.rounds(made, N), fp.differentiable.loss(made, TEST)

    def after(leaves):
        state, info = run.with_info(leaves, values={"rate": 0.0})
        return loss(state), jnp.sum(info.norms)

    @jax.jit
    def gradients(leaves):
        _, back = jax.vjp(after, leaves)
        one, zero = jnp.float32(1), jnp.float32(0)
        start = jax.grad(lambda leaves: loss(run.start(leaves)))(leaves)
        return start, *back((one, zero)), *back((zero, one))

    start, still, norms = gradients(run.leaves)
    for name, x in start.items():
        assert_close(still[name], x, rtol=1e-5, atol=1e-7)
    assert not any(np.any(x) for x in jax.tree.leaves(norms))


def test_metrics_of_an_aggregator_have_no_derivative():
    """Also those of an aggregator that has no version without metrics."""
    aggregator = aggregators.mean()._replace(
        finish=lambda total, *_: fp.contracts.Aggregated(total, {"norm": total}, ()),
        unmeasured=None,
    )
    setup = session().setup
    setup = setup._replace(algorithm=setup.algorithm._replace(aggregator=aggregator))
    finish = measured_apart(setup, "training", True).algorithm.aggregator.finish
    derivative = jax.jacobian(lambda total: finish(total, None, None, ())[:2])(jnp.float32(2))
    assert derivative == (1, {"norm": 0})


def test_checkpoints_save_memory_and_change_nothing():
    made, bytes_, found = session("fedavg", local_steps=12), [], []
    for checkpoint in (True, False):
        run = fp.differentiable.rounds(made, 4, checkpoint=checkpoint)

        def after(leaves, run=run):
            return jnp.sum(jnp.sin(run(leaves).server["head.kernel"]))

        compiled = jax.jit(jax.grad(after)).lower(run.leaves).compile()
        bytes_.append(compiled.memory_analysis().temp_size_in_bytes)
        found.append(compiled(run.leaves))
    assert bytes_[0] < 0.5 * bytes_[1], bytes_
    for name, x in found[0].items():
        assert_close(x, found[1][name], rtol=1e-4, atol=1e-6)
        assert np.any(x), name


CURVATURE = jnp.array([0.5, 2.0])


def quadratic(clients=3):
    """Returns a session of clients with the losses ½ (θ - x)ᵀ H (θ - x), x an example's point."""

    def apply(frozen, trainable, batch, key, train):
        return fp.contracts.Outputs(trainable["adapter.theta"][None] - batch["x"])

    def half_squares(outputs, batch):
        each = 0.5 * jnp.sum(CURVATURE[None] * outputs.logits**2, axis=-1)
        return jnp.sum(each * batch["mask"]), jnp.sum(batch["mask"]).astype(jnp.float32)

    task = fp.tasks.classification()._replace(
        loss=half_squares,
        metrics=lambda o, b: {"loss": half_squares(o, b)},
        predict=None,
        score=None,
    )
    theta = {"adapter.theta": jnp.array([1.0, -2.0]), "head.none": jnp.zeros(1)}
    kinds = {"adapter.theta": "adapter", "head.none": "head"}
    model = fp.Model(apply, {}, theta, kinds, None).replace(name="quadratic", labels=("a",))
    x = np.random.default_rng(0).normal(size=(2 * clients, 2)).astype(np.float32)
    data = fp.Dataset({"x": x, "labels": np.zeros(len(x), np.int32)}, ("a",), "quadratic")
    # The even rows train, the odd rows measure.
    rows = tuple(np.array([2 * k], np.int32) for k in range(clients))
    algorithm = algorithms.local(optax.sgd(0.3), train="adapters")
    made = fp.session(
        model,
        algorithm,
        fp.Clients(data, rows),
        sampling="all",
        task=task,
        placement=fp.Placement(lanes=1),
    )
    return made, data, x


def test_the_gradient_of_per_fedavg_has_its_second_order_term():
    """Fallah et al. 2020, Eq. 4: (I - α ∇²f_k) ∇f_k(θ - α ∇f_k(θ)), here with ∇²f_k = H."""
    made, data, x = quadratic()
    run = fp.differentiable.rounds(made, 1)
    loss = fp.differentiable.loss(made, data, rows={k: [2 * k + 1] for k in range(3)})
    theta = np.asarray(run.leaves["adapter.theta"])

    def after(leaves):
        state = run(leaves)
        return loss(state), state.client_state["adapter.theta"]

    found, own = jax.jit(jax.grad(after, has_aux=True))(run.leaves)
    h = np.asarray(CURVATURE)
    adapted = theta - 0.3 * h * (theta - x[::2])
    expected = ((1 - 0.3 * h) * h * (adapted - x[1::2])).mean(0)
    assert_close(found["adapter.theta"], expected, rtol=1e-5)
    assert_close(own, adapted, rtol=1e-6)


test_wrong_arguments_are_refused = refusals(
    lambda call: call(fp.differentiable.rounds(session(), N)),
    (lambda run: run({"layer.lora_c": jnp.zeros(1)}), "no leaf 'layer.lora_c'"),
    (lambda run: run({"head.bias": jnp.zeros(1)}), "has the shape"),
    (lambda run: run(values={"learning_rate": 1.0}), "no run-time value 'learning_rate'"),
    (lambda run: run(weights=jnp.ones(3)), "one weight for each round"),
    (lambda run: run(run.leaves, state=run.start()), "part of the state"),
)


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_a_number_of_rounds_is_asked_for(n):
    refused("number of rounds", fp.differentiable.rounds, session(), n)


def test_sums_of_integers_and_unknown_metrics_are_refused():
    secure = fp.session(
        toy.lora_model(),
        algorithms.fedavg(optax.sgd(0.1)),
        CLIENTS,
        clients_per_round=3,
        batch_size=4,
        privacy=privacy.distributed(clip=1.0, noise_multiplier=1.0),
    )
    refused("sums integers", fp.differentiable.rounds, secure, 1)
    refused("on the device", fp.differentiable.rounds, session("ditto", client_state="host"), 1)
    made = session()
    loss = fp.differentiable.loss(made, TEST, metric="accurcy")
    refused("accuracy", loss, made.init(0))
