"""A run that has stopped goes on to the same bits, whatever an algorithm keeps between rounds."""

import functools

import jax
import numpy as np
import optax
import pytest
import toy
from options import run_options

import fedjax_peft as fp
from fedjax_peft import algorithms

pytestmark = pytest.mark.slow

SGD, ADAM = optax.sgd(0.3), optax.adam(0.02)
FALLING = fp.schedules.scheduled(ADAM, fp.schedules.cosine(4))
OF_PRODUCTS = {"space": "product", "momentum": 0.7, "aggregator": fp.aggregators.fra(split="B")}
CASES = {
    "ditto": algorithms.ditto(ADAM),
    "fedadam": algorithms.fedadam(SGD, head="frozen"),
    "fedavgm": algorithms.fedavgm(SGD, **OF_PRODUCTS),
    "fedprox": algorithms.fedprox(FALLING, keep_optimizer=True),
    "hilora": algorithms.hilora(ADAM, clients=5, root_rounds=2, cluster_rounds=1),
    "local": algorithms.local(ADAM, keep_optimizer=True),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample("fedavgm")  # test_simulation_resume.py has other states
def test_a_run_resumes_to_the_same_bits(name, tmp_path):
    model = toy.sum_model() if name == "hilora" else toy.lora_model()
    options = {"clients_per_round": 3, "batch_size": 4, "lanes": 1, "checkpoint_every": 2}
    run = functools.partial(
        fp.simulate, model, CASES[name], toy.clients((7, 4, 12, 1, 9)), **run_options(**options)
    )
    whole = run(rounds=4)
    run(rounds=2, out=tmp_path / "run")
    again = run(rounds=4, out=tmp_path / "run", resume=True)
    states = [(x.server, x.client_state, x.params) for x in (whole, again)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    assert jax.tree.all(jax.tree.map(np.array_equal, *states))
    rows = [[{**row, "time": None} for row in x.metrics] for x in (whole, again)]
    assert rows[0] == rows[1]
    fixed = ("layer.lora_scale", *toy.HEAD) if name == "fedadam" else ()
    for leaf in fixed:
        np.testing.assert_array_equal(whole.params[leaf], model.trainable[leaf])
