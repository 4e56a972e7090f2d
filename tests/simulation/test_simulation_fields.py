"""The table of fields contains every field of real rows, with its unit."""

import optax
import pytest
import toy
from options import run_options

import fedjax_peft as fp
from fedjax_peft.simulation import fields

pytestmark = pytest.mark.slow

ADAM = optax.adam(1e-3)
SCHEDULED = fp.schedules.scheduled(ADAM, fp.schedules.constant(warmup=1))
DATA = toy.clients([16] * 4), toy.dataset(16, seed=1)
TEXTS = [fp.testing.tiny_dataset(n, classes=toy.CLASSES) for n in (64, 16)]


def dual():
    return toy.dual_model().replace(method=fp.peft.dual(size=2))


@pytest.mark.parametrize(
    ("make", "data", "algorithm", "options", "expected"),
    [
        (
            toy.lora_model,
            DATA,
            fp.algorithms.fedavg(ADAM, aggregator=fp.aggregators.fra()),
            {
                "diagnostics": ["clients", "local", "variation", "spectrum"],
                "failure_rate": 0.3,
                "deadline": 1e6,
                "late": "partial",
                "local_steps": (1, 2),
                "stop": lambda rows: len(rows) > 1,
                "rounds": 2,
            },
            {
                *("late", "stopped", "spectrum_kept", "per_client.loss", "client_tests.client"),
                *("local_loss_std", "validation_accuracy", "client_validations.accuracy"),
                *("partial", "client_steps"),
            },
        ),
        (
            dual,
            DATA,
            fp.algorithms.fedmcp(ADAM),
            {"diagnostics": ["cka", "second_classifier"], "attack": fp.attacks.sign_flip(0.5)},
            {
                *("client_cka_mean", "client_loss_global_mean", "train_accuracy_global"),
                *("test_accuracy_std", "validation_accuracy_std", "client_loss_worst"),
                *("client_validation_loss_weighted", "hostile"),
            },
        ),
        (
            toy.text_model,
            (fp.partition.iid(TEXTS[0], clients=4), TEXTS[1]),
            fp.algorithms.fedrep(SCHEDULED, tune_epochs=1),
            {"attack": fp.attacks.backdoor(0.5, 1, token=5)},
            {
                *("test_backdoor_success", "test_backdoor_success_std"),
                *("tuned_client_loss_mean", "client_count_unseen", "time.tune_s"),
                *("tuned_client_validation_loss_mean", "tuned_validation_loss"),
                "learning_rate_factor",
            },
        ),
    ],
    ids=["fra", "fedmcp", "fedrep"],
)
@pytest.mark.long("a run with every measurement")
def test_every_field_of_a_run_is_in_the_table(make, data, algorithm, options, expected):
    (train, held_out), test = data[0].holdout(0.25), data[1]
    options = {"rounds": 1, "local_steps": 1, "batch_size": 4, "lanes": 1} | options
    tests = {"test": test, "client_test": held_out}
    tests |= {"validation": test, "client_validation": held_out}
    made = fp.simulate(make(), algorithm, train, **run_options(**tests, **options)).metrics
    names = set().union(*map(fields.field_names, made))
    assert {name for name in names if fields.find(name) is None} == set()
    assert expected <= names, "the run must have the fields that it is here for"
    assert all(0 < row["test_cka"] <= 1 + 1e-5 for row in made if "cka" in str(expected))


def test_names_that_are_no_fields_are_not_found():
    assert fields.find("train_losses") is None
    assert fields.find("client_f1_mean_unseen").name == "client_METRIC_mean"
    assert fields.find("layers.effective_rank.encoder.layer.0").name.endswith("MODULE")
    doubled = {field.name for field in fields.FIELDS}
    assert len(doubled) == len(fields.FIELDS)
