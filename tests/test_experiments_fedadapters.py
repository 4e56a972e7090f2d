"""The configs of FedAdapters' experiments, and the script that makes its tables and figures."""

import itertools
import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from closeness import approx, assert_close, roughly
from internals import config as configs
from internals import read_toml
from made_runs import columns, read_table, resolved, write_sweep
from shallow import no_drawings  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_drawings")

FOLDER = Path(__file__).parents[1] / "experiments/fedadapters"
PAPER = sorted(FOLDER.glob("paper/*.toml"))
SMALL = sorted(FOLDER.glob("small/*.toml"))
RATES = [5e-3, 1e-3, 5e-4, 1e-4]
"""Of the paper's Table 1."""


def test_there_is_a_config_for_every_table():
    tables = [("stack_overflow", "shakespeare", "emnist", "cifar100"), ("natural", "grouped")]
    expected = {f"{data}_{clients}" for data in tables[0] for clients in tables[1]}
    assert {path.stem for path in PAPER} == expected


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_configs_of_the_paper(path):
    sweep, found = read_toml(path)["sweep"], resolved(path)
    text = path.stem.startswith(("stack", "shake"))
    assert sweep["grid"]["optimizer.learning_rate"] == RATES
    scratch = ["rnn", "lstm"] if text else ["cnn"]
    assert [*found] == [*scratch, "full", "pfeiffer", "lora", "houlsby"]
    for name, config in found.items():
        assert config["optimizer"]["name"] == "adam"
        assert config["optimizer"]["eps"] == 5e-4
        assert (config["rounds"], config["batch_size"]) == ((30, 16) if text else (50, 12))
        assert (config["epochs"], config["local_steps"], config["sampling"]) == (5, None, "all")
        assert config["time"]["preset"] == "fedadapters"
        assert (config["model"]["config"] is None) == (name not in scratch)
    if text:
        assert found["rnn"]["data"]["vocabulary"] == 54_175
    else:
        assert found["cnn"]["model"]["config"]["channels"] == [16, 96, 256]


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_small_configs(path):
    raw, found = read_toml(path), resolved(path)
    if path.stem != "pretrain":
        assert set(raw["sweep"]["grid"]["optimizer.learning_rate"]) <= set(RATES)
        assert len(raw["sweep"]["grid"]["optimizer.learning_rate"]) >= 3
        assert len(raw["sweep"]["grid"]["seed"]) >= 3
        assert raw["sweep"]["choose_by"] == "validation_accuracy"
        assert raw["data"]["validation_share"] == 0.1
        points = len(found) * 9
        assert f"# {points} points" in path.read_text()
    assert "data.source=DIR" in path.read_text()
    for config in found.values():
        assert config["sampling"] == "all"


@pytest.mark.parametrize("name", ["fashion_mnist_natural", "fashion_mnist_grouped"])
def test_clients_in_place_of_users(name):
    path = FOLDER / f"small/{name}.toml"
    config = resolved(path, "data.source=tiny", "data.test_examples=")["cnn"]
    data, clients = configs.federation(config)
    assert len(clients) == 9
    rows = np.concatenate(clients.indices)
    assert len(set(rows.tolist())) == len(rows)
    assert (len(rows) == len(data["train"])) == name.endswith("grouped")


def test_merged_clients_contain_the_natural_ones():
    tiny = "data.source=tiny", "data.test_examples="
    nine, merged = (
        configs.federation(resolved(FOLDER / f"small/fashion_mnist_{x}.toml", *tiny)["cnn"])[1]
        for x in ("natural", "grouped")
    )
    groups = [set(rows.tolist()) for rows in merged.indices]
    assert all(any(set(rows.tolist()) <= group for group in groups) for rows in nine.indices)


def test_pretraining_has_none_of_the_federations_users(tmp_path):
    sizes = {f"role {i}": 2 + 5 * (i % 2) for i in range(8)}
    rows = [{"client": name, "text": f"a {i}"} for name, n in sizes.items() for i in range(n)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = f"data.source={tmp_path}"
    path = FOLDER / "small/pretrain.toml"
    config = resolved(path, source, "data.test_examples=", "partition.below=5")[""]
    data, pretraining = configs.federation(config)
    names = set(data["train"].meta["client"][pretraining.indices[0]])
    assert names == {name for name, n in sizes.items() if n < 5}
    path = FOLDER / "small/shakespeare_natural.toml"
    few = "data.users=3", "data.user_examples=5"
    _, clients = configs.federation(resolved(path, source, *few)["rnn"])
    assert not names & set(clients.names)


# --------------------------------------------------------------------------------- the script


@pytest.fixture
def sweep(tmp_path):
    """Made-up runs of three methods: seeds add a point to the test, a low rate takes ten."""
    runs = []
    config = resolved(FOLDER / "small/shakespeare_natural.toml")["lora"] | {"rounds": 2}
    for name, seed, rate in itertools.product(("lstm", "full", "lora"), range(3), RATES[:2]):
        low = 0.1 * (rate < 5e-3)
        rows = columns(
            test_accuracy=(0.02, 0.5 - low, 0.2 + seed / 100 - low),  # the best in the middle
            validation_accuracy=[0.3 - low] * 3,
            time=(None, *[{"train_s": 1.0}] * 2),
        )
        own = {"name": name, "seed": seed}
        runs.append((config | own | {"optimizer.learning_rate": rate}, rows))
    keys = ["seed", "optimizer.learning_rate"]
    head = {"choose_by": "validation_accuracy", "baseline": "lstm", "keys": keys}
    return write_sweep(tmp_path / "tiny_natural", runs, **head)


@pytest.fixture
def script(capsys, monkeypatch):
    """Runs the script, and returns what it prints."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "printed", raising=False)  # of another folder
    module = runpy.run_path(str(FOLDER / "tables.py"))

    def run(*words):
        module["main"]([*map(str, words)])
        return capsys.readouterr().out

    return run


def test_tables_and_figures_of_a_sweep(sweep, script, tmp_path):
    shown = script(sweep, "--out", tmp_path)
    rows = {row["Method"]: row for row in read_table(tmp_path / "table_4_tiny_natural.csv")}
    assert [*rows] == ["LSTM", "Full fine-tuning", "LoRA"]
    lora = rows["LoRA"]
    assert lora["Paper %"] == "27.75"
    assert lora["Ours %"] == "21.0 ± 1.0"
    assert (lora["n"], lora["Rate"], lora["Rate of the best"]) == ("3", "0.005", "0.005")
    assert lora["Its rate"] == "0.0005", "the paper's"
    assert lora["Untrained %"] == "2.0 ± 0.0"
    assert lora["Best on test %"] == "50.0 ± 0.0"
    assert lora["Minus LSTM, 95 %"] == "+0.0 n.s."
    assert "chosen by the mean of validation_accuracy" in shown.replace("\\", "")
    assert "random weights" in shown
    assert "Table 11: training time, Shakespeare, natural clients" in shown
    table = read_table(tmp_path / "table_11_tiny_natural.csv")
    times = {row["Method"]: row["Paper: seconds"] for row in table}
    assert times == {"LSTM": "-", "Full fine-tuning": "740", "LoRA": "463"}
    for stem in ("figure_4_tiny_natural", "figure_12_tiny_natural"):
        assert (tmp_path / f"{stem}.png").exists()
        data = read_table(tmp_path / f"{stem}.csv")
        assert {row["name"] for row in data} == {"LSTM", "Full fine-tuning", "LoRA"}
    low = [row for row in data if row["name"] == "LoRA" and float(row["x"]) == 1e-3]
    assert_close([float(row["value"]) for row in low], [10, 11, 12])


def in_seconds(duration):
    """Returns the seconds of "3 h 37 min" or "8 min 17 s"."""
    parts = re.findall(r"(\d+) (h|min|s)\b", duration)
    return sum(int(number) * {"h": 3600, "min": 60, "s": 1}[unit] for number, unit in parts)


@pytest.mark.slow
def test_tables_without_runs(script, tmp_path):
    shown = script("--costs", "--out", tmp_path)
    sizes = {row["Model"]: row for row in read_table(tmp_path / "table_12.csv")}
    for row in sizes.values():
        assert float(row["Ours MiB"]) == approx(float(row["Paper MiB"]), abs=0.01)
    assert sizes["GPT-2 base"]["Parameters MiB"] == "474.700"
    traffic = {row["Method"]: row for row in read_table(tmp_path / "equations_1_2.csv")}
    assert traffic["LSTM"]["Our time"] == "3 h 37 min"
    # Nine clients send ViT's head of 768 x 100 and 100 numbers both ways in 50 rounds.
    run, paper = (int(traffic["ViT, LoRA"][x].replace(",", "")) for x in ("Run MiB", "Ours MiB"))
    assert run - paper == roughly(9 * 50 * 2 * 4 * 76_900 / 2**20, abs=1)
    for row in traffic.values():
        if row["Paper MiB"] != "-":
            printed, ours = (float(row[x].replace(",", "")) for x in ("Paper MiB", "Ours MiB"))
            assert ours == approx(printed, rel=4e-3)
            printed, ours = (in_seconds(row[x]) for x in ("Paper's time", "Our time"))
            # Ours is rounded to seconds, or to minutes as the paper's.
            exact = 60 if " h " in row["Paper's time"] else 0
            assert ours == approx(printed, rel=6e-3, abs=exact), row
    assert "| Epsilon | .0005 | .0005 | 0.0005 | 0.0005 |" in shown
