"""Classification: sums over real rows, macro F1, and the task of a data set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import approx, assert_close
from sklearn.metrics import f1_score

import fedjax_peft as fp
from fedjax_peft import tasks

LOGITS = jnp.array([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0], [2.0, 2.5, 4.0]])
BATCH = {"labels": jnp.array([1, 0, 2])}


def outputs(logits=LOGITS):
    return fp.contracts.Outputs(logits, logits)


def score(gold, predicted, classes=5):
    data = fp.Dataset({"labels": np.array(gold, np.int32)}, tuple("abcde"[:classes]))
    return tasks.classification().score({}, {"label": np.array(predicted, np.int32)}, data)


def test_loss_and_accuracy():
    task = tasks.classification()
    total, count = task.loss(outputs(), BATCH)
    expected = -jax.nn.log_softmax(LOGITS)[jnp.arange(3), BATCH["labels"]]
    assert_close(total, expected.sum(), rtol=1e-6)
    metrics = task.metrics(outputs(), BATCH)
    assert metrics["loss"] == (total, count)
    assert [float(x) for x in metrics["accuracy"]] == [2, 3]


def test_masked_rows_have_no_effect_even_with_nan():
    logits = LOGITS.at[1].set(jnp.nan)
    batch = {"labels": BATCH["labels"].at[1].set(-100), "mask": jnp.array([True, False, True])}
    task, some = tasks.classification(), jnp.array([0, 2])

    def loss(logits, batch):
        return task.loss(outputs(logits), batch)[0]

    assert_close(loss(logits, batch), loss(LOGITS[some], {"labels": BATCH["labels"][some]}))
    assert float(task.loss(outputs(logits), batch)[1]) == 2
    accuracy = task.metrics(outputs(logits), batch)["accuracy"]
    assert [float(x) for x in accuracy] == [2, 2]
    assert np.isfinite(jax.grad(loss)(LOGITS, batch)).all()


def test_classes_of_other_tasks_are_ruled_out_in_predictions_too():
    batch = {**BATCH, "classes": jnp.array([3, 2, 2])}
    predicted = tasks.classification().predict(outputs(), batch)["label"]
    assert predicted.tolist() == [1, 0, 1]
    assert predicted.dtype == jnp.int32


@pytest.mark.parametrize("seed", range(5))
def test_macro_f1_equals_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    gold, predicted = rng.integers(0, 4, 30), rng.integers(1, 5, 30)
    expected = f1_score(gold, predicted, average="macro", zero_division=0)
    assert score(gold, predicted)["macro_f1"] == approx(expected, abs=1e-12)
    assert score([0, 0, 3], [0, 0, 3]) == {"macro_f1": 1.0}, "classes that nobody has do not count"


def test_the_task_of_a_data_set():
    columns = {"labels": np.zeros(2, np.int32)}
    for name in ("classification", "image_classification", "tagging", "next_token"):
        task = tasks.for_data(fp.Dataset(columns, ("a",), task=name))
        assert task == getattr(tasks, name)()
    assert tasks.for_data(fp.Dataset(columns, ("a",), task="question_answering")).headline == "f1"
    with pytest.raises(fp.InputError, match=r"data set 'x' .*'taging'.* Did you mean 'tagging'"):
        tasks.for_data(fp.Dataset(columns, ("a",), "x", "taging"))
