"""The contract of every algorithm. A new algorithm is tested as soon as it is listed."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import toy
import toy_cores
from closeness import assert_close
from toy_transforms import clip_by_state, record

from fedjax_peft import aggregators, algorithms, attacks, schedules, summation, tree
from fedjax_peft.aggregators.products import with_products
from fedjax_peft.algorithms.checks import CLIENT_RATES
from fedjax_peft.engine.plan import Cohort
from fedjax_peft.engine.round import build_round, evaluation
from fedjax_peft.engine.state import State
from fedjax_peft.errors import InputError
from fedjax_peft.privacy import central
from fedjax_peft.random import stream
from fedjax_peft.roles import assign_roles
from fedjax_peft.simulation.checks import check_transforms
from fedjax_peft.tasks import classification
from fedjax_peft.transforms import clip_norm
from fedjax_peft.typing import Aggregated, Federation, Outputs

SIZES = (7, 4, 12, 1, 9)
FEDERATION = toy.clients(SIZES)
POOLED = toy.clients([33])
OPTIONS = {
    "scaffold": {"learning_rate": 0.1},
    "fra_ffa": {"at": 1},
    "hilora": {"clients": 5, "root_rounds": 1, "cluster_rounds": 1},
    "slora": {"sparse_rounds": 1},
}
PLATEAU = {"trigger": "plateau", "patience": 1}
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
    "fedavg_private_head": functools.partial(algorithms.fedavg, head="private"),
    "fedavg_keeps_optimizer": functools.partial(algorithms.fedavg, keep_optimizer=True),
    "fedavgm_product": functools.partial(algorithms.fedavgm, space="product"),
    "fra_ffa_plateau": functools.partial(algorithms.fra_ffa, **PLATEAU),
    "lora_a2_one": functools.partial(algorithms.lora_a2, budget=1),
    "hetlora_prunes": functools.partial(algorithms.hetlora, prune=0.5),
}
NAMES = sorted([*algorithms.__all__, *OTHERS])


def dual_model():
    """Returns a model with a global and a private adapter and two classifiers, for FedMCP."""
    rng = np.random.default_rng(0)
    kinds, trainable = {}, {}

    def add(name, kind, *shape):
        kinds[name] = kind
        trainable[name] = jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32)

    for own in ("global", "private"):
        add(f"layer.{own}_adapter.down.kernel", "adapter", toy.WIDTH, 2)
        add(f"layer.{own}_adapter.up.kernel", "adapter", 2, toy.WIDTH)
    for name in ("classifier", "second_classifier"):
        add(f"{name}.kernel", "head", toy.WIDTH, toy.CLASSES)

    def apply(frozen, params, batch, key, train):
        h = jnp.tanh(batch["x"] @ frozen["layer.kernel"])
        if train:
            h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0.0)
        for own in ("global", "private"):
            adapter = f"layer.{own}_adapter"
            low = jnp.tanh(h @ params[f"{adapter}.down.kernel"])
            h = h + 0.5 * low @ params[f"{adapter}.up.kernel"]
        logits, second = (h @ params[f"{n}.kernel"] for n in ("classifier", "second_classifier"))
        return Outputs(logits, h[:, None], second=second)

    model = toy.model(dropout=0)
    return model.replace(apply=apply, trainable=trainable, kinds=kinds)


MODELS = {
    **dict.fromkeys(DUAL, dual_model),
    **toy_cores.MODELS,
    "fedalt": toy.mixture_model,
    "hilora": toy.sum_model,
    "pfedlora": toy.own_kernel_model,
}
"""Algorithm -> its model, where it is not plain LoRA."""


def model_of(name):
    """Returns the model of an algorithm."""
    return MODELS.get(name, toy.lora_model)()


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    """The name of the algorithm. With module scope, the tests of an algorithm run together."""
    return request.param


def make(name, rate=0.1):
    """Returns an algorithm by its name, with its model and clients."""
    factory = OTHERS.get(name) or getattr(algorithms, name)
    algorithm = factory(optax.sgd(rate), **OPTIONS.get(name, {}))
    model = model_of(name)
    return algorithm, model, POOLED if name == "centralised" else FEDERATION


@functools.lru_cache(maxsize=2)
def rig(name, lanes=3):
    algorithm, model, federation = make(name)
    algorithm.check(model.kinds, len(federation))
    per_round = len(federation)
    return toy.Engine(algorithm, federation, per_round=per_round, lanes=lanes, bound=model)


@functools.lru_cache(maxsize=2)
def rounds(name, lanes=3):
    """Returns the results of three rounds by one executable, which accepts only these shapes."""
    engine, state, results = rig(name, lanes), rig(name, lanes).start(), []
    for number in (1, 2, 3):
        result = engine.run(engine.schedule.cohort(number), number, state)
        results.append(result)
        state = (result.server, result.client_state)
    return results


def leaf_names(shapes):
    paths = jax.tree.leaves_with_path(shapes)
    return {str(path[-1].key) for path, _ in paths if isinstance(path[-1], jax.tree_util.DictKey)}


def test_rounds_run_without_recompilation_and_stay_finite(name):
    for result in rounds(name):
        assert result.finite.all()
        leaves = (rig(name).algorithm.server.model(result.server), result.client_state)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(leaves))
        assert {"loss", "accuracy"} <= set(result.sums)


def test_training_reaches_the_model_that_predicts(name):
    algorithm = rig(name).algorithm
    server, private = rounds(name)[-1][:2]
    received = algorithm.server.broadcast(server)
    before = {n: np.asarray(x) for n, x in rig(name).model_at_start().items()}
    after = algorithm.model(received, tree.take(private, 0))
    moved = {n for n, x in after.items() if not np.array_equal(x, before[n])}
    shift = {} if algorithm.server.frozen_delta is None else algorithm.server.frozen_delta(server)
    assert moved or any(np.any(x) for x in shift.values())


def test_the_global_and_the_clients_own_models_can_be_measured(name):
    algorithm, model, federation = make(name)
    names = assign_roles(model.kinds, algorithm.roles)
    engine, fixed = rig(name), tree.select(model.trainable, names["fixed"])
    plan, round_index = engine.plan(engine.schedule.cohort(1)), jnp.zeros((), jnp.int32)
    server, client_state = engine.start()
    for personal in (True, False):
        if not personal and names["private"]:
            continue  # there is no one model
        measuring = evaluation(algorithm, personal=personal)
        round_ = build_round(measuring, model.apply, classification(), len(federation))
        inputs = (
            fixed,
            {},
            dict(federation.data.columns),
            State(server, client_state if personal else ()).on_device(),
        )
        key = stream(0, "clients")
        predictions = jax.eval_shape(
            round_, model.frozen, *inputs, plan, key, round_index
        ).predictions
        assert set(predictions["metrics"]) == {"loss", "accuracy"}


def test_the_number_of_lanes_does_not_matter(name):
    one, three = rounds(name, 1)[-1], rounds(name, 3)[-1]
    for a, b in zip(jax.tree.leaves(one[:2]), jax.tree.leaves(three[:2]), strict=True):
        assert_close(a, b, rtol=0, atol=1e-5)


def test_the_round_program_computes_what_a_plain_loop_over_clients_does(name):
    """Both do the same float32 operations, in another order where lanes sum and XLA fuses.

    A rounding error of such a sum is about 1e-7 of its terms, which are of order 1 here, and a few
    local steps carry it on: 1e-5 leaves room for that, and for nothing else (a wrong key, mask or
    weight changes numbers by 1e-3 or more). It is the second round, where clients have kept things.
    """
    algorithm, model, federation = make(name)
    plain = toy.Engine(
        *(algorithm, federation),
        per_round=len(federation),
        lanes=3,
        bound=model,
        engine="reference",
    )
    first, expected = rounds(name)[:2]
    result = plain.run(plain.schedule.cohort(2), 2, first[:2])
    got, wanted = jax.tree.flatten(result), jax.tree.flatten(expected)
    assert got[1] == wanted[1]
    for x, y in zip(got[0], wanted[0], strict=True):
        assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_private_leaves_are_never_sent_and_fixed_ones_are_not_in_any_state(name):
    algorithm, model, _ = make(name)
    names = assign_roles(model.kinds, algorithm.roles)
    shared = tree.select(model.trainable, names["shared"])
    state = algorithm.server.init(shared)
    sent = leaf_names(algorithm.server.broadcast(state))
    sent |= leaf_names(algorithm.server.unchanged(state))
    assert not sent & {*names["private"], *names["fixed"]}
    assert set(algorithm.server.model(state)) == set(names["shared"])
    assert not leaf_names(rig(name).client_state) & set(names["fixed"])


def test_a_round_without_participants_changes_no_state(name):
    engine = rig(name)
    first = engine.run(engine.schedule.cohort(1), 1)
    again = engine.run(Cohort([], [], []), 2, jax.tree.map(jnp.asarray, first[:2]))
    for a, b in zip(jax.tree.leaves(first[:2]), jax.tree.leaves(again[:2]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ALONE], indirect=True)
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


@pytest.mark.parametrize("name", [n for n in NAMES if n != "centralised"], indirect=True)
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
    the label's logit is read as NaN, and no gradient flows back to it.
    """
    engine, _, federation = rig(name), *make(name)[1:]
    columns = {n: x.copy() for n, x in federation.data.columns.items()}
    column, value = {"loss": ("labels", 99), "upload": ("x", np.inf)}[kind]
    columns[column][federation.indices[0][0]] = value
    state = engine.start()
    for number in (1, 2):
        result = engine.run(engine.schedule.cohort(number), number, state, columns)
        assert result.finite.tolist() == [kind == "loss"] + [True] * (len(federation) - 1)
        assert not np.isfinite(result.sums["loss"][0][0])
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.server))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.client_state))
        state = (result.server, result.client_state)


# ----------------------------------------------------------- schedules, and kept optimizer states


def at_rates(name, factor, **options):
    """Returns an algorithm whose clients' learning rates are all multiplied by a factor."""
    factory = OTHERS.get(name) or getattr(algorithms, name)
    default = {n: p.default for n, p in inspect.signature(factory).parameters.items()}
    options = {**OPTIONS.get(name, {}), **options}
    rates = {n: options.get(n, default[n]) * factor for n in CLIENT_RATES if n in default}
    return factory(optax.sgd(0.1 * factor), **{**options, **rates})


@pytest.mark.parametrize("name", algorithms.__all__, indirect=True)
def test_a_schedule_over_rounds_multiplies_every_learning_rate_of_the_clients(name):
    """Round 2 is that of the algorithm at a quarter of the rates; one executable runs both."""
    _, model, federation = make(name)
    more = {"apfl": {"adaptive": True}}.get(name, {})
    factory, options = getattr(algorithms, name), {**OPTIONS.get(name, {}), **more}
    scheduled = schedules.scheduled(optax.sgd(0.1), lambda t: 0.25 ** (t - 1.0))
    arguments = {"per_round": len(federation), "lanes": 3, "bound": model}
    engine = toy.Engine(factory(scheduled, **options), federation, **arguments)
    state, results = engine.start(), []
    for number in (1, 2):
        results.append(engine.run(engine.schedule.cohort(number), number, state))
        state = results[-1][:2]
        assert results[-1].aggregation["learning_rate_factor"] == 0.25 ** (number - 1)
    state = engine.start()
    for number in (1, 2):
        plain = at_rates(name, 0.25 ** (number - 1), **more)
        at_once = toy.Engine(plain, federation, engine="reference", **arguments)
        expected = at_once.run(engine.schedule.cohort(number), number, state)
        state = expected[:2]
        for a, b in zip(*map(jax.tree.leaves, (results[number - 1][:2], state)), strict=True):
            assert_close(a, b, rtol=1e-5, atol=1e-5)


KEEPING_REFUSED = {
    "fedmomentum": "factors LoRA's average product anew",
    "fednova": "weight of the gradients of this round",
    "fedrot": "rotates its factors at the end of a round",
    "fedsvd": "the server turns A after a round",
    "flora": "starts each round from a random A",
    "fra_ffa": "factors LoRA's products anew",
    "hilora": "three stages of HiLoRA train different leaves",
    "lora_a2": "each factor rests in every second round",
    "ravan": "scales become a part of its cores",
    "rolora": "each factor rests in every second round",
    "scaffold": "means of the gradients of one round",
    "slora": "train different leaves",
}


def counts(optimizer_states):
    """Returns the counts of steps in Adam's states, ``[states, clients]``."""
    adam = optax.tree_utils.tree_get_all_with_path(optimizer_states, "count")
    return np.array([count for _, count in adam])


@pytest.mark.parametrize("name", algorithms.__all__, indirect=True)
def test_clients_can_keep_the_state_of_their_optimizer_or_the_algorithm_says_why_not(name):
    options = {**OPTIONS.get(name, {}), "keep_optimizer": True}
    factory, (_, model, federation) = getattr(algorithms, name), make(name)
    if name in KEEPING_REFUSED:
        with pytest.raises(InputError, match=KEEPING_REFUSED[name]):
            factory(optax.adam(0.02), **options)
        return
    algorithm = factory(optax.adam(0.02), **options)
    assert "keep_optimizer" in algorithm.needs_fixed_basis or name in FIXED_BASIS
    arguments = {"per_round": len(federation), "lanes": 3, "bound": model}
    engine = toy.Engine(algorithm, federation, **arguments)
    first = engine.run(engine.schedule.cohort(1), 1)
    second = engine.run(engine.schedule.cohort(2), 2, first[:2])
    once, twice = (counts(x.client_state["optimizer"]) for x in (first, second))
    assert (once > 0).all()
    np.testing.assert_array_equal(twice, 2 * once)  # the bias correction counts on
    plain = toy.Engine(algorithm, federation, engine="reference", **arguments)
    expected = plain.run(engine.schedule.cohort(2), 2, first[:2])
    for a, b in zip(*map(jax.tree.leaves, (second, expected)), strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-5)
    # Without it the first round is the same and the second is another.
    fresh = factory(optax.adam(0.02), **{**options, "keep_optimizer": False})
    plain = toy.Engine(fresh, federation, engine="reference", **arguments)
    again = plain.run(engine.schedule.cohort(2), 2, (first.server, first.client_state["model"]))
    models = [first.client_state["model"], expected.client_state["model"], again.client_state]
    servers = [first.server, expected.server, again.server]
    moved = [jax.tree.leaves(pair) for pair in zip(servers, models, strict=True)]
    assert max(np.abs(a - b).max() for a, b in zip(*moved[1:], strict=True)) > 1e-3


FIXED_BASIS = ("apfl", "ditto", "fedadagrad", "fedadam", "fedavgm", "feddyn", "fedyogi")
"""Algorithms that need a fixed basis without kept optimizer states too."""


# -------------------------------------------------------------------------------- upload transforms


def refused(algorithm):
    """Returns whether the uploads of an algorithm are no changes of the model, as it declares."""
    if algorithm.no_transforms is None:
        return False
    with pytest.raises(InputError, match="cannot be combined with the upload transform"):
        check_transforms(clip_norm(1.0), algorithm)
    return True


@pytest.mark.parametrize("name", algorithms.__all__, indirect=True)
def test_changes_are_clipped_and_those_that_are_short_keep_every_bit(name):
    """One program: the largest norm is a part of the transform's state."""
    algorithm, model, federation = make(name)
    if refused(algorithm):
        return
    transform = check_transforms([clip_by_state(), record()], algorithm)
    options = {"per_round": len(federation), "lanes": 3, "bound": model}
    engine = toy.Engine(algorithm, federation, transform=transform, **options)
    cohort, plain = engine.schedule.cohort(1), rounds(name)[0]

    def clipped_at(max_norm):
        server, client_state, state = engine.start()
        state = state._replace(server=(jnp.float32(max_norm), *state.server[1:]))
        return engine.run(cohort, 1, (server, client_state, state))

    whole, short = clipped_at(np.inf), clipped_at(1e-3)
    for a, b in zip(jax.tree.leaves(plain[:2]), jax.tree.leaves(whole[:2]), strict=True):
        np.testing.assert_array_equal(a, b)
    if name != "fednova":  # it sends a direction for each unit of work
        sent = name != "centralised"  # where nothing travels
        longest = np.max(plain.norms) * sent
        assert_close(whole.aggregation["largest_norm"], longest, rtol=1e-5)
    longest = 0.0 if name in ALONE else 1e-3
    assert_close(short.aggregation["largest_norm"], longest, rtol=1e-5)
    assert short.finite.all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(short[:2]))


# ------------------------------------------------------------------------------ central privacy

PRIVACY_REFUSED = {
    "fedex": "passes the factors of every client on",
    "fedmomentum": "passes the factors of every client on",
    "flora": "passes the factors of every client on",
    "fedavg_hetlora": "weights a client by what it sends",
    "hetlora": "weights a client by what it sends",
    "hetlora_prunes": "weights a client by what it sends",
    "fedavg_flora_na": "looks at the uploads one by one",
    "hilora": "looks at the uploads one by one",
    "fedavg_median": "looks at the uploads one by one",
    "fedavg_geometric_median_product": "looks at the uploads one by one",
    "fra_ffa_plateau": "Set trigger = 'round' or 'subspace'",
}


def privately(name):
    """Returns an algorithm with central privacy, on its model and clients."""
    algorithm, model, federation = make(name)
    facts = Federation(
        *(len(federation), len(federation), "all"),
        batch_size=4,
        batch_sampling="shuffled",
        most_steps=9,
        most_passes=1,
        fewest_examples=1,
    )
    private = central(0.5, 0.5).protect(algorithm, facts)
    return toy.Engine(private, federation, per_round=len(federation), lanes=3, bound=model)


def test_central_privacy_runs_over_the_algorithm_or_says_why_not(name):
    if name in PRIVACY_REFUSED:
        with pytest.raises(InputError, match=PRIVACY_REFUSED[name]):
            privately(name)
        return
    engine = privately(name)
    state = engine.start()
    first = jax.device_get(engine.algorithm.server.model(state[0]))
    for number in (1, 2):
        result = engine.run(engine.schedule.cohort(number), number, state)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((result.server, result.norms)))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.client_state))
        clients = len(engine.schedule.indices)
        assert_close(result.aggregation["privacy_noise_std"], 0.25 / clients)
        state = (result.server, result.client_state)
    if name not in ALONE:  # every leaf is released, with noise
        last = engine.algorithm.server.model(result.server)
        released = {n: x for n, x in first.items() if n not in CONSTANT and np.all(x != 0)}
        assert all(np.all(last[n] != x) for n, x in released.items())


# ---------------------------------------------------------------------------- the norm of updates

RANKED = (
    *("fedavg", "fedavg_flexlora", "fedavg_hetlora", "fedavg_ilora", "fedrot", "flora"),
    *("fra_ffa", "hetlora", "fedalt", "fedavg_flora_na", "lora_a2", "pfedlora", "scaffold"),
)
"""Tried with clients of unequal ranks too."""


@pytest.mark.filterwarnings("ignore:SCAFFOLD")
def test_unchanged_clients_have_an_update_norm_of_zero(name):
    algorithm, model, federation = make(name, rate=0.0)
    ranks = [1, 2] if name in RANKED else None
    engine = toy.Engine(
        algorithm, federation, per_round=len(federation), lanes=3, bound=model, ranks=ranks
    )
    state = engine.start()
    for number in (1, 2):
        result = engine.run(engine.schedule.cohort(number), number, state)
        np.testing.assert_array_equal(result.norms, 0)
        state = (result.server, result.client_state)


def trained_by_hand(client):
    """Returns a client's leaves after plain SGD in round 1, in float64."""
    model = toy.model()
    frozen, leaves = reference.leaves64(model.frozen), reference.leaves64(model.trainable)
    for x, labels, kept in reference.local_batches(FEDERATION, client, 1, batch_size=4, epochs=1):
        by = reference.gradients(frozen, leaves, x, labels, kept)
        leaves = {**leaves, **{n: leaves[n] - 0.1 * by[n] for n in toy.SHARED}}
    return leaves


LIKE_FEDAVG = ("fedavg", "fedavg_fra", "fednova", "fedex", "flora", "fra_ffa", "scaffold", "ditto")
"""Clients do plain local training in the first round, whatever they send."""


@pytest.mark.parametrize("name", LIKE_FEDAVG, indirect=True)
def test_the_update_norm_is_the_length_of_the_change_of_the_model(name):
    start, expected = reference.leaves64(toy.model().trainable), []

    def product(leaves):
        return leaves["layer.lora_scale"][0] * leaves["layer.lora_a"] @ leaves["layer.lora_b"]

    for client in range(len(SIZES)):
        leaves = trained_by_hand(client)
        changes = [leaves[n] - start[n] for n in toy.SHARED]
        if name == "flora":  # its factors only count as products
            changes = [leaves[n] - start[n] for n in toy.HEAD] + [product(leaves) - product(start)]
        expected.append(np.sqrt(sum((x**2).sum() for x in changes)))
    assert_close(rounds(name)[0].norms, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["hetlora_prunes"], indirect=True)
def test_directions_that_hetlora_has_pruned_do_not_count_in_the_update_norm(name):
    algorithm, model, federation = make(name, rate=0.0)
    engine = toy.Engine(algorithm, federation, per_round=len(federation), lanes=3, bound=model)
    server, client_state = engine.start()
    client_state["ranks"] = jax.tree.map(jnp.ones_like, client_state["ranks"])
    result = engine.run(engine.schedule.cohort(1), 1, (server, client_state))
    np.testing.assert_array_equal(result.norms, 0)


def own_aggregator():
    """Returns the mean aggregator with an additional metric; it adds 1 to every leaf."""
    mean = aggregators.mean(error=False)

    def finish(total, template, context, state):
        update = mean.finish(total, template, context, state).update
        return Aggregated({n: x + 1 for n, x in update.items()}, {"mine": jnp.ones(())}, state)

    return mean._replace(name="mine", finish=finish)


TAKES_AGGREGATOR = [
    n
    for n in algorithms.__all__
    if "aggregator" in inspect.signature(getattr(algorithms, n)).parameters
]


@pytest.mark.parametrize("name", TAKES_AGGREGATOR)
def test_the_given_aggregator_is_the_one_that_is_used(name):
    factory, options = getattr(algorithms, name), OPTIONS.get(name, {})
    algorithm = factory(optax.sgd(0.1), aggregator=own_aggregator(), **options)
    model = model_of(name)
    assert algorithm.aggregator.name == "mine"
    engine = toy.Engine(algorithm, FEDERATION, per_round=5, lanes=1, bound=model)
    names = assign_roles(model.kinds, algorithm.roles)
    fixed = tree.select(model.trainable, names["fixed"])
    columns = {n: jnp.asarray(x) for n, x in FEDERATION.data.columns.items()}
    round_ = build_round(algorithm, model.apply, classification(), len(FEDERATION))
    state = State(*engine.start()).on_device()
    inputs = (fixed, {}, columns, state, engine.plan(engine.schedule.cohort(1)))
    shapes = jax.eval_shape(round_, model.frozen, *inputs, stream(0, "clients"), jnp.int32(1))
    assert "mine" in shapes.aggregation
    # Its update is what the server gets.
    state = algorithm.server.init(engine.shared)
    template = algorithm.server.unchanged(state)
    context, aggregator = toy.context()._replace(fixed=fixed), algorithm.aggregator
    nothing = summation.empty(aggregator, template, fixed, 1)
    update = aggregator.finish(
        summation.summed(nothing), template, context, aggregator.init(template)
    ).update
    new = algorithm.server.model(algorithm.server.update(state, update, context))
    for n, x in algorithm.server.model(state).items():
        assert n in CONSTANT or np.abs(new[n] - x).min() > 1e-3


def taking(option):
    """Returns the names of algorithms that have an option."""
    every = [*algorithms.__all__, "fedopt"]
    return [n for n in every if option in inspect.signature(getattr(algorithms, n)).parameters]


def made(name, **options):
    """Returns an algorithm and its model."""
    more = {"server": optax.sgd(0.5)} if name == "fedopt" else {}
    factory = getattr(algorithms, name)
    algorithm = factory(optax.sgd(0.1), **OPTIONS.get(name, {}), **more, **options)
    return algorithm, model_of(name)


@pytest.mark.parametrize("name", taking("weights"))
def test_the_given_weights_are_used(name):
    assert {w: made(name, weights=w)[0].weights for w in ("size", "uniform")} == {
        "size": "size",
        "uniform": "uniform",
    }


ONE_HEAD = {"fedbabu": "frozen", "fedper": "private", "fedrep": "private"}
"""Algorithms that are another one with any other head."""


@pytest.mark.parametrize("policy", ["shared", "private", "frozen"])
@pytest.mark.parametrize("name", taking("head"))
def test_the_given_head_policy_decides_on_the_heads_role(name, policy):
    if name in ONE_HEAD and policy != ONE_HEAD[name]:
        with pytest.raises(InputError, match=f"must be '{ONE_HEAD[name]}'"):
            made(name, head=policy)
        return
    algorithm, model = made(name, head=policy)
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
        algorithm, _ = made(name, **options)
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


@pytest.mark.parametrize("name", MEAN_TYPE, indirect=True)
def test_memory_does_not_grow_with_the_cohort(name):
    model, needed = toy.lora_model(width=256), []
    algorithm = getattr(algorithms, name)(optax.sgd(0.1))
    federation = toy.clients([6] * 100)
    for per_round in (10, 100):
        engine = toy.Engine(algorithm, federation, per_round=per_round, lanes=4, bound=model)
        plan = engine.plan(engine.schedule.cohort(1))
        names = assign_roles(model.kinds, algorithm.roles)
        fixed = tree.select(model.trainable, names["fixed"])
        columns = {n: jnp.asarray(x) for n, x in federation.data.columns.items()}
        function = jax.jit(build_round(algorithm, model.apply, classification(), 100))
        state = State(*engine.start()).on_device()
        inputs = (model.frozen, fixed, {}, columns, state, plan, stream(0, "clients"), 1)
        analysis = function.lower(*inputs).compile().memory_analysis()
        needed.append(analysis.temp_size_in_bytes)
    assert needed[1] <= 1.02 * needed[0]


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
ON_UPLOADS = {*ATTACKS} - {"label_flip"}
NOT_ATTACKED = {
    "flora": "starts from a random A of its own",
    "hetlora_prunes": "hold zeros in the directions",
    "local": "send nothing",
}
"""Algorithms whose uploads cannot be tampered with, and why."""


def facts(name):
    """Returns the facts about the federation of an algorithm."""
    clients = make(name)[2]
    columns = tuple((n, x.shape[1:]) for n, x in clients.data.columns.items())
    n = len(clients)
    parts = (n, n, "all", 4, "shuffled", 3, 1, 1, columns, toy.CLASSES)
    return Federation(*parts)


ONE_OF_EACH_PLACE = ("label_flip", "gaussian", "min_max")
"""Attacks on batches, on single uploads and on cohorts; the others differ in a formula."""


@pytest.mark.parametrize(
    "attack",
    [a if a in ONE_OF_EACH_PLACE else pytest.param(a, marks=pytest.mark.slow) for a in ATTACKS],
)
def test_every_attack_runs_or_is_refused_with_the_reason(name, attack):
    """The shapes of a round are computed, which runs all functions without compiling them."""
    algorithm, model, federation = make(name)
    if name in NOT_ATTACKED and attack in ON_UPLOADS:
        with pytest.raises(InputError, match=NOT_ATTACKED[name]):
            ATTACKS[attack].apply(algorithm, facts(name))
        return
    attacked = ATTACKS[attack].apply(algorithm, facts(name))
    plain = rig(name)
    names = assign_roles(model.kinds, algorithm.roles)
    fixed = tree.select(model.trainable, names["fixed"])
    server, client_state = plain.start()
    template = algorithm.server.unchanged(server)
    state = State(server, client_state, attacked.aggregator.init(template)).on_device()
    columns = dict(federation.data.columns)
    plan = plain.plan(plain.schedule.cohort(1))
    inputs = (fixed, {}, columns, state, plan, stream(0, "clients"), jnp.int32(1))
    round_ = build_round(attacked, model.apply, classification(), len(federation))
    result = jax.eval_shape(round_, model.frozen, *inputs)
    assert result.aggregation["hostile"].shape == ()
    assert jax.tree.structure(result.state.server) == jax.tree.structure(server)
    for x, y in zip(*map(jax.tree.leaves, (result.state.server, server)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
