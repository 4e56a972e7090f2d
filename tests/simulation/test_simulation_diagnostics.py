"""Optional diagnostics: the additional fields of a row."""

import numpy as np
import optax
import pytest
import toy
from closeness import approx
from options import run_options

from fedjax_peft import heads, peft
from fedjax_peft.algorithms import fedavg, fedmatch, fedmcp
from fedjax_peft.data import partition
from fedjax_peft.models.registry import random_model
from fedjax_peft.peft.base import attach
from fedjax_peft.simulation.records import Evaluation
from fedjax_peft.simulation.simulate import simulate
from fedjax_peft.support.errors import InputError
from fedjax_peft.testing import TINY_BERT, tiny_dataset

pytestmark = pytest.mark.slow

SIZES = [9, 4, 0, 13]


def run(**options):
    return simulate(
        toy.model(),
        fedavg(optax.sgd(0.5)),
        toy.clients(SIZES),
        rounds=2,
        clients_per_round=4,
        batch_size=4,
        **run_options(**options),
    )


def test_every_client_and_the_drift_of_the_global_factors():
    plain, result = run(), run(diagnostics=["clients", "variation", "spectrum"])
    for row, other in zip(result.metrics[1:], plain.metrics[1:], strict=True):
        assert row["clients"] == [0, 1, 3]
        each = row["per_client"]
        assert {name: len(values) for name, values in each.items()} == {
            "accuracy": 3,
            "loss": 3,
            "update_norm": 3,
        }
        assert row["train_loss_worst"] == max(each["loss"])
        assert row["train_accuracy_worst"] == min(each["accuracy"])
        assert row["train_loss_std"] == approx(np.std(each["loss"]), rel=1e-5)
        assert row["update_norm"] == approx(np.mean(each["update_norm"]), rel=1e-5)
        sizes = [9, 4, 13]
        assert row["train_loss"] == approx(np.average(each["loss"], weights=sizes), rel=1e-5)
        for kind in ("a", "b"):
            assert row[f"variation_magnitude_{kind}"] > 0
            assert 0 < row[f"variation_direction_{kind}"] < 2
        assert 1 <= row["effective_rank"] <= toy.RANK
        assert row["layers"]["singular_value"]["layer"] > 0
        assert other["train_loss"] == row["train_loss"], "measuring changes nothing"
        assert "per_client" not in other
        assert "effective_rank" not in other
        assert other["update_norm"] == row["update_norm"]


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("shared", {"shared": 22 + 21, "private": 0, "fixed": 2}),
        ("private", {"shared": 22, "private": 21, "fixed": 2}),
        ("frozen", {"shared": 22, "private": 0, "fixed": 21 + 2}),
    ],
)
def test_row_0_counts_parameters_by_kind_and_by_role(head, expected):
    # A is 5 x 2 and B 2 x 6, with a scale of 2; the head 6 x 3 with a bias.
    algorithm = fedavg(optax.sgd(0.5), head=head)
    options = {"rounds": 1, "clients_per_round": 1, "batch_size": 4}
    row = simulate(toy.model(), algorithm, toy.clients(SIZES), **run_options(**options)).metrics[0]
    assert row["roles"] == expected
    assert row["parameters"] == {"adapter": 22, "head": 21, "frozen": 30}


def test_the_update_norm_is_the_norm_of_a_clients_change():
    start = toy.model().trainable
    alone = simulate(
        toy.model(),
        fedavg(optax.sgd(0.5)),
        toy.clients(SIZES),
        rounds=1,
        clients_per_round=1,
        batch_size=4,
    )
    square = sum(float(((alone.params[n] - start[n]) ** 2).sum()) for n in toy.SHARED)
    assert alone.metrics[1]["update_norm"] == approx(square**0.5, rel=1e-5)


def test_global_and_private_adapters_are_compared_on_the_test_set():
    model = attach(random_model(TINY_BERT, head=heads.classification(4)), peft.dual(size=2))
    data, test = tiny_dataset(24), tiny_dataset(16, seed=1)
    clients = partition.iid(data, clients=2, seed=0)
    options = {"rounds": 1, "clients_per_round": 2, "batch_size": 8, "eval_batch_size": 8}
    result = simulate(
        model,
        fedmatch(optax.sgd(0.1)),
        clients,
        test=test,
        **run_options(diagnostics=["cka"], **options),
    )
    for row in result.metrics:
        assert 0 < row["test_cka"] <= 1 + 1e-5


def test_the_second_classifier_is_tested_on_the_global_adapter_alone():
    config = {**TINY_BERT, "num_hidden_layers": 1}
    model = attach(random_model(config, head=heads.two_classifiers(4)), peft.dual(size=4))
    clients, held = (partition.iid(tiny_dataset(n, seed=n), clients=2) for n in (32, 40))
    run = simulate(
        model,
        fedmcp(optax.adam(1e-2), mu=0.0),
        clients,
        evaluation=Evaluation(client_test=held, diagnostics=["clients", "second_classifier"]),
        rounds=2,
        batch_size=8,
        local_steps=4,
    )
    tests = run.metrics[-1]["client_tests"]
    for client, rows in enumerate(held.indices):
        params = dict(run.client_params(client))
        for name, x in params.items():  # Eq 2: h + f_g(h); a pair of adapters adds half of each
            if ".private_adapter.up." in name or ".global_adapter.up." in name:
                params[name] = 2 * x if ".global_adapter." in name else 0 * x
        batch = {n: x[rows] for n, x in held.data.columns.items()}
        batch["mask"] = np.ones(len(rows), bool)
        logits = model.apply(model.frozen, params, batch, None, False).second
        right = np.mean(np.argmax(logits, -1) == batch["labels"])
        assert tests["accuracy_global"][client] == approx(right)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
        assert tests["loss_global"][client] == approx(float(nats), rel=1e-5)
    assert tests["loss_global"] != tests["loss"]


def test_a_model_without_a_second_classifier_cannot_be_tested_on_it():
    model = attach(random_model(TINY_BERT, head=heads.classification(4)), peft.dual(size=2))
    options = {"rounds": 1, "diagnostics": ["second_classifier"]}
    with pytest.raises(InputError, match=r"heads\.two_classifiers"):
        simulate(
            model,
            fedmatch(optax.sgd(0.1)),
            partition.iid(tiny_dataset(8), 2),
            **run_options(**options),
        )


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("varation", r"no diagnostic 'varation'.*'variation'"),
        ("cka", r"attach dual\(\)"),
        ("second_classifier", r"attach dual\(\)"),
    ],
)
def test_unsupported_diagnostics_are_errors_before_training(wanted, message):
    with pytest.raises(InputError, match=message):
        run(diagnostics=[wanted])


def test_scores_of_every_client_on_its_own_test():
    held = toy.clients([3, 0, 2, 5], seed=1)
    result = run(client_test=held, diagnostics=["clients"])
    for row in result.metrics:
        tests = row["client_tests"]
        assert tests["client"] == [0, 2, 3]
        for metric, values in tests.items():
            if metric != "client":
                assert len(values) == 3
                assert row[f"client_{metric}_mean"] == approx(np.mean(values))
    assert {"accuracy", "loss", "macro_f1"} < tests.keys()
    assert "client_tests" not in run(client_test=held).metrics[-1]
