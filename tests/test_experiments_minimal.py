"""``experiments/minimal/federated_lora.py``, rounds without an engine, equals ``simulate``."""

import itertools
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from closeness import approx, assert_close

import fedjax_peft as fp

SCRIPT = Path(__file__).parents[1] / "experiments" / "minimal" / "federated_lora.py"
PAGE = runpy.run_path(str(SCRIPT))
ROUNDS = 4
ATOL = 2e-5
"""Adam divides by the root of small numbers, so a rounding of a gradient grows; an SVD, and sums in
another order, add theirs."""
OPTIMIZER = PAGE["OPTIMIZER"]
ALGORITHMS = {
    "FedAvg": fp.algorithms.fedavg(OPTIMIZER),
    "FRA": fp.algorithms.fedavg(OPTIMIZER, aggregator=fp.aggregators.fra()),
    "Ditto": fp.algorithms.ditto(OPTIMIZER, lam=0.1),
}


@pytest.fixture(scope="module")
def model():
    """The page's model, as the library takes it."""
    frozen, trained = PAGE["init_model"]()
    kinds = {name: "adapter" if "lora" in name else "head" for name in trained}

    def apply(frozen, trained, batch, key, train):
        return fp.contracts.Outputs(PAGE["logits"](frozen, trained, batch["tokens"]))

    return fp.Model(apply, frozen, trained, kinds, None)


@pytest.mark.slow  # algorithms are compiled twice
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.sample("FRA", "Ditto")  # a mean is in Ditto too
def test_the_page_equals_simulate(name, model):
    columns, train, test = PAGE["make_data"]()
    columns = {name: np.asarray(x) for name, x in columns.items()}
    data = fp.Dataset(columns, tuple(f"class {i}" for i in range(PAGE["CLASSES"])))
    run = fp.simulate(
        model,
        ALGORITHMS[name],
        fp.Clients(data, tuple(train)),
        evaluation=fp.Evaluation(client_test=fp.Clients(data, tuple(test))),
        rounds=ROUNDS,
        clients_per_round=PAGE["COHORT"],
        batch_size=PAGE["BATCH"],
        seed=PAGE["SEED"],
        placement=fp.Placement(lanes=2),
    )
    page = list(itertools.islice(PAGE["simulate"](PAGE["METHODS"][name]), ROUNDS))
    for (_, _, accuracy), row in zip(page, run.metrics[1:], strict=True):
        assert accuracy == approx(row["client_accuracy_mean"], abs=1e-5)
    server, models, _ = jax.device_get(page[-1])
    for leaf, x in server.items():
        assert_close(x, run.server[leaf], atol=ATOL)
        assert np.abs(x - model.trainable[leaf]).max() > 0.01, "the leaf has been trained"
    for client in range(PAGE["CLIENTS"]):
        for leaf, x in run.client_params(client).items():
            assert_close(models[leaf][client], x, atol=ATOL)


def test_the_page_is_short_and_needs_no_library():
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 300
    assert "import fedjax_peft" not in text
