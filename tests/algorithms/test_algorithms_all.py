"""The contract of every algorithm. A new algorithm is tested as soon as it is listed.

Tracing and compiling take nearly all of the time, so the tests of an algorithm share two programs:
:func:`rig` has a schedule and a transform, :func:`guarded` privacy and kept optimizer states.
"""

import functools
import inspect
import os

import jax
import jax.numpy as jnp
import memory
import numpy as np
import optax
import pytest
import reference
import toy
import toy_cores
from closeness import assert_close
from internals import (
    Cohort,
    assign_roles,
    check_transforms,
    evaluation,
    peak_bytes,
    summation,
    with_products,
    wrapped,
)
from toy_transforms import clip_by_state

import fedjax_peft as fp
from fedjax_peft import aggregators, algorithms, attacks
from fedjax_peft.algorithms.checks import CLIENT_RATES

SGD = optax.sgd(0.1)
SIZES = (7, 4, 12, 1, 9)
FEDERATION = toy.clients(SIZES)
POOLED = toy.clients([33])
OPTIONS = {
    "afl": {"clients": 5},
    "apfl": {"adaptive": True},
    "scaffold": {"learning_rate": 0.1},
    "fedkseed": {"seeds": 8, "epsilon": 0.1},
    "fedmezo": {"steps": 8, "epsilon": 0.1},
    "fedlease": {"clients": 5, "warmup_rounds": 1, "max_experts": 4},
    "fedplora": {"ranks": [1, 2]},
    "fra_ffa": {"at": 1},
    "q_fedavg": {"lipschitz": 10.0},
    "gossip": {"clients": 5},
    "fslora": {"ranks": [1, 2]},
    "hilora": {"clients": 5, "root_rounds": 1, "cluster_rounds": 1},
    "slora": {"sparse_rounds": 1},
}
PLATEAU = {"trigger": "plateau", "patience": 1}
ZEROTH = ("fedkseed", "fedmezo")
OF_LOSSES = ("afl", "q_fedavg")
"""Clients send their loss too."""
ROWS = ("fedlease", "gossip", "hierfavg", "ifca")
"""The server has several models."""
DUAL = ("fedmatch", "fedmcp")
ALONE = ("centralised", "local")
"""Nothing is sent, or there are no others."""
CONSTANT = ("layer.ravan_s",)
"""Leaves of the global model that are the same after every round: RAVAN's scales are 1."""
OTHERS = {
    "fedopt": functools.partial(algorithms.fedopt, server=optax.adam(0.1)),
    "fedavg_fra": functools.partial(algorithms.fedavg, aggregator=aggregators.fra()),
    "fedavg_flexlora": functools.partial(algorithms.fedavg, aggregator=aggregators.flexlora()),
    "fedavg_ilora": functools.partial(algorithms.fedavg, aggregator=aggregators.ilora()),
    "fedavg_lora_fair": functools.partial(
        algorithms.fedavg, aggregator=aggregators.lora_fair(steps=2)
    ),
    "fedavg_flora_na": functools.partial(
        algorithms.fedavg, aggregator=aggregators.flora_na(steps=3)
    ),
    "fedavg_hetlora": functools.partial(algorithms.fedavg, aggregator=aggregators.hetlora()),
    "fedavg_median": functools.partial(algorithms.fedavg, aggregator=aggregators.median()),
    "fedavg_geometric_median_product": functools.partial(
        algorithms.fedavg, aggregator=aggregators.geometric_median(space="product")
    ),
    "fedavg_raflora": functools.partial(algorithms.fedavg, aggregator=aggregators.raflora()),
    "fedavg_private_head": functools.partial(algorithms.fedavg, head="private"),
    "fedavg_keeps_optimizer": lambda optimizer, **options: algorithms.fedavg(
        fp.optimizers.kept(optimizer), **options
    ),
    "fedavgm_product": functools.partial(algorithms.fedavgm, space="product"),
    "fra_ffa_plateau": functools.partial(algorithms.fra_ffa, **PLATEAU),
    "lora_a2_one": functools.partial(algorithms.lora_a2, budget=1),
    "hetlora_prunes": functools.partial(algorithms.hetlora, prune=0.5),
}
NAMES = sorted([*algorithms.__all__, *OTHERS])
AS_OTHERS = (
    *("fedavg_keeps_optimizer", "fedavg_private_head", "fedopt", "lora_a2_one"),
    *("fedavg_flexlora", "fedavg_hetlora", "fedavg_ilora", "fedavg_lora_fair", "fedavg_median"),
    *("fedavg_flora_na", "fedavg_geometric_median_product", "fedavg_raflora", "fedavgm_product"),
    *(
        *ROWS,
        "afl",
        "fedadagrad",
        "fedavgm",
        "fedbabu",
        "feddpa_f",
        "fedmatch",
        "fedyogi",
        "fra_ffa",
    ),
    *("fedper", "fedsa", "fedsb", "ffa", "hetlora", "pfedlora", "q_fedavg", "rolora"),
    *("fedask", "fedplora", "fslora"),
)
"""Rarely tested: their rounds have nothing that no other algorithm has, or an aggregator that
``tests/aggregators`` runs with any number of lanes. Other files compare each one with a loop."""
SIMILAR = ("ditto", "fedprox", "moon", "pfedme")
"""Rarely run here, for their rounds have nothing that those of APFL or FedAvg do not have. Their
private rounds are traced, and ``test_algorithms_personal.py`` and
``test_algorithms_optimisation.py`` compare each one with a loop."""
LOOPED = ("apfl", "fedavg", "fedavg_fra", "hetlora_prunes", "scaffold", "slora")
"""Algorithms with a part that no other one has: states, masks, ranks, rates. Their rounds have
dropout and three lanes; those of the others have neither, which compiles in half of the time.
FedNova, FedRep, HiLoRA and LoRA-A2 have such parts too, and their own files compare three lanes of
them with a loop.
"""


MODELS = {
    **dict.fromkeys(DUAL, toy.dual_model),
    **toy_cores.MODELS,
    "fedalt": toy.mixture_model,
    "fedlease": toy.experts_model,
    "hilora": toy.sum_model,
    "pfedlora": toy.own_kernel_model,
}
"""Algorithm -> its model, where it is not plain LoRA."""


def model_of(name, dropout=0):
    """Returns the model of an algorithm."""
    return MODELS[name]() if name in MODELS else toy.lora_model(dropout=dropout)


def rare(name):
    """Returns a row of a grid that only ``make exhaustive`` runs."""
    return pytest.param(name, marks=pytest.mark.exhaustive)


def only(*names, of=NAMES):
    """Returns names of algorithms; all but the given ones are rare."""
    return [n if n in names else rare(n) for n in of]


def rows(*rarer, of=NAMES):
    """Returns names of algorithms; the given ones are rare too."""
    return [rare(n) if n in (*AS_OTHERS, *SIMILAR, *rarer) else n for n in of]


@pytest.fixture(scope="module", params=rows())
def name(request):
    """The name of the algorithm. With module scope, the tests of an algorithm run together."""
    yield request.param
    for kept in (rig, rounds, guarded):
        kept.cache_clear()
    memory.release()


def make(name, optimizer=SGD, **options):
    """Returns an algorithm by its name."""
    factory = OTHERS.get(name) or getattr(algorithms, name)
    return factory(optimizer, **{**OPTIONS.get(name, {}), **options})


def clients_of(name):
    """Returns the clients that an algorithm is tried on."""
    return POOLED if name == "centralised" else FEDERATION


def engine_of(name, algorithm, **options):
    """Returns the engine of an algorithm on its model and clients, who take part in every round."""
    clients = clients_of(name)
    options = {"lanes": 1, "bound": model_of(name), **options}
    return toy.Engine(algorithm, clients, per_round=len(clients), **options)


def factor(t):
    """Returns the factor of the clients' rates in round t: 1, 1/4, 1/16, and 0 from round 4 on."""
    return jnp.where(t < 4, 0.25 ** (t - 1.0), 0.0)


RANKED = (
    *("fedavg", "fedavg_flexlora", "fedavg_hetlora", "fedavg_ilora", "fedrot", "flora"),
    *("fra_ffa", "hetlora", "fedalt", "fedavg_flora_na", "lora_a2", "pfedlora", "scaffold"),
    *("fedask", "fedavg_raflora"),
)
"""Tried with clients of unequal ranks too. The program of :func:`rig` takes any ranks."""


@functools.lru_cache(maxsize=1)
def rig(name):
    """Returns the engine of an algorithm whose clients' rates follow :func:`factor`.

    It has a transform where one fits. This clips uploads to a norm that is a part of its state, at
    first infinity, and so changes nothing.
    """
    algorithm = make(name, fp.schedules.scheduled(SGD, factor))
    algorithm.check(model_of(name).kinds, len(clients_of(name)))
    refused = fp.contracts.Feature.TRANSFORMS in algorithm.incompatible
    transform = None if refused else check_transforms(clip_by_state(), algorithm)
    ranks = [toy.RANK] if name in RANKED else None
    return engine_of(name, algorithm, transform=transform, ranks=ranks, **form_of(name))


def form_of(name):
    """Returns the lanes and the model of an algorithm's rounds."""
    looped = name in LOOPED
    return {"lanes": 3 if looped else 1, "bound": model_of(name, 0.2 if looped else 0)}


@functools.lru_cache(maxsize=1)
def rounds(name):
    """Returns the results of three rounds by one executable, which accepts only these shapes."""
    return rig(name).rounds((1, 2, 3))


def same(got, expected, tolerance=1e-5):
    """Asserts that two trees have the same structure, and the same numbers but for rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert_close(x, y, rtol=tolerance, atol=tolerance)


def all_finite(*trees):
    """Returns whether all numbers of some trees are finite."""
    return all(np.isfinite(x).all() for x in jax.tree.leaves(trees))


def leaf_names(shapes):
    paths = jax.tree.leaves_with_path(shapes)
    return {str(path[-1].key) for path, _ in paths if isinstance(path[-1], jax.tree_util.DictKey)}


def test_rounds_run_without_recompilation_and_stay_finite(name):
    for number, result in enumerate(rounds(name), 1):
        assert result.finite.all()
        assert all_finite(rig(name).algorithm.server.model(result.server), result.client_state)
        assert {"loss", "accuracy"} <= set(result.sums)
        assert result.aggregation["learning_rate_factor"] == 0.25 ** (number - 1)


OF_HEADS = ("fedavg_private_head", "fedbabu", "fedper", "fedrep")
"""Algorithms that treat the head by itself."""


def test_a_language_model_has_no_head_to_train():
    for one in sorted({*NAMES} - {*OF_HEADS}):
        kinds = {n: kind for n, kind in model_of(one).kinds.items() if kind != "head"}
        assert set(kinds.values()) >= {"adapter"}
        assign_roles(kinds, make(one).roles)  # every rule covers a leaf


def test_training_reaches_the_model_that_predicts(name):
    algorithm = rig(name).algorithm
    server, private = rounds(name)[-1][:2]
    received = algorithm.server.broadcast(server)
    before = {n: np.asarray(x) for n, x in rig(name).model_at_start().items()}
    after = algorithm.model(received, fp.tree.take(private, 0))
    moved = {n for n, x in after.items() if not np.array_equal(x, before[n])}
    shift = {} if algorithm.server.frozen_delta is None else algorithm.server.frozen_delta(server)
    assert moved or any(np.any(x) for x in shift.values())


@pytest.mark.parametrize("name", rows(*OTHERS), indirect=True)
def test_the_global_and_the_clients_own_models_can_be_measured(name):
    engine = rig(name)
    for personal in (True, False):
        if not personal and engine.leaves:
            continue  # there is no one model
        measuring = evaluation(engine.algorithm, personal=personal)
        _, shapes = engine.traced(measuring, **({} if personal else {"client_state": ()}))
        assert set(shapes.predictions["metrics"]) == {"loss", "accuracy"}


ADDED = ("learning_rate_factor", "largest_norm")
"""Metrics of the schedule and of the transform."""


@pytest.mark.parametrize("name", only(*LOOPED), indirect=True)
def test_the_round_program_computes_what_a_plain_loop_over_clients_does(name):
    """The loop has one lane, the rates of a round as numbers and no transform, so this is the
    contract of lanes, of schedules and of transforms that change nothing too.

    Both do the same float32 operations, in another order where lanes sum and XLA fuses. A rounding
    error of such a sum is about 1e-7 of its terms, which are of order 1 here, and a few local steps
    carry it on: 1e-5 leaves room for that, and for nothing else (a wrong key, mask, weight or rate
    changes numbers by 1e-3 or more). It is the second round, where clients have kept things.
    """
    plain = engine_of(name, at_rate(name, factor(2)), engine="reference", **form_of(name))
    before, cohort = rounds(name)[0].state, few(plain.schedule.cohort(2))
    expected = rig(name).run(cohort, 2, before)._replace(transform_state=())
    metrics = {n: x for n, x in expected.aggregation.items() if n not in ADDED}
    same(plain.run(cohort, 2, before[:2]), expected._replace(aggregation=metrics))


def few(cohort):
    """Returns three clients of a cohort, with two, one and one local steps: a loop is slow."""
    return (
        Cohort(*([x[i] for i in (0, 1, 3)] for x in cohort)) if len(cohort.client) > 3 else cohort
    )


def at_rate(name, share):
    """Returns an algorithm whose clients' learning rates are all multiplied by a number."""
    share, options = float(share), OPTIONS.get(name, {})
    factory = OTHERS.get(name) or getattr(algorithms, name)
    default = {n: p.default for n, p in inspect.signature(factory).parameters.items()}
    rates = {n: options.get(n, default[n]) * share for n in CLIENT_RATES if n in default}
    return make(name, optax.sgd(0.1 * share), **rates)


def test_private_leaves_are_never_sent_and_fixed_ones_are_not_in_any_state(name):
    engine = rig(name)
    server, state = engine.algorithm.server, engine.start()[0]
    fixed = set(engine.setup.fixed)
    sent = leaf_names(server.broadcast(state)) | leaf_names(server.unchanged(state))
    assert not sent & {*engine.leaves, *fixed}
    assert set(server.model(state)) == set(engine.shared)
    assert not leaf_names(engine.client_state) & fixed


def test_a_round_without_participants_changes_no_state(name):
    before = rounds(name)[0].state
    after = rig(name).run(Cohort([], [], []), 2, before).state
    for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", rows(of=[n for n in NAMES if n not in ALONE]), indirect=True)
def test_a_single_client_with_a_single_example_moves_the_server(name):
    """The smallest possible round has a total weight of 1 and one upload."""
    engine = rig(name)
    cohort = engine.schedule.cohort(1)
    place = SIZES.index(1)
    result = engine.run(Cohort(*([x[place]] for x in cohort)), 1)
    start = engine.algorithm.server.model(engine.start()[0])
    new = engine.algorithm.server.model(result.server)
    shift = engine.algorithm.server.frozen_delta
    moved = [np.abs(new[n] - x).max() for n, x in start.items()]
    moved += [] if shift is None else [np.abs(x).max() for x in shift(result.server).values()]
    assert max(moved) > 1e-4


@pytest.mark.parametrize("name", rows(of=[n for n in NAMES if n != "centralised"]), indirect=True)
def test_only_participants_change_their_client_state(name):
    engine = rig(name)
    clients, weights, work = engine.schedule.cohort(1)
    result = engine.run(Cohort(clients[:2], weights[:2], work[:2]), 1)
    start = engine.start()[1]
    for a, b in zip(jax.tree.leaves(result.client_state), jax.tree.leaves(start), strict=True):
        np.testing.assert_array_equal(a[2:], b[2:])


@pytest.mark.parametrize("kind", ["loss", "upload"])
def test_one_client_of_numbers_that_are_not_finite_leaves_the_server_finite(name, kind):
    """An infinite input spoils a client's upload. A label that there is not spoils its loss alone:
    the label's logit is read as NaN, and no gradient flows back to it. Zeroth-order steps are made
    of the loss itself.
    """
    federation = clients_of(name)
    columns = {n: x.copy() for n, x in federation.data.columns.items()}
    column, value = {"loss": ("labels", 99), "upload": ("x", np.inf)}[kind]
    columns[column][federation.indices[0][0]] = value
    for result in rig(name).rounds(columns=columns):
        fine = kind == "loss" and name not in (*ZEROTH, *OF_LOSSES)
        assert result.finite.tolist() == [fine] + [True] * (len(federation) - 1)
        assert not np.isfinite(result.sums["loss"][0][0])
        assert all_finite(result.server, result.client_state)


# -------------------------------------------------- kept optimizer states, and central privacy


FIXED_BASIS = ("apfl", "ditto", "fedadagrad", "fedadam", "fedavgm", "feddyn", "fedyogi")
"""Algorithms that need a fixed basis without kept optimizer states too."""
PRIVACY_REFUSED = {
    "gossip": "there is no server",
    **dict.fromkeys(("fedlease", "hierfavg", "ifca"), "averages the changes of groups of clients"),
    "afl": "looks at the uploads one by one",
    "fedex": "passes the factors of every client on",
    "fedmomentum": "passes the factors of every client on",
    "flora": "passes the factors of every client on",
    "fedavg_hetlora": "weights a client by what it sends",
    "hetlora": "weights a client by what it sends",
    "hetlora_prunes": "weights a client by what it sends",
    "fedavg_flora_na": "looks at the uploads one by one",
    "fedavg_raflora": "looks at the uploads one by one",
    "fedask": "sums of sketches",
    "fedplora": "divides the sum of each direction",
    "fedmezo": "looks at the uploads one by one",
    "hilora": "looks at the uploads one by one",
    "fedavg_median": "looks at the uploads one by one",
    "fedavg_geometric_median_product": "looks at the uploads one by one",
    "q_fedavg": "weighed by the loss of its client",
    "fra_ffa_plateau": "Set trigger = 'round' or 'subspace'",
}
NO_NOISE = (*PRIVACY_REFUSED, "centralised")
"""Algorithms without noise on what the server has: they refuse it, or nothing is sent."""


def facts(name):
    """Returns the facts about the federation of an algorithm."""
    clients = clients_of(name)
    columns = tuple((n, x.shape[1:]) for n, x in clients.data.columns.items())
    parts = (len(clients), len(clients), "all", 4, "shuffled", 3, 1, 1, columns, toy.CLASSES)
    return fp.contracts.Federation(*parts)


KEEPING = [
    n
    for n in algorithms.__all__
    if fp.contracts.Feature.KEPT_OPTIMIZER not in fp.contracts.refusals(make(n))
]
GUARDED = ("fedavg", "fedrep")
"""Algorithms whose private rounds are run, without and with clients' own leaves;
``test_algorithms_privacy.py`` traces the others, and ``tests/privacy`` has the noise of products
and of SCAFFOLD's two fields."""


@functools.lru_cache(maxsize=1)
def guarded(name, private):
    """Returns an engine and two rounds, with privacy and kept optimizer states where they fit."""
    algorithm = make(name, fp.optimizers.adam(0.02, keep=True)) if name in KEEPING else make(name)
    if private:
        algorithm = fp.privacy.central(0.5, 0.5).protect(algorithm, facts(name))
    engine = engine_of(name, algorithm)
    return engine, engine.rounds()


@pytest.mark.parametrize("name", only(*GUARDED, *PRIVACY_REFUSED), indirect=True)
def test_central_privacy_runs_over_the_algorithm_or_says_why_not(name):
    if name in PRIVACY_REFUSED:
        with pytest.raises(fp.InputError, match=PRIVACY_REFUSED[name]):
            guarded(name, True)
        return
    engine, results = guarded(name, True)
    for result in results:
        assert all_finite(result.server, result.norms, result.client_state)
        assert_close(result.aggregation["privacy_noise_std"], 0.25 / engine.clients)
    if name not in ALONE:  # every leaf is released, with noise
        model = engine.algorithm.server.model
        first, last = model(engine.start()[0]), model(results[-1].server)
        released = {n: x for n, x in first.items() if n not in CONSTANT and np.all(x != 0)}
        assert all(np.all(last[n] != x) for n, x in released.items())


def counts(optimizer_states):
    """Returns the counts of steps in Adam's states, ``[states, clients]``."""
    adam = optax.tree_utils.tree_get_all_with_path(optimizer_states, "count")
    return np.array([count for _, count in adam])


@pytest.mark.parametrize("name", only(*GUARDED, of=KEEPING), indirect=True)
def test_clients_can_keep_the_state_of_their_optimizer(name):
    engine, (first, second) = guarded(name, name not in NO_NOISE)
    reason = engine.algorithm.incompatible[fp.contracts.Feature.NEW_FACTORS]
    assert "kept optimizer" in reason or name in FIXED_BASIS
    once, twice = (counts(x.client_state["optimizer"]) for x in (first, second))
    assert (once > 0).all()
    np.testing.assert_array_equal(twice, 2 * once)  # the bias correction counts on
    # With the states of new optimizers, the second round is another.
    new = {**first.client_state, "optimizer": engine.start()[1]["optimizer"]}
    again = engine.run(engine.schedule.cohort(2), 2, (first.server, new))
    models = [(x.server, x.client_state["model"]) for x in (second, again)]
    pairs = zip(*map(jax.tree.leaves, models), strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) > 1e-3


@pytest.mark.parametrize("name", [n for n in KEEPING if make(n).local_model is not None])
def test_local_models_are_the_same_where_optimizers_are_kept(name):
    made = (make(name), make(name, fp.optimizers.kept(SGD)))
    own, keeps = (engine_of(name, algorithm) for algorithm in made)
    (server, plain), (_, kept) = own.start()[:2], keeps.start()[:2]
    one = jax.tree.map(lambda x: x[0], (plain, kept))
    upload = own.algorithm.server.unchanged(server)
    received = own.algorithm.server.broadcast(server)
    models = [
        engine.algorithm.local_model(received, upload, state)
        for engine, state in zip((own, keeps), one, strict=True)
    ]
    jax.tree.map(np.testing.assert_array_equal, *models)


# -------------------------------------------------------------------------------- upload transforms


AVERAGES = ("apfl", "ditto", "fedavg", "fedprox", "moon", "scaffold")
"""Algorithms whose server takes the mean of the uploads as its model."""


def test_changes_are_clipped_where_a_transform_fits(name):
    """Where the uploads of an algorithm are changes of the model."""
    engine = rig(name)
    if fp.contracts.Feature.TRANSFORMS in engine.algorithm.incompatible:
        return  # test_algorithms_compatibility.py
    if name != "fednova":  # it sends a direction for each unit of work
        for whole in rounds(name):
            longest = np.max(whole.norms) * (name != "centralised")  # where nothing travels
            assert_close(whole.aggregation["largest_norm"], longest, rtol=1e-5)
    server, client_state, state = engine.start()
    state = state._replace(server=(jnp.float32(1e-3),))
    short = engine.run(engine.schedule.cohort(1), 1, (server, client_state, state))
    longest = 0.0 if name in ALONE else 1e-3
    assert_close(short.aggregation["largest_norm"], longest, rtol=1e-5)
    if name in AVERAGES:  # so the server's model moves by no more
        new, old = map(engine.algorithm.server.model, (short.server, engine.start()[0]))
        assert 0 < fp.tree.norm(jax.tree.map(np.subtract, new, old)) < 1e-3 * (1 + 1e-5)
    assert short.finite.all()
    assert all_finite(short[:2])


# ---------------------------------------------------------------------------- the norm of updates


def test_unchanged_clients_have_an_update_norm_of_zero(name):
    ranks = [1, 2] if name in RANKED else None
    for result in rig(name).rounds((4, 5), ranks=ranks):
        np.testing.assert_array_equal(result.norms, 0)


def trained_by_hand(client, dropout):
    """Returns a client's leaves after plain SGD in round 1, in float64."""
    slow = reference.Slow(
        **{"model": toy.model(), "federation": FEDERATION, "shared": toy.SHARED},
        optimizer=functools.partial(reference.Sgd, 0.1),
        local={"batch_size": 4, "epochs": 1, "dropout": dropout},
    )
    return slow.train(client, 1)


LIKE_FEDAVG = ("fedavg", "fedavg_fra", "fednova", "fedex", "flora", "fra_ffa_plateau", "scaffold")
"""Clients do plain local training in the first round, whatever they send."""


@pytest.mark.parametrize("name", LIKE_FEDAVG, indirect=True)
def test_the_update_norm_is_the_length_of_the_change_of_the_model(name):
    start, expected = reference.leaves64(toy.model().trainable), []

    def product(leaves):
        return leaves["layer.lora_scale"][0] * leaves["layer.lora_a"] @ leaves["layer.lora_b"]

    for client in range(len(SIZES)):
        leaves = trained_by_hand(client, name in LOOPED)
        changes = [leaves[n] - start[n] for n in toy.SHARED]
        if name == "flora":  # its factors only count as products
            changes = [leaves[n] - start[n] for n in toy.HEAD] + [product(leaves) - product(start)]
        expected.append(np.sqrt(sum((x**2).sum() for x in changes)))
    assert_close(rounds(name)[0].norms, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["hetlora_prunes"], indirect=True)
def test_directions_that_hetlora_has_pruned_do_not_count_in_the_update_norm(name):
    engine = rig(name)
    server, client_state = engine.start()
    client_state["ranks"] = jax.tree.map(jnp.ones_like, client_state["ranks"])
    result = engine.run(engine.schedule.cohort(4), 4, (server, client_state))
    np.testing.assert_array_equal(result.norms, 0)


def own_aggregator():
    """Returns the mean aggregator with an additional metric; it adds 1 to every leaf."""
    mean = aggregators.mean(error=False)

    def finish(total, template, context, state):
        update = mean.finish(total, template, context, state).update
        return fp.contracts.Aggregated(
            {n: x + 1 for n, x in update.items()}, {"mine": jnp.ones(())}, state
        )

    return mean._replace(name="mine", finish=finish)


def taking(option):
    """Returns the names of algorithms that have an option."""
    every = [*algorithms.__all__, "fedopt"]
    return [n for n in every if option in inspect.signature(getattr(algorithms, n)).parameters]


@pytest.mark.parametrize("name", taking("aggregator"))
def test_the_given_aggregator_is_the_one_that_is_used(name):
    """What it makes of no uploads at all is what the server gets."""
    algorithm, model = make(name, aggregator=own_aggregator()), model_of(name)
    aggregator, server = algorithm.aggregator, algorithm.server
    assert aggregator.name == "mine"
    names = assign_roles(model.kinds, algorithm.roles)
    shared, fixed = (fp.tree.select(model.trainable, names[role]) for role in ("shared", "fixed"))
    state = server.init(shared)
    template, context = server.unchanged(state), toy.context()._replace(fixed=fixed)
    nothing = summation.summed(summation.empty(aggregator, template, fixed, 1))
    result = aggregator.finish(nothing, template, context, aggregator.init(template))
    assert "mine" in result.metrics
    new = server.model(server.update(state, result.update, context))
    for n, x in server.model(state).items():
        assert n in CONSTANT or np.abs(new[n] - x).min() > 1e-3


def test_algorithms_whose_uploads_have_another_form_say_what_the_local_model_is():
    shared = fp.tree.select(toy.lora_model().trainable, toy.SHARED)
    for name in algorithms.__all__:
        algorithm = make(name)
        rules = algorithm.server
        server = jax.eval_shape(rules.init, shared)
        forms = [jax.eval_shape(f, server) for f in (rules.broadcast, rules.unchanged)]
        assert algorithm.local_model is not None or forms[0] == forms[1], name


@pytest.mark.parametrize("name", taking("weights"))
def test_the_given_weights_are_used(name):
    for given in ("size", "uniform"):
        assert make(name, weights=given).weights == given


ONE_HEAD = {"fedbabu": "frozen", "fedper": "private", "fedrep": "private"}
"""Algorithms that are another one with any other head."""


@pytest.mark.parametrize("policy", ["shared", "private", "frozen"])
@pytest.mark.parametrize("name", taking("head"))
def test_the_given_head_policy_decides_on_the_heads_role(name, policy):
    if name in ONE_HEAD and policy != ONE_HEAD[name]:
        with pytest.raises(fp.InputError, match=f"must be ['\"]{ONE_HEAD[name]}"):
            make(name, head=policy)
        return
    algorithm, model = make(name, head=policy), model_of(name)
    roles = assign_roles(model.kinds, algorithm.roles)
    heads = [n for n, kind in model.kinds.items() if kind == "head"]
    assert set(heads) <= set(roles["fixed" if policy == "frozen" else policy])


SERVER_OPTIONS = [
    (name, option, value)
    for name in ("fedavgm", "fedadam", "fedyogi", "fedadagrad")
    for option, value in {
        "server_learning_rate": 0.02,
        "momentum": 0.3,
        "nesterov": True,
        "b1": 0.3,
        "b2": 0.3,
        "tau": 0.5,
        "start": 0.5,
        "space": "product",
    }.items()
    if name in taking(option)
]


@pytest.mark.parametrize(("name", "option", "value"), SERVER_OPTIONS)
def test_every_option_of_a_server_optimizer_changes_its_second_step(name, option, value):
    start = {n: toy.model().trainable[n] for n in toy.SHARED}

    def second(**options):
        algorithm = make(name, **options)
        state = algorithm.server.init(start)
        for move in (0.1, -0.2):
            new = {n: x + move for n, x in algorithm.server.model(state).items()}
            if "space" in options:
                template = {n: jnp.zeros_like(x) for n, x in with_products(new).items()}
                new = {"change": template, "scale": {"layer": jnp.ones(())}}
            context = toy.context()
            state = algorithm.server.update(state, new, context)
        return algorithm.server.model(state)

    plain, other = second(), second(**{option: value})
    assert np.abs(plain["layer.lora_a"] - other["layer.lora_a"]).max() > 1e-5


MEAN_TYPE = ("fedprox", "fednova", "fedyogi", "flora", "fedex", "rolora", "ffa")


@pytest.mark.skipif("REORDERED_SUMS" in os.environ, reason="reversed copies are memory too")
@pytest.mark.parametrize("name", only("flora", of=MEAN_TYPE), indirect=True)
def test_memory_does_not_grow_with_the_cohort(name):
    """Except for the plan: some numbers for each client, whose upload has a thousand."""
    model, needed = toy.lora_model(width=256, dropout=0), []
    federation = toy.clients([6] * 100)
    for per_round in (10, 100):
        engine = toy.Engine(make(name), federation, per_round=per_round, lanes=4, bound=model)
        plan = engine.session.plan(1)
        lowered = engine.session.program(plan, 0).lower(engine.session.init(0), plan)
        needed.append(peak_bytes(lowered.compile()))
    assert needed[1] - needed[0] < 90 * 200


@pytest.mark.parametrize("name", [*algorithms.__all__, "fedopt"])
def test_every_option_of_an_algorithm_is_described_once(name):
    factory = getattr(algorithms, name)
    described = [line.split(":")[0].strip() for line in factory.__doc__.splitlines()]
    for option in inspect.signature(factory).parameters:
        assert described.count(option) == 1, option


# ------------------------------------------------------------------------------------------ attacks


ATTACKS = {
    "label_flip": attacks.label_flip(0.4),
    "sign_flip": attacks.sign_flip(0.4),
    "gaussian": attacks.gaussian(0.4, 0.1),
    "scaled": attacks.scaled(0.4, 4.0),
    "alie": attacks.alie(0.4),
    "ipm": attacks.ipm(0.4),
    "min_max": attacks.min_max(0.4),
}
"""The backdoor changes batches, like the first, and then scales uploads, like the fourth."""
SENDING = (
    *("fedalt", "fedavg", "fedavg_fra", "fedex", "fedmcp", "fedrep", "fedsvd", "hilora", "lora_a2"),
    *("local", "ravan", "scaffold"),
)
"""Algorithms whose uploads have different forms."""
UPLOADS, COHORTS = ("sign_flip", "gaussian", "scaled"), ("alie", "ipm", "min_max")


def attacked(name):
    """Returns whether hostile clients can change the uploads of an algorithm."""
    return (
        not {fp.contracts.Feature.ATTACKS, fp.contracts.Feature.TRANSFORMS}
        & fp.contracts.refusals(make(name)).keys()
    )


def run_attacked(name, *chosen):
    """Traces a round under attacks, which runs all functions without compiling them."""
    algorithm, stages = wrapped(make(name), [ATTACKS[attack] for attack in chosen], facts(name))
    state, result = engine_of(name, algorithm, stages=stages).traced()
    assert result.aggregation["hostile"].shape == ()
    assert jax.tree.structure(result.state.server) == jax.tree.structure(state.server)
    for x, y in zip(*map(jax.tree.leaves, (result.state.server, state.server)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


@pytest.mark.parametrize("name", only(*SENDING), indirect=True)
def test_attacks_of_every_place_that_fits_run_together(name):
    """On batches, on single uploads and on cohorts, in turn; the others differ in a formula."""
    place = NAMES.index(name)
    on_uploads = (UPLOADS[place % 3], COHORTS[place // 3 % 3]) if attacked(name) else ()
    run_attacked(name, "label_flip", *on_uploads)
