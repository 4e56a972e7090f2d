"""Schedules over rounds and kept optimizer states, against loops and sums by hand.

The grids over all algorithms are in ``test_algorithms_all.py``.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from closeness import assert_close
from internals import Cohort, check_method, fedopt, with_products
from refusals import refused
from toy import context

import fedjax_peft as fp

pytestmark = pytest.mark.slow

SIZES, BATCH = (7, 4, 9), 4
FEDERATION, MODEL = toy.clients(SIZES), toy.model(dropout=0)


def engine(algorithm, **options):
    options = {"per_round": 3, "lanes": 3, "bound": MODEL, **options}
    return toy.Engine(algorithm, FEDERATION, **options)


# -------------------------------------------------------------------------------------- schedules


def test_a_schedule_compiles_once_for_all_rounds_and_run_time_values():
    """The round, the learning rate and the schedule's last factor are arguments of one program."""

    def make(values):
        falling = fp.schedules.linear(4, final_factor=values["final"])
        return fp.algorithms.fedprox(
            fp.schedules.scheduled(optax.adam(values["rate"]), falling), mu=0.1
        )

    session = fp.session(
        toy.model(), make, FEDERATION, batch_size=BATCH, rounds=3, values={"rate": 0.1, "final": 0}
    )
    compiled = set()
    for values, expected in (({}, [1, 0.75, 0.5]), ({"final": 0.6, "rate": 0.02}, [1, 0.9, 0.8])):
        state = session.init(0, values)
        for factor in expected:
            state, info = session.step(state)
            compiled.add(session.compile_seconds)
            assert_close(info.aggregation["learning_rate_factor"], factor, rtol=1e-6)
    assert len(compiled) == 1


def test_a_round_at_rate_zero_moves_no_model_and_no_control_variate():
    """SCAFFOLD divides by the rate: where it is 0 the client has learned nothing about c."""
    off = fp.schedules.scheduled(optax.sgd(0.1), lambda t: jnp.where(t == 2, 0.0, 1.0))
    first, second = engine(fp.algorithms.scaffold(off, learning_rate=0.1)).rounds()
    for a, b in zip(*(jax.tree.leaves(x[:2]) for x in (first, second)), strict=True):
        assert_close(a, b, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(fp.algorithms.fedavgm, server_learning_rate=0.4, momentum=0.6),
        functools.partial(fp.algorithms.fedadam, server_learning_rate=0.4),
        functools.partial(fp.algorithms.fedyogi, server_learning_rate=0.4),
        functools.partial(fp.algorithms.fedadagrad, server_learning_rate=0.4),
        functools.partial(fedopt, server=optax.adamw(0.4, weight_decay=0.1)),
        functools.partial(fp.algorithms.pfedme, beta=0.4),
        functools.partial(fp.algorithms.scaffold, learning_rate=0.1, server_learning_rate=0.4),
    ],
    ids=["fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedopt", "pfedme", "scaffold"],
)
def test_a_server_schedule_multiplies_the_server_s_step(make):
    """From the same state, the step of round 3 is 1/3 of the step without a schedule."""
    start = {n: toy.model().trainable[n] for n in toy.SHARED}
    rules = [
        make(optax.sgd(0.1), server_schedule=schedule).server
        for schedule in (None, lambda t: 1.0 / t)
    ]
    state = rules[0].init(start)
    update = {n: x + 0.1 for n, x in start.items()}
    if "control" in state:
        update = {"model": update, "control": jax.tree.map(jnp.ones_like, start)}
    now = context(round_index=3)
    before = rules[0].model(state)
    plain, scaled = (rule.model(rule.update(state, update, now)) for rule in rules)
    for n in start:
        assert np.abs(plain[n] - before[n]).min() > 1e-3
        assert_close(scaled[n] - before[n], (plain[n] - before[n]) / 3, rtol=1e-4, atol=1e-6)
    metrics = make(optax.sgd(0.1), server_schedule=lambda t: 1.0 / t).round_metrics(jnp.int32(4))
    assert metrics == {"server_learning_rate_factor": 0.25}


def test_a_server_schedule_over_products():
    """The step on the product is scaled, before it is factored anew."""
    half = fp.schedules.scheduled(optax.sgd(1.0), lambda t: 0.5 * t)
    start = {n: toy.model().trainable[n] for n in toy.SHARED}
    change = {n: jnp.full_like(x, 0.1) for n, x in with_products(start).items()}
    update, ends = {"change": change, "scale": {"layer": jnp.ones(())}}, []
    for server in (optax.sgd(0.5), half):
        rules = fedopt(optax.sgd(0.1), server=server, space="product").server
        ends.append(rules.update(rules.init(start), update, context(round_index=1)).model)
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        assert_close(a, b, rtol=0, atol=1e-5)


def test_heads_are_tuned_at_the_full_rate():
    """Before the last evaluation, after the schedule's end."""
    tuned = []
    for factor in (0.0, 1.0):
        optimizer = fp.schedules.scheduled(optax.sgd(0.1), lambda t, f=factor: f * t)
        session = engine(fp.algorithms.fedrep(optimizer, tune_epochs=1), engine="reference").session
        state = session.init(0)
        tuned.append(session.tune(state).client_state["head.kernel"])
        assert np.abs(tuned[-1] - state.client_state["head.kernel"]).max() > 1e-3
    np.testing.assert_array_equal(*tuned)


# ------------------------------------------------------------------------- kept optimizer states


KEPT = fp.optimizers.kept(optax.adam(0.02))


def test_the_kept_state_is_that_of_optax():
    """Runs of FedAvg that were made when it alone could keep it have the same structure."""
    algorithm = fp.algorithms.fedavg(KEPT, head="private")
    rig = engine(algorithm)
    _, kept = rig.start()
    assert set(kept) == {"model", "optimizer"}
    assert set(kept["model"]) == set(toy.HEAD)
    expected = optax.adam(0.02).init(rig.model_at_start())
    assert jax.tree.structure(kept["optimizer"]) == jax.tree.structure(expected)


def test_absent_clients_and_those_whose_upload_is_not_finite_keep_the_state_from_before():
    rig = engine(fp.algorithms.fedavg(KEPT))
    (first,) = rig.rounds((1,))
    clients, weights, work = rig.schedule.cohort(2)
    cohort = Cohort(clients[:2], weights[:2], work[:2])
    second = rig.run(cohort, 2, first[:2], toy.poisoned(FEDERATION, 0).data.columns)
    assert second.finite.tolist() == [False, True, True]
    moved = [
        jax.tree.leaves(jax.tree.map(lambda a, b, k=k: np.array_equal(a[k], b[k]), *kept))
        for kept in [(first.client_state["optimizer"], second.client_state["optimizer"])]
        for k in range(3)
    ]
    assert all(moved[0])
    assert not any(moved[1])
    assert all(moved[2])


def test_a_kept_optimizer_can_have_a_schedule():
    """In either order: the steps of round 2 have half of the rate, and the counts go on."""
    half, adam = (lambda t: 1.0 / t), optax.adam(0.02)
    results = []
    for optimizer in (
        fp.schedules.scheduled(fp.optimizers.kept(adam), half),
        fp.optimizers.kept(fp.schedules.scheduled(fp.optimizers.kept(adam), half)),
    ):
        rig = engine(fp.algorithms.fedavg(optimizer))
        first, second = rig.rounds((1, 2))
        assert [float(x.aggregation["learning_rate_factor"]) for x in (first, second)] == [1, 0.5]
        counts = [x.client_state["optimizer"][0].count for x in (first, second)]
        np.testing.assert_array_equal(counts[1], 2 * counts[0])
        results.append(second.server)
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert_close(a, b, rtol=1e-6)
    constant = engine(fp.algorithms.fedavg(KEPT)).rounds((1, 2))[1].server
    pairs = zip(jax.tree.leaves(constant), jax.tree.leaves(results[0]), strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) > 1e-3


def test_centralised_keeps_the_optimizer_unless_it_shall_be_fresh():
    shared = {n: toy.model().trainable[n] for n in toy.SHARED}
    kept = (
        fp.algorithms.centralised(optimizer, **options).init_client_state(shared, {})
        for optimizer in (optax.adam(0.1), KEPT)
        for options in ({}, {"fresh_optimizer": True})
    )
    assert ["optimizer" in state for state in kept] == [True, False, True, True]


def test_a_kept_optimizer_is_for_the_clients_as_a_whole():
    """In a chain, or at the server, it would silently not be kept."""
    chained = optax.chain(optax.clip(1.0), KEPT)
    start = {n: toy.model().trainable[n] for n in toy.SHARED}
    refused("Keep the whole optimizer", chained.update, start, chained.init(start), start)
    twice = fp.optimizers.kept(fp.schedules.scheduled(KEPT, fp.schedules.constant()))
    refused("a schedule already", fp.schedules.scheduled, twice, fp.schedules.constant())


def test_where_a_state_cannot_be_kept():
    for algorithm in (
        fp.algorithms.fedprox(KEPT, aggregator=fp.aggregators.fra()),
        fp.algorithms.fedavgm(KEPT, space="product"),
    ):
        with pytest.raises(fp.InputError, match=r"kept optimizer .* remembers .* Set keep = false"):
            check_method(toy.lora_model(), algorithm, 3, None, ())
