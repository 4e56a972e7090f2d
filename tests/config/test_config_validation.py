"""The keys of a config that say what is evaluated to choose settings by."""

import pytest
from internals import DATASETS, explicit, read_config
from internals import config as configs
from refusals import refused
from small_config import small

import fedjax_peft as fp
from fedjax_peft.config import labels

pytestmark = pytest.mark.usefixtures("simple_encoder")

TASKS = DATASETS["glue_silo"].parts
QUARTER = {"name": "sst2", "validation_share": 0.25}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(fp.testing.write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def resolved(checkpoint):
    """Returns a function that resolves a config of a tiny model and a stand-in."""

    def make(data, evaluation=(), **keys):
        tables = {"data": {"source": "tiny", **data}, "model": {"name": checkpoint}}
        tables |= {"local_steps": 1, "clients_per_round": 2, "placement": {"lanes": 1}}
        tables |= {"evaluation": {"every": 5, **dict(evaluation)}, "peft": "head_only"}
        return configs.resolve(small(**tables | keys))

    return make


def evaluated(config):
    data, clients = configs.federation(config)
    clients, found = configs.evaluation_data(config, data, clients)
    return data, clients, {name: x for name, x in found.items() if x is not None}


@pytest.mark.slow
def test_a_validation_split_is_evaluated_and_recorded(resolved, tmp_path):
    config = resolved({"name": "sst2", "validation_share": 0.1})
    rows = configs.run(config, out=tmp_path / "run").metrics
    assert {"validation_accuracy", "validation_loss"} <= rows[-1].keys()
    assert rows[-1]["validation_examples"] == 12
    assert read_config(tmp_path / "run")["validation"] == "10 % of train"
    again = configs.run(config, out=tmp_path / "run", resume=True).metrics
    assert [{**row, "time": 0} for row in again] == [{**row, "time": 0} for row in rows]
    recorded = configs.resolve_recorded(read_config(tmp_path / "run"))
    assert recorded["data"]["validation_share"] == 0.1


@pytest.mark.parametrize(
    ("data", "keys", "names", "kind"),
    [
        ({"name": "sst2"}, {}, {"test"}, None),
        ({"name": "wnut17"}, {}, {"test", "validation"}, "official"),
        ({"name": "wnut17"}, {"global_validation": False}, {"test"}, "official"),
        (QUARTER, {"global_test": False}, set(), "25 % of train"),
        (
            QUARTER,
            {"global_test": False, "global_validation": True, "client_holdout": 0.2},
            {"validation", "client_test"},
            "25 % of train",
        ),
        (
            {"name": "sst2"},
            {"client_validation_holdout": 0.1},
            {"test", "client_validation"},
            "10 % of each client's examples",
        ),
    ],
)
def test_what_is_evaluated(resolved, data, keys, names, kind):
    config = resolved(data, keys)
    splits, _, found = evaluated(config)
    assert found.keys() == names
    assert explicit(config, splits)["validation"] == kind


def test_held_out_examples_are_disjoint(resolved):
    keys = {"client_holdout": 0.2, "client_validation_holdout": 0.25}
    _, clients, found = evaluated(resolved({"name": "sst2"}, keys))
    parts = (clients, found["client_test"], found["client_validation"])
    assert [set(part.sizes.tolist()) for part in parts] == [{18}, {6}, {6}]
    rows = [row for part in parts for own in part.indices for row in own.tolist()]
    assert sorted(rows) == list(range(120))


@pytest.mark.parametrize("split", ["6:2:2", "fedpetuning"])
def test_six_tasks_are_tested_and_validated_on_their_own_examples(resolved, split):
    config = resolved(
        {"name": "glue_silo", "split": split, "validation_examples": 5},
        {"client_test": True, "client_validation": True, "global_test": False},
        partition={"name": "natural", "by": "task"},
    )
    splits, clients, found = evaluated(config)
    assert found.keys() == {"client_test", "client_validation"}
    assert sorted(clients.names) == sorted(TASKS)
    assert found["client_validation"].names == clients.names
    assert found["client_validation"].sizes.tolist() == [5] * 6
    assert explicit(config, splits)["validation"] == f"a part of the split {split}"


@pytest.mark.slow
def test_a_run_of_six_tasks(resolved):
    keys = {"client_test": True, "client_validation": True, "global_test": False}
    config = resolved(
        {"name": "glue_silo", "validation_examples": 5, "test_examples": 5},
        keys,
        partition={"name": "natural", "by": "task"},
    )
    row = configs.run(config).metrics[-1]
    assert {"client_accuracy_mean", "client_validation_accuracy_mean"} <= row.keys()
    assert row["client_validation_count"] == 6
    assert not any(name.startswith(("validation_", "test_")) for name in row)


@pytest.mark.parametrize(
    ("keys", "partition", "message"),
    [
        (
            {"client_validation": True},
            {},
            r"validation examples.*evaluation.client_validation_holdout = 0.1",
        ),
        (
            {"client_validation": True, "client_validation_holdout": 0.1},
            {"name": "natural"},
            r"client_validation = true and evaluation.client_validation_holdout exclude each other",
        ),
        (
            {"global_validation": True},
            {},
            r"global_validation = true needs .*'sst2' has none.* = 0.1",
        ),
        (
            {"client_validation": True},
            {"name": "natural", "by": "x"},
            r"client_validation = true needs a validation split",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(resolved, keys, partition, message):
    more = {"partition": partition} if partition else {}
    refused(message, configs.federation, resolved({"name": "sst2"}, keys, **more))


@pytest.mark.parametrize(
    ("partition", "more", "remedies"),
    [
        ({"name": "iid", "clients": 2}, {}, ["evaluation.client_holdout = 0.2"]),
        (
            {"name": "natural"},
            {"diagnostics": ["spectrum", "clients"]},
            ["evaluation.client_test = true", "evaluation.client_holdout = 0.2"],
        ),
    ],
)
def test_scores_of_each_client_need_tests_of_their_own(partition, more, remedies):
    """Without them, a run records the training of each client, and says so before it begins."""
    asked = {"diagnostics": ["clients"]} | more
    (notice,) = labels.notices("", configs.resolve(small(partition=partition, evaluation=asked)))
    assert "no scores" in notice
    assert all(remedy in notice for remedy in remedies)
    assert ("client_test = true" in notice) == (partition["name"] == "natural")


@pytest.mark.parametrize("key", ["client_holdout", "client_validation_holdout"])
def test_any_tests_of_the_clients_are_enough_for_their_scores(key):
    asked = {"diagnostics": ["clients"], key: 0.2}
    assert not [*labels.notices("", configs.resolve(small(evaluation=asked)))]


def test_a_recorded_run_without_them_is_still_read():
    resolved = configs.resolve(small())
    resolved["evaluation"]["diagnostics"] = ["clients"]
    assert configs.resolve_recorded(resolved)["evaluation"]["diagnostics"] == ["clients"]
