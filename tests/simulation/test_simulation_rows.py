"""Reading, writing and summarising metrics."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from internals import RunRecord, append_metrics, read_metrics, summary
from refusals import refused

from fedjax_peft.simulation.rows import (
    LOWER,
    field_is_lower_better,
    has_ended,
    without_end,
    without_scores,
    write_metrics,
)
from fedjax_peft.simulation.score_names import Score
from fedjax_peft.simulation.summaries import rounds_to, series

ROWS = [
    {"round": 0, "test_accuracy": 0.1, "bytes_up": 0, "bytes_down": 0, "simulated_seconds": 0.0},
    {"round": 1, "bytes_up": 10, "bytes_down": 20, "simulated_seconds": 1.5},
    {"round": 2, "test_accuracy": 0.4, "bytes_up": 10, "bytes_down": 20, "simulated_seconds": 2.0},
    {"round": 3, "test_accuracy": None, "bytes_up": 5, "bytes_down": 20},
    {"round": 4, "test_accuracy": 0.3, "bytes_up": 10, "bytes_down": 20, "simulated_seconds": 1.0},
]


GROUPS = ("", "_seen", "_unseen")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_appended_rows_are_read_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for row in ROWS:
        append_metrics(path, row)
    assert read_metrics(path) == ROWS
    assert path.read_text().count("\n") == len(ROWS)


def test_arrays_become_numbers_and_non_finite_numbers_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    row = {
        "round": 1,
        "loss": np.float32("nan"),
        "accuracy": np.float32(0.5),
        "clients": np.arange(3),
        "time": {"train_s": math.inf},
    }
    append_metrics(path, row)
    assert json.loads(path.read_text()) == {
        "round": 1,
        "loss": None,
        "accuracy": 0.5,
        "clients": [0, 1, 2],
        "time": {"train_s": None},
    }


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_torn_last_line_is_ignored_and_gone_after_the_next_append(tmp_path, cut):
    path = write(tmp_path / "metrics.jsonl", ROWS)
    path.write_bytes(path.read_bytes()[:-cut])
    kept = ROWS if cut == 1 else ROWS[:-1]  # without its newline only, the row is whole
    assert read_metrics(path) == kept
    append_metrics(path, {"round": 5})
    assert read_metrics(path) == [*kept, {"round": 5}]


@pytest.mark.parametrize(
    "line", ['{"round": 1, "te', "[1]", '{"loss": 1}', '{"round": "1"}', "\xff"]
)
def test_a_damaged_earlier_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"round": 0}\n' + line.encode("latin-1") + b'\n{"round": 2}\n')
    refused(r"metrics\.jsonl, line 2 ", read_metrics, path)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ('"clients": 3', "'clients' is 3"),
        ('"dropped": [[1]]', "'dropped'"),
        ('"late": {"a": 1}', "'late'"),
        ('"partial": ["a"]', "'partial'"),
        ('"headline": "a/b"', "'headline' is 'a/b'"),
        ('"headline": ["x"]', "'headline'"),
        ('"headline_better": 1', "'headline_better'"),
        ('"lower_is_better": "loss"', "'lower_is_better'"),
        ('"client_accuracy_mean": "much"', "'client_accuracy_mean'"),
        ('"time": [1]', "'time'"),
        ('"roles": {"shared": "x"}', "'roles'"),
        ('"test_accuracy": "high"', "'test_accuracy' is 'high'"),
        ('"bytes_up": [1]', "'bytes_up'"),
        (f'"anything": [{10**400}]', "beyond 64 bits"),
        ('"x": ' + "[" * 100_000, ""),
        ('"round": -1', "'round' is -1"),
        (f'"round": {2**40}', "'round'"),
    ],
)
def test_a_row_that_was_edited_is_refused_with_its_line_and_field(tmp_path, field, words):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"round": 0}}\n{{"round": 1, {field}}}\n')
    refused(rf"metrics.jsonl, line 2 is not a row.*{words}", read_metrics, path)


def test_a_missing_file_is_an_input_error(tmp_path):
    refused("cannot be read", read_metrics, tmp_path / "metrics.jsonl")


def test_literal_nan_reads_as_none_and_rows_are_sorted_by_round(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 1, "loss": NaN}\n{"round": 0}\n')
    assert read_metrics(path) == [{"round": 0}, {"round": 1, "loss": None}]


def test_replaced_rows_leave_no_scratch_file(tmp_path):
    path = write(tmp_path / "metrics.jsonl", ROWS)
    write_metrics(path, ROWS[:3])
    assert read_metrics(path) == ROWS[:3]
    write_metrics(path, [])
    assert read_metrics(path) == []
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("last", "ended"),
    [
        ({"round": 9}, True),
        ({"round": 4}, False),  # although it was stopped before, and continued
        ({"round": 4, "stopped": "test_accuracy reached 0.8"}, True),
    ],
)
def test_the_last_row_says_whether_a_run_has_ended(last, ended):
    rows = [{"round": 0}, {"round": 3, "stopped": "on_round returned True"}, last]
    assert has_ended(rows, 9) is ended
    assert RunRecord("", Path(), {"rounds": 9}, {}, rows).finished is ended
    assert not has_ended([], 9)


def test_scores_are_the_fields_of_evaluations():
    scores = {
        *("headline", "headline_better", "test_loss", "global_validation_examples", "local_loss"),
        *("client_tests", "client_accuracy_mean", "tuned_client_loss_mean", "tuned_test_loss"),
        *("client_count_seen", "client_validation_examples", "client_f1_worst_unseen"),
    }
    others = {"round", "clients", "client_steps", "train_loss", "per_client", "bytes_up", "stopped"}
    others |= {"client_clusters"}  # of HiLoRA's server
    assert without_scores(dict.fromkeys(scores | others)).keys() == others
    ended = {"tuned_client_loss_mean", "tuned_test_loss", "stopped"}
    assert without_end(dict.fromkeys(scores | others)).keys() == (scores | others) - ended


@pytest.mark.parametrize(
    ("name", "score"),
    [
        ("test_accuracy", Score("test", "accuracy")),
        ("global_test_loss_global", Score("global_test", "loss_global")),
        ("validation_f1_std", Score("validation", "f1", "std")),
        ("test_backdoor_success_seen", Score("test", "backdoor_success", group="seen")),
        ("client_exact_match_mean_unseen", Score("client", "exact_match", "mean", "unseen")),
        ("client_validation_loss_worst", Score("client_validation", "loss", "worst")),
        ("client_loss_worst_tenth_seen", Score("client", "loss", "worst_tenth", "seen")),
        ("client_count_seen", Score("client", "count", group="seen")),
        ("tuned_client_loss_weighted", Score("client", "loss", "weighted", tuned=True)),
        ("tuned_test_accuracy", Score("test", "accuracy", tuned=True)),
        ("train_update_norm_worst", Score("train", "update_norm", "worst")),
        ("local_accuracy", Score("local", "accuracy")),
        *((name, None) for name in ("round", "client_steps", "client_tests", "time.train_s")),
        *((name, None) for name in ("client_clusters", "tests", "tuned_", "global_accuracy", "")),
    ],
)
def test_the_name_of_a_score_is_composed_and_read(name, score):
    assert Score.read(name) == score
    assert score is None or score.name == name


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        ("test_distance", True),
        ("client_validation_distance_mean_seen", True),
        ("test_distance_to_mean", True),  # a second measurement
        ("train_loss_global", True),
        ("test_time_saved", False),  # of a score, only what is declared counts
        ("test_accuracy", False),
        ("client_accuracy_std", True),
        ("test_examples", False),
        ("bytes_up", True),
        ("time.train_s", True),
        ("spectrum_kept", False),
    ],
)
def test_the_direction_of_a_score_is_recorded(name, lower):
    rows = [{"round": 0, LOWER: ["loss", "distance"]}, {"round": 1, "headline": "accuracy"}]
    assert field_is_lower_better(rows, name) == lower


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        ("test_perplexity_std", True),
        ("client_loss_mean", True),
        ("validation_f1", False),
        ("test_depth", True),
    ],
)
def test_rows_without_directions_have_that_of_the_headline(name, lower):
    rows = [{"round": 0, "headline": "depth", "headline_better": "lower"}]
    assert field_is_lower_better(rows, name) == lower


def test_costs_accumulate_over_rounds_that_were_not_evaluated():
    assert series(ROWS, "round", "test_accuracy") == ([0, 2, 4], [0.1, 0.4, 0.3])
    assert series(ROWS, "bytes", "test_accuracy") == ([0, 60, 115], [0.1, 0.4, 0.3])
    assert series(ROWS, "simulated_seconds", "test_accuracy")[0] == [0, 3.5, 4.5]


def test_a_series_without_its_fields_has_no_points():
    assert series(ROWS, "round", "perplexity") == ([], [])
    assert series([{"round": 0, "test_accuracy": 0.1}], "bytes", "test_accuracy") == ([], [])
    assert series([], "bytes", "test_accuracy") == ([], [])


def test_an_unknown_axis_gets_advice():
    refused("'bytes'", series, ROWS, "byte", "test_accuracy")


def test_summary():
    rows = [
        ROWS[0] | {"roles": {"shared": 30, "private": 4, "fixed": 2}},
        *ROWS[1:4],
        ROWS[4]
        | {
            "clients": [1, 2, 3],
            "dropped": [2, 3],
            "slot_utilisation": 0.5,
            "aggregation_error_relative": 0.2,
            "client_accuracy_worst": 0.05,
            "tuned_test_accuracy": 0.5,
            "tuned_client_accuracy_mean": 0.6,
            "tuned_client_accuracy_std": 0.2,
            "time": {"train_s": 2.0, "eval_s": 1.0, "compile_s": None},
        },
    ]
    nothing = {"epsilon", "delta", "aggregation_error", "test_examples", "test_count", "test_std"}
    nothing |= {f"client_{kind}" for kind in ("std", "worst_tenth")}
    nothing |= {f"client_{k}{g}" for k in ("count", "mean", "weighted") for g in GROUPS}
    assert summary(rows) == dict.fromkeys(nothing) | {
        **{"headline": "accuracy", "rounds": 4, "client_rounds": 3, "dropped": 2, "trained": 34},
        **{"final_score": 0.3, "final_round": 4, "best_score": 0.4, "best_round": 2},
        **{"global_score": 0.3, "personal_score": None},
        **{"bytes_up": 35, "bytes_down": 80, "simulated_seconds": 4.5, "wall_seconds": 3.0},
        **{"slot_utilisation": 0.5, "aggregation_error_relative": 0.2, "client_worst": 0.05},
        **{"tuned_score": 0.5, "tuned_client_mean": 0.6, "tuned_client_std": 0.2},
    }


def test_an_earlier_score_is_not_the_final_one_of_a_run_that_diverged():
    rows = [*ROWS[:4], {"round": 4}]
    keys = ("final_score", "final_round", "global_score", "best_score", "best_round")
    assert [summary(rows)[key] for key in keys] == [None, 3, None, 0.4, 2]
    rows[3] = rows[3] | {"test_count": 2, "global_test_accuracy": 0.2}
    assert [summary(rows)[key] for key in keys] == [None, 3, 0.2, 0.4, 2]
    assert summary(rows)["personal_score"] is None


@pytest.mark.parametrize("rows", [[], [{"round": 0}]])
def test_a_summary_without_rows_has_the_same_keys(rows):
    facts = summary(rows)
    assert facts.keys() == summary(ROWS).keys()
    known = ("headline", "rounds", "client_rounds", "dropped")
    assert {facts[key] for key in facts if key not in known} == {None}


def test_rounds_to_a_target():
    assert rounds_to(ROWS, 0.1) == 0
    assert rounds_to(ROWS, 0.3) == 2
    assert rounds_to(ROWS, 0.41) is None
    assert rounds_to([], 0.0) is None
    below = float(np.float32(0.76))
    assert below < 0.76
    assert rounds_to([{"round": 3, "test_accuracy": below}], 0.76) == 3
    assert rounds_to([{"round": 3, "test_accuracy": 0.7599}], 0.76) is None
    losses = [{"round": n, "test_accuracy": x, "test_loss": x} for n, x in enumerate((0.9, 0.5))]
    assert rounds_to(losses, 0.6, "test_loss") == 1, "of another metric than the headline"
