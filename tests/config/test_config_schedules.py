"""Schedules over rounds and kept optimizer states in a config."""

import jax
import jax.numpy as jnp
import optax
import pytest
import toy
from closeness import assert_close
from internals import config as configs
from internals import explicit, running, sweeps
from refusals import refusals
from small_config import small

import fedjax_peft as fp
from fedjax_peft import testing

BASE = small(rounds=8, optimizer={"name": "sgd", "learning_rate": 0.1})


def made(**changes):
    return configs.build_algorithm(configs.resolve({**BASE, **changes}))


def factors(algorithm, name="learning_rate_factor"):
    return [float(algorithm.round_metrics(jnp.int32(t))[name]) for t in (1, 2, 3, 8)]


def test_a_schedule_lasts_as_long_as_the_run():
    expected = [float(optax.cosine_decay_schedule(1.0, 8)(t - 1)) for t in (1, 2, 3, 8)]
    assert_close(factors(made(schedule="cosine")), expected, rtol=1e-6)
    linear = made(schedule={"name": "linear", "rounds": 4, "final_factor": 0.2})
    assert_close(factors(linear), [1.0, 0.8, 0.6, 0.2], rtol=1e-6)
    assert made().round_metrics(jnp.int32(1)) == {}


def test_a_run_records_the_length_of_its_schedule():
    """So a run that is continued for more rounds keeps its schedule, or is refused."""
    changes = {"schedule": "cosine", "server_schedule": {"name": "linear", "rounds": 5}}
    config = configs.resolve({**BASE, **changes, "algorithm": "fedadam"})
    assert config["schedule"]["rounds"] is None
    recorded = explicit(config, {"train": testing.tiny_dataset(4)})
    assert [recorded[table]["rounds"] for table in changes] == [8, 5]


def test_scaffold_takes_the_learning_rate_of_plain_sgd():
    """Its check compares the two, and it follows a run-time value."""
    kinds = toy.model().kinds
    made(algorithm="scaffold").check(kinds, 3)
    raw = configs.resolve({**BASE, "algorithm": "scaffold"})
    values = running.made_from_values({**raw, "runtime": ["optimizer.learning_rate"]})
    values["algorithm"]({"optimizer.learning_rate": 0.3}).check(kinds, 3)
    with pytest.raises(fp.InputError, match=r"step size 0\.1"):
        made(algorithm={"name": "scaffold", "learning_rate": 0.2}).check(kinds, 3)
    for other in ({"momentum": 0.9}, {"clip_norm": 1.0}, {"name": "adam"}):
        with pytest.raises(fp.InputError, match=r"write algorithm\.learning_rate = 0\.1"):
            made(algorithm="scaffold", optimizer={**BASE["optimizer"], **other})


def test_clients_and_server_have_their_own_schedules():
    algorithm = made(
        algorithm="fedadam",
        optimizer={**BASE["optimizer"], "keep": True},
        schedule={"name": "constant", "warmup": 3},
        server_schedule={"name": "exponential", "decay": 0.5},
    )
    assert factors(algorithm) == [0.25, 0.5, 0.75, 1.0]
    assert factors(algorithm, "server_learning_rate_factor") == [1.0, 0.5, 0.25, 0.5**7]
    keeping = made(algorithm="fedprox", optimizer={**BASE["optimizer"], "keep": True})
    assert "kept optimizer" in keeping.incompatible[fp.contracts.Feature.NEW_FACTORS]


def test_an_optimizer_of_any_kind_is_kept(tmp_path):
    """Also under a user's algorithm without decorator, and an optimizer that is made in Python."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    keep = {**BASE["optimizer"], "keep": True}
    lion = {"name": "kept", "optimizer": {"name": f"{path}:lion", "rate": 0.1}}
    for changes in (
        {"optimizer": keep, "algorithm": f"{path}:plain"},
        {"optimizer": keep, "algorithm": "centralised", "schedule": "cosine"},
        {"optimizer": lion},
    ):
        reason = made(**changes).incompatible[fp.contracts.Feature.NEW_FACTORS]
        assert "kept optimizer" in reason


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["fedavg", "centralised"])
def test_runs_that_were_recorded_with_the_argument_of_the_algorithm_are_read(name, keep):
    recorded = configs.resolve({**BASE, "algorithm": name})
    recorded["algorithm"] = {"name": name, "keep_optimizer": keep}
    again = configs.build_algorithm(configs.resolve_recorded(recorded))
    assert (fp.contracts.Feature.NEW_FACTORS in again.incompatible) == keep


def test_the_numbers_of_a_schedule_are_run_time_values_of_a_sweep():
    raw = {**BASE, "schedule": "linear"}
    points = sweeps.plan(raw, ["schedule.final_factor=0.2,0.4"]).points
    assert [point.config["runtime"] for point in points] == [["schedule.final_factor"]] * 2
    one, other = (running.made_from_values(point.config) for point in points)
    assert one["algorithm"] == other["algorithm"]

    @jax.jit
    def factor(values):
        return one["algorithm"](values).round_metrics(jnp.int32(5))["learning_rate_factor"]

    expected = [0.2 + 0.8 / 2, 0.4 + 0.6 / 2]
    assert_close([factor(x["values"]) for x in (one, other)], expected, rtol=1e-6)


OWN = """
import jax, optax
import fedjax_peft as fp

def stairs(height: float, rounds: int):
    return lambda t: height ** t / rounds

@fp.part
def lion(rate: float):
    return optax.lion(rate)

def plain(optimizer):
    def client(context):
        def step(state, batch, key):
            loss = lambda params: context.objective(params, batch, key)
            gradient, metrics = jax.grad(loss, has_aux=True)(state[0])
            updates, opt = optimizer.update(gradient, state[1], state[0])
            return (optax.apply_updates(state[0], updates), opt), metrics
        init = lambda broadcast, own, key: (broadcast, optimizer.init(broadcast))
        return fp.contracts.ClientUpdate(init, step, lambda state: (state[0], {}))
    return fp.algorithms.fedavg(optimizer)._replace(name="plain", client=client)
"""


@pytest.mark.slow
def test_own_functions_follow_a_schedule_without_a_word(tmp_path):
    """An algorithm of a user's file need not be decorated, and a schedule is a function."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    own = {"algorithm": f"{path}:plain", "schedule": {"name": f"{path}:stairs", "height": 2.0}}
    algorithm, builtin = made(**own), made(optimizer={"name": "sgd", "learning_rate": 0.05})
    assert factors(algorithm) == [2 / 8, 4 / 8, 8 / 8, 256 / 8]
    results = []
    for one in (algorithm, builtin):
        engine = toy.Engine(one, toy.clients([5, 6]), per_round=2, lanes=1)
        results.append(engine.run(engine.schedule.cohort(2), 2).server)
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-6)


test_bad_tables_are_named = refusals(
    lambda changes: made(**changes),
    ({"schedule": "cosin"}, "There is no schedule 'cosin'. .*'cosine'"),
    ({"schedule": {"warmup": 2}}, r"\[schedule\] needs a name"),
    ({"schedule": {"name": "cosine", "warmup": 8}}, "warmup = 8 rounds leave none"),
    ({"schedule": "exponential"}, r"\[schedule\] 'decay' is missing"),
    ({"schedule": {"name": "linear", "last": 1}}, r"Unknown config key \[schedule\] 'last'"),
    ({"algorithm": {"keep_optimizer": True}}, r"Unknown config key \[algorithm\] 'keep_opt"),
    ({"server_schedule": "cosine"}, "that of 'fedavg' has none.* fedadam, .*, scaffold"),
)
