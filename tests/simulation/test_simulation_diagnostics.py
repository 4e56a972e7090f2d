"""Optional diagnostics: the additional fields of a row."""

import numpy as np
import optax
import pytest
import running
import toy
from closeness import approx
from internals import TINY_BERT, real_rows, total
from running import model

import fedjax_peft as fp
from fedjax_peft import InputError, attach, heads, partition, peft, random_model, tasks

pytestmark = pytest.mark.slow

CLIENTS, FEDAVG = toy.clients([9, 4, 0, 13]), fp.algorithms.fedavg(optax.sgd(0.5))


def run(algorithm=FEDAVG, **options):
    return running.run(algorithm, **{"clients": CLIENTS, **options})


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
        # Measuring changes nothing but the program of the round, and so the order of its sums.
        assert other["train_loss"] == approx(row["train_loss"], rel=1e-5)
        assert "per_client" not in other
        assert "effective_rank" not in other
        assert other["update_norm"] == approx(row["update_norm"], rel=1e-5)


def test_a_client_with_nothing_to_measure_has_no_metric():
    clients = toy.clients([9, 1, 13])
    base, labels = tasks.classification(), clients.data.columns["labels"]
    (unmeasured,) = labels[clients.indices[1]]

    def metrics(outputs, batch):
        counted = real_rows(batch, batch["labels"]) & (batch["labels"] != unmeasured)
        hits, count = total(outputs.logits.argmax(-1) == batch["labels"], counted)
        return base.metrics(outputs, batch) | {"others": (hits / 99, count / 99)}

    task = tasks.Task(base.loss, metrics)
    row = run(clients=clients, rounds=1, task=task, diagnostics=["clients"]).metrics[1]
    one, none, other = row["per_client"]["others"]
    assert none is None
    assert row["train_others_worst"] == min(one, other)
    sizes = [(labels[clients.indices[i]] != unmeasured).sum() for i in (0, 2)]
    assert row["train_others"] == approx(np.average([one, other], weights=sizes), rel=1e-5)


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
    row = run(fp.algorithms.fedavg(optax.sgd(0.5), head=head), on_round=lambda row: True).metrics[0]
    assert row["roles"] == expected
    assert row["parameters"] == {"adapter": 22, "head": 21, "frozen": 30}


def test_the_update_norm_is_the_norm_of_a_clients_change():
    alone, start = run(rounds=1, clients_per_round=1), model().trainable
    square = sum(float(((alone.params[n] - start[n]) ** 2).sum()) for n in toy.SHARED)
    assert alone.metrics[1]["update_norm"] == approx(square**0.5, rel=1e-5)


def test_the_second_classifier_is_tested_on_the_global_adapter_alone():
    model = toy.dual_model().replace(method=peft.dual(size=2))
    held = toy.clients([20, 13, 8, 15], seed=1)
    options = {"client_test": held, "diagnostics": ["clients", "second_classifier"]}
    made = run(fp.algorithms.fedmcp(optax.adam(1e-2), mu=0.0), model=model, **options)
    tests = made.metrics[-1]["client_tests"]
    for client, rows in enumerate(held.indices):
        params = dict(made.client_params(client))
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
    options = {"model": model, "clients": partition.iid(fp.testing.tiny_dataset(8), 2)}
    with pytest.raises(InputError, match=r"heads\.two_classifiers"):
        run(fp.algorithms.fedmatch(optax.sgd(0.1)), diagnostics=["second_classifier"], **options)


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
