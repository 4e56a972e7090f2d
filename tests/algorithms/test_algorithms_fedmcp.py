"""FedMCP and FedMatch equal loops written from the paper; similarities equal their definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import toy
from closeness import assert_close, roughly
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_peft import heads, peft, random_model, simulate
from fedjax_peft.algorithms import fedavg, fedmatch, fedmcp
from fedjax_peft.contracts import ClientContext, Outputs
from fedjax_peft.data.combine import combine
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.engine.plan import Cohort, batches
from fedjax_peft.measures.representation import SIMILARITIES, cka, cka_debiased, cosine, pool
from fedjax_peft.models.base import Model
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.random import client_key, host_rng, stream
from fedjax_peft.numerics.roles import assign_roles
from fedjax_peft.peft.base import attach
from fedjax_peft.simulation.records import Evaluation
from fedjax_peft.support.errors import InputError
from fedjax_peft.tasks import classification
from fedjax_peft.testing import TINY_BERT, tiny_dataset

pytestmark = pytest.mark.slow

# ------------------------------------------------------------------------------ a tiny dual model

FEATURES, LENGTH, WIDTH, SIZE, CLASSES, BATCH = 5, 3, 6, 2, 3, 4
PLACES = [f"{part}.{leaf}" for part in ("down", "up") for leaf in ("kernel", "bias")]
GLOBAL = tuple(f"layer.global_adapter.{p}" for p in PLACES)
PRIVATE = tuple(f"layer.private_adapter.{p}" for p in PLACES)
HEADS = tuple(f"{h}.{x}" for h in ("classifier", "second_classifier") for x in ("kernel", "bias"))
KINDS = dict.fromkeys((*GLOBAL, *PRIVATE), "adapter") | dict.fromkeys(HEADS, "head")
KEEP = 0.8


def adapter(p, which, h):
    """Returns ``f(h)`` of one adapter."""
    down, up = (f"layer.{which}_adapter.{part}" for part in ("down", "up"))
    low = jax.nn.gelu(h @ p[f"{down}.kernel"] + p[f"{down}.bias"][None, None])
    return low @ p[f"{up}.kernel"] + p[f"{up}.bias"][None, None]


def outputs_of(p, hidden):
    """Returns the outputs for hidden states; both classifiers read the first token."""
    main, second = (
        hidden[:, 0] @ p[f"{h}.kernel"] + p[f"{h}.bias"][None]
        for h in ("classifier", "second_classifier")
    )
    return Outputs(main, hidden, (), second)


def apply_with(dropout):
    def apply(frozen, p, batch, key, train):
        h = batch["x"] @ frozen["layer.kernel"]
        h = jnp.tanh(h + 0.5 * (adapter(p, "global", h) + adapter(p, "private", h)))
        if train and dropout:
            h = jnp.where(jax.random.bernoulli(key, KEEP, h.shape), h / KEEP, 0.0)
        return outputs_of(p, h)

    return apply


def model(*, dropout=True, kinds=None):
    rng = np.random.default_rng(0)
    shapes = {"down.kernel": (WIDTH, SIZE), "down.bias": (SIZE,)}
    shapes |= {"up.kernel": (SIZE, WIDTH), "up.bias": (WIDTH,)}
    shapes |= {"kernel": (WIDTH, CLASSES), "bias": (CLASSES,)}

    def draw(shape):
        return jnp.asarray(rng.normal(0, 0.6, shape), jnp.float32)

    leaves = {
        n: draw(next(shape for end, shape in shapes.items() if n.endswith(end)))
        for n in sorted(KINDS)
    }
    frozen = {"layer.kernel": draw((FEATURES, WIDTH))}
    labels = tuple(f"class {i}" for i in range(CLASSES))
    bound = Model(apply_with(dropout), frozen, leaves, kinds or KINDS, None)
    return bound.replace(name="dual toy", labels=labels)


def task_data(examples, classes, seed):
    rng = np.random.default_rng(seed)
    columns = {
        "x": rng.normal(size=(examples, LENGTH, FEATURES)).astype(np.float32),
        "attention_mask": np.arange(LENGTH)[None] < rng.integers(1, LENGTH + 1, (examples, 1)),
        "labels": rng.integers(0, classes, examples).astype(np.int32),
    }
    return Dataset(columns, tuple("abc"[:classes]), f"task {seed}")


COUNTS = (2, 3, 2)
FEDERATION = combine(
    {f"t{i}": task_data(n, c, i) for i, (n, c) in enumerate(zip((7, 11, 3), COUNTS, strict=True))}
)

# --------------------------------------------------- the paper, slowly: float64, one call per mode

COEFFICIENTS = {"dual": (0.5, 0.5), "global": (1.0, 0.0), "private": (0.0, 1.0)}


def forward(frozen, p, x, which, kept=None):
    h = x @ frozen["layer.kernel"]
    on_global, on_private = COEFFICIENTS[which]
    h = jnp.tanh(h + on_global * adapter(p, "global", h) + on_private * adapter(p, "private", h))
    return outputs_of(p, h if kept is None else jnp.where(kept, h / KEEP, 0.0))


def hsic_cka(x, y):
    n = len(x)
    if n < 2:
        return 0.0
    centre = np.eye(n) - 1 / n

    def hsic(k, other):
        return jnp.trace(k @ centre @ other @ centre) / (n - 1) ** 2

    k, other = x @ x.T, y @ y.T
    return hsic(k, other) / jnp.sqrt(hsic(k, k) * hsic(other, other))


def song_cka(x, y):
    n = len(x)
    if n < 4:
        return 0.0

    def hsic(k, other):
        k, other = k * (1 - np.eye(n)), other * (1 - np.eye(n))
        one = jnp.ones(n)
        total = jnp.trace(k @ other) - 2 / (n - 2) * (one @ k @ other @ one)
        total += (one @ k @ one) * (one @ other @ one) / ((n - 1) * (n - 2))
        return total / (n * (n - 3))

    k, other = x @ x.T, y @ y.T
    return hsic(k, other) / jnp.sqrt(hsic(k, k) * hsic(other, other))


def mean_cosine(x, y):
    lengths = jnp.sqrt(jnp.sum(x**2, axis=1) * jnp.sum(y**2, axis=1))
    return jnp.mean(jnp.sum(x * y, axis=1) / lengths)


DEFINED = {"cka": hsic_cka, "cka_debiased": song_cka, "cosine": mean_cosine}


def paper_loss(p, frozen, received, x, tokens, labels, classes, masks, o):
    """Returns the loss of Eq. 8 for one batch of one client."""

    def passed(which):
        return forward(frozen, p, x, which, masks.get(which))

    def entropy(logits):
        own = jnp.arange(CLASSES)[None] < classes
        logs = jax.nn.log_softmax(jnp.where(own, logits, -1e30))
        return -jnp.mean(logs[jnp.arange(len(labels)), labels])

    def rep(outputs):
        if o["pooling"] == "cls":
            return outputs.hidden[:, 0]
        weights = tokens / tokens.sum(axis=1, keepdims=True)
        return jnp.sum(outputs.hidden * weights[:, :, None], axis=1)

    loss = (1 - o["gamma"]) * entropy(passed("dual").logits)
    loss += o["gamma"] * entropy(passed("global").second)
    if o["mu"]:
        similar = DEFINED[o["similarity"]]
        ours = pushed = rep(passed("global"))
        if o["stop"]:
            pushed = jax.lax.stop_gradient(ours)
        private = rep(passed("private" if o["private_rep"] == "private_only" else "dual"))
        average = jax.lax.stop_gradient(rep(forward(frozen, {**p, **received}, x, "global")))
        loss += o["mu"] * (similar(pushed, private) - similar(ours, average))
    return loss


@functools.cache
def paper_gradient(options):
    return jax.jit(jax.grad(functools.partial(paper_loss, o=dict(options))))


def paper(bound, federation, *, rounds, per_round, rate, epochs, weights, options, optimizers=None):
    """Returns (global adapter, client states) after some rounds of SGD.

    With ``optimizers``, an optimizer for each client makes its steps, over all rounds.
    """
    defaults = {"gamma": 0.5, "mu": 0.05, "similarity": "cka", "pooling": "mean"}
    o = {**defaults, "private_rep": "private_only", "stop": False, **options}
    columns = federation.data.columns
    frozen, start = reference.leaves64(bound.frozen), reference.leaves64(bound.trainable)
    server = {n: start[n] for n in GLOBAL}
    own = [{n: start[n] for n in (*PRIVATE, *HEADS)} for _ in federation.indices]
    for number in range(1, rounds + 1):
        members, sizes = reference.cohort_of(federation, number, per_round)
        uploads = []
        for c in members:
            p, step = {**server, **own[c]}, 0
            key = client_key(stream(0, "clients"), number, c)
            rng = host_rng(0, "order", number, c)
            for _ in range(epochs):
                order = rng.permutation(federation.indices[c])
                for begin in range(0, len(order), BATCH):
                    step += 1
                    rows = order[begin : begin + BATCH]
                    masks = masks_of(jax.random.fold_in(key, step), len(rows))
                    x, tokens = columns["x"][rows], columns["attention_mask"][rows]
                    arguments = (x.astype(float), tokens.astype(float), columns["labels"][rows])
                    with jax.enable_x64(True):
                        derive = paper_gradient(tuple(o.items()))
                        gradient = derive(p, frozen, server, *arguments, COUNTS[c], masks)
                        gradient = {n: np.asarray(g) for n, g in gradient.items()}
                    if optimizers is None:
                        p = {n: p[n] - rate * gradient[n] for n in p}
                    else:
                        optimizers[c].count += 1
                        p = {n: p[n] + optimizers[c](n, gradient[n]) for n in p}
            own[c] = {n: p[n] for n in own[c]}
            uploads.append(p)
        sizes = sizes if weights == "size" else None
        server = {n: np.average([u[n] for u in uploads], axis=0, weights=sizes) for n in server}
    return server, own


def masks_of(key, rows):
    keys = {"dual": key, "global": stream(key, "global"), "private": stream(key, "private")}
    shape = (BATCH, LENGTH, WIDTH)
    return {n: np.asarray(jax.random.bernoulli(k, KEEP, shape))[:rows] for n, k in keys.items()}


RATE, EPOCHS = 0.3, 1
CASES = {
    "default": {},
    "strong": {"mu": 1.0, "gamma": 0.3},
    "cosine": {"mu": 1.0, "similarity": "cosine", "pooling": "cls", "stop": True},
    "debiased": {
        "mu": 1.0,
        "similarity": "cka_debiased",
        "private_rep": "dual",
        "gamma": 0.0,
    },
    "dual": {"mu": 1.0, "similarity": "cosine", "private_rep": "dual"},
    "no contrast": {"mu": 0.0},
}


def algorithm_of(options, **more):
    renamed = {
        ("stop_grad_global_in_private_term" if n == "stop" else n): v for n, v in options.items()
    }
    return fedmcp(optax.sgd(RATE), **renamed, **more)


def two_rounds(algorithm, *, lanes, per_round=3, bound=None):
    rig = toy.Engine(
        algorithm,
        FEDERATION,
        per_round=per_round,
        lanes=lanes,
        epochs=EPOCHS,
        bound=bound or model(),
    )
    state = rig.start()
    for number in (1, 2):
        result = rig.run(rig.schedule.cohort(number), number, state)
        state = (result.server, result.client_state)
    return result


@pytest.mark.parametrize(
    ("case", "lanes", "per_round", "weights"),
    [
        ("default", 3, 2, "uniform"),
        ("strong", 1, 3, "uniform"),
        ("strong", 3, 2, "size"),
        ("cosine", 3, 3, "uniform"),
        ("debiased", 1, 2, "uniform"),
        ("dual", 1, 2, "uniform"),
        ("no contrast", 3, 3, "uniform"),
    ],
)
@pytest.mark.sample("default-*", "strong-3-2-size", "cosine-*", "debiased-*", "dual-*")
def test_fedmcp_is_the_paper_s_loop(case, lanes, per_round, weights):
    options = CASES[case]
    result = two_rounds(algorithm_of(options, weights=weights), lanes=lanes, per_round=per_round)
    server, own = paper(
        model(),
        FEDERATION,
        rounds=2,
        per_round=per_round,
        rate=RATE,
        epochs=EPOCHS,
        weights=weights,
        options=options,
    )
    start = model().trainable
    assert set(result.server) == set(GLOBAL)
    assert set(result.client_state) == {*PRIVATE, *HEADS}
    for name in GLOBAL:
        assert_close(result.server[name], server[name], rtol=0, atol=1e-5)
        assert np.abs(server[name] - start[name]).max() > 1e-2
    for name in (*PRIVATE, *HEADS):
        expected = np.array([kept[name] for kept in own])
        assert_close(result.client_state[name], expected, rtol=0, atol=1e-5)
    assert np.isfinite([total.sum() for total, _ in result.sums.values()]).all()


def test_kept_moments_continue_in_the_paper_s_loop():
    """Each client's Adam goes on over rounds, for both adapters and both heads."""
    options = {"mu": 1.0, "gamma": 0.3}
    algorithm = fedmcp(optax.adam(0.02), **options, keep_optimizer=True)
    result = two_rounds(algorithm, lanes=3, per_round=2)
    adams = [reference.Adam(0.02) for _ in COUNTS]
    server, own = paper(
        model(),
        FEDERATION,
        rounds=2,
        per_round=2,
        rate=None,
        epochs=EPOCHS,
        weights="uniform",
        options=options,
        optimizers=adams,
    )
    for name in GLOBAL:
        assert_close(result.server[name], server[name], rtol=0, atol=1e-5)
    kept, adam = result.client_state["model"], result.client_state["optimizer"][0]
    for name in (*PRIVATE, *HEADS):
        expected = np.array([leaves[name] for leaves in own])
        assert_close(kept[name], expected, rtol=0, atol=1e-5)
    assert adam.count.tolist() == [one.count for one in adams]
    for client, one in enumerate(adams):
        for name, moment in one.m.items():
            assert_close(adam.mu[name][client], moment, rtol=0, atol=1e-5)


def test_a_clients_state_does_not_depend_on_other_clients():
    algorithm = fedmcp(optax.sgd(RATE))
    rig = toy.Engine(algorithm, FEDERATION, per_round=3, lanes=3, bound=model())
    rows = FEDERATION.indices

    def run(*clients):
        work = [batches(rows[c], BATCH) for c in clients]
        return rig.run(Cohort(clients, [float(len(rows[c])) for c in clients], work))

    everyone, alone = run(0, 1, 2), run(1)
    for name in (*PRIVATE, *HEADS):
        kept = everyone.client_state[name]
        assert_close(kept[1], alone.client_state[name][1], rtol=0, atol=1e-6)
        np.testing.assert_array_equal(alone.client_state[name][0], model().trainable[name])
        assert np.abs(kept[0] - kept[1]).max() > 1e-3, "each has its own"


# ----------------------------------------------------------------------------------- one step


def one_step(algorithm, bound, *, client=1, trace_only=False):
    """Returns a client's leaves after one step, and the step's metrics."""
    roles = assign_roles(bound.kinds, algorithm.roles)
    shared, private = (tree.select(bound.trainable, roles[r]) for r in ("shared", "private"))
    fixed = tree.select(bound.trainable, roles["fixed"])

    def apply(p, batch, key, train):
        return bound.apply(bound.frozen, {**fixed, **p}, batch, key, train)

    rows = FEDERATION.indices[client][:BATCH]
    batch = {n: jnp.asarray(x[rows]) for n, x in FEDERATION.data.columns.items()}
    batch["mask"] = jnp.ones(len(rows), bool)

    def run(batch):
        update = algorithm.client(ClientContext(apply, classification(), fixed, jnp.int32(1)))
        key = jax.random.key(3)
        state, metrics = update.step(update.init(shared, private, key), batch, key)
        return update.final(state), metrics

    if trace_only:
        return jax.eval_shape(run, batch)
    (uploaded, kept), metrics = jax.device_get(jax.jit(run)(batch))
    return {**uploaded, **kept}, metrics


def moved(leaves, bound, names):
    return {n: np.asarray(leaves[n]) - np.asarray(bound.trainable[n]) for n in names}


def test_the_leaves_that_each_loss_changes():
    bound = model()
    steps = {
        gamma: one_step(fedmcp(optax.sgd(1.0), mu=0, gamma=gamma), bound)[0] for gamma in (0.2, 0.6)
    }
    first = [n for n in (*PRIVATE, *HEADS) if not n.startswith("second")]
    for names, weight in ((first, lambda g: 1 - g), (HEADS[2:], lambda g: g)):
        some, other = (moved(steps[g], bound, names) for g in (0.2, 0.6))
        for name in names:
            assert_close(some[name] / weight(0.2), other[name] / weight(0.6), rtol=1e-4, atol=1e-6)
            assert np.abs(some[name]).max() > 1e-3
    # The contrast moves both adapters, and no classifier.
    without, with_ = steps[0.2], one_step(fedmcp(optax.sgd(1.0), mu=1, gamma=0.2), bound)[0]
    for name in KINDS:
        if name in HEADS:
            assert_close(with_[name], without[name], rtol=0, atol=1e-6)
        else:
            assert np.abs(with_[name] - without[name]).max() > 1e-5, name


def test_the_first_step_without_dropout_is_finite():
    # There the global representations are the average's: a similarity of 1, with no gradient.
    bound = model(dropout=False)
    plain, _ = one_step(fedmcp(optax.sgd(1.0), mu=0), bound)
    for similarity in SIMILARITIES:
        options = {"mu": 0.5, "similarity": similarity, "stop_grad_global_in_private_term": True}
        leaves, metrics = one_step(fedmcp(optax.sgd(1.0), **options), bound)
        total, count = metrics[f"{similarity}_global_average"]
        assert_close(total / count, 1, atol=1e-5)
        assert metrics[f"{similarity}_global_private"][0] / count < 0.999
        for name in GLOBAL:  # the pushed term is stopped and the other has no slope
            assert np.isfinite(leaves[name]).all()
            assert_close(leaves[name], plain[name], rtol=0, atol=1e-5)


def test_with_the_private_adapter_off_it_is_fedavg_over_the_global_one():
    off = {n: jnp.zeros_like(x) for n, x in model().trainable.items() if "private_adapter.up" in n}
    bound = model()
    bound = bound.replace(trainable={**bound.trainable, **off})
    still = optax.multi_transform(
        {"train": optax.adam(0.02), "rest": optax.set_to_zero()},
        lambda leaves: {n: "rest" if n in PRIVATE else "train" for n in leaves},
    )
    result = two_rounds(fedmcp(still, mu=0, gamma=0), lanes=3, bound=bound)
    kinds = {n: "fixed" if n in PRIVATE else kind for n, kind in KINDS.items()}
    plain = fedavg(optax.adam(0.02), head="private", weights="uniform")
    expected = two_rounds(plain, lanes=3, bound=bound.replace(kinds=kinds))
    for name in GLOBAL:
        assert_close(result.server[name], expected.server[name], rtol=0, atol=1e-6)
    for name in HEADS:
        assert_close(result.client_state[name], expected.client_state[name], atol=1e-6)
    for name in PRIVATE:
        np.testing.assert_array_equal(result.client_state[name][0], bound.trainable[name])


def test_unneeded_passes_are_not_computed():
    calls = []

    def counted(frozen, p, batch, key, train):
        calls.append(train)
        return apply_with(True)(frozen, p, batch, key, train)

    bound = model().replace(apply=counted)
    for options, expected in {
        (("mu", 0.0), ("gamma", 0.0)): [True],
        (("mu", 0.0),): [True],  # both in one batched call
        (): [True, True, False],
        (("private_rep", "dual"),): [True, False],
    }.items():
        calls.clear()
        one_step(fedmcp(optax.sgd(1.0), **dict(options)), bound, trace_only=True)
        assert calls == expected, options


@pytest.mark.parametrize("head", ["private", "shared", "frozen"])
def test_head_policies(head):
    for algorithm in (fedmcp(optax.sgd(1.0), head=head), fedmatch(optax.sgd(1.0), head=head)):
        roles = assign_roles(KINDS, algorithm.roles)
        role = "fixed" if head == "frozen" else head
        expected = {"fixed": [], "private": [*PRIVATE], "shared": [*GLOBAL]}
        expected[role] += HEADS
        assert {r: sorted(n) for r, n in expected.items()} == roles
        assert algorithm.weights == "uniform"


def test_refusals():
    kinds = dict.fromkeys(KINDS, "adapter")
    sgd = optax.sgd(1.0)
    plain = {n: k for n, k in kinds.items() if "second" not in n}
    with pytest.raises(InputError, match=r"two_classifiers.*gamma = 0"):
        fedmcp(sgd).check(plain, 3)
    fedmcp(sgd, gamma=0).check(plain, 3)
    fedmcp(sgd).check(kinds, 3)
    for algorithm in (fedmcp(sgd), fedmatch(sgd)):
        with pytest.raises(InputError, match=r"attach peft\.dual\(\)"):
            algorithm.check({n: k for n, k in kinds.items() if n not in PRIVATE}, 3)
    for wrong, match in (
        ({"gamma": 1.0}, "gamma"),
        ({"mu": -1}, "mu"),
        ({"similarity": "cca"}, "'cka'"),
        ({"pooling": "max"}, "cls, mean"),
        ({"private_rep": "both"}, "dual, private_only"),
    ):
        with pytest.raises(InputError, match=match):
            fedmcp(sgd, **wrong)


# ------------------------------------------------------------------------------------- FedMatch


def test_fedmatch_is_plain_training_and_a_uniform_mean_of_the_global_adapter():
    result = two_rounds(fedmatch(optax.sgd(RATE)), lanes=3, per_round=2)
    server, own = paper(
        model(),
        FEDERATION,
        rounds=2,
        per_round=2,
        rate=RATE,
        epochs=EPOCHS,
        weights="uniform",
        options={"gamma": 0.0, "mu": 0.0},
    )
    for name in GLOBAL:
        assert_close(result.server[name], server[name], rtol=0, atol=1e-5)
    for name in (*PRIVATE, *HEADS):
        expected = np.array([kept[name] for kept in own])
        assert_close(result.client_state[name], expected, rtol=0, atol=1e-5)


# --------------------------------------------------------------------------------- end to end


def test_tasks_of_unequal_classes_on_a_real_encoder():
    head = heads.two_classifiers(3)
    config = {**TINY_BERT, "num_hidden_layers": 1}
    bound = attach(random_model(config, head=head), peft.dual(size=2))
    data = {n: tiny_dataset(20, classes=c, seed=c) for n, c in (("two", 2), ("three", 3))}
    federation = combine(data)
    run = simulate(
        bound,
        fedmcp(optax.adam(1e-3)),
        federation,
        rounds=2,
        clients_per_round=2,
        batch_size=8,
        evaluation=Evaluation(client_test=federation, every=2),
    )
    last = run.metrics[-1]
    sent = {n: x for n, x in bound.trainable.items() if ".global_adapter." in n}
    assert last["bytes_up"] == 2 * tree.nbytes(sent)
    assert 0 < last["train_cka_global_private"] < 1
    assert 0.5 < last["train_cka_global_average"] < 1  # they differ by dropout at least
    assert 0 <= last["client_accuracy_mean"] <= 1
    assert last["train_loss_global"] not in (0, last["train_loss"]), "of the second classifier"
    assert set(run.client_state) == {n for n in bound.trainable if n not in sent}


# ------------------------------------------------------------------- representations and similarity


def test_pooling_leaves_padding_out():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(4, 5, 6)).astype(np.float32)
    lengths = np.array([5, 1, 3, 0])
    mask = np.arange(5)[None] < lengths[:, None]
    outputs = Outputs(jnp.zeros((4, 2)), jnp.asarray(hidden, jnp.bfloat16))
    hidden = np.asarray(outputs.hidden, np.float32)
    got = pool(outputs, {"attention_mask": jnp.asarray(mask)}, "mean")
    expected = [
        h[:n].mean(axis=0) if n else np.zeros(6) for h, n in zip(hidden, lengths, strict=True)
    ]
    assert_close(got, expected, rtol=0, atol=1e-6)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(pool(outputs, {}, "cls"), hidden[:, 0])
    assert_close(pool(outputs, {}, "mean"), hidden.mean(axis=1), atol=1e-6)


PADDED = 8  # all arrays have as many rows: each function is compiled once
FAST = {name: jax.jit(jax.value_and_grad(f, argnums=(0, 1))) for name, f in SIMILARITIES.items()}
seeds = st.integers(0, 10_000)


def similarity(name, x, y, fill=0.0):
    """Returns (value, gradients by x and y), padded with rows of ``fill``."""
    n = len(x)

    def pad(z):
        return jnp.asarray(np.pad(z, ((0, PADDED - n), (0, 0)), constant_values=fill), jnp.float32)

    value, gradients = FAST[name](pad(x), pad(y), jnp.arange(PADDED) < n)
    return float(value), [np.asarray(g) for g in gradients]


def pair(seed, n, width=5):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, width)) + rng.normal(size=(1, width)), rng.normal(size=(n, width))


@settings(max_examples=30, deadline=None)
@given(seed=seeds, n=st.integers(1, PADDED), name=st.sampled_from(list(SIMILARITIES)))
def test_similarities_are_their_definitions(seed, n, name):
    x, y = pair(seed, n)
    with jax.enable_x64(True):
        expected = float(DEFINED[name](jnp.asarray(x), jnp.asarray(y)))
    value, gradients = similarity(name, x, y, fill=1e6)
    assert_close(value, expected, rtol=0, atol=3e-5)
    for g in gradients:
        assert np.isfinite(g).all()
        np.testing.assert_array_equal(g[n:], 0)


@settings(max_examples=20, deadline=None)
@given(
    seed=seeds,
    n=st.integers(4, PADDED),
    factor=st.floats(1e-6, 1e6),
    name=st.sampled_from(["cka", "cka_debiased"]),
)
def test_cka_is_invariant_to_rotation_shift_and_scale(seed, n, factor, name):
    x, y = pair(seed, n)
    rng = np.random.default_rng(seed + 1)
    rotation, _ = np.linalg.qr(rng.normal(size=(5, 5)))
    turned = factor * (x @ rotation + rng.normal(size=(1, 5)))
    assert_close(similarity(name, x, x)[0], 1, atol=1e-5)
    assert_close(similarity(name, x, turned)[0], 1, atol=1e-4)
    assert_close(similarity(name, turned, y)[0], similarity(name, x, y)[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", SIMILARITIES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_similarities_without_examples_are_zero_without_gradient(name, scale):
    x, y = (scale * z for z in pair(0, 6))
    same = np.repeat(x[:1], 6, axis=0)
    cases = [(x[:0], y[:0]), (0 * x, y), (0 * x, 0 * x)]
    if name != "cosine":
        cases += [(x[:1], y[:1]), (same, y), (same, same), (y, same)]
    if name == "cka_debiased":
        cases += [(x[:3], y[:3])]
    for one, other in cases:
        value, gradients = similarity(name, one, other)
        assert value == 0
        for g in gradients:
            if name == "cosine":  # only vectors of zeros have no direction
                assert np.isfinite(g).all()
            else:
                np.testing.assert_array_equal(g, 0)


def test_known_values_of_independent_gaussians():
    rng = np.random.default_rng(0)
    values: dict = {4: [], 16: [], 64: []}
    for n, found in values.items():
        for _ in range(3):
            x, y = (jnp.asarray(rng.normal(size=(n, 768)), jnp.float32) for _ in range(2))
            everybody = jnp.ones(n, bool)
            found.append([float(f(x, y, everybody)) for f in (cka, cka_debiased, cosine)])
    biased = {n: np.mean([v[0] for v in found]) for n, found in values.items()}
    found = [biased[4], biased[16], biased[64]]
    assert found == roughly([0.997, 0.980, 0.922], abs=2e-3), "means of three draws"
    assert np.abs([v[1:] for v in values[64]]).max() < 0.03


# ------------------------------------------------------------------------ classes that are not ours


def test_classes_of_other_tasks_have_no_effect():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32).at[:, 2:].add(9.0)
    batch = {"labels": jnp.array([0, 1, 0, 1, 0, 1]), "mask": jnp.arange(6) < 5}
    masked = {**batch, "classes": jnp.full(6, 2)}
    task = classification()

    def loss(x, batch):
        return task.loss(Outputs(x, x), batch)[0]

    few = logits[:, :2]
    assert_close(loss(logits, masked), loss(few, batch), rtol=1e-6)
    gradient = jax.grad(loss)(logits, masked)
    assert_close(gradient[:, :2], jax.grad(loss)(few, batch), rtol=1e-6)
    np.testing.assert_array_equal(gradient[:, 2:], 0)
    here, there = (
        task.metrics(Outputs(x, x), b)["accuracy"] for x, b in ((logits, masked), (few, batch))
    )
    assert here == there
    assert here[0] > task.metrics(Outputs(logits, logits), batch)["accuracy"][0] == 0


# ------------------------------------------------------------ a real encoder, one adapter at a time


def encoder_batch():
    """Returns the model with both adapters, the one with a single adapter, and a batch."""
    config = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = {**TINY_BERT, **config, "num_hidden_layers": 1}
    plain = random_model(config, head=heads.two_classifiers(3))
    # Adapters of one size: what they add is as large as what they read.
    both, one = (attach(plain, make(size=2)) for make in (peft.dual, peft.opendelta))
    rng = np.random.default_rng(1)
    leaves = {
        n: x if "classifier" in n else jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype)
        for n, x in both.trainable.items()
    }
    data = tiny_dataset(6, classes=3)
    batch = {n: jnp.asarray(x) for n, x in data.columns.items()}
    batch["mask"] = jnp.arange(6) < 5
    return both.replace(trainable=leaves), one, batch


def alone(leaves, which):
    """Returns the leaves of a single-adapter model, with the values of one of the two adapters."""
    other = {"global": "private", "private": "global"}[which]
    return {
        n.replace(f".{which}_adapter.", "."): x
        for n, x in leaves.items()
        if f".{other}_adapter." not in n
    }


def real_loss(leaves, received, both, one, batch, o):
    """Returns the loss of Eq. 8; single-adapter models compute the passes with one adapter."""
    real = np.flatnonzero(np.asarray(batch["mask"]))
    labels = batch["labels"][real]

    def of(model, leaves):
        return model.apply(model.frozen, leaves, batch, None, False)

    def entropy(logits):
        return -jnp.mean(jax.nn.log_softmax(logits[real])[jnp.arange(len(real)), labels])

    def rep(outputs):
        if o["pooling"] == "cls":
            return outputs.hidden[real, 0]
        tokens = batch["attention_mask"][real].astype(jnp.float32)
        total = jnp.sum(outputs.hidden[real] * tokens[..., None], axis=1)
        return total / jnp.sum(tokens, axis=1, keepdims=True)

    dual, ours = of(both, leaves), of(one, alone(leaves, "global"))
    average = of(one, alone(received, "global"))
    private = dual if o["private_rep"] == "dual" else of(one, alone(leaves, "private"))
    similar = DEFINED[o["similarity"]]
    contrast = similar(rep(ours), rep(private))
    contrast -= similar(rep(ours), jax.lax.stop_gradient(rep(average)))
    return 0.7 * entropy(dual.logits) + 0.3 * entropy(ours.second) + 2.0 * contrast


@pytest.mark.parametrize(
    ("private_rep", "pooling", "similarity"),
    [("private_only", "mean", "cka"), ("dual", "cls", "cosine")],
)
@pytest.mark.sample("dual-*")
def test_passes_of_a_real_encoder_are_those_of_models_with_one_adapter(
    private_rep, pooling, similarity
):
    both, one, batch = encoder_batch()
    o = {"private_rep": private_rep, "pooling": pooling, "similarity": similarity}
    algorithm = fedmcp(optax.sgd(0.5), gamma=0.3, mu=2.0, **o)
    roles = assign_roles(both.kinds, algorithm.roles)
    shared, private = (tree.select(both.trainable, roles[r]) for r in ("shared", "private"))

    def apply(leaves, batch, key, train):
        return both.apply(both.frozen, leaves, batch, key, train)

    @jax.jit
    def two_steps(batch):
        update = algorithm.client(ClientContext(apply, classification(), {}, jnp.int32(1)))
        key = jax.random.key(0)
        state = update.init(shared, private, key)
        for _ in range(2):  # in the second the global adapter is no longer the received one
            state, _ = update.step(state, batch, key)
        return update.final(state)

    uploaded, kept = two_steps(batch)
    leaves = received = both.trainable
    derive = jax.jit(jax.grad(lambda leaves: real_loss(leaves, received, both, one, batch, o)))
    for _ in range(2):
        leaves = jax.tree.map(lambda x, g: x - 0.5 * g, leaves, derive(leaves))
    for n, x in {**uploaded, **kept}.items():
        assert_close(x, leaves[n], rtol=0, atol=2e-5)
        assert np.abs(leaves[n] - received[n]).max() > 1e-4, n


# --------------------------------------------------------------------------------- causal models


CAUSAL = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 64,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 32,
        "initializer_range": 0.3,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    "rnn": {"model_type": "rnn", "vocab_size": 64, "embedding_size": 8, "hidden_size": 16},
}
HEADS_OF = {
    "classification": lambda: heads.classification(3),
    "causal_lm": heads.causal_lm,
    "token_classification": lambda: heads.token_classification(("O", "B-X")),
    "span_classification": heads.span_classification,
}


@pytest.mark.parametrize(
    ("family", "head"), [*(("gpt2", head) for head in HEADS_OF), ("rnn", "causal_lm")]
)
def test_causal_models_pool_the_last_token_instead_of_the_first(family, head):
    bound = random_model(CAUSAL[family], head=HEADS_OF[head]())
    data = tiny_dataset(8, classes=3)
    batch = {n: data.columns[n] for n in ("input_ids", "attention_mask")}
    outputs = bound.apply(bound.frozen, bound.trainable, batch, None, False)
    hidden, real = np.asarray(outputs.hidden), np.asarray(batch["attention_mask"])
    np.testing.assert_array_equal(hidden[:, 0], np.repeat(hidden[:1, 0], 8, axis=0))
    got = pool(outputs, batch, "cls")
    expected = [h[np.flatnonzero(m)[-1]] for h, m in zip(hidden, real, strict=True)]
    np.testing.assert_array_equal(got, expected)
    assert len({tuple(x) for x in np.asarray(got).tolist()}) == 8, "texts differ"
    without = {"input_ids": batch["input_ids"]}
    if family == "rnn":  # without a mask all positions count
        outputs = bound.apply(bound.frozen, bound.trainable, without, None, False)
        np.testing.assert_array_equal(pool(outputs, without, "cls"), hidden[:, -1])


def test_prompts_do_not_shift_the_last_token():
    plain = random_model(CAUSAL["gpt2"], head=heads.classification(3))
    bound = attach(plain, peft.prompt_tuning(4))
    data = tiny_dataset(8, classes=3)
    batch = {n: data.columns[n] for n in ("input_ids", "attention_mask")}
    outputs = bound.apply(bound.frozen, bound.trainable, batch, None, False)
    assert outputs.hidden.shape[1] == batch["input_ids"].shape[1]
    np.testing.assert_array_equal(outputs.last, batch["attention_mask"].sum(axis=1) - 1)


def test_an_unknown_pooling_is_refused():
    from fedjax_peft.algorithms import moon

    for make in (fedmcp, moon):
        with pytest.raises(InputError, match=r"pooling = 'last'.*mean"):
            make(optax.sgd(0.1), pooling="last")
