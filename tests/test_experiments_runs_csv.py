"""``experiments/runs_csv.py``: the numbers of every run of a folder."""

import json
import runpy
from pathlib import Path

import pytest
from closeness import approx
from made_runs import read_table

FOLDER = Path(__file__).parents[1] / "experiments"
SCRIPT = runpy.run_path(str(FOLDER / "runs_csv.py"))


def made_run(path: Path, rounds: int) -> None:
    """Writes a run of three planned rounds."""
    rows = [{"round": 0, "test_accuracy": 0.1, "bytes_up": 0}]
    for n in range(1, rounds + 1):
        row = {"round": n, "aggregation_error_relative": n / 10, "bytes_up": 5}
        rows.append(row | ({"test_accuracy": 0.2 * n} if n != 2 else {}))
    path.mkdir(parents=True)
    config = 'name = "fra"\nrounds = 3\nseed = 7\n[optimizer]\nlearning_rate = 0.01\n'
    (path / "config.toml").write_text(config)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_row_for_each_finished_run_or_for_each_round(tmp_path):
    made_run(tmp_path / "study" / "fra", 3)
    made_run(tmp_path / "study" / "unfinished", 2)
    words = [f"mine={tmp_path / 'study'}", "--metrics", "test_accuracy", "--out"]
    SCRIPT["main"]([*words, str(tmp_path / "runs.csv")])
    (row,) = read_table(tmp_path / "runs.csv")
    assert (row["study"], row["method"], row["seed"], row["rounds"]) == ("mine", "fra", "7", "3")
    assert float(row["test_accuracy"]) == approx(0.6)
    assert float(row["test_accuracy_mean"]) == approx(0.4), "round 0 does not count"
    assert [float(row[f"error_{end}"]) for end in ("first", "last")] == approx([0.1, 0.3])
    assert row["bytes_up"] == "15"
    SCRIPT["main"]([*words, str(tmp_path / "rounds.csv"), "--by-round"])
    rows = read_table(tmp_path / "rounds.csv")
    assert [row["round"] for row in rows] == ["0", "1", "2", "3"]
    assert [row["bytes_up"] for row in rows] == ["0", "5", "10", "15"]
    assert [row["test_accuracy"] for row in rows] == ["0.1", "0.2", "", "0.6"]


@pytest.mark.parametrize(("target", "rounds"), [(0.2, 1), (0.3, 3), (0.6, 3), (0.7, 5)])
def test_rounds_to_a_target(tmp_path, target, rounds):
    """Rounds 1 and 3 were evaluated, with .2 and .6; the next evaluation would be in round 5."""
    made_run(tmp_path / "study" / "fra", 3)
    words = [str(tmp_path / "study"), "--metrics", "test_accuracy"]
    words += ["--target", f"test_accuracy={target}", "--out", str(tmp_path / "runs.csv")]
    SCRIPT["main"](words)
    (row,) = read_table(tmp_path / "runs.csv")
    assert row["rounds_to"] == str(rounds)


def test_the_committed_runs_give_the_committed_tables():
    """MiniLM-L3: the accuracy of each method at its chosen rate."""
    rows = read_table(FOLDER / "peft" / "results" / "runs.csv")
    for made in read_table(FOLDER / "peft" / "results" / "minilm_l3.csv"):
        found = [
            float(row["test_accuracy"])
            for row in rows
            if row["study"] in ("minilm_l3", "minilm_l3_seeds")
            and (row["method"], float(row["rate"]))
            == (made["method"], float(made["learning rate"]))
        ]
        assert len(found) == int(made["seeds"])
        assert f"{100 * sum(found) / len(found):.1f}" == made["last round"].split(" ")[0]
