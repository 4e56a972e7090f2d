"""Scores by class of a run: what it records, and what it computes for other examples."""

import dataclasses

import jax
import numpy as np
import optax
import pandas as pd
import pytest
import toy
from closeness import assert_close
from internals import predict
from refusals import refused
from running import PRIVATE, rows, run
from shallow import simplify
from sklearn.metrics import confusion_matrix, f1_score

import fedjax_peft as fp
from fedjax_peft.simulation.rows import by_class_of

TEST = toy.dataset(30, seed=1)


def test_the_last_row_alone_has_the_counts():
    result = run(test=TEST, eval_every=1, rounds=3)
    assert [("by_class" in row) for row in result.metrics] == [False, False, False, True]
    found = result.scores_by_class()
    assert_close(np.nanmean(found.f1), result.metrics[-1]["test_macro_f1"], rtol=1e-12)
    assert found.support.tolist() == np.bincount(TEST.labels).tolist()
    assert str(result.scores_by_class(TEST)) == str(found)


@pytest.mark.parametrize("last", [2, 3])
def test_a_resumed_run_has_the_rows_of_one_that_was_never_stopped(last, tmp_path):
    """Also where the end of the shorter run is evaluated by the schedule."""
    options = {"test": TEST, "eval_every": 2}
    whole = run(rounds=4, **options)
    run(rounds=last, out=tmp_path, **options)
    again = run(rounds=4, out=tmp_path, resume=True, **options)
    assert rows(again) == rows(whole)


@pytest.mark.parametrize("how", ["rule", "on_round"])
def test_a_run_that_is_stopped_has_them_too(how):
    stop = {"stop": lambda rows: len(rows) > 2} if how == "rule" else {}
    stop |= {"on_round": lambda row: row["round"] == 2} if how == "on_round" else {}
    result = run(rounds=5, test=TEST, eval_every=1, **stop)
    assert [row["round"] for row in result.metrics if "by_class" in row] == [2]
    assert result.metrics[-1]["stopped"]


def test_a_run_that_is_stopped_before_its_first_round_has_them():
    assert "test" in by_class_of(run(test=TEST, on_round=lambda row: True).metrics)


def test_personal_models_are_counted_together():
    train, held = toy.clients([12] * 4).holdout(0.25)
    options = {"client_test": held, "test_clients": 3}
    result = run(PRIVATE, clients=train, test=TEST, **options)
    found = by_class_of(result.metrics)
    assert found.keys() == {"test", "client"}
    chosen = result.metrics[-1]["test_count"]
    assert found["test"].support.sum() == chosen * len(TEST) == 90
    assert found["client"].support.sum() == held.sizes.sum()
    every = [result.scores_by_class(TEST, client=c).matrix for c in range(4)]
    single = [result.predict(TEST, output="labels", client=c) for c in range(4)]
    names = np.array(TEST.label_names)[TEST.labels]
    for matrix, labels in zip(every, single, strict=True):
        expected = confusion_matrix(names, labels, labels=TEST.label_names)
        np.testing.assert_array_equal(matrix, expected)
    refused("private to the clients", result.scores_by_class, TEST)
    refused("single client's model: give labelled examples", result.scores_by_class, client=1)


def test_a_task_without_classes_records_none():
    task = fp.tasks.classification()._replace(by_class=None, name="plain")
    result = run(test=TEST, task=task)
    assert all("by_class" not in row for row in result.metrics)
    refused("recorded no scores by class", result.scores_by_class)
    refused("'plain' has no classes to score", result.scores_by_class, TEST)


def test_a_damaged_record_is_no_record():
    assert by_class_of([{"round": 1, "by_class": {"test": 3, "client": None}}]) == {}
    assert by_class_of([{"round": 1, "by_class": [1]}]) == by_class_of([]) == {}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        simplify(patch)
        yield fp.testing.write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def texts(checkpoint):
    """Returns a run on texts with three classes, and its data."""
    model = fp.load_model(checkpoint, head=fp.heads.classification(3))
    model = fp.attach(model, fp.peft.head_only())
    data = dataclasses.replace(fp.testing.tiny_dataset(24, classes=3), label_names=("a", "b", "c"))
    clients = fp.partition.iid(data, 2)
    how = {"rounds": 1, "local_steps": 2, "placement": fp.Placement(lanes=1)}
    made = fp.simulate(model, fp.algorithms.fedavg(optax.adam(0.05)), clients, test=data, **how)
    return made, data


def test_labels_and_probabilities_are_those_of_the_logits(texts):
    made, data = texts
    for given in (data, ["w1 w2", "w3"], pd.DataFrame({"text": ["w1", "w2 w4"]})):
        logits = made.predict(given)
        labels = made.predict(given, output="labels")
        assert labels.tolist() == [made.model.labels[i] for i in logits.argmax(1)]
        assert {*made.model.labels} == {"a", "b", "c"}
        probabilities = made.predict(given, output="probabilities")
        assert_close(probabilities, jax.nn.softmax(logits), rtol=1e-5)
    assert made.predict([], output="labels").shape == (0,)
    assert made.predict([], output="probabilities").shape == (0, 3)


def test_a_table_is_scored_by_the_names_of_its_labels(texts):
    """Its classes may be in another order, and some may be missing."""
    made, data = texts
    said = [" ".join(f"w{(7 * i + j) % 50}" for j in range(6)) for i in range(9)]
    gold = ["c", "a", "c", "a", "a", "c", "a", "c", "c"]
    found = made.scores_by_class(pd.DataFrame({"label": gold, "text": said}))
    predicted = made.predict(said, output="labels")
    assert_close(
        np.nan_to_num(found.f1),
        f1_score(gold, predicted, labels=["a", "b", "c"], average=None, zero_division=0),
        rtol=1e-12,
    )
    some = {name: x[:4] for name, x in data.columns.items()}
    some["labels"] = np.array([0, 1, 1, 1], np.int32)
    assert made.scores_by_class(fp.Dataset(some, ("c", "a"))).support.tolist() == [3, 0, 1]


def test_data_that_do_not_fit_are_refused(texts):
    made, data = texts
    odd = dataclasses.replace(data, label_names=("a", "b", "z"))
    refused("has the class 'z'", made.scores_by_class, odd)
    refused("is none of the classes", made.scores_by_class, [{"text": "w1", "label": "q"}])
    refused("need labelled examples", made.scores_by_class, ["w1"])
    refused(r"output = 'label' is unknown.*labels", made.predict, ["w1"], output="label")
    refused("leave pairs out", made.predict, data, ["w1"] * 24)
    refused("no examples", made.predict, data.take(np.arange(0)))
    images = fp.Dataset({"pixel_values": np.zeros((2, 3, 4, 4), np.uint8)})
    refused("reads the column 'input_ids'", made.predict, images)


def test_a_model_of_tokens_has_no_labels_of_texts(checkpoint):
    model = fp.load_model(checkpoint, head=fp.heads.token_classification(3))
    with pytest.raises(fp.InputError, match="does not choose one class for a text"):
        predict(model, model.trainable, ["w1"], output="labels", max_length=8)
    assert predict(model, model.trainable, ["w1"], max_length=8).ndim == 3
