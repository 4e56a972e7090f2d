"""Run-time values: numbers that are arguments of the compiled program and not constants in it."""

import functools
import inspect

import jax
import numpy as np
import optax
import pytest
import toy
from closeness import assert_close
from compiled import compilations
from options import session_options
from refusals import refused
from test_algorithms_all import NAMES, OPTIONS, OTHERS, clients_of, engine_of, model_of, only

import fedjax_peft as fp
from fedjax_peft import algorithms

MODEL, FEDERATION = toy.lora_model(), toy.clients((7, 4, 12, 1, 9))
CONSTANTS = ("fedadam", "scaffold")
"""Algorithms that are also compared with a program that has their numbers as constants."""
RUN = ("hetlora_prunes", *CONSTANTS)
"""Algorithms that run with values; those of the others are traced, if there are any but a rate."""


def numbers(factory):
    """Returns the options of an algorithm that are numbers other than 0."""
    parameters = inspect.signature(factory).parameters
    return {
        name: one.default
        for name, one in parameters.items()
        if isinstance(one.default, float) and one.default
    }


def case(name):
    """Returns (function of the values, values)."""
    factory = OTHERS.get(name) or getattr(algorithms, name)
    fixed = OPTIONS.get(name, {})
    given = {n: x for n, x in fixed.items() if isinstance(x, float)}
    rest = {n: x for n, x in fixed.items() if n not in given}
    values = {"rate": 0.1, **numbers(factory), **given}
    if "prune" in getattr(factory, "keywords", {}):
        values["prune"] = 0.5

    def make(p):
        options = {n: x for n, x in p.items() if n != "rate"}
        return factory(optax.sgd(p["rate"], momentum=0.5), **options, **rest)

    def make_scaffold(p):  # it warns of any other optimizer than plain SGD
        return factory(optax.sgd(p["rate"]), learning_rate=p["rate"])

    return (make_scaffold, {"rate": 0.1}) if name == "scaffold" else (make, values)


def rounds(session, seed=0, values=None, *, number=2):
    state = session.init(seed, values)
    for _ in range(number):
        state, _ = session.step(state)
    return state


def leaves(state):
    return [np.asarray(x) for x in jax.tree.leaves((state.server, state.client_state))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fedavg", *(n for n in NAMES if n not in (*OTHERS, *RUN) and len(case(n)[1]) > 1)]
)
def test_no_number_of_an_algorithm_must_be_a_constant(name):
    make, values = case(name)
    engine = engine_of(name, make(values))
    jax.eval_shape(lambda values: engine.traced(make(values)) and None, values)


@pytest.mark.slow
@pytest.mark.parametrize("name", only(*RUN))
def test_every_number_of_an_algorithm_can_be_a_run_time_value(name, pytestconfig):
    make, values = case(name)
    others, options = {n: 0.9 * x for n, x in values.items()}, {"batch_size": 4}
    options |= {"clients": clients_of(name), "placement": fp.Placement(lanes=1)}
    session = functools.partial(fp.session, model_of(name), **options)
    tunable = session(make, values=values)
    first = rounds(tunable)
    compilations.clear()
    second = rounds(tunable, values=others)
    again = rounds(session(make, values=others))
    assert not compilations, "other values compiled another program"
    for mine, its in zip(leaves(second), leaves(again), strict=True):
        np.testing.assert_array_equal(mine, its)
    if name in CONSTANTS or pytestconfig.getoption("exhaustive"):
        same(second, rounds(session(make(others))))
    assert any(not np.array_equal(a, b) for a, b in zip(leaves(first), leaves(second), strict=True))


def same(one, other):
    """Asserts that two states are equal but for rounding.

    SCAFFOLD divides differences of weights by the rate, so that their rounding is ten times as big.
    """
    for mine, its in zip(leaves(one), leaves(other), strict=True):
        assert_close(mine, its, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_transforms_can_be_functions_of_the_values():
    def make(p):
        return algorithms.fedavg(optax.sgd(p["rate"]))

    def session(transforms, **options):
        options |= session_options(transforms=transforms, batch_size=4, lanes=1)
        return fp.session(MODEL, clients=FEDERATION, **options)

    values = {"rate": 0.1, "norm": 0.01}
    tunable = session(lambda p: fp.transforms.clip_norm(p["norm"]), algorithm=make, values=values)
    narrow = rounds(tunable)
    compilations.clear()
    wide = rounds(tunable, values={"norm": 100.0})
    assert not compilations
    same(narrow, rounds(session(fp.transforms.clip_norm(0.01), algorithm=make(values))))
    assert any(not np.array_equal(a, b) for a, b in zip(leaves(narrow), leaves(wide), strict=True))


def prox(p):
    return algorithms.fedprox(optax.sgd(p["rate"]), mu=p["mu"])


PROX = {"rate": 0.1, "mu": 0.5}


def test_wrong_values_are_refused_before_anything_is_compiled():
    session = functools.partial(fp.session, MODEL, prox, FEDERATION)
    refused("asks for 'mu', and values has 'rate'", session, values={"rate": 0.1})
    refused("mu = -1", session, values={**PROX, "mu": -1.0})
    made = session(values=PROX)
    for values, message in (
        ({"nu": 1.0}, "no run-time value 'nu'"),
        ({"mu": -1.0}, "mu = -1"),
        ({"rate": "x"}, "'rate' must be a number, not 'x'"),
    ):
        refused(message, made.init, values=values)
