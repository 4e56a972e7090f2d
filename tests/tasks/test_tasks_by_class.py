"""Scores by class are those of scikit-learn, and of seqeval for entities by type."""

import numpy as np
import pytest
from closeness import assert_close
from internals import IGNORE, MOST, of_labels
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

import fedjax_peft as fp
from fedjax_peft import tasks
from fedjax_peft.tasks.by_class import ByClass

ROUNDING = {"rtol": 1e-12, "atol": 0}  # quotients of whole numbers in float64


def drawn(seed, classes=6, n=200):
    """Returns (gold, predicted): class 4 has no example, 0 no prediction, 5 has neither."""
    rng = np.random.default_rng(seed)
    gold = rng.choice([0, 1, 2, 3], n).astype(np.int32)
    return gold, np.where(rng.random(n) < 0.6, np.maximum(gold, 1), rng.integers(1, 5, n))


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_scikit_learn(seed):
    gold, predicted = drawn(seed)
    names = tuple("abcdef")
    data = fp.Dataset({"labels": gold}, names)
    found = tasks.classification().by_class({"label": predicted}, data)
    expected = precision_recall_fscore_support(
        gold, predicted, labels=range(6), zero_division=np.nan
    )
    for ours, theirs in zip(
        (found.precision, found.recall, found.f1, found.support), expected, strict=True
    ):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
        assert_close(np.nan_to_num(ours), np.nan_to_num(theirs), **ROUNDING)
    np.testing.assert_array_equal(found.matrix, confusion_matrix(gold, predicted, labels=range(6)))
    assert found.names == names
    assert np.isnan(found.f1[5])
    assert found.precision[4] == 0


def test_the_mean_of_the_f1_is_the_tasks_macro_f1():
    gold, predicted = drawn(7)
    task, data = tasks.classification(), fp.Dataset({"labels": gold}, tuple("abcdef"))
    mean = np.nanmean(task.by_class({"label": predicted}, data).f1)
    assert_close(mean, task.score({}, {"label": predicted}, data)["macro_f1"], **ROUNDING)


def test_entities_are_scored_by_type_as_seqeval_does():
    from seqeval.metrics import classification_report

    names = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER", "B-ORG")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, (12, 9)).astype(np.int32)
    tags = np.where(rng.random(labels.shape) < 0.7, labels, rng.integers(0, 6, labels.shape))
    labels[rng.random(labels.shape) < 0.2] = IGNORE
    found = tasks.tagging().by_class({"tag": tags}, fp.Dataset({"labels": labels}, names))
    seen = labels != IGNORE
    gold, said = (
        [[names[t] for t in row[own]] for row, own in zip(x, seen, strict=True)]
        for x in (labels, tags)
    )
    report = classification_report(gold, said, output_dict=True, zero_division=0)
    assert found.matrix is None
    assert found.names == ("LOC", "PER", "ORG")
    for row in found.rows():
        theirs = report[row["class"]]
        ours = [row["precision"], np.nan_to_num(row["recall"]), row["f1"], row["support"]]
        keys = ("precision", "recall", "f1-score", "support")
        assert_close(np.array(ours), np.array([theirs[key] for key in keys]), **ROUNDING)
    assert found.support[2] == 0


def test_no_entities_at_all():
    data = fp.Dataset({"labels": np.zeros((2, 3), np.int32)}, ("O", "B-LOC"))
    found = tasks.tagging().by_class({"tag": np.zeros((2, 3), np.int32)}, data)
    assert found.support.tolist() == [0]
    assert np.isnan(found.f1).all()


def test_counts_of_two_sets_add_up():
    (gold, predicted), (more, said) = drawn(0), drawn(1)
    names = tuple("abcdef")
    total = of_labels(gold, predicted, names) + of_labels(more, said, names)
    whole = of_labels(np.concatenate([gold, more]), np.concatenate([predicted, said]), names)
    np.testing.assert_array_equal(total.matrix, whole.matrix)
    assert str(total) == str(whole)


def test_a_class_without_a_name_and_many_classes():
    found = of_labels(np.array([0, 1]), np.array([0, 3]), ("a",))
    assert found.names == ("a", "LABEL_1", "LABEL_2", "LABEL_3")
    numbers = np.arange(MOST + 1)
    many = of_labels(numbers, numbers, tuple(map(str, numbers)))
    assert many.matrix is None
    assert many.f1.tolist() == [1.0] * (MOST + 1)


def test_the_text_has_each_class_and_the_matrix():
    text = str(of_labels(np.array([0, 1, 1]), np.array([0, 1, 0]), ("bad\nname", "good")))
    lines = text.splitlines()
    assert lines[1].split() == ["bad", "name", "1", "0.500", "1.000", "0.667"]
    assert lines[2].split() == ["good", "2", "1.000", "0.500", "0.667"]
    assert lines[-1].split() == ["1", "good", "1", "1"]
    assert str(of_labels(np.array([0]), np.array([0]), ("a", "b"))).splitlines()[2].split() == [
        *("b", "0", "-", "-", "-")
    ]


def test_what_is_recorded_is_read_and_damage_is_not():
    found = of_labels(np.array([0, 1, 1]), np.array([0, 1, 0]), ("a", "b"))
    record = found.record()
    assert str(ByClass.read(record)) == str(found)
    damaged = [
        *(None, 3, [], {}, {**record, "support": [1]}, {**record, "right": [1, "x"]}),
        *({**record, "matrix": [[1, 2]]}, {**record, "matrix": 1}, {**record, "classes": None}),
        *({**record, "predicted": [1, -1]}, {**record, "predicted": [1, 0.5]}),
    ]
    assert [ByClass.read(one) for one in damaged] == [None] * len(damaged)
