"""What must not change a model: clients that count for nothing, their order, the unit of weights.

``tests/aggregators/test_aggregators_all.py`` has the same for single calls of every aggregator.
"""

from dataclasses import replace

import linear
import numpy as np
import optax
import pytest
import running
import toy
from closeness import assert_close

from fedjax_peft import aggregators, algorithms, privacy

pytestmark = pytest.mark.slow

SGD = optax.sgd(0.5)
SIZES = (8, 6, 5, 7, 4)
CLIENTS = toy.clients(SIZES)
MODEL = linear.model()
LAST = CLIENTS.indices[-1]


def spoiled(value):
    """Returns the clients with other features of the last one."""
    x = CLIENTS.data.columns["x"].copy()
    x[LAST] = value
    return replace(CLIENTS, data=replace(CLIENTS.data, columns={**CLIENTS.data.columns, "x": x}))


WEIGHTLESS = np.array([*map(float, SIZES[:-1]), 0.0])
WITHOUT = replace(CLIENTS, indices=(*CLIENTS.indices[:-1], LAST[:0]))
"""The last client has no examples; the other federations must give the same model."""
SAME = {
    "weight 0": replace(CLIENTS, weights=WEIGHTLESS),
    "weight 0, other examples": replace(spoiled(-9.0), weights=WEIGHTLESS),
    "not finite": spoiled(np.nan),
    "another order": replace(WITHOUT, indices=tuple(WITHOUT.indices[i] for i in (3, 0, 4, 2, 1))),
    "weights times 7": replace(WITHOUT, weights=7 * np.array(SIZES, float)),
}
CASES = {
    "mean": {},
    "median": {"algorithm": algorithms.fedavg(SGD, aggregator=aggregators.median())},
    "central": {"privacy": privacy.central(0.5, 1e-6)},
    "local": {"privacy": privacy.local(0.5, 1e-6)},
    "local, reference": {"privacy": privacy.local(0.5, 1e-6), "engine": "reference"},
    "distributed": {"privacy": privacy.distributed(0.5, 1e-3, bits=24)},
}
ROUNDING = {"distributed": 3e-3}
"""Noise that differs by settings has a standard deviation of z C / 5 = 1e-4 on each entry."""
COUNTED = ("central", "not finite")
"""Central noise is on a sum that is divided by an expected number of uploads (q N): the one that
is not finite counts there, as nobody may learn that it was left out."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample("mean", "median", "distributed")
def test_clients_that_count_for_nothing_change_nothing(case):
    options = {"algorithm": algorithms.fedavg(SGD), **CASES[case]}

    def model_of(clients):
        return running.run(clients=clients, model=MODEL, batch_size=8, **options).params

    expected = model_of(WITHOUT)
    for name, x in expected.items():
        assert np.abs(x - MODEL.trainable[name]).max() > 0.05, "it has learned"
    tolerance = ROUNDING.get(case, 1e-5)
    for what, clients in SAME.items():
        if (case, what) == COUNTED:
            continue
        for name, x in model_of(clients).items():
            assert_close(x, expected[name], rtol=0, atol=tolerance, err_msg=f"{what}: {name}")


@pytest.mark.parametrize("mechanism", [None, "local"])
def test_a_client_of_weight_0_keeps_what_it_learns(mechanism):
    """Its weight is that of its upload: it trains, and its own part of the model is its own."""
    how = None if mechanism is None else privacy.local(0.5, 0.0)
    runs = [
        running.run(running.PRIVATE, clients=clients, rounds=1, privacy=how)
        for clients in (SAME["weight 0"], CLIENTS)
    ]
    for name in toy.HEAD:
        own = [run.client_state[name][-1] for run in runs]
        assert_close(*own, rtol=0, atol=1e-6)
        assert np.abs(own[0] - running.model().trainable[name]).max() > 1e-3
    assert runs[0].metrics[1]["steps"] == runs[1].metrics[1]["steps"]
