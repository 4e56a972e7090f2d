"""A deployed run is the simulated run: its leaves, its rows, and what goes wrong."""


import jax
import numpy as np
import pytest
import toy
from closeness import assert_close, assert_trees_close
from deployed import deployed, kept

import fedjax_peft as fp

SGD = fp.optimizers.sgd(0.1)
SIZES = [5, 11, 8, 3]
CLIENTS = toy.clients(SIZES)
TEST = toy.dataset(16, seed=1)
HOW = {"rounds": 3, "batch_size": 4, "clients_per_round": 3}
FEDAVG = fp.algorithms.fedavg(SGD)
FEEDBACK = [fp.transforms.quantize(4, error_feedback=True)]

CASES = {
    "fedavg": (toy.lora_model, FEDAVG, {}),
    "fra": (toy.lora_model, fp.algorithms.fedavg(SGD, aggregator=fp.aggregators.fra()), {}),
    "fedmcp": (toy.dual_model, fp.algorithms.fedmcp(SGD), {}),
    "scaffold": (toy.lora_model, fp.algorithms.scaffold(SGD, learning_rate=0.1), {}),
    "int8": (toy.lora_model, FEDAVG, {"transforms": fp.transforms.int8(8)}),
    "feedback": (toy.lora_model, FEDAVG, {"transforms": FEEDBACK}),
    "fedex": (toy.lora_model, fp.algorithms.fedex(SGD), {}),
    "local privacy": (
        toy.lora_model,
        FEDAVG,
        {"privacy": fp.privacy.local(clip=1.0, noise_multiplier=0.1), "seed": 3},
    ),
}


def simulated(make, algorithm, **options):
    return fp.simulate(make(), algorithm, CLIENTS, placement=fp.Placement(lanes=1), **options)


@pytest.mark.parametrize("name", CASES)
def test_a_deployed_run_equals_the_simulated_one(name, tmp_path):
    """Rounding alone differs: the client's program has one lane and one slot."""
    make, algorithm, options = CASES[name]
    options = {**HOW, **options}
    personal = name == "fedmcp"
    expected = simulated(make, algorithm, test=None if personal else TEST, **options)
    salt = None
    if "privacy" in options:  # a real client has its own secret
        salt = session_salt(make, algorithm, options)
    options |= {"test": None if personal else TEST, "out": tmp_path / "run"}
    run, exchange = deployed(make(), algorithm, CLIENTS, tmp_path / "clients", salt=salt, **options)
    assert_trees_close(run.server, expected.server, rtol=0, atol=1e-6)
    for got, row in zip(run.metrics, expected.metrics, strict=True):
        assert got.keys() == row.keys()
        for field in ("clients", "bytes_up", "bytes_down", "steps"):
            assert got.get(field) == row.get(field), field
        for field in ("train_loss", "test_loss", "update_norm"):
            if row.get(field) is not None:
                assert_close(got[field], row[field], rtol=1e-5)
    if jax.tree.leaves(expected.client_state):
        last = max(row["round"] for row in run.metrics if 0 in row.get("clients", ()))
        own = jax.tree.map(lambda x: np.asarray(x)[0], expected.client_state)
        got = kept(exchange, 0, last).client_state
        assert_trees_close(got, own, rtol=0, atol=1e-6)


def session_salt(make, algorithm, options):
    session = fp.session(
        make(), algorithm, CLIENTS, **{k: options[k] for k in options if k != "seed"}
    )
    return np.asarray(session.init(options["seed"]).salt)
