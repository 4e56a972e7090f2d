"""FedMCP and FedMatch equal loops written from the paper; similarities equal their definitions."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import toy
from closeness import EXACT, assert_close, roughly
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import (
    SIMILARITIES,
    assign_roles,
    cka,
    cka_debiased,
    client_key,
    cosine,
    host_rng,
    pool,
    stream,
)

import fedjax_peft as fp
from fedjax_peft import heads, peft, random_model, simulate

pytestmark = pytest.mark.slow

# ------------------------------------------------------------------------------ a tiny dual model

FEATURES, LENGTH, WIDTH, SIZE, CLASSES, BATCH = 5, 3, 6, 2, 3, 4
PLACES = [f"{part}.{leaf}" for part in ("down", "up") for leaf in ("kernel", "bias")]
GLOBAL = tuple(f"layer.global_adapter.{p}" for p in PLACES)
PRIVATE = tuple(f"layer.private_adapter.{p}" for p in PLACES)
HEADS = tuple(f"{h}.{x}" for h in ("classifier", "second_classifier") for x in ("kernel", "bias"))
OWN = (*PRIVATE, *HEADS)
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
    return fp.contracts.Outputs(main, hidden, (), second)


def apply_with(dropout):
    def apply(frozen, p, batch, key, train):
        h = batch["x"] @ frozen["layer.kernel"]
        h = jnp.tanh(h + 0.5 * (adapter(p, "global", h) + adapter(p, "private", h)))
        if train and dropout:
            h = jnp.where(jax.random.bernoulli(key, KEEP, h.shape), h / KEEP, 0.0)
        return outputs_of(p, h)

    return apply


def model(*, dropout=True):
    rng = np.random.default_rng(0)
    shapes = {"down.kernel": (WIDTH, SIZE), "down.bias": (SIZE,)}
    shapes |= {"up.kernel": (SIZE, WIDTH), "up.bias": (WIDTH,)}
    shapes |= {"kernel": (WIDTH, CLASSES), "bias": (CLASSES,)}

    def draw(shape):
        return jnp.asarray(rng.normal(0, 0.6, shape), jnp.float32)

    ends = {n: next(end for end in shapes if n.endswith(end)) for n in sorted(KINDS)}
    leaves = {n: draw(shapes[end]) for n, end in ends.items()}
    frozen = {"layer.kernel": draw((FEATURES, WIDTH))}
    labels = tuple(f"class {i}" for i in range(CLASSES))
    bound = fp.Model(apply_with(dropout), frozen, leaves, KINDS, None)
    return bound.replace(name="dual toy", labels=labels)


MODEL = model()


def task_data(examples, classes, seed):
    rng = np.random.default_rng(seed)
    columns = {
        "x": rng.normal(size=(examples, LENGTH, FEATURES)).astype(np.float32),
        "attention_mask": np.arange(LENGTH)[None] < rng.integers(1, LENGTH + 1, (examples, 1)),
        "labels": rng.integers(0, classes, examples).astype(np.int32),
    }
    return fp.Dataset(columns, MODEL.labels[:classes], f"task {seed}")


COUNTS = (2, 3, 2)
FEDERATION = fp.combine(
    {f"t{i}": task_data(n, c, i) for i, (n, c) in enumerate(zip((7, 11, 3), COUNTS, strict=True))}
)

# --------------------------------------------------- the paper, slowly: float64, one call per mode

COEFFICIENTS = {"dual": (0.5, 0.5), "global": (1.0, 0.0), "private": (0.0, 1.0)}


def forward(frozen, p, x, which, kept=None):
    h = x @ frozen["layer.kernel"]
    on_global, on_private = COEFFICIENTS[which]
    h = jnp.tanh(h + on_global * adapter(p, "global", h) + on_private * adapter(p, "private", h))
    return outputs_of(p, h if kept is None else jnp.where(kept, h / KEEP, 0.0))


def hsic_cka(x, y, xp=jnp):
    n = len(x)
    if n < 2:
        return 0.0
    centre = np.eye(n) - 1 / n

    def hsic(k, other):
        return xp.trace(k @ centre @ other @ centre) / (n - 1) ** 2

    k, other = x @ x.T, y @ y.T
    return hsic(k, other) / xp.sqrt(hsic(k, k) * hsic(other, other))


def song_cka(x, y, xp=jnp):
    n = len(x)
    if n < 4:
        return 0.0

    def hsic(k, other):
        k, other = k * (1 - np.eye(n)), other * (1 - np.eye(n))
        one = np.ones(n)
        total = xp.trace(k @ other) - 2 / (n - 2) * (one @ k @ other @ one)
        total += (one @ k @ one) * (one @ other @ one) / ((n - 1) * (n - 2))
        return total / (n * (n - 3))

    k, other = x @ x.T, y @ y.T
    return hsic(k, other) / xp.sqrt(hsic(k, k) * hsic(other, other))


def mean_cosine(x, y, xp=jnp):
    lengths = xp.sqrt(xp.sum(x**2, axis=1) * xp.sum(y**2, axis=1))
    return xp.mean(xp.sum(x * y, axis=1) / lengths)


DEFINED = {"cka": hsic_cka, "cka_debiased": song_cka, "cosine": mean_cosine}
"""The papers' formulas, in NumPy (``xp=np``) or, to be derived, in ``jax.numpy``."""


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


class Slow(reference.Slow):
    """The paper's loop; with ``adams``, an optimizer for each client steps over all rounds."""

    model, federation, shared, private = MODEL, FEDERATION, GLOBAL, OWN
    size_weights, adams = False, None

    def train(self, client, number):
        p, key = self.start(client, number), client_key(stream(0, "clients"), number, client)
        columns, received = FEDERATION.data.columns, {n: self.leaves[n] for n in GLOBAL}
        frozen = {"layer.kernel": self.kernel}
        order = host_rng(0, "order", number, client).permutation(FEDERATION.indices[client])
        for step, begin in enumerate(range(0, len(order), BATCH), 1):
            rows = order[begin : begin + BATCH]
            masks = masks_of(jax.random.fold_in(key, step), len(rows))
            x, tokens = (columns[n][rows].astype(float) for n in ("x", "attention_mask"))
            facts = (columns["labels"][rows], COUNTS[client], masks)
            with jax.enable_x64(True):
                gradient = self.derive(p, frozen, received, x, tokens, *facts)
            optimizer = self.adams[client] if self.adams else reference.Sgd(RATE)
            p = reference.moved(optimizer, p, {n: np.asarray(g) for n, g in gradient.items()})
        return p


def paper(options, per_round, **more):
    """Returns the slow federation after two rounds of SGD."""
    defaults = {"gamma": 0.5, "mu": 0.05, "similarity": "cka", "pooling": "mean"}
    o = {**defaults, "private_rep": "private_only", "stop": False, **options}
    slow = Slow(derive=paper_gradient(tuple(o.items())), **more)
    return slow.run(reference.cohorts(FEDERATION, per_round))


def masks_of(key, rows):
    keys = {"dual": key, "global": stream(key, "global"), "private": stream(key, "private")}
    shape = (BATCH, LENGTH, WIDTH)
    return {n: np.asarray(jax.random.bernoulli(k, KEEP, shape))[:rows] for n, k in keys.items()}


RATE = 0.3
STRONG = {"mu": 1.0, "gamma": 0.3}
CASES = {
    "default": {},
    "strong": STRONG,
    "cosine": {"mu": 1.0, "similarity": "cosine", "pooling": "cls", "stop": True},
    "debiased": {"mu": 1.0, "similarity": "cka_debiased", "private_rep": "dual", "gamma": 0.0},
    "dual": {"mu": 1.0, "similarity": "cosine", "private_rep": "dual"},
    "no contrast": {"mu": 0.0},
    "fedmatch": {"mu": 0.0, "gamma": 0.0},
}


@functools.cache
def algorithm_of(case, weights="uniform"):
    if case == "fedmatch":  # plain training, and a uniform mean of the global adapter
        return fp.algorithms.fedmatch(optax.sgd(RATE))
    names = {"stop": "stop_grad_global_in_private_term"}
    options = {names.get(n, n): x for n, x in CASES[case].items()}
    return fp.algorithms.fedmcp(optax.sgd(RATE), weights=weights, **options)


def engine(algorithm, *, lanes=3, per_round=3, bound=MODEL):
    return toy.Engine(algorithm, FEDERATION, per_round=per_round, lanes=lanes, bound=bound)


def two_rounds(algorithm, **options):
    return engine(algorithm, **options).rounds()[-1]


def compare(result, kept, expected):
    """Asserts that a round ends as the paper's loop; ``kept`` are the leaves of the clients."""
    server, own = expected.leaves, expected.own
    assert (set(result.server), set(kept)) == (set(GLOBAL), set(OWN))
    for name in GLOBAL:
        assert_close(result.server[name], server[name], rtol=0, atol=1e-5)
        assert np.abs(server[name] - MODEL.trainable[name]).max() > 1e-2
    for name in OWN:
        assert_close(kept[name], [leaves[name] for leaves in own], rtol=0, atol=1e-5)
    assert np.isfinite([total.sum() for total, _ in result.sums.values()]).all()


@pytest.mark.parametrize(
    ("case", "lanes", "per_round", "weights"),
    [
        ("default", 3, 2, "uniform"),
        ("strong", 1, 3, "uniform"),
        ("cosine", 3, 2, "size"),
        ("debiased", 1, 2, "uniform"),
        ("dual", 1, 2, "uniform"),
        ("no contrast", 3, 3, "uniform"),
        ("fedmatch", 3, 2, "uniform"),
    ],
)
@pytest.mark.sample("cosine-*", "fedmatch*")
def test_rounds_are_the_paper_s_loop(case, lanes, per_round, weights):
    result = two_rounds(algorithm_of(case, weights), lanes=lanes, per_round=per_round)
    compare(
        result, result.client_state, paper(CASES[case], per_round, size_weights=weights == "size")
    )


def test_the_defaults_are_the_paper_s():
    defaults = inspect.signature(fp.algorithms.fedmcp).parameters
    expected = {"mu": 0.05, "gamma": 0.5, "similarity": "cka", "pooling": "mean"}
    expected |= {"private_rep": "private_only", "stop_grad_global_in_private_term": False}
    assert {n: defaults[n].default for n in expected} == expected


@pytest.mark.exhaustive
def test_kept_moments_continue_in_the_paper_s_loop():
    """Each client's Adam goes on over rounds, for both adapters and both heads."""
    algorithm = fp.algorithms.fedmcp(fp.optimizers.kept(optax.adam(0.02)), **STRONG)
    result = two_rounds(algorithm, per_round=2)
    adams, adam = [reference.Adam(0.02) for _ in COUNTS], result.client_state["optimizer"][0]
    compare(result, result.client_state["model"], paper(STRONG, 2, adams=adams))
    assert adam.count.tolist() == [one.count for one in adams]
    for client, one in enumerate(adams):
        for name, moment in one.m.items():
            assert_close(adam.mu[name][client], moment, rtol=0, atol=1e-5)


# ----------------------------------------------------------------------------------- one step


def one_step(algorithm, bound=MODEL, *, trace_only=False):
    """Returns a client's leaves after one step, and the step's metrics."""
    roles = assign_roles(bound.kinds, algorithm.roles)
    shared, private = (fp.tree.select(bound.trainable, roles[r]) for r in ("shared", "private"))
    fixed = fp.tree.select(bound.trainable, roles["fixed"])

    def apply(p, batch, key, train):
        return bound.apply(bound.frozen, {**fixed, **p}, batch, key, train)

    rows = FEDERATION.indices[1][:BATCH]
    batch = {n: jnp.asarray(x[rows]) for n, x in FEDERATION.data.columns.items()}
    batch["mask"] = jnp.ones(len(rows), bool)

    def run(batch):
        update = algorithm.client(
            fp.contracts.ClientContext(apply, fp.tasks.classification(), fixed, jnp.int32(1))
        )
        key = jax.random.key(3)
        state, metrics = update.step(update.init(shared, private, key), batch, key)
        return update.final(state), metrics

    if trace_only:
        return jax.eval_shape(run, batch)
    (uploaded, kept), metrics = jax.device_get(jax.jit(run)(batch))
    return {**uploaded, **kept}, metrics


def test_the_first_step_without_dropout_is_finite():
    # There the global representations are the average's: a similarity of 1, with no gradient.
    bound = model(dropout=False)
    plain, _ = one_step(fp.algorithms.fedmcp(optax.sgd(1.0), mu=0), bound)
    for similarity in SIMILARITIES:
        options = {"mu": 0.5, "similarity": similarity, "stop_grad_global_in_private_term": True}
        leaves, metrics = one_step(fp.algorithms.fedmcp(optax.sgd(1.0), **options), bound)
        total, count = metrics[f"{similarity}_global_average"]
        assert_close(total / count, 1, atol=1e-5)
        assert metrics[f"{similarity}_global_private"][0] / count < 0.999
        for name in GLOBAL:  # the pushed term is stopped and the other has no slope
            assert np.isfinite(leaves[name]).all()
            assert_close(leaves[name], plain[name], rtol=0, atol=1e-5)


def test_unneeded_passes_are_not_computed():
    calls = []

    def counted(frozen, p, batch, key, train):
        calls.append(train)
        return apply_with(True)(frozen, p, batch, key, train)

    bound = MODEL.replace(apply=counted)
    for options, expected in {
        (("mu", 0.0), ("gamma", 0.0)): [True],
        (("mu", 0.0),): [True],  # both in one batched call
        (): [True, True, False],
        (("private_rep", "dual"),): [True, False],
    }.items():
        calls.clear()
        one_step(fp.algorithms.fedmcp(optax.sgd(1.0), **dict(options)), bound, trace_only=True)
        assert calls == expected, options


# --------------------------------------------------------------------------------- end to end


def test_a_run_sends_the_global_adapter_and_measures_both_classifiers():
    evaluation = fp.Evaluation(client_test=FEDERATION, every=2)
    options = {"rounds": 2, "batch_size": BATCH, "evaluation": evaluation}
    run = simulate(MODEL, fp.algorithms.fedmcp(optax.adam(1e-3)), FEDERATION, **options)
    last, sent = run.metrics[-1], {n: MODEL.trainable[n] for n in GLOBAL}
    assert last["bytes_up"] == 3 * fp.tree.nbytes(sent)
    assert 0 < last["train_cka_global_private"] < 1
    assert 0.5 < last["train_cka_global_average"] < 1  # they differ by dropout at least
    assert 0 <= last["client_accuracy_mean"] <= 1
    assert last["train_loss_global"] not in (0, last["train_loss"]), "of the second classifier"
    assert set(run.client_state) == set(OWN)


# ------------------------------------------------------------------- representations and similarity


def test_pooling_leaves_padding_out():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(4, 5, 6)).astype(np.float32)
    lengths = np.array([5, 1, 3, 0])
    mask = np.arange(5)[None] < lengths[:, None]
    outputs = fp.contracts.Outputs(jnp.zeros((4, 2)), jnp.asarray(hidden, jnp.bfloat16))
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


@pytest.mark.parametrize("n", range(1, PADDED + 1))
@pytest.mark.parametrize("name", SIMILARITIES)
def test_similarities_are_their_definitions(name, n):
    x, y = pair(n, n)
    expected = DEFINED[name](x, y, xp=np)
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

    @jax.jit
    def measured(pairs):
        everybody = jnp.ones(pairs.shape[2], bool)
        return jax.vmap(lambda x, y: [f(x, y, everybody) for f in (cka, cka_debiased, cosine)])(
            pairs[:, 0], pairs[:, 1]
        )

    values = {
        n: np.asarray(measured(rng.normal(size=(3, 2, n, 768)).astype(np.float32)))
        for n in (4, 16, 64)
    }
    biased = [x[0].mean() for x in values.values()]
    assert biased == roughly([0.997, 0.980, 0.922], abs=2e-3), "means of three draws"
    assert np.abs(values[64][1:]).max() < 0.03


# ------------------------------------------------------------------------ classes that are not ours


def test_classes_of_other_tasks_have_no_effect():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 4)).astype(np.float32) + np.float32([0, 0, 9, 9])
    batch = {"labels": jnp.array([0, 1, 0, 1, 0, 1]), "mask": jnp.arange(6) < 5}
    masked = {**batch, "classes": jnp.full(6, 2)}
    task = fp.tasks.classification()

    @jax.jit
    def measured(x, batch):
        loss, slope = jax.value_and_grad(lambda x: task.loss(fp.contracts.Outputs(x, x), batch)[0])(
            x
        )
        return loss, slope, task.metrics(fp.contracts.Outputs(x, x), batch)["accuracy"]

    (loss, slope, here), (expected, few_slope, there) = (
        measured(x, b) for x, b in ((logits, masked), (logits[:, :2], batch))
    )
    assert_close(loss, expected, rtol=1e-6)
    assert_close(slope[:, :2], few_slope, rtol=1e-6)
    np.testing.assert_array_equal(slope[:, 2:], 0)
    assert here == there
    assert here[0] > measured(logits, batch)[2][0] == 0


# --------------------------------------------------------------------------------- causal models


CAUSAL = {
    "gpt2": {
        **{"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2},
        **{"n_positions": 32, "initializer_range": 0.3},
        **dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0),
    },
    "rnn": {"model_type": "rnn", "vocab_size": 64, "embedding_size": 8, "hidden_size": 16},
}
HEADS_OF = {
    "classification": lambda: heads.classification(3),
    "causal_lm": heads.causal_lm,
    "token_classification": lambda: heads.token_classification(("O", "B-X")),
    "span_classification": heads.span_classification,
}
TEXTS = {
    n: fp.testing.tiny_dataset(8, classes=3).columns[n] for n in ("input_ids", "attention_mask")
}


def outputs_for(bound, batch=TEXTS):
    return jax.jit(bound.apply, static_argnums=4)(bound.frozen, bound.trainable, batch, None, False)


@pytest.mark.parametrize(
    ("family", "head"), [*(("gpt2", head) for head in HEADS_OF), ("rnn", "causal_lm")]
)
@pytest.mark.sample("gpt2-c*", "rnn-*")
def test_causal_models_pool_the_last_token_instead_of_the_first(family, head):
    bound = random_model(CAUSAL[family], head=HEADS_OF[head]())
    outputs = outputs_for(bound)
    hidden, real = np.asarray(outputs.hidden), np.asarray(TEXTS["attention_mask"])
    # A product may sum its last rows in another order than its first ones.
    assert_close(hidden[:, 0], np.repeat(hidden[:1, 0], 8, axis=0), **EXACT)
    got = pool(outputs, TEXTS, "cls")
    expected = [h[np.flatnonzero(m)[-1]] for h, m in zip(hidden, real, strict=True)]
    np.testing.assert_array_equal(got, expected)
    assert len({tuple(x) for x in np.asarray(got).tolist()}) == 8, "texts differ"
    if family == "rnn":  # without a mask all positions count
        without = {"input_ids": TEXTS["input_ids"]}
        outputs = outputs_for(bound, without)
        assert_close(pool(outputs, without, "cls"), hidden[:, -1], **EXACT)
    elif head == "classification":  # prompts do not shift the last token
        outputs = outputs_for(fp.attach(bound, peft.prompt_tuning(4)))
        assert outputs.hidden.shape == hidden.shape
        np.testing.assert_array_equal(outputs.last, real.sum(axis=1) - 1)
