"""Evaluation: the direction of metrics, clients that never trained, and validation examples."""

from types import SimpleNamespace

import numpy as np
import optax
import pytest
import running
import toy
from closeness import approx
from internals import Task, host_rng, seen_clients

import fedjax_peft as fp
from fedjax_peft import InputError, early_stop, tasks
from fedjax_peft.simulation import evaluation
from fedjax_peft.simulation.evaluation import evaluations
from fedjax_peft.simulation.moment import Moment
from fedjax_peft.simulation.rows import headline_is_lower_better
from fedjax_peft.simulation.score_names import is_lower_better, worst

pytestmark = pytest.mark.slow

SIZES = (7, 4, 12, 5, 9)
TRAIN, HELD_OUT = toy.clients(SIZES).holdout(0.4)
TEST, OTHER = toy.dataset(30, seed=5), toy.dataset(21, seed=6)
PERSONAL, SHARED = (
    fp.algorithms.fedavg(optax.sgd(0.5), head="private"),
    fp.algorithms.fedavg(optax.sgd(0.5)),
)
GROUPS = ("", "_seen", "_unseen")


def run(algorithm, rounds=2, **options):
    defaults = {"test": TEST, "client_test": HELD_OUT, "test_clients": 4, "clients_per_round": 1}
    options = {"diagnostics": ["clients"], **defaults, **options}
    return running.run(algorithm, clients=TRAIN, rounds=rounds, **options)


@pytest.fixture(scope="module")
def personal():
    """A run with a private head, in which some clients never train."""
    return run(PERSONAL)


@pytest.mark.parametrize(("ranks", "models"), [(None, 1), ([1, 2], 4)])
@pytest.mark.sample("ranks*")
def test_equal_initial_models_are_evaluated_once(ranks, models):
    """At a learning rate of 0, all four models stay equal: each has its evaluation in round 1."""
    phases = []
    options = {"client_ranks": ranks, "on_phase": phases.append, "validation": HELD_OUT.data}
    start, after = run(fp.algorithms.local(optax.sgd(0.0)), 1, **options).metrics
    for name, data in (("test", TEST), ("validation", HELD_OUT.data)):
        totals = dict[int, int]()
        for phase in phases:
            if phase.name == "evaluating" and phase.details["evaluation"] == name:
                totals[phase.round_index] = phase.total
        assert totals == {0: models * len(data), 1: 4 * len(data)}
        same = [k for k in start if k.startswith(name) and not k.endswith("seen")]
        assert {k: start[k] for k in same} == {k: after[k] for k in same}
        assert {f"{name}_accuracy", f"{name}_loss_std", f"{name}_count"} <= set(same)


@pytest.mark.parametrize(
    ("task", "metric", "lower"),
    [
        ("classification", "accuracy", False),
        ("classification", "macro_f1", False),
        ("classification", "loss", True),
        ("classification", "loss_global", True),
        ("classification", "accuracy_global", False),
        ("tagging", "f1", False),
        ("tagging", "lost_entities", True),
        ("next_token", "perplexity", True),
        ("question_answering", "raw_f1", False),
    ],
)
def test_a_metric_knows_its_direction(task, metric, lower):
    declared = getattr(tasks, task)().lower_is_better
    assert is_lower_better(metric, declared) == lower
    values = np.array([0.8, 0.1, 0.05])
    assert worst(values, metric, declared) == (0.8 if lower else 0.05)


def test_an_algorithm_declares_the_direction_of_its_own_metrics():
    declared = fp.algorithms.fedmcp(optax.sgd(0.1), similarity="cosine").lower_is_better
    assert is_lower_better("cosine_global_private", declared)
    assert not is_lower_better("cosine_global_average", declared)


def test_the_worst_client_of_a_metric_of_the_user():
    """An error rate, an accuracy under another name, and a headline of which less is better."""
    base = tasks.classification()

    def metrics(outputs, batch):
        both = base.metrics(outputs, batch)
        hits, count = both["accuracy"]
        return both | {"accuracy_global": (hits, count), "errors": (count - hits, count)}

    task = Task(base.loss, metrics, headline="errors", lower_is_better=("loss", "errors"))
    result = run(SHARED, 1, task=task, clients_per_round=4)
    row = result.metrics[-1]
    assert len(set(row["per_client"]["errors"])) > 1
    for prefix, values in (("train", row["per_client"]), ("client", row["client_tests"])):
        assert row[f"{prefix}_errors_worst"] == approx(max(values["errors"]))
        assert row[f"{prefix}_accuracy_global_worst"] == min(values["accuracy_global"])
        assert row[f"{prefix}_loss_worst"] == max(values["loss"])
    assert (row["headline"], row["headline_better"]) == ("errors", "lower")
    assert headline_is_lower_better(result.metrics)
    assert {"loss", "errors"} < {*result.metrics[0]["lower_is_better"]}


def test_clients_that_never_trained_have_separate_scores(personal):
    first, last = personal.metrics[0], personal.metrics[-1]
    seen = {c for row in personal.metrics[1:] for c in row["clients"]}
    assert 0 < len(seen) < len(SIZES)
    assert [first[f"client_count{group}"] for group in GROUPS] == [5, 0, 5]
    assert "client_accuracy_mean_seen" not in first
    tests, sizes = last["client_tests"], HELD_OUT.sizes
    values = np.array(tests["accuracy"])
    own = np.isin(tests["client"], list(seen))
    for group, members in zip(GROUPS, (own | True, own, ~own), strict=True):
        assert last[f"client_count{group}"] == members.sum()
        expected = {
            "mean": values[members].mean(),
            "weighted": np.average(values[members], weights=sizes[members]),
            "std": values[members].std(),
            "worst": values[members].min(),
            "worst_tenth": values[members].min(),  # of at most five clients
        }
        for kind, value in expected.items():
            assert last[f"client_accuracy_{kind}{group}"] == approx(value, abs=1e-6)
        worst_loss = np.array(tests["loss"])[members].max()
        assert last[f"client_loss_worst{group}"] == approx(worst_loss, rel=1e-6)


def test_personal_models_on_the_test_set_have_separate_scores_too(personal):
    last = personal.metrics[-1]
    counts = [last[f"test_count{group}"] for group in GROUPS]
    assert counts[0] == 4 == counts[1] + counts[2]
    assert 0 < counts[1] < 4
    both = counts[1] * last["test_accuracy_seen"] + counts[2] * last["test_accuracy_unseen"]
    assert last["test_accuracy"] == approx(both / 4, abs=1e-6)
    assert last["test_examples"] == len(TEST)
    model, columns = running.model(), TEST.columns
    each = []
    for client in host_rng(0, "test clients").permutation(5)[:4]:
        leaves = {**model.trainable, **personal.client_params(client)}
        logits = model.apply(model.frozen, leaves, columns, None, False).logits
        each.append(np.mean(np.argmax(logits, axis=1) == columns["labels"]))
    assert last["test_accuracy"] == approx(np.mean(each), abs=1e-6)
    assert last["test_accuracy_std"] == approx(np.std(each), abs=1e-6)
    assert np.std(each) > 1e-3


def test_the_clients_of_a_common_test_set_are_drawn_by_the_seed():
    session = fp.session(running.model(), PERSONAL, TRAIN)
    how = fp.Evaluation(test_clients=2)
    for seed in range(8):
        found = evaluations(session, TEST, None, how, triggered=None, seed=seed)["test"]
        drawn = host_rng(seed, "test clients").permutation(5)[:2]
        assert sorted(drawn) == found.evaluator.plan.client.tolist()


def test_a_client_whose_upload_was_dropped_has_not_trained():
    rows = [{"round": 0}, {"clients": [1, 2], "dropped": [2]}, {"clients": [3]}]
    assert seen_clients(rows) == {1, 3}


def test_each_row_is_read_once_and_only_for_clients_models(monkeypatch):
    read, known = [], []

    def seen(rows):
        read.append([row["round"] for row in rows])
        return seen_clients(rows)

    def evaluate(*_, seen, **options):
        known.append({*seen})
        yield from ()
        return {}

    monkeypatch.setattr(evaluation, "seen_clients", seen)
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    rows = [{"round": n, "clients": [n]} for n in range(5)]
    for personal in (False, True):
        one = SimpleNamespace(personal=personal)
        scores = evaluation.Scores(None, {"test": one}, fp.Evaluation(every=2), None)
        for n, row in enumerate(rows):
            [*scores(Moment(SimpleNamespace(round_index=n), row, rows[:n]))]
    assert read == [[0], [1, 2], [3, 4]]
    assert known == [set()] * 3 + [{0}, {0, 1, 2}, {0, 1, 2, 3, 4}]


# ------------------------------------------------------------------------------ validation examples


def validated(algorithm=PERSONAL, rounds=3, **options):
    defaults = {"test_clients": 3, "eval_every": 2, "clients_per_round": 2, "lanes": 1}
    return run(algorithm, rounds, **defaults | options)


def without(row, *parts):
    parts = (*parts, "time")
    return {name: value for name, value in row.items() if not any(p in name for p in parts)}


@pytest.fixture(scope="module")
def tested():
    """A run without validation examples."""
    return validated()


@pytest.fixture(scope="module")
def both():
    """A run that validates on its test examples."""
    return validated(validation=TEST, client_validation=HELD_OUT)


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


def test_validation_changes_nothing_else(tested, both):
    for plain, row in zip(tested.metrics, both.metrics, strict=True):
        assert without(row, "validation") == without(plain)


def test_other_examples_have_their_own_metrics():
    a = validated(SHARED, validation=OTHER).metrics[-1]
    b = validated(SHARED, test=OTHER, client_test=None).metrics[-1]
    # Other sets of examples have other programs. A loss is a mean of up to 30 of order one.
    assert a["validation_loss"] == approx(b["test_loss"], rel=1e-5)
    assert abs(a["validation_loss"] - a["test_loss"]) > 1e-3
    assert (a["validation_examples"], a["test_examples"]) == (21, 30)
    alone = validated(SHARED, test=None, client_test=None, validation=OTHER).metrics[-1]
    assert alone["validation_loss"] == approx(a["validation_loss"], rel=1e-5)
    assert "test_loss" not in alone


def test_a_run_stops_on_a_validation_metric():
    # Labels of noise: the validation loss does not improve for long.
    labels = np.random.default_rng(0).permutation(OTHER.labels).astype(np.int32)
    noise = OTHER.take(np.arange(21))
    noise.columns["labels"][:] = labels
    rule = early_stop(metric="validation_loss", patience=1)
    ended = validated(SHARED, 30, validation=noise, stop=rule, eval_every=1).metrics
    assert ended[-1]["stopped"].startswith("validation_loss has not improved")
    assert ended[-1]["validation_loss"] >= min(row["validation_loss"] for row in ended[:-1])
    with pytest.raises(InputError, match="No row of this run has the metric 'validation_loss'"):
        validated(SHARED, 30, stop=rule, eval_every=1)
