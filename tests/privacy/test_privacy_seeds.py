"""Runs of one seed draw their noise independently, unless all their settings are equal."""

import functools
import itertools
from dataclasses import replace

import jax
import linear
import numpy as np
import optax
import pytest
import running
import toy
from closeness import assert_close, roughly
from compiled import compilations
from options import run_options, session_options
from running import CLIENTS

import fedjax_peft as fp

pytestmark = pytest.mark.slow

CLIP, Z = 0.5, 4.0
MODEL, PLAIN = linear.model(), fp.algorithms.fedavg(optax.sgd(0.1))
TASK = fp.tasks.classification()
WORK = {"batch_size": 4, "lanes": 1}
MECHANISMS = {
    "central": fp.privacy.central(CLIP, Z),
    "local": fp.privacy.local(CLIP, Z),
    "distributed": fp.privacy.distributed(CLIP, Z),
    "example": fp.privacy.example(CLIP, Z),
}


def learning(values):
    return fp.algorithms.fedavg(optax.sgd(values["rate"]))


@fp.part
def squared(share=1.0):
    """Returns a task under the name of a built-in one, with an option."""

    def loss(outputs, batch):
        total, count = TASK.loss(outputs, batch)
        return share * total**2, count

    return TASK._replace(loss=loss)


def flat(params):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(params))])


def run(algorithm, privacy, **options):
    return running.run(algorithm, model=MODEL, privacy=privacy, rounds=1, lanes=1, **options)


@functools.cache
def released(mechanism, rate, number=0):
    """Returns the model after a round; ``number`` counts repetitions."""
    made = run(learning, MECHANISMS[mechanism], values={"rate": rate})
    return flat(made.params) - flat(MODEL.trainable)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.sample("central", "distributed")
def test_points_of_one_seed_do_not_share_their_noise(mechanism):
    """Their released models differ by as much as independent noises do, and repeats do not."""
    one, again = released(mechanism, 0.1), released(mechanism, 0.1, 1)
    np.testing.assert_array_equal(one, again)
    other = released(mechanism, 0.1001)
    assert np.linalg.norm(one) > 0.1, "there is noise"
    ratio = np.linalg.norm(one - other) / np.hypot(np.linalg.norm(one), np.linalg.norm(other))
    assert ratio == roughly(1.0, 0.5)


def salt(model=MODEL, algorithm=None, clients=CLIENTS, values=None, **options):
    made = {"privacy": MECHANISMS["central"], **WORK, **options}
    made |= {} if values is None else {"values": dict.fromkeys(values, 0.5)}
    session = fp.session(model, algorithm or PLAIN, clients, **session_options(**made))
    return tuple(np.asarray(session.init(options.get("seed", 0), values).salt).tolist())


def with_merged(model, factor):
    """Returns a model after a run that merged something into a frozen leaf."""
    name = max(model.frozen, key=lambda name: model.frozen[name].size)
    frozen = {**model.frozen, name: factor * model.frozen[name]}
    return model.replace(frozen=frozen, wide=frozenset({name}))


def test_the_noise_depends_on_every_setting_and_on_nothing_else():
    wider = fp.attach(fp.testing.tiny_model(), fp.lora(rank=4))
    texts = fp.partition.iid(fp.testing.tiny_dataset(20), clients=5)
    changes = [
        {},
        {"algorithm": fp.algorithms.fedavg(optax.sgd(0.2))},
        {"algorithm": fp.algorithms.fedavg(optax.adam(0.1))},
        {"algorithm": fp.algorithms.fedprox(optax.sgd(0.1), mu=0.1)},
        {"privacy": fp.privacy.central(CLIP, 2.0)},
        {"privacy": fp.privacy.adaptive(CLIP, Z)},
        {"transforms": fp.transforms.clip_norm(1.0)},
        {"attack": fp.attacks.sign_flip(0.4)},
        {"batch_size": 5},
        {"epochs": 2},
        {"local_steps": 3},
        {"epochs": (1, 2), "stragglers": 0.5},
        {"clients_per_round": 3},
        {"clients_per_round": 3, "sampling": "poisson"},
        {"failure_rate": 0.1},
        {"failure_rate": 0.1, "failure_exponent": 1.0},
        {"failure_rate": 0.1, "failure_exponent": 1.0, "time_model": fp.TimeModel(spread=1.0)},
        {"deadline": 1.0},
        {"deadline": 1.0, "late": "partial"},
        {"deadline": 1.0, "time_model": fp.TimeModel(latency=0.1)},
        {"task": TASK._replace(loss=lambda outputs, batch: TASK.loss(outputs, batch))},
        {"task": squared()},
        {"task": squared(share=0.5)},
        {"clients": toy.clients(running.SIZES, seed=1)},
        {"clients": replace(CLIENTS, weights=np.array([1.0, 0, 1, 1, 1]))},
        {"clients": replace(CLIENTS, weights=np.array([1.0, 1, 0, 1, 1]))},
        {"clients": replace(CLIENTS, weights=np.array([1.0, 2, 1, 1, 1]))},
        {"model": wider, "clients": texts},
        {"model": fp.attach(fp.testing.tiny_model(), fp.lora(rank=2)), "clients": texts},
        {"model": wider, "clients": texts, "client_ranks": (2, 4)},
        {"model": fp.attach(fp.testing.tiny_model(), fp.lora(rank=4), seed=1), "clients": texts},
        {"model": MODEL.replace(trainable={n: 1.01 * x for n, x in MODEL.trainable.items()})},
        *({"model": with_merged(wider, x), "clients": texts} for x in (1.01, 1.02)),
    ]
    salts = [salt(**change) for change in changes]
    for (i, a), (j, b) in itertools.combinations(enumerate(salts), 2):
        assert a != b, (changes[i], changes[j])
    same_work = {"task": TASK}, {"time_model": fp.TimeModel(latency=0.1)}
    computed = {"lanes": 3}, {"engine": "reference"}, {"client_state": "host"}
    for same in ({"rounds": 7}, *same_work, *computed):
        assert salt(**same) == salts[0], same
    assert salt(privacy=None) == ()


def test_a_schedule_that_has_been_called_keeps_the_noise():
    schedule = optax.cosine_decay_schedule(0.1, 5)
    algorithm = fp.algorithms.fedavg(optax.sgd(schedule))
    before = salt(algorithm=algorithm)
    schedule(0)  # turns the 5 that it holds into 5.0
    assert salt(algorithm=algorithm) == before


def test_a_run_time_value_is_described_by_its_number():
    assert salt(algorithm=learning, values={"rate": 0.1}) == salt()
    assert salt(algorithm=learning, values={"rate": 0.2}) != salt()


def test_a_point_of_a_sweep_has_the_noise_of_the_same_run_alone():
    private = MECHANISMS["central"]
    options = {"rounds": 1, **WORK}
    points = fp.grid(rate=[0.1], clip=[CLIP], seed=[0])
    private_of = lambda p: fp.privacy.central(p["clip"], Z)  # noqa: E731
    swept = fp.sweep(
        MODEL, learning, CLIENTS, points=points, privacy=private_of, **run_options(**options)
    )
    (point,) = swept.runs.values()
    assert_close(flat(point.params), flat(run(PLAIN, private).params), atol=1e-5)


def test_another_seed_or_an_equal_mechanism_compiles_no_program():
    first = flat(run(PLAIN, fp.privacy.central(CLIP, Z), seed=0).params)
    compilations.clear()
    assert not np.array_equal(flat(run(PLAIN, fp.privacy.central(CLIP, Z), seed=1).params), first)
    assert not compilations
    for name, mechanism in MECHANISMS.items():
        assert getattr(fp.privacy, name)(CLIP, Z) == mechanism
