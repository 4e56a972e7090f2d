"""Validation examples: evaluated like test examples, in the same rounds."""

import numpy as np
import optax
import pytest
import toy
from options import run_options

from fedjax_peft.algorithms import fedavg
from fedjax_peft.data.dataset import Clients
from fedjax_peft.simulation.simulate import simulate
from fedjax_peft.simulation.stopping import early_stop
from fedjax_peft.support.errors import InputError

TRAIN, HELD_OUT = toy.clients((7, 4, 12, 5, 9)).holdout(0.4)
TEST, OTHER = toy.dataset(30, seed=5), toy.dataset(21, seed=6)
MODEL = toy.model()
PERSONAL, SHARED = fedavg(optax.sgd(0.5), head="private"), fedavg(optax.sgd(0.5))


def run(algorithm=PERSONAL, rounds=3, **options):
    defaults = {"test": TEST, "client_test": HELD_OUT, "test_clients": 3, "eval_every": 2}
    defaults |= {"clients_per_round": 2, "batch_size": 4, "diagnostics": ["clients"], "lanes": 1}
    return simulate(MODEL, algorithm, TRAIN, rounds=rounds, **run_options(**defaults | options))


def without(row, *parts):
    parts = (*parts, "time")
    return {name: value for name, value in row.items() if not any(p in name for p in parts)}


@pytest.fixture(scope="module")
def tested():
    """A run without validation examples."""
    return run()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A run that validates on its test examples, ended after round 2 and resumed."""
    out = tmp_path_factory.mktemp("run") / "a"
    data = {"validation": TEST, "client_validation": HELD_OUT}
    run(rounds=2, out=out, **data)
    return run(out=out, resume=True, **data)


def twin(name):
    """Returns the field of the test examples."""
    name = name.replace("client_validations", "client_tests")
    return name.replace("client_validation_", "client_").replace("validation", "test")


def test_validation_fields_are_those_of_the_test(both):
    for row in both.metrics:
        fields = {name for name in row if "validation" in name}
        others = row.keys() - fields
        tests = {name for name in others if name.startswith(("test_", "client_"))}
        assert {twin(name): row[name] for name in fields} == {name: row[name] for name in tests}
        assert bool(fields) == (row["round"] in (0, 2, 3))
    assert "validation_accuracy_std" in both.metrics[-1]
    assert "client_validation_accuracy_worst_seen" in both.metrics[-1]


def test_validation_changes_nothing_else_and_a_resumed_run_continues(tested, both):
    for plain, row in zip(tested.metrics, both.metrics, strict=True):
        assert without(row, "validation") == without(plain)


def test_other_examples_have_their_own_metrics():
    a = run(SHARED, validation=OTHER).metrics[-1]
    b = run(SHARED, test=OTHER, client_test=None).metrics[-1]
    assert a["validation_loss"] == b["test_loss"] != a["test_loss"]
    assert (a["validation_examples"], a["test_examples"]) == (21, 30)
    alone = run(SHARED, test=None, client_test=None, validation=OTHER).metrics[-1]
    assert alone["validation_loss"] == a["validation_loss"]
    assert "test_loss" not in alone


def test_a_run_stops_on_a_validation_metric():
    # Labels of noise: the validation loss does not improve for long.
    labels = np.random.default_rng(0).permutation(OTHER.labels).astype(np.int32)
    noise = OTHER.take(np.arange(21))
    noise.columns["labels"][:] = labels
    rule = early_stop(metric="validation_loss", patience=1)
    ended = run(SHARED, 30, validation=noise, stop=rule, eval_every=1).metrics
    assert ended[-1]["stopped"].startswith("validation_loss has not improved")
    assert ended[-1]["validation_loss"] >= min(row["validation_loss"] for row in ended[:-1])
    with pytest.raises(InputError, match="No row of this run has the metric 'validation_loss'"):
        run(SHARED, 30, stop=rule, eval_every=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": TRAIN}, r"'validation' is of the type Clients, .*=data\['validation'\]"),
        ({"client_validation": TEST}, r"'client_validation' is of the type Dataset"),
        ({"validation": TEST.take(np.arange(0))}, "The validation data have no examples"),
        (
            {"client_validation": Clients(TEST, (np.arange(2),) * 4)},
            "client_validation is of 4 clients, but there are 5",
        ),
        (
            {"client_validation": Clients(TEST, (np.arange(0),) * 5)},
            "client_validation gives no client an example",
        ),
    ],
)
def test_wrong_validation_data_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        run(**options)
