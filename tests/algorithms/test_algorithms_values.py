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
from test_algorithms_all import OPTIONS, OTHERS, model_of

import fedjax_peft as fp
from fedjax_peft import algorithms
from fedjax_peft.support.errors import InputError

FEDERATION = toy.clients((7, 4, 12, 1, 9))
POOLED = toy.clients([33])
NAMES = sorted([*algorithms.__all__, *OTHERS])
QUICK = ("fedavg", "fedprox", "fedadam", "fedmcp")
CONSTANTS = ("apfl", "fedadam", "feddyn", "fedprox", "hilora", "pfedme", "scaffold")
"""Algorithms that are also compared with a program that has their numbers as constants."""
LIKE_OTHERS = ("fedadagrad", "fedavgm", "fedyogi", "feddpa_f", "ditto")
"""Algorithms with the numbers, in the same places, of FedAdam, FedDPA-T and FedProx."""


def numbers(factory):
    """Returns the options of an algorithm that are numbers other than 0."""
    parameters = inspect.signature(factory).parameters
    return {
        name: one.default
        for name, one in parameters.items()
        if isinstance(one.default, float) and one.default
    }


def marks(name):
    """Returns the marks of an algorithm: most have no number but the learning rate, like FedAvg."""
    if name in QUICK:
        return ()
    options = {**numbers(OTHERS.get(name) or getattr(algorithms, name)), **OPTIONS.get(name, {})}
    own = name not in OTHERS and any(isinstance(x, float) for x in options.values())
    own = own and name not in LIKE_OTHERS
    return (pytest.mark.slow,) if own or name == "hetlora_prunes" else (pytest.mark.exhaustive,)


def case(name):
    """Returns (function of the values, values, other values, model, clients)."""
    factory = OTHERS.get(name) or getattr(algorithms, name)
    fixed = OPTIONS.get(name, {})
    given = {n: x for n, x in fixed.items() if isinstance(x, float)}
    values = {"rate": 0.1, **numbers(factory), **given}
    if "prune" in getattr(factory, "keywords", {}):
        values["prune"] = 0.5
    rest = {n: x for n, x in fixed.items() if n not in given}

    def make(p):
        options = {n: x for n, x in p.items() if n != "rate"}
        return factory(optax.sgd(p["rate"], momentum=0.5), **options, **rest)

    if name == "scaffold":  # it warns of any other optimizer than plain SGD

        def make(p):
            return factory(optax.sgd(p["rate"]), learning_rate=p["rate"])

        values = {"rate": 0.1}
    others = {n: 0.9 * x for n, x in values.items()}
    model = model_of(name)
    return make, values, others, model, POOLED if name == "centralised" else FEDERATION


def rounds(session, seed=0, values=None, *, number=2):
    state = session.init(seed, values)
    for _ in range(number):
        state, _ = session.step(state)
    return state


def leaves(state):
    return [np.asarray(x) for x in jax.tree.leaves((state.server, state.client_state))]


@pytest.mark.parametrize("name", [pytest.param(n, marks=marks(n)) for n in NAMES])
def test_every_number_of_an_algorithm_can_be_a_run_time_value(name):
    make, values, others, model, clients = case(name)
    session = functools.partial(
        fp.session, model, clients=clients, batch_size=4, placement=fp.Placement(lanes=1)
    )
    tunable = session(make, values=values)
    first, second = rounds(tunable), None
    compilations.clear()
    second = rounds(tunable, values=others)
    again = rounds(session(make, values=others))
    assert not compilations, "other values compiled another program"
    for mine, its in zip(leaves(second), leaves(again), strict=True):
        np.testing.assert_array_equal(mine, its)
    if name in CONSTANTS:
        constants = rounds(session(make(others)))
        for mine, its in zip(leaves(second), leaves(constants), strict=True):
            assert_close(mine, its, rtol=1e-5, atol=1e-6)
    assert any(not np.array_equal(a, b) for a, b in zip(leaves(first), leaves(second), strict=True))


def test_transforms_can_be_functions_of_the_values():
    def make(p):
        return algorithms.fedavg(optax.sgd(p["rate"]))

    def clip(p):
        return fp.transforms.clip_norm(p["norm"])

    given = {"transforms": clip, "batch_size": 4, "lanes": 1}
    model = toy.lora_model()
    tunable = fp.session(
        model, make, FEDERATION, values={"rate": 0.1, "norm": 0.01}, **session_options(**given)
    )
    narrow = rounds(tunable)
    compilations.clear()
    wide = rounds(tunable, values={"norm": 100.0})
    assert not compilations
    given["transforms"] = fp.transforms.clip_norm(0.01)
    constants = rounds(
        fp.session(model, make({"rate": 0.1}), FEDERATION, **session_options(**given))
    )
    for mine, its in zip(leaves(narrow), leaves(constants), strict=True):
        assert_close(mine, its, rtol=1e-5, atol=1e-6)
    assert any(not np.array_equal(a, b) for a, b in zip(leaves(narrow), leaves(wide), strict=True))


def test_the_reference_engine_takes_the_values_of_the_state():
    def make(p):
        return algorithms.fedprox(optax.sgd(p["rate"]), mu=p["mu"])

    given = {"values": {"rate": 0.1, "mu": 0.5}, "batch_size": 4, "lanes": 1}
    states = [
        rounds(
            fp.session(
                toy.lora_model(), make, FEDERATION, **session_options(engine=engine, **given)
            )
        )
        for engine in ("compiled", "reference")
    ]
    for mine, its in zip(*map(leaves, states), strict=True):
        assert_close(mine, its, rtol=1e-5, atol=1e-6)


def test_wrong_values_are_refused_before_anything_is_compiled():
    def make(p):
        return algorithms.fedprox(optax.sgd(p["rate"]), mu=p["mu"])

    model, values = toy.lora_model(), {"rate": 0.1, "mu": 0.5}
    with pytest.raises(InputError, match="asks for 'mu', and values has 'rate'"):
        fp.session(model, make, FEDERATION, values={"rate": 0.1})
    with pytest.raises(InputError, match="mu = -1"):
        fp.session(model, make, FEDERATION, values={**values, "mu": -1.0})
    session = fp.session(model, make, FEDERATION, values=values)
    with pytest.raises(InputError, match="no run-time value 'nu'"):
        session.init(values={"nu": 1.0})
    with pytest.raises(InputError, match="mu = -1"):
        session.init(values={"mu": -1.0})
    with pytest.raises(InputError, match="'rate' must be a number, not 'x'"):
        session.init(values={"rate": "x"})
