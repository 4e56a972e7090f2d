"""``experiments/llm``: from texts to a base, instructions, a sweep, a figure and a table."""

import itertools
import json
import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
from closeness import approx
from internals import Cell, Table, cli, config, plan
from made_runs import read_table
from shallow import no_drawings  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_drawings")

FOLDER = Path(__file__).parents[1] / "experiments" / "llm"
PRETRAIN, INSTRUCTIONS, FIGURES, PREFERENCES = (
    runpy.run_path(str(FOLDER / f"{name}.py"))
    for name in ("pretrain", "instructions", "figures", "preferences")
)

GROUPS = """
alt.atheism comp.graphics comp.os.ms-windows.misc comp.sys.ibm.pc.hardware comp.sys.mac.hardware
comp.windows.x misc.forsale rec.autos rec.motorcycles rec.sport.baseball rec.sport.hockey sci.crypt
sci.electronics sci.med sci.space soc.religion.christian talk.politics.guns talk.politics.mideast
talk.politics.misc talk.religion.misc
"""
"""All groups of 20 Newsgroups."""


def test_the_sweeps_have_their_methods_and_seeds():
    smollm2 = config.methods(config.load(FOLDER / "smollm2.toml"))
    assert smollm2.keys() == {"fedavg", "fra", "federa"}
    rates = {name: [3e-3, 6e-3, 1.2e-2] for name in FIGURES["METHODS"] if name != "federa"}
    rates["ffa"] = rates["fedsvd"] = [3e-3, 6e-3, 1.2e-2, 2.4e-2]
    for name, expected in {"instructions": {"fedavg": [6e-3]}, "methods": rates}.items():
        sweep = plan(config.load(FOLDER / f"{name}.toml"))
        found: dict[str, list] = {}
        for point in sweep.points:
            rate = point.config["optimizer"]["learning_rate"]
            found.setdefault(point.method, []).append((rate, point.config["seed"]))
            assert config.task_of(point.config).generate is not None
            assert point.config["task"]["max_new_tokens"] == FIGURES["TOKENS"]
        assert found.keys() == expected.keys()
        for method, points in found.items():
            assert sorted(points) == list(itertools.product(expected[method], (0, 1, 2)))


def test_preferences_obey_the_request_and_have_two_methods():
    rows = PREFERENCES["rows_of"](np.random.default_rng(0), 40)
    for row in rows:
        assert row["chosen"].isupper() == row["prompt"].endswith("capitals.")
        assert row["rejected"] == row["chosen"].swapcase()
    assert [*Counter(row["request"] for row in rows).values()] == [20, 20]
    points = plan(config.load(FOLDER / "preferences.toml")).points
    seeds = itertools.product(("centralised", "feddpo"), (0, 1, 2))
    assert sorted((x.method, x.config["seed"]) for x in points) == list(seeds)
    assert {config.task_of(x.config).name for x in points} == {"preference"}


def test_documents_join_short_texts():
    documents = PRETRAIN["documents"]
    assert list(documents(["a b", "c\nd", "e" * 20, "f"], 6)) == ["a b\nc d", "e" * 20, "f"]


def test_answers_are_parts_of_labels():
    subjects = [INSTRUCTIONS["subject"](group) for group in GROUPS.split()]
    counts = {"computers": 5, "recreation": 4, "science": 4, "politics": 3, "religion": 3}
    assert Counter(subjects) == counts | {"for sale": 1}
    assert INSTRUCTIONS["relation"]("Cause-Effect(e1,e2)") == "Cause-Effect"
    assert INSTRUCTIONS["relation"]("Other") == "Other"


def test_texts_are_cut_and_labels_replaced():
    table = Table("here", {"text": ["a  b\nc " * 20, "d"], "label": ["Other", "A-B(e2,e1)"]})
    made = INSTRUCTIONS["prepared"](table, INSTRUCTIONS["relation"])
    assert made.columns == {"text": ["a b c " * 9 + "a b c", "d"], "label": ["Other", "A-B"]}


def test_scores_by_task():
    rows = [
        {"task": task, "messages": [{}, {"content": answer}]}
        for task, answer in [("a", "yes"), ("a", "no"), ("b", "One, two")]
    ]
    right = FIGURES["matches"](["Yes.", "yes", "one two"], rows)
    assert right == [1, 0, 1]
    assert FIGURES["shares"](right, rows) == {"all": 2 / 3, "a": 0.5, "b": 1}
    train = [rows[0], rows[0], rows[1], rows[2]]
    assert FIGURES["most_frequent"](train, rows) == [1, 0, 1]


def test_the_table_compares_with_the_most_frequent_answer():
    record = SimpleNamespace(config={"optimizer": {"learning_rate": 0.1}})
    cells = {"fedavg": Cell("fedavg", {}, {0: record, 1: record})}
    scores = {"fedavg": {0: {"all": 0.5}, 1: {"all": 0.7}}}
    fixed = {"the base": {"all": 0.0}, FIGURES["FREQUENT"]: {"all": 0.35}}
    made = FIGURES["table"](cells, scores, fixed)
    assert made.rows[-1][2] == "60.0 ± 14.1"
    assert made.rows[-1][3].startswith("+25.0 [")


def test_one_seed_is_compared_by_prompts():
    record = SimpleNamespace(config={"optimizer": {"learning_rate": 0.1}})
    right = {FIGURES["FREQUENT"]: [1, 0, 0, 0], "fedavg": [1, 1, 0, 0], "fra": [1, 1, 1, 0]}
    cells = {name: Cell(name, {}, {0: record}) for name in ("fedavg", "fra")}
    scores = {name: {0: {"all": np.mean(right[name])}} for name in cells}
    made = FIGURES["table"](cells, scores, {FIGURES["FREQUENT"]: {"all": 0.25}}, right)
    expected = scipy.stats.ttest_1samp([0, 1, 0, 0], 0).confidence_interval(0.95)
    interval = f"[{100 * expected.low:+.1f}, {100 * expected.high:+.1f}]"
    assert [row[3] for row in made.rows[1:]] == [f"+25.0 {interval}", "+50.0 [-41.9, +141.9]"]
    assert made.rows[2][4] == f"+25.0 {interval}"
    assert "paired by prompt" in made.notes[0]


def test_differences_with_an_interval_are_drawn(tmp_path):
    scores = {name: {s: {"all": x + up * s} for s in (0, 1)} for name, x, up in METHODS}
    FIGURES["draw_differences"](scores, tmp_path / "differences")
    (only,) = read_table(tmp_path / "differences.csv")
    assert only["method"] == "FFA-LoRA", "that of fra is the same with both seeds"
    assert float(only["points"]) == approx(15.0)


METHODS = (("fedavg", 0.5, 0.0), ("ffa", 0.6, 0.1), ("fra", 0.4, 0.0))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.long("a whole experiment, from pretraining to its table")
def test_from_texts_to_the_table(tmp_path, capsys):
    base = tmp_path / "base"
    small = ["--vocabulary", "300", "--width", "32", "--layers", "1", "--length", "32"]
    small += ["--batch", "4", "--tokens", "1024", "--steps-per-round", "4"]
    PRETRAIN["main"](["--out", str(base), "--texts", "sst2=tiny", "qqp=tiny", *small])
    rows = [json.loads(x) for x in (base / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3  # the start and two rounds
    assert rows[-1]["test_perplexity"] < rows[0]["test_perplexity"]

    checkpoint, data = base / "checkpoint", tmp_path / "instructions"
    sizes = ["--length", "128", "--train", "20", "--validation", "5", "--test", "5"]
    words = ["--out", str(data), "--base", str(checkpoint), *sizes]
    INSTRUCTIONS["main"]([*words, "--data", "sst2=tiny", "semeval2010_task8=tiny"])
    train = [json.loads(x) for x in (data / "train.jsonl").read_text().splitlines()]
    assert {row["task"] for row in train} == {"sst2", "semeval2010_task8"}

    sweep, out = tmp_path / "sweep", tmp_path / "out"
    tiny = [f"model.name={checkpoint}", f"data.name={data}", "data.max_length=128"]
    tiny += ["data.packing=256", "task.max_new_tokens=20", "partition.clients=4"]
    tiny += ["partition.min_size=1", "clients_per_round=2", "rounds=2", "local_steps=2"]
    tiny += ["evaluation.every=2", "seed=0..0", "optimizer.learning_rate=6e-3"]
    tiny += ["peft.rank=2", 'peft.targets=["q_proj"]']
    words = ["sweep", str(FOLDER / "methods.toml"), *tiny, "--only", "fedavg"]
    assert cli.main([*words, "--out", str(sweep)]) == 0
    capsys.readouterr()
    FIGURES["main"]([str(sweep), "--data", str(data), "--out", str(out)])
    assert {path.name for path in out.iterdir()} == {
        *(f"exact_match.{form}" for form in ("png", "svg", "pdf", "csv")),
        *(f"by_task.{form}" for form in ("md", "csv", "tex")),
        "answers.md",
    }
    names = [row["method"] for row in read_table(out / "by_task.csv")]
    assert names == ["the base", "always the most frequent answer", "FedAvg over LoRA"]
    assert "```text" in (out / "answers.md").read_text()
