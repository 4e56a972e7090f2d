"""Privacy and every algorithm: it fits, or it is refused with a reason.

Rounds with noise at clients are traced: ``test_algorithms_all.py`` and ``tests/privacy`` run some.
"""

import inspect
import re

import jax
import numpy as np
import optax
import pytest
import running
import toy
from closeness import assert_close
from internals import Cohort
from refusals import refused
from test_algorithms_all import (
    AS_OTHERS,
    DUAL,
    NAMES,
    PRIVACY_REFUSED,
    all_finite,
    clients_of,
    engine_of,
    facts,
    make,
    only,
)

import fedjax_peft as fp
from fedjax_peft import algorithms, privacy

QUICK = ("fedavg", "fedavg_fra", "scaffold")
"""Algorithms that are traced with every mechanism."""
RUN = ("moon", "scaffold")
"""Algorithms whose private rounds are run: a loss of several passes, and uploads of two fields."""
FITTING = [
    n for n in NAMES if fp.contracts.Feature.EXAMPLE_PRIVACY not in fp.contracts.refusals(make(n))
]
"""Algorithms with private examples. ``test_algorithms_compatibility.py`` has the others."""
COUNTED = ("apfl", "moon", "pfedme")
"""Algorithms whose steps take several gradients, or a gradient of a loss of their own; Ditto,
FedDPA-T and FedRep, whose steps have no other form, are rare here."""


def same_shapes(state, result):
    """Asserts that a round, which is traced, returns a state like the one that it is given."""
    shapes = jax.eval_shape(lambda: state)
    assert jax.tree.structure(result.state) == jax.tree.structure(shapes)
    for new, old in zip(jax.tree.leaves(result.state), jax.tree.leaves(shapes), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)


def run(name, federation):
    """Returns the result of a round with private examples, and its engine."""
    protected = privacy.example(0.5, 1.0).protect(make(name), facts("fedavg"))
    engine = engine_of(name, protected)
    return engine.run(engine.schedule.cohort(1), 1, columns=federation.data.columns), engine


@pytest.mark.parametrize("name", only(*RUN, of=FITTING))
def test_an_algorithm_runs_with_private_examples(name):
    # One example is infinite. Without privacy, the upload of its client would be dropped.
    result, engine = run(name, toy.poisoned(clients_of(name), 0))
    assert result.finite.all()
    assert all_finite(result.server, result.client_state)
    moved = engine.algorithm.server.model(result.server)
    start = engine.algorithm.server.model(engine.start()[0])
    ours = engine.start()[1]
    pairs = [*zip(*map(jax.tree.leaves, (moved, start)), strict=True)]
    pairs += zip(*map(jax.tree.leaves, (result.client_state, ours)), strict=True)
    assert any(not np.array_equal(x, y) for x, y in pairs)


def test_fedmcp_fits_where_its_loss_is_a_mean_over_examples():
    algorithm = algorithms.fedmcp(optax.sgd(0.1), similarity="cosine")
    protected = privacy.example(0.5, 1.0).protect(algorithm, facts("fedavg"))
    same_shapes(*engine_of("fedmcp", protected).traced())


def test_a_factor_that_rests_takes_nothing_of_the_clip_of_the_other():
    """So B's step of RoLoRA's and LoRA-A²'s first round is that of FFA-LoRA, whose A is fixed."""
    model, rng = toy.lora_model(dropout=0), np.random.default_rng(0)
    factors = {n: x for n, x in model.trainable.items() if n.endswith(("lora_a", "lora_b"))}
    moved = {n: rng.normal(size=x.shape).astype(np.float32) for n, x in factors.items()}
    given = {"model": model.replace(trainable={**model.trainable, **moved}), "rounds": 1}
    given |= {"privacy": privacy.example(1e-3, 0.0), "clients": toy.clients([8]), "batch_size": 8}
    ours = [
        running.run(algorithm, **given).params["layer.lora_b"] - moved["layer.lora_b"]
        for algorithm in (
            algorithms.ffa(optax.sgd(1.0)),
            algorithms.rolora(optax.sgd(1.0)),
            algorithms.lora_a2(optax.sgd(1.0), budget=9, rate_ratio=1.0),
        )
    ]
    assert np.abs(ours[0]).max() > 1e-5
    for other in ours[1:]:
        assert_close(other, ours[0], atol=1e-7)


@pytest.mark.parametrize("name", only(*COUNTED, of=[n for n in NAMES if n not in DUAL]))
def test_gradients_per_step_says_how_many_gradients_a_step_takes(name):
    """Counted in the steps of one client; a step in a loop counts as often as the loop runs."""
    algorithm = make(name)
    counted = {"most": 0}

    def counting(context):
        def client_step(state, batch, key):
            counted["now"] = 0

            def gradient(*arguments):
                counted["now"] += 1
                return context.gradient(*arguments)

            with jax.disable_jit():  # loops and conditions run as in Python
                update = algorithm.client(context._replace(gradient=gradient))
                result = update.step(state, batch, key)
            counted["most"] = max(counted["most"], counted["now"])
            return result

        return algorithm.client(context)._replace(step=client_step)

    counting_algorithm = algorithm._replace(client=counting)
    engine = engine_of(name, counting_algorithm, engine="reference")
    cohort = engine.schedule.cohort(1)
    engine.run(Cohort(*(x[:1] for x in cohort)), 1)
    assert counted["most"] == algorithm.gradients_per_step


def test_no_algorithm_takes_gradients_of_examples_by_itself():
    """Only HetLoRA's penalty, which is a function of parameters, is derived directly."""
    found = {
        name
        for name in dir(algorithms)
        if inspect.ismodule(module := getattr(algorithms, name))
        and re.search(r"jax\.(value_and_)?grad\(", inspect.getsource(module))
    }
    assert found <= {"hetlora"}


def marks(place, name):
    """Returns the marks of a pair: an algorithm is tried with one mechanism, and a few with all."""
    if name in QUICK:
        return ()
    tried = NAMES.index(name) % 3 == place and name not in AS_OTHERS
    return (pytest.mark.slow,) if tried or name in PRIVACY_REFUSED else (pytest.mark.exhaustive,)


MECHANISMS = (privacy.central, privacy.local, privacy.distributed)
PAIRS = [pytest.param(m, n, marks=marks(i, n)) for i, m in enumerate(MECHANISMS) for n in NAMES]


def traced(mechanism, name):
    """Returns the state before a private round, and the shapes of what the round returns."""
    protected = mechanism(0.5, 1.0).protect(make(name), facts(name))
    return engine_of(name, protected).traced()


@pytest.mark.parametrize(("mechanism", "name"), PAIRS)
def test_an_algorithm_fits_the_noise_of_a_mechanism_or_is_refused(mechanism, name):
    if name in PRIVACY_REFUSED:
        refused(PRIVACY_REFUSED[name], traced, mechanism, name)
        return
    state, result = traced(mechanism, name)
    same_shapes(state, result)
    assert "privacy_noise_std" in result.aggregation
