"""Descriptions of settings: equal for equal calls, in every process, and different otherwise."""

import json
import logging
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_peft as fp
from fedjax_peft.simulation.description import describe

RATE = 0.1
MADE = """
import json, optax, fedjax_peft as fp
from fedjax_peft.simulation.description import describe
optimizer = optax.adamw(optax.cosine_decay_schedule(1e-3, 100), b1=0.8)
parts = [fp.algorithms.fedprox(optimizer, mu=0.1), fp.privacy.central(0.5, 1.0), {"b", "a"}]
parts += [fp.transforms.top_k(0.1), fp.attacks.sign_flip(0.2)]
parts += [fp.partition.dirichlet(fp.testing.tiny_dataset(50), 5, alpha=1.0)]
made = json.dumps([describe(parts), describe(parts, "contents")], sort_keys=True)
"""


def prox(**options):
    return fp.algorithms.fedprox(optax.sgd(0.1), **options)


def text(value):
    return json.dumps(describe(value), sort_keys=True)


@pytest.mark.slow
def test_descriptions_are_the_same_in_another_process():
    own = {**os.environ, "PYTHONHASHSEED": "1"}
    run = [sys.executable, "-c", f"{MADE}\nprint(made)"]
    told = subprocess.run(run, env=own, capture_output=True, check=True, text=True).stdout
    here: dict = {}
    exec(MADE, here)
    assert told.strip() == here["made"]
    assert len(told) > 1000
    assert "0x" not in told, "no addresses"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: optax.adamw(1e-3), lambda: optax.adamw(1e-3, b1=0.8)),
        (lambda: optax.sgd(0.1), lambda: optax.sgd(0.1, momentum=0.0)),
        (lambda: optax.linear_schedule(1, 0, 5), lambda: optax.linear_schedule(1, 0, 6)),
        (lambda: prox(mu=0.1), lambda: prox(mu=0.2)),
        (lambda: fp.privacy.local(0.5, 1.0), lambda: fp.privacy.local(0.5, 1.5)),
        (lambda: fp.privacy.local(0.5, 1.0), lambda: fp.privacy.central(0.5, 1.0)),
        (lambda: lambda x: x * 0.5, lambda: lambda x: x * 0.25),
        (lambda: partial(max, 1), lambda: partial(max, 2)),
        (lambda: np.add, lambda: np.maximum),
        (lambda: np.zeros(3), lambda: np.zeros(4)),
        (lambda: 1.0, lambda: 2.0),
        (lambda: jnp.float32(0.1), lambda: jnp.float32(0.2)),
    ],
)
def test_other_numbers_and_other_functions_have_other_descriptions(one, other):
    assert text(one()) == text(one())
    assert text(one()) != text(other())


def rate(step):
    return RATE * step


def test_a_users_function_has_the_global_numbers_of_what_it_calls(monkeypatch):
    def schedule(step):
        return rate(step + 1)

    before = text(rate), text(schedule)
    monkeypatch.setitem(globals(), "RATE", 0.2)
    assert all(a != b for a, b in zip(before, (text(rate), text(schedule)), strict=True))


def test_what_is_not_plain_is_a_name_or_a_shape():
    assert describe(jnp.ones((2, 3))) == "float32[2, 3]"
    assert describe(jax.jit(jnp.tanh)) == "tanh"
    assert describe(np.float32(0.5)) == 0.5
    assert describe(float("nan")) == "nan"
    assert describe(optax) == "optax"
    logger = describe(logging.getLogger("optax"))
    assert (logger[""], logger["name"]) == ("logging.Logger", "optax")
    assert "manager" not in logger
    loop: list = [1]
    loop.append(loop)
    assert describe(loop) == [1, "itself"]
