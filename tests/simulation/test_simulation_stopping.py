"""Early stopping: by a rule on the rows, or by ``on_round``."""

import json

import numpy as np
import pytest
import running
import toy
from internals import Phase, console, read_metrics
from refusals import refused
from running import rows as rows_of

from fedjax_peft import InputError, early_stop

pytestmark = pytest.mark.slow

MODEL, CLIENTS, TEST = toy.model(dropout=0), toy.clients([7, 4, 12]), toy.dataset(20, seed=3)


def run(*, rounds=6, **options):
    options = {"model": MODEL, "clients": CLIENTS, "test": TEST, "batch_size": 64, **options}
    return running.run(rounds=rounds, **options)


def rows(*scores, headline="accuracy", better="higher"):
    first = {"headline": headline, "headline_better": better}
    return [{"round": r, f"test_{headline}": s, **first} for r, s in enumerate(scores)]


@pytest.mark.parametrize(
    ("options", "scores", "expected"),
    [
        ({"target": 0.8}, [0.9], None),  # before training
        ({"target": 0.8}, [0.9, 0.7], None),
        ({"target": 0.8}, [0.1, 0.8], "test_accuracy reached 0.8"),
        ({"target": 0.76}, [0.1, float(np.float32(0.76))], "test_accuracy reached 0.76"),
        ({"patience": 2}, [0.1, 0.3, 0.2], None),
        ({"patience": 2}, [0.1, 0.3, 0.2, 0.3], "test_accuracy has not improved in 2 evaluations"),
        ({"patience": 2}, [0.1, 0.3, 0.2, 0.4], None),
        ({"patience": 1}, [0.3, None], "test_accuracy has not improved in 1 evaluations"),
        ({"patience": 1, "min_delta": 0.1}, [0.3, 0.35], "has not improved"),
        ({"patience": 1, "better": "lower"}, [0.3, 0.35], "has not improved"),
    ],
)
def test_targets_and_patience(options, scores, expected):
    reason = early_stop(**options)(rows(*scores))
    assert reason is None if expected is None else expected in reason


def test_less_of_a_loss_is_better():
    found = rows(3.0, 2.0, headline="perplexity", better="lower")
    assert early_stop(target=2.5)(found) == "test_perplexity reached 2.5"
    assert early_stop(target=1.5)(found) is None
    for name in ("test_loss", "test_errors", "validation_rmse"):
        rising = [{**row, name: 1.0 + row["round"]} for row in rows(0.1, 0.2)]
        assert name in early_stop(patience=1, metric=name)(rising)


def test_fields_of_tables_and_of_the_global_model_are_found():
    slower = [{**row, "time": {"train_s": 1.0 + row["round"]}} for row in rows(0.1, 0.2)]
    missed = "time.train_s has not improved in 1 evaluations"
    assert early_stop(patience=1, metric="time.train_s")(slower) == missed
    shared = early_stop(target=0.2, metric="global_test_accuracy")  # without personal models
    assert shared(slower) == "global_test_accuracy reached 0.2"
    refused("'time.train_s'", early_stop(target=1, metric="time.train"), slower)


def test_rules_that_cannot_be_are_refused():
    for options, complaint in (
        ({}, "a target, a patience, or both"),
        ({"patience": 0}, "patience = 0"),
        ({"patience": 1, "min_delta": -1}, "min_delta = -1"),
        ({"patience": 1, "better": "more"}, "better = 'more'"),
    ):
        refused(complaint, early_stop, **options)
    with pytest.raises(InputError, match="No row of this run has the metric 'test_acuracy'"):
        early_stop(target=1, metric="test_acuracy")(rows(0.1, 0.2))


def test_on_round_ends_a_run_with_its_final_evaluation_and_checkpoint(tmp_path):
    straight, out = run(eval_every=4), tmp_path / "run"
    seen = []

    def on_round(row):
        seen.append(row["round"])
        return np.bool_(row["round"] == 3)

    stopped = run(eval_every=4, out=out, on_round=on_round, checkpoint_every=2)
    assert seen == [0, 1, 2, 3]
    last = stopped.metrics[-1]
    assert (last["round"], last["stopped"]) == (3, "on_round returned True")
    assert last["train_loss"] == straight.metrics[3]["train_loss"]
    assert "test_accuracy" not in straight.metrics[3]
    assert "test_accuracy" in last
    assert read_metrics(out / "metrics.jsonl")[-1] == json.loads(json.dumps(last))
    assert (out / "checkpoints" / "3").is_dir()
    assert (out / "params.safetensors").exists()
    # A resume goes on, to the same numbers.
    again = run(eval_every=4, out=out, resume=True, checkpoint_every=2)
    for name, value in straight.params.items():
        np.testing.assert_array_equal(again.params[name], value)
    assert "stopped" not in again.metrics[-1]


@pytest.mark.parametrize("answer", [None, 1, "yes", False])
def test_on_round_ends_a_run_by_returning_true_only(answer):
    assert len(run(rounds=2, on_round=lambda row: answer).metrics) == 3


def test_a_run_may_end_before_training(tmp_path):
    stopped = run(out=tmp_path / "run", on_round=lambda row: True)
    assert [row["round"] for row in stopped.metrics] == [0]
    assert (tmp_path / "run" / "checkpoints" / "0").is_dir()
    for name, value in MODEL.trainable.items():
        np.testing.assert_array_equal(stopped.params[name], value)


def test_a_rule_ends_a_run_where_a_resumed_one_ends(tmp_path):
    straight = run(checkpoint_every=1)
    losses = [row["train_loss"] for row in straight.metrics[1:]]
    target = losses[3] + 1e-5  # of round 4
    assert min(losses[:3]) > target + 1e-5
    options = {
        "stop": early_stop(target=target, metric="train_loss"),
        "eval_every": 6,
        "checkpoint_every": 2,
    }
    whole = run(out=tmp_path / "whole", **options)
    assert whole.metrics[-1]["round"] == 4
    assert whole.metrics[-1]["stopped"].startswith("train_loss reached")
    assert whole.metrics[-1]["test_loss"] == straight.metrics[4]["test_loss"]
    out, phases = tmp_path / "run", []
    with pytest.raises(KeyboardInterrupt):
        run(out=out, on_round=running.interrupt(3), **options)
    again = run(out=out, resume=True, on_phase=phases.append, **options)
    assert rows_of(again) == rows_of(whole)
    assert phases[-1].details["stopped"] == whole.metrics[-1]["stopped"]
    # A run that has ended stays so; another rule may let it go on.
    assert len(run(out=out, resume=True, **options).metrics) == 5
    assert len(run(out=out, resume=True, checkpoint_every=2, eval_every=6).metrics) == 7


@pytest.mark.parametrize(
    "interruption",
    [{"on_round": lambda row: row["round"] == 2}, {"rounds": 2}],
    ids=["asked", "rounds"],
)
def test_the_evaluation_of_an_interruption_does_not_count(interruption, tmp_path):
    rule = early_stop(patience=2, metric="test_loss", min_delta=100.0)  # nothing improves
    options = {"stop": rule, "eval_every": 3, "rounds": 8}
    whole = run(out=tmp_path / "whole", **options)
    assert whole.metrics[-1]["round"] == 6
    first = run(out=tmp_path / "run", **{**options, **interruption})
    assert first.metrics[-1]["round"] == 2
    assert "test_loss" in first.metrics[-1]
    run(out=tmp_path / "run", resume=True, **options)
    found, expected = (
        [{**row, "time": 0} for row in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("run", "whole")
    )
    assert found == expected


def test_a_resume_with_fewer_evaluations_keeps_those_that_were_due(tmp_path):
    first = run(rounds=2, out=tmp_path / "run")
    run(rounds=4, out=tmp_path / "run", resume=True, eval_every=3)
    found = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert ["test_loss" in row for row in found] == [True] * 5
    assert found[2]["test_loss"] == first.metrics[2]["test_loss"]


def test_the_command_line_prints_the_reason_for_stopping(tmp_path, capsys):
    with console.screen("mine", "", 9, tmp_path / "metrics.jsonl") as screen:
        screen(Phase("finished", 4, 9, details={"stopped": "test_f1 reached 0.8"}))
    assert "mine  stopped after round 4: test_f1 reached 0.8" in capsys.readouterr().out
