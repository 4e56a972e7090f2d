"""Personalised algorithms and baselines equal loops written from the papers, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import toy
from closeness import approx, assert_close, assert_small, assert_trees_close
from internals import Cohort, Task, assign_roles, tree
from options import run_options

import fedjax_peft as fp
from fedjax_peft.algorithms.moon import contrastive

pytestmark = pytest.mark.slow

SIZES, EPOCHS, BATCH = (7, 4, 12, 1, 9), 2, 4
FEDERATION = toy.clients(SIZES)
PER_ROUND = {"full": len(SIZES), "partial": 3}
START = reference.leaves64(toy.model().trainable)
FROZEN = reference.leaves64(toy.model().frozen)
FIXED = {"layer.lora_scale": START["layer.lora_scale"]}
SGD, ADAM = (optax.sgd, 0.3), (optax.adam, 0.02)


# ---------------------------------------------------------------------- the papers, one by one


def fresh(optimizer):
    kind, rate = optimizer
    return (reference.Adam if kind is optax.adam else reference.Sgd)(rate)


def batches_of(client, number, dropout=True, federation=FEDERATION, epochs=EPOCHS):
    options = {"batch_size": BATCH, "epochs": epochs}
    for x, labels, kept in reference.local_batches(federation, client, number, **options):
        yield x, labels, kept if dropout else 0.8


def gradient_at(params, batch):
    """Returns the gradient by the leaves that ``params`` has; it may lack the head."""
    by = reference.gradients(FROZEN, {**START, **params}, *batch)
    return {n: by[n] for n in params}


def stepped(leaves, batch, part, rate=0.3):
    """Returns leaves after a step of SGD on some of them."""
    by = gradient_at(of(leaves, toy.SHARED), batch)
    return leaves | {n: leaves[n] - rate * by[n] for n in part}


def in_rounds(work, kept, shared, *, per_round, **options):
    """Returns (server, client states); ``work`` is the local work of one client."""

    def local_work(client, number):
        return work({n: slow.leaves[n] for n in shared}, slow.own[client], client, number)

    slow = reference.Slow(
        **{"model": toy.model(), "federation": FEDERATION, "shared": shared},
        **{"work": local_work, **options},
    )
    slow.own = [kept] * len(SIZES)
    slow.run(reference.cohorts(FEDERATION, per_round))
    return {n: slow.leaves[n] for n in shared}, slow.own


def names(head):
    """Returns (shared, private) names for a head policy."""
    return {
        "shared": (toy.SHARED, ()),
        "private": (toy.ADAPTER, toy.HEAD),
        "frozen": (toy.ADAPTER, ()),
    }[head]


def of(params, some):
    return {n: params[n] for n in some}


def ditto_slowly(per_round, optimizer, head, lam):
    shared, private = names(head)

    def work(theta, kept, client, number):
        model, v = {**theta, **kept["model"]}, kept["personal"]
        one, other = fresh(optimizer), fresh(optimizer)
        for batch in batches_of(client, number):
            by_model, by_v = gradient_at(model, batch), gradient_at(v, batch)
            by_v = {n: g + lam * (v[n] - theta[n]) if n in theta else g for n, g in by_v.items()}
            model, v = reference.moved(one, model, by_model), reference.moved(other, v, by_v)
        return of(model, shared), {"model": of(model, private), "personal": v}

    kept = {"model": of(START, private), "personal": of(START, (*shared, *private))}
    return in_rounds(work, kept, shared, per_round=per_round)


def pfedme_slowly(per_round, optimizer, head, lam, rate, inner_steps, beta):
    shared, private = names(head)

    def work(theta, kept, client, number):
        w, x = dict(theta), {**kept["personal"], **theta}
        inner = fresh(optimizer)
        for batch in batches_of(client, number, dropout=False):
            for _ in range(inner_steps):
                by = gradient_at(x, batch)
                x = reference.moved(
                    inner, x, {n: g + lam * (x[n] - w.get(n, x[n])) for n, g in by.items()}
                )
            w = {n: w[n] - rate * lam * (w[n] - x[n]) for n in w}
        return w, {"personal": x}

    kept = {"personal": of(START, (*shared, *private))}
    return in_rounds(work, kept, shared, per_round=per_round, size_weights=False, mixing=beta)


def apfl_slowly(per_round, optimizer, head, alpha, alpha_rate):
    shared, private = names(head)

    def work(theta, kept, client, number):
        w, v, alpha = {**theta, **kept["model"]}, kept["personal"], kept["alpha"]
        one, other = fresh(optimizer), fresh(optimizer)
        for step, batch in enumerate(batches_of(client, number)):
            mixture = {n: alpha * v[n] + (1 - alpha) * w[n] for n in v}
            by_w, by_mixture = gradient_at(w, batch), gradient_at(mixture, batch)
            slope = sum(np.sum((v[n] - w[n]) * by_mixture[n]) for n in v)
            w = reference.moved(one, w, by_w)
            v = reference.moved(other, v, {n: alpha * g for n, g in by_mixture.items()})
            if step == 0:
                alpha = min(max(alpha - alpha_rate * slope, 0.0), 1.0)
        return of(w, shared), {"model": of(w, private), "personal": v, "alpha": alpha}

    kept = {"model": of(START, private), "personal": of(START, (*shared, *private))}
    kept["alpha"] = np.float64(alpha)
    return in_rounds(work, kept, shared, per_round=per_round, size_weights=False)


def fedrep_slowly(per_round, optimizer, head, head_epochs, body_epochs):
    assert head == "private"
    shared, private = names(head)

    def work(theta, kept, client, number):
        body, own = theta, kept
        one, other = fresh(optimizer), fresh(optimizer)
        batches = list(batches_of(client, number))
        on_head = -(-len(batches) * head_epochs // (head_epochs + body_epochs))
        on_head = min(on_head, len(batches) - 1)  # EPOCHS = 2: everybody has two steps
        for batch in batches[:on_head]:
            by = gradient_at({**body, **own}, batch)
            own = reference.moved(one, own, of(by, private))
        for batch in batches[on_head:]:
            by = gradient_at({**body, **own}, batch)
            body = reference.moved(other, body, of(by, shared))
        return body, own

    return in_rounds(work, of(START, private), shared, per_round=per_round)


def hidden_of(params, x):
    leaves = {**START, **params}
    low = (x @ leaves["layer.lora_a"]) * leaves["layer.lora_scale"]
    return np.tanh(x @ FROZEN["layer.kernel"] + low @ leaves["layer.lora_b"])


def entropies(params, hidden, labels):
    """Returns the cross-entropy of every example."""
    logits = hidden @ params["head.kernel"] + params["head.bias"]
    return np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]


def moon_loss(params, received, previous, batch, mu, temperature):
    x, labels, kept = batch
    z = hidden_of(params, x) * kept / 0.8

    def similarity(other):
        lengths = np.linalg.norm(z, axis=1) * np.linalg.norm(other, axis=1)
        return np.exp(np.sum(z * other, axis=1) / lengths / temperature)

    near, far = similarity(hidden_of(received, x)), similarity(hidden_of(previous, x))
    return np.mean(entropies(params, z, labels)) + mu * np.mean(-np.log(near / (near + far)))


def moon_slowly(per_round, optimizer, head, mu, temperature):
    shared, private = names(head)

    def work(theta, kept, client, number):
        model, one, others = {**theta, **kept["model"]}, fresh(optimizer), (theta, kept["previous"])
        for batch in batches_of(client, number):

            def loss(params, batch=batch):
                return moon_loss(params, *others, batch, mu, temperature)

            model = reference.moved(one, model, reference.slopes(loss, model))
        return of(model, shared), {"model": of(model, private), "previous": of(model, shared)}

    kept = {"model": of(START, private), "previous": of(START, shared)}
    return in_rounds(work, kept, shared, per_round=per_round)


def fedper_slowly(per_round, optimizer, head, keep=False):
    shared, private = names(head)
    optimizers = [fresh(optimizer) for _ in SIZES]

    def work(theta, kept, client, number):
        model = {**theta, **kept}
        one = optimizers[client] if keep else fresh(optimizer)
        for batch in batches_of(client, number):
            model = reference.moved(one, model, gradient_at(model, batch))
        return of(model, shared), of(model, private)

    return in_rounds(work, of(START, private), shared, per_round=per_round)


def case(fast, slow, optimizer, head, *options, dropout=0.2, **named):
    """Returns (algorithm, its reference given the cohort's size, dropout)."""
    kind, rate = optimizer
    return (
        fast(kind(rate), head=head, **named),
        lambda per_round: slow(per_round, optimizer, head, *options, *named.values()),
        dropout,
    )


PFEDME = {"lam": 2.0, "learning_rate": 0.2, "inner_steps": 3, "beta": 0.7}
PFEDME_PRIVATE = {"lam": 1.0, "learning_rate": 0.5, "inner_steps": 2, "beta": 0.6}
CASES = {
    "ditto": case(fp.algorithms.ditto, ditto_slowly, SGD, "shared", lam=0.5),
    "ditto private": case(fp.algorithms.ditto, ditto_slowly, ADAM, "private", lam=2.0),
    "pfedme": case(fp.algorithms.pfedme, pfedme_slowly, SGD, "shared", **PFEDME, dropout=0),
    "pfedme private": case(
        fp.algorithms.pfedme, pfedme_slowly, ADAM, "private", **PFEDME_PRIVATE, dropout=0
    ),
    "apfl": (
        fp.algorithms.apfl(optax.sgd(0.3), alpha=0.5, adaptive=True, alpha_rate=0.4),
        lambda per_round: apfl_slowly(per_round, SGD, "shared", 0.5, 0.4),
        0.2,
    ),
    "apfl private": (
        fp.algorithms.apfl(optax.adam(0.02), alpha=0.6, head="private"),
        lambda per_round: apfl_slowly(per_round, ADAM, "private", 0.6, 0.0),
        0.2,
    ),
    "fedper": case(fp.algorithms.fedper, fedper_slowly, SGD, "private"),
    "fedrep": case(
        fp.algorithms.fedrep, fedrep_slowly, SGD, "private", head_epochs=1, body_epochs=1
    ),
    "fedrep 2 to 1": case(
        fp.algorithms.fedrep, fedrep_slowly, ADAM, "private", head_epochs=2, body_epochs=1
    ),
    "moon": case(fp.algorithms.moon, moon_slowly, SGD, "shared", mu=2.0, temperature=0.5),
    "moon private": case(fp.algorithms.moon, moon_slowly, ADAM, "private", mu=1.0, temperature=0.2),
}


def played(algorithm, *, lanes, per_round, dropout=0.2, rounds=2, federation=FEDERATION):
    """Returns the result of the last of several rounds of the engine."""
    options = {"per_round": per_round, "lanes": lanes, "bound": toy.model(dropout=dropout)}
    rig = toy.Engine(algorithm, federation, epochs=EPOCHS, **options)
    return rig.rounds(range(1, rounds + 1))[-1]


def distance(tree, expected):
    """Returns the largest difference between two trees of the same structure."""
    apart = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), tree, expected)
    return max(jax.tree.leaves(apart), default=0.0)


SECOND = ("ditto private", "pfedme private", "apfl private", "fedrep 2 to 1", "moon private")
GRID = [(name, 3, "partial") for name in CASES]
GRID += [(name, 1, "full") for name in CASES if name not in SECOND]


@pytest.mark.parametrize(("name", "lanes", "cohort"), GRID)
@pytest.mark.sample("ditto private-*", "pfedme private-*", "moon private-*", "fedrep 2*", "apfl-1*")
def test_rounds_equal_the_slow_reference(name, lanes, cohort):
    algorithm, slowly, dropout = CASES[name]
    result = played(algorithm, lanes=lanes, per_round=PER_ROUND[cohort], dropout=dropout)
    server, client_state = slowly(PER_ROUND[cohort])
    stacked = jax.tree.map(lambda *x: np.stack(x), *client_state)
    assert_small(distance(result.server, server), 1e-5)
    assert_small(distance(result.client_state, stacked), 1e-5)
    start = {n: START[n] for n in server}
    assert distance(start, server) > 0.01, "the server has moved"
    if "alpha" in stacked:
        inside = stacked["alpha"][(stacked["alpha"] > 0) & (stacked["alpha"] < 1)]
        assert (np.ptp(inside) > 0.01) == (name == "apfl"), "clients have their own"
    if name.startswith(("ditto", "pfedme")):  # clients predict with their personal models
        received = algorithm.server.broadcast(result.server)
        kept = tree.take(result.client_state, reference.cohorts(FEDERATION, 3)[2][0])
        leaves = algorithm.model(received, kept)
        assert set(leaves) == set(toy.SHARED)
        for n in toy.SHARED:
            np.testing.assert_array_equal(leaves[n], kept["personal"][n])
        assert all(np.abs(leaves[n] - x).max() > 1e-4 for n, x in received.items())


def test_a_stored_optimizer_state_continues():
    algorithm = fp.algorithms.fedavg(fp.optimizers.adam(0.02, keep=True), head="private")
    result = played(algorithm, lanes=3, per_round=3)
    server, client_state = fedper_slowly(3, ADAM, "private", True)
    assert_small(distance(result.server, server), 1e-5)
    own = jax.tree.map(lambda *x: np.stack(x), *client_state)
    assert_small(distance(result.client_state["model"], own), 1e-5)
    members = reference.cohorts(FEDERATION, 3)
    times = [sum(c in members[n] for n in (1, 2)) for c in range(len(SIZES))]
    steps = [t * EPOCHS * -(-size // BATCH) for t, size in zip(times, SIZES, strict=True)]
    assert result.client_state["optimizer"][0].count.tolist() == steps


# ----------------------------------------------------------- by hand: F(x) = (x - c)² / 2, c = 2


def scalar_problem():
    def apply(params, batch, key, train):
        return fp.contracts.Outputs(params["x"], params["x"])

    def loss(outputs, batch):
        return (outputs.logits - batch["c"]) ** 2 / 2, jnp.float32(1)

    return fp.contracts.ClientContext(
        apply, Task(loss, lambda outputs, batch: {}), {}, jnp.int32(1)
    )


def two_steps(algorithm, kept, received=0.0):
    """Returns the local state after each of two steps, c = 2."""
    update = algorithm.client(scalar_problem())
    key = jax.random.key(0)
    state = update.init({"x": jnp.float32(received)}, kept, key)
    for step in range(2):
        batch = {"c": jnp.float32(2), "step": jnp.int32(step), "steps": jnp.int32(2)}
        state, _ = update.step(state, batch, key)
        yield update.final(state)


def test_apfl_predicts_with_the_mixture_of_both_models():
    kept = {"model": {}, "personal": {"x": jnp.float32(1)}, "alpha": jnp.float32(0.65)}
    predicting = fp.algorithms.apfl(optax.sgd(0.1)).model({"x": jnp.float32(10)}, kept)
    assert predicting["x"] == approx(0.65 * 1 + 0.35 * 10)


def test_two_models_of_a_client_keep_two_states():
    """APFL: the state of the global model's optimizer first, then that of the personal model's."""
    algorithm = fp.algorithms.apfl(fp.optimizers.sgd(0.1, momentum=0.9, keep=True), alpha=0.5)
    kept = algorithm.init_client_state({"x": jnp.float32(1)}, {})
    _, (_, own) = two_steps(algorithm, kept)
    # w: gradients -2 and -1.8. v: 0.5 * -1.5, then 0.5 * (0.5 * 1.075 + 0.5 * 0.2 - 2)
    found = [float(state[0].trace["x"]) for state in own["optimizer"]]
    assert found == approx([0.9 * -2 - 1.8, 0.9 * -0.75 - 0.68125])


def test_moons_loss_by_hand():
    z, near, far = (jnp.float32(v)[None] for v in ([2, 0], [3, 0], [0, 5]))
    # Cosines 1 and 0: -log(e^2 / (e^2 + 1))
    assert contrastive(z, near, far, 0.5)[0] == approx(0.1269280)
    assert contrastive(z, far, near, 0.5)[0] == approx(2.1269280)
    slope = jax.jit(jax.grad(lambda z, near: contrastive(z, near, far, 0.5)[0]))
    assert_close(slope(z, far), 0, atol=1e-7)
    assert np.isfinite(slope(0 * z, near)).all()


# ----------------------------------------------------------------------- what must stay, and where


def toy_problem():
    """Returns the context of a client, its body and its head, and a batch."""
    bound = toy.model()

    def apply(params, batch, key, train):
        return bound.apply(bound.frozen, {**bound.trainable, **params}, batch, key, train)

    body, head = ({n: bound.trainable[n] for n in names} for names in (toy.ADAPTER, toy.HEAD))
    data = FEDERATION.data
    batch = {"x": jnp.asarray(data.columns["x"][:4]), "labels": jnp.asarray(data.labels[:4])}
    batch |= {"mask": jnp.ones(4, bool), "step": jnp.int32(0), "steps": jnp.int32(7)}
    return (
        fp.contracts.ClientContext(apply, fp.tasks.classification(), {}, jnp.int32(1)),
        body,
        head,
        batch,
    )


def unchanged(one, other):
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


def test_fedrep_does_not_change_the_other_part_and_its_moments():
    context, body, head, batch = toy_problem()
    update = fp.algorithms.fedrep(optax.adam(0.1), head_epochs=2, body_epochs=1).client(context)
    key = jax.random.key(0)
    state, one_step = update.init(body, head, key), jax.jit(update.step)
    on_head = []
    for step in range(7):
        new, _ = one_step(state, {**batch, "step": jnp.int32(step)}, key)
        same, rested = (
            [unchanged(getattr(new, name), getattr(state, name)) for name in names]
            for names in (("body", "head"), ("body_optimizer", "head_optimizer"))
        )
        assert same == rested
        assert sorted(same) == [False, True]
        on_head.append(same[0])
        state = new
    assert on_head == [True] * 5 + [False] * 2, "2/3 of 7 steps, rounded up"


def test_tuning_uses_a_new_optimizer_and_leaves_the_kept_one():
    (context, body, head, batch), key = toy_problem(), jax.random.key(0)
    kept = jax.tree.map(lambda x: x + 7, (optax.adam(0.05).init(body), optax.adam(0.05).init(head)))
    ends = []
    for keep in (False, True):
        algorithm = fp.algorithms.fedrep(fp.optimizers.adam(0.05, keep=keep), tune_epochs=1)
        update = algorithm.tuning.client(context)
        own = {"model": head, "optimizer": kept} if keep else head
        state, _ = jax.jit(update.step)(update.init(body, own, key), batch, key)
        ends.append(update.final(state))
    assert ends[0][0] == ends[1][0] == {}
    assert unchanged(ends[1][1]["optimizer"], kept)
    assert_trees_close(ends[1][1]["model"], ends[0][1])  # of two programs
    assert not unchanged(ends[0][1], head)


def test_moons_worst_client_is_the_one_of_the_highest_contrastive_loss():
    model = fp.attach(fp.testing.tiny_model(dropout=0.0), fp.lora())
    clients = fp.partition.iid(fp.testing.tiny_dataset(24), clients=3, seed=0)
    each = fp.Evaluation(diagnostics=["clients"])
    result = fp.simulate(
        model, fp.algorithms.moon(optax.sgd(0.1)), clients, rounds=2, evaluation=each
    )
    row = result.metrics[-1]
    assert row["train_contrastive_worst"] > row["train_contrastive"]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_moon_compares_the_pooled_representations(pooling):
    """One step on texts of three tokens: the term is computed by hand from the hidden states."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3, 4)).astype(np.float32)
    tokens = np.arange(3)[None] < np.array([3, 1, 2, 3, 2])[:, None]
    leaves = {"adapter.w": rng.normal(size=(4, 6)), "head.w": rng.normal(size=(6, 3))}
    previous = rng.normal(size=(4, 6))
    leaves = {n: jnp.asarray(w, jnp.float32) for n, w in leaves.items()}

    def apply(params, batch, key, train):
        hidden = jnp.tanh(batch["x"] @ params["adapter.w"]) * (1.5 if train else 1.0)
        return fp.contracts.Outputs(hidden[:, 0] @ params["head.w"], hidden)

    def pooled(w, factor=1.0):
        hidden = np.tanh(x.astype(float) @ np.asarray(w, float)) * factor
        if pooling == "cls":
            return hidden[:, 0]
        return np.sum(hidden * tokens[..., None], axis=1) / tokens.sum(axis=1)[:, None]

    def similarity(a, b):
        return np.sum(a * b, axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)

    algorithm = fp.algorithms.moon(optax.sgd(0.1), temperature=0.3, pooling=pooling)
    update = algorithm.client(
        fp.contracts.ClientContext(apply, fp.tasks.classification(), {}, jnp.int32(1))
    )
    kept = {"model": {}, "previous": {**leaves, "adapter.w": jnp.asarray(previous, jnp.float32)}}
    state = update.init(leaves, kept, None)
    # A step has been made, so that the local model is no longer the received one.
    moved = {**leaves, "adapter.w": leaves["adapter.w"] + 0.3}
    state = state._replace(shared=moved)
    batch = {"x": x, "attention_mask": tokens, "labels": np.array([0, 1, 2, 0, 1])}
    batch["mask"] = np.arange(5) < 4
    _, metrics = jax.jit(update.step)(state, batch, jax.random.key(0))
    z = pooled(moved["adapter.w"], 1.5)
    near = np.exp(similarity(z, pooled(leaves["adapter.w"])) / 0.3)
    far = np.exp(similarity(z, pooled(previous)) / 0.3)
    expected = -np.log(near / (near + far))[:4]
    total, count = metrics["contrastive"]
    assert count == 4
    assert_close(total, expected.sum(), rtol=1e-5)


def test_a_single_step_of_fedrep_trains_both_parts():
    sizes, bound = (4, 3, 1), toy.model(dropout=0)  # one batch each
    few = toy.clients(sizes)
    algorithm = fp.algorithms.fedrep(optax.sgd(0.3), head_epochs=10, body_epochs=1)
    rig = toy.Engine(algorithm, few, per_round=3, lanes=3, bound=bound)
    result, ends, losses = rig.run(rig.schedule.cohort(1)), [], []
    for client in range(3):
        (batch,) = batches_of(client, 1, False, few, 1)
        ends.append(stepped(stepped(START, batch, toy.HEAD), batch, toy.ADAPTER))
        losses.append(np.sum(entropies(START, hidden_of({}, batch[0]), batch[1])))
    body = {n: np.average([e[n] for e in ends], axis=0, weights=sizes) for n in toy.ADAPTER}
    assert_small(distance(result.server, body), 1e-5)
    assert distance(result.server, of(START, toy.ADAPTER)) > 1e-3, "shared leaves have moved"
    heads = {n: np.stack([e[n] for e in ends]) for n in toy.HEAD}
    assert_small(distance(result.client_state, heads), 1e-5)
    # The training loss is that of the received model, counted once.
    assert_close(result.sums["loss"][0], losses, rtol=1e-5)
    np.testing.assert_array_equal(result.sums["loss"][1], sizes)


def test_a_single_step_of_fedrep_draws_two_dropout_masks():
    few = toy.clients([4])
    rig = toy.Engine(fp.algorithms.fedrep(optax.sgd(0.3)), few, per_round=1, lanes=1)
    result = rig.run(rig.schedule.cohort(1))
    (batch,) = batches_of(0, 1, True, few, 1)
    leaves = stepped(START, batch, toy.HEAD)
    assert_close(result.client_state["head.bias"][0], leaves["head.bias"], atol=1e-6)
    same = stepped(leaves, batch, ["layer.lora_b"])["layer.lora_b"]
    assert np.abs(result.server["layer.lora_b"] - same).max() > 1e-3


def test_fedrep_gives_the_body_at_least_one_step():
    federation = toy.clients([8, 20])  # two and five batches
    algorithm = fp.algorithms.fedrep(optax.sgd(0.3), head_epochs=10, body_epochs=1)
    rig = toy.Engine(algorithm, federation, per_round=2, lanes=1, bound=toy.model(dropout=0))
    for client, steps in ((0, 2), (1, 5)):
        result = rig.run(Cohort(*([x[client]] for x in rig.schedule.cohort(1))))
        leaves = START
        for i, batch in enumerate(batches_of(client, 1, False, federation, 1)):
            leaves = stepped(leaves, batch, toy.ADAPTER if i == steps - 1 else toy.HEAD)
        assert_small(distance(result.server, of(leaves, toy.ADAPTER)), 1e-5)


def test_fedrep_tunes_heads_for_the_last_evaluation_only(tmp_path):
    """Equals the same run without tuning, and a run of ``local`` on the heads alone."""
    model, federation = toy.model(dropout=0), toy.clients([9, 6, 12])
    train, held_out = federation.holdout(0.34)
    test = toy.dataset(40, seed=3)
    settings = {"clients_per_round": 2, "batch_size": 4, "test": test, "client_test": held_out}
    settings |= {"checkpoint_every": 1}
    run = functools.partial(fp.simulate, model, clients=train, **run_options(**settings))
    tuning = fp.algorithms.fedrep(optax.sgd(0.3), tune_epochs=3)
    plain, tuned = run(fp.algorithms.fedrep(optax.sgd(0.3)), rounds=2), run(tuning, rounds=2)
    assert unchanged(plain.client_state, tuned.client_state)
    assert unchanged(plain.server, tuned.server)
    scores = {n: x for n, x in tuned.metrics[-1].items() if n.startswith("tuned_")}
    rest = [{k: v for k, v in row.items() if k not in (*scores, "time")} for row in tuned.metrics]
    assert rest == [{k: v for k, v in row.items() if k != "time"} for row in plain.metrics]
    assert {"tuned_test_accuracy", "tuned_test_loss", "tuned_client_accuracy_mean"} <= set(scores)
    assert not any("count" in n or "examples" in n for n in scores)

    losses = []
    for client in range(3):
        leaves = of(START, toy.SHARED) | jax.tree.map(
            np.float64, tree.take(plain.client_state, client) | plain.server
        )
        for batch in batches_of(client, 3, False, train, 3):
            leaves = stepped(leaves, batch, toy.HEAD)
        hidden = hidden_of(leaves, test.columns["x"].astype(float))
        losses.append(np.mean(entropies(leaves, hidden, test.labels)))
    assert scores["tuned_test_loss"] == approx(np.mean(losses), rel=1e-5)
    assert tuned.metrics[-1]["test_loss"] != approx(np.mean(losses), rel=1e-3)

    # A run that goes on is not changed by having been tuned on the way.
    run(tuning, rounds=1, out=tmp_path / "run")
    again = run(tuning, rounds=2, out=tmp_path / "run", resume=True)
    assert unchanged(again.client_state, tuned.client_state)
    assert {n: again.metrics[-1][n] for n in scores} == scores


@pytest.mark.parametrize(
    ("train", "trained"), [("all", toy.SHARED), ("head", toy.HEAD), ("adapters", toy.ADAPTER)]
)
def test_the_trained_leaves_of_baselines(train, trained):
    alone = assign_roles(toy.KINDS, fp.algorithms.local(optax.sgd(0.1), train=train).roles)
    assert (alone["shared"], alone["private"]) == ([], sorted(trained))
    together = fp.algorithms.centralised(optax.sgd(0.1), train=train)
    roles = assign_roles(toy.KINDS, together.roles)
    assert (roles["shared"], roles["private"]) == (sorted(trained), [])
    sent = together.traffic.sent_leaves(of(START, trained), jnp.int32(1))
    assert sent == dict.fromkeys(trained, False), "nothing is sent"


def test_centralised_training_continues_over_rounds():
    everything = fp.partition.pooled(FEDERATION.data)
    algorithm = fp.algorithms.centralised(optax.adam(0.02))
    result = played(algorithm, lanes=1, per_round=1, rounds=3, federation=everything)
    params, adam = of(START, toy.SHARED), fresh(ADAM)
    for number in (1, 2, 3):
        for batch in batches_of(0, number, federation=everything):
            params = reference.moved(adam, params, gradient_at(params, batch))
    # Adam divides by the root of squares: the rounding of a small gradient counts as much.
    assert_small(distance(result.server, params), 5e-5)


# ------------------------------------------------------------------------------------ whole runs


def run(algorithm, *, model=None, **options):
    options = {"rounds": 2, "clients_per_round": 3, "batch_size": BATCH, "lanes": 3, **options}
    return fp.simulate(model or toy.model(), algorithm, FEDERATION, **run_options(**options))


def test_the_global_model_is_tested_beside_the_clients_own():
    last = run(fp.algorithms.ditto(optax.adam(0.02)), test=toy.dataset(20, seed=3)).metrics[-1]
    assert abs(last["global_test_loss"] - last["test_loss"]) > 1e-3


def test_fedbabu_is_tuned_after_the_run():
    body = run(fp.algorithms.fedbabu(optax.adam(0.02)))
    slow = reference.Slow(
        **{"model": toy.model(), "federation": FEDERATION, "shared": toy.ADAPTER},
        optimizer=functools.partial(reference.Adam, 0.02),
        local={"batch_size": BATCH, "epochs": 1},
    )
    server, start = slow.run(reference.cohorts(FEDERATION, 3)).leaves, toy.model().trainable
    for name in toy.ADAPTER:
        assert_close(body.params[name], server[name], atol=1e-5)
    for name in toy.HEAD:
        np.testing.assert_array_equal(body.params[name], start[name])
    options = {"model": body.trained, "rounds": 1, "clients_per_round": len(SIZES)}
    tuned = run(fp.algorithms.local(optax.sgd(0.1), train="head"), **options)
    for client in range(len(SIZES)):
        params = tuned.client_params(client)
        leaves = reference.leaves64(body.params)
        for batch in batches_of(client, 1, epochs=1):
            leaves = stepped(leaves, batch, toy.HEAD, 0.1)
        for name in toy.ADAPTER:
            np.testing.assert_array_equal(params[name], body.params[name])
        for name in toy.HEAD:
            assert_close(params[name], leaves[name], atol=1e-5)
            assert np.abs(np.asarray(params[name]) - body.params[name]).max() > 1e-3
