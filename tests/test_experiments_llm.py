"""``experiments/llm``: from texts to a base, instructions, a sweep, a figure and a table."""

import csv
import json
import runpy
from pathlib import Path

import pytest

from fedjax_peft.cli import main as cli
from fedjax_peft.config import config
from fedjax_peft.config.sweeps import plan

FOLDER = Path(__file__).parents[1] / "experiments" / "llm"
PRETRAIN, INSTRUCTIONS, FIGURES = (
    runpy.run_path(str(FOLDER / f"{name}.py")) for name in ("pretrain", "instructions", "figures")
)


def test_the_sweep_has_its_methods_and_seeds():
    sweep = plan(config.load(FOLDER / "instructions.toml"))
    found = [(point.method, point.config["seed"]) for point in sweep.points]
    assert found == [(method, seed) for method in FIGURES["METHODS"] for seed in (0, 1, 2)]
    for point in sweep.points:
        assert config.task_of(point.config).generate is not None


def test_documents_join_short_texts():
    documents = PRETRAIN["documents"]
    assert list(documents(["a b", "c\nd", "e" * 20, "f"], 6)) == ["a b\nc d", "e" * 20, "f"]


def test_scores_by_task():
    rows = [
        {"task": task, "messages": [{}, {"content": answer}]}
        for task, answer in [("a", "yes"), ("a", "no"), ("b", "One, two")]
    ]
    assert FIGURES["matches"](["Yes.", "yes", "one two"], rows) == {"all": 2 / 3, "a": 0.5, "b": 1}
    train = [rows[0], rows[0], rows[1], rows[2]]
    assert FIGURES["most_frequent"](train, rows) == {"all": 2 / 3, "a": 0.5, "b": 1}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_from_texts_to_the_table(tmp_path, capsys):
    base = tmp_path / "base"
    small = ["--vocabulary", "300", "--width", "32", "--layers", "1", "--length", "32"]
    small += ["--batch", "4", "--tokens", "1024", "--steps-per-round", "4"]
    PRETRAIN["main"](["--out", str(base), "--texts", "sst2=tiny", "qqp=tiny", *small])
    rows = [json.loads(x) for x in (base / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3  # the start and two rounds
    assert rows[-1]["test_perplexity"] < rows[0]["test_perplexity"]

    checkpoint, data = base / "checkpoint", tmp_path / "instructions"
    sizes = ["--length", "256", "--train", "20", "--held-out", "5"]
    words = ["--out", str(data), "--base", str(checkpoint), *sizes]
    INSTRUCTIONS["main"]([*words, "--data", "sst2=tiny", "20newsgroups=tiny"])
    train = [json.loads(x) for x in (data / "train.jsonl").read_text().splitlines()]
    assert {row["task"] for row in train} == {"sst2", "20newsgroups"}

    sweep, out = tmp_path / "sweep", tmp_path / "out"
    overrides = [f"model.name={checkpoint}", f"data.name={data}", "data.max_length=256"]
    overrides += ["data.packing=256", "rounds=2", "local_steps=2", "eval_every=2"]
    overrides += ["partition.clients=4", "clients_per_round=2", "task.max_new_tokens=4"]
    overrides += ["seed=0,1", "partition.min_size=1"]
    config_path = str(FOLDER / "instructions.toml")
    assert cli.main(["sweep", config_path, *overrides, "--out", str(sweep)]) == 0
    capsys.readouterr()
    FIGURES["main"]([str(sweep), "--data", str(data), "--out", str(out)])
    assert {path.name for path in out.iterdir()} == {
        *(f"exact_match.{form}" for form in ("png", "svg", "pdf", "csv")),
        *(f"by_task.{form}" for form in ("md", "csv", "tex")),
        "answers.md",
    }
    with (out / "by_task.csv").open() as file:
        table = list(csv.reader(file))
    names = [row[0] for row in table[1:]]
    assert names[:3] == ["the base", "always the most frequent answer", "FedAvg over LoRA"]
    assert "```text" in (out / "answers.md").read_text()
