"""The documentation's tables contain every field of real rows."""

import dataclasses

import documented_fields
import optax
import pytest
import toy
from options import run_options

import fedjax_peft as fp

pytestmark = pytest.mark.slow

ADAM = optax.adam(1e-3)
SCHEDULED = fp.schedules.scheduled(ADAM, fp.schedules.constant(warmup=1))
(TRAIN, HELD_OUT), TEST = toy.clients([16] * 4).holdout(0.25), toy.dataset(16, seed=1)
TEST = dataclasses.replace(TEST, notes=("A row was left out.",))
TRIGGERED = fp.attacks.sign_flip(0.5)._replace(triggered=lambda test: test)


@pytest.mark.parametrize(
    ("make", "algorithm", "options", "expected"),
    [
        (
            toy.lora_model,
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
            lambda: toy.dual_model().replace(method=fp.peft.dual(size=2)),
            fp.algorithms.fedmcp(ADAM),
            {"diagnostics": ["cka", "second_classifier"], "attack": fp.attacks.sign_flip(0.5)},
            {
                *("client_cka_mean", "client_loss_global_mean", "train_accuracy_global"),
                *("test_accuracy_std", "validation_accuracy_std", "client_loss_worst"),
                *("client_validation_loss_weighted", "hostile"),
            },
        ),
        (
            toy.lora_model,
            fp.algorithms.fedrep(SCHEDULED, tune_epochs=1),
            {"attack": TRIGGERED},
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
def test_every_field_of_a_run_is_in_the_table(make, algorithm, options, expected):
    options = {"rounds": 1, "local_steps": 1, "batch_size": 4, "lanes": 1} | options
    tests = {"test": TEST, "client_test": HELD_OUT}
    tests |= {"validation": TEST, "client_validation": HELD_OUT}
    made = fp.simulate(make(), algorithm, TRAIN, **run_options(**tests, **options)).metrics
    names = set().union(*map(documented_fields.field_names, made))
    assert made[0]["notes"] == ["A row was left out."]
    assert all("notes" not in row for row in made[1:])
    assert {name for name in names if documented_fields.find(name) is None} == set()
    assert expected <= names, "the run must have the fields that it is here for"
    assert all(0 < row["test_cka"] <= 1 + 1e-5 for row in made if "cka" in str(expected))


def test_names_that_are_no_fields_are_not_found():
    assert documented_fields.find("train_losses") is None
    assert documented_fields.find("client_f1_mean_unseen") == "client_METRIC_mean"
    assert documented_fields.find("layers.effective_rank.encoder.layer.0").endswith("MODULE")
    assert len({*documented_fields.FIELDS}) == len(documented_fields.FIELDS)
