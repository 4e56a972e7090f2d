"""``experiments/fedmcp``: its configs resolve, and its script makes the paper's tables."""

import itertools
import runpy
from pathlib import Path

import numpy as np
import pytest
from closeness import approx
from made_runs import columns, grids, read_table, resolved, write_sweep
from shallow import no_drawings  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_drawings")

FOLDER = Path(__file__).parents[1] / "experiments" / "fedmcp"
SCRIPT = runpy.run_path(str(FOLDER / "tables.py"))
NINE = ("fedft", "local", "fedavg", "fedlr", "fedap", "moon", "fedrep", "fedmatch", "fedmcp")


@pytest.mark.parametrize("size", ["paper", "small"])
def test_nine_methods_with_the_papers_settings(size):
    found, grid = (read(FOLDER / size / "table1.toml") for read in (resolved, grids))
    assert tuple(found) == NINE
    for name, one in found.items():
        assert one["preset"] == ("fedmcp" if name == "fedmcp" else f"fedmcp/{name}")
        assert (one["sampling"], one["optimizer"]["name"]) == ("all", "adam")
        assert one["partition"]["by"] == "task"
        assert one["evaluation"]["client_test"]
        assert one["evaluation"]["client_validation"]
        assert not one["evaluation"]["global_test"]
        assert one["peft"].get("size", 16) == 16
        assert len(grid[name]["seed"]) == {"paper": 5, "small": 3}[size]
        assert len(grid[name]["optimizer.learning_rate"]) >= 3
    if size == "paper":
        assert all(set(one["preset_changes"] or {}) <= {"epochs"} for one in found.values())
        assert {one["rounds"] for one in found.values()} == {25}
        assert {one["batch_size"] for one in found.values()} == {64}
        assert 5e-4 in grid["fedmcp"]["optimizer.learning_rate"]
    full, adapters = (grid[n]["optimizer.learning_rate"] for n in ("fedft", "fedmcp"))
    assert max(full) <= min(adapters)
    key = "epochs" if size == "paper" else "local_steps"
    assert found["fedrep"][key] == 2 * found["fedavg"][key]


@pytest.mark.parametrize("size", ["paper", "small"])
def test_studies_change_one_setting_of_the_complete_method(size):
    path = FOLDER / size
    complete = resolved(path / "table1.toml")["fedmcp"]
    swept = grids(path / "table1.toml")["fedmcp"]
    expected = {
        "table2": {"without_contrast": {"mu": 0.0}, "without_second": {"gamma": 0.0}},
        "figure4": {
            "cosine": {"similarity": "cosine"},
            "cka_debiased": {"similarity": "cka_debiased"},
        },
        "figure5": {"cls": {"pooling": "cls"}},
    }
    for file, variants in expected.items():
        found = resolved(path / f"{file}.toml")
        assert found.keys() == variants.keys()
        for name, one in found.items():
            assert grids(path / f"{file}.toml")[name] == swept
            different = {key for key, x in one.items() if x != complete[key]}
            assert different <= {"name", "preset_changes", "evaluation", "algorithm"}
            assert one["algorithm"] == {**complete["algorithm"], **variants[name]}


def test_figure_3_shows_every_round_of_the_runs_of_table_1():
    table, figure = (resolved(FOLDER / "small" / f"{x}.toml") for x in ("table1", "figure3"))
    for name, one in figure.items():
        assert one["evaluation"]["every"] == 1
        different = {key for key, x in one.items() if table[name][key] != x}
        assert different <= {"optimizer", "evaluation", "preset_changes"}
        assert one["optimizer"]["name"] == "adam"
    paper = resolved(FOLDER / "paper" / "table1.toml")
    assert {paper[name]["evaluation"]["every"] for name in figure} == {1}


# -------------------------------------------------------------------------------------- the script


def made_sweep(root, scores, *, rounds=2, rates=(0.1, 0.2)):
    """Writes made-up runs: ``scores`` is method -> accuracy of seed 0 at the second rate.

    On validation examples, the second rate is the best; on test examples, it is the first.
    """
    runs = []
    for method, rate, seed in itertools.product(scores, rates, range(3)):
        # Client i is i points above client 0; seed s is s points above seed 0.
        values = scores[method] + 0.01 * (np.arange(6) + seed) + 0.3 * (rate != rates[-1])
        tests = {"client": list(range(6)), "accuracy": values.tolist()}
        if method == "fedmcp":
            tests["accuracy_global"] = (values - 0.1).tolist()
        n = rounds + 1
        rows = columns(
            client_tests=[tests] * n,
            client_accuracy_mean=[values.mean()] * n,
            client_validation_accuracy_mean=[0.5 + rate + 0.01 * seed] * n,
            bytes_up=[4 * 6 * 10] * n,
            clients=[tests["client"]] * n,
        )
        rows[0]["parameters"] = {"adapter": 20, "head": 5, "frozen": 1000}
        settings = {"name": method, "seed": seed, "model.name": "google/tiny"}
        runs.append((settings | {"optimizer": {"name": "adam", "learning_rate": rate}}, rows))
    keys, best = ["seed", "optimizer.learning_rate"], "client_validation_accuracy_mean"
    return write_sweep(root, runs, keys=keys, baseline="fedavg", choose_by=best)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of the script's files for made-up runs."""
    root = tmp_path_factory.mktemp("fedmcp")
    table1 = {name: 0.2 + 0.02 * i for i, name in enumerate(NINE)}
    sweeps = [
        made_sweep(root / "a", table1),
        made_sweep(root / "b", {"without_contrast": 0.3, "without_second": 0.35}),
        made_sweep(root / "c", {"cosine": 0.3, "cka_debiased": 0.32, "cls": 0.3}),
        made_sweep(root / "d", {"fedavg": 0.5, "fedmcp": 0.6}, rounds=4, rates=(0.2,)),
    ]
    SCRIPT["main"]([*map(str, sweeps), "--out", str(root / "out")])
    return root / "out"


def test_table_1_has_nine_methods_and_the_second_classifier(made):
    rows = {row["method"]: row for row in read_table(made / "table1.csv")}
    assert len(rows) == 10
    local, mcp = rows["Local"], rows["FedMCP"]
    # Local's seed 0 has 22 % on client 0 (MNLI); clients and seeds rise by one point each.
    assert local["MNLI"] == "23.0 ± 1.0"
    assert local["RTE"] == "27.0 ± 1.0", "client 4: tasks are sorted by name"
    assert local["average"] == "25.5 ± 1.0"
    assert local["learning rate"] == "0.2", "chosen on validation examples"
    assert local["minus FedAvg (PEFT)"] == "-2.0"
    assert rows["FedAvg (PEFT)"]["minus FedAvg (PEFT)"] == "-"
    assert (mcp["paper: average"], mcp["paper: sent %"]) == ("85.11 ± 0.40", "0.58")
    assert rows["FedAvg (PEFT)"]["paper: average"] == "83.62 ± 0.34"
    assert (rows["MOON"]["paper: RTE"], local["paper: sent %"]) == ("78.90 ± 0.83", "-")
    assert mcp["paper: minus FedAvg (PEFT)"] == "+1.49"
    assert (mcp["trained %"], mcp["sent %"]) == ("2.000", "1.000")
    second = rows["FedMCP, second classifier"]
    assert float(mcp["average"].split()[0]) - float(second["average"].split()[0]) == approx(10.0)
    for form in ("md", "tex"):
        assert "83.62" in (made / f"table1.{form}").read_text()
    notes = (made / "table1.md").read_text()
    assert "client\\_validation\\_accuracy\\_mean" in notes
    assert "Model: tiny" in notes


def test_table_2_compares_with_the_complete_method(made):
    rows = {row["variant"]: row for row in read_table(made / "table2.csv")}
    contrast, second, complete = rows.values()
    printed = [row["paper: average"].split()[0] for row in rows.values()]
    assert printed == ["83.57", "84.13", "85.11"]
    assert contrast["minus complete"] == "-6.0"
    assert second["minus complete"] == "-1.0"
    assert complete["minus complete"] == "-"


def test_figures_have_their_data_beside_them(made):
    for name in ("figure3", "figure4", "figure5"):
        assert all((made / f"{name}.{form}").stat().st_size for form in ("png", "svg", "pdf"))
    curves = read_table(made / "figure3.csv")
    assert {row["task"] for row in curves} == {"RTE", "MRPC", "SST-2", "QNLI", "QQP", "MNLI"}
    assert {float(row["x"]) for row in curves} == set(range(5)), "the sweep with most rounds"
    one = [r for r in curves if (r["task"], r["seed"], r["name"]) == ("MRPC", "2", "FedMCP")]
    assert [float(row["value"]) for row in one] == approx([63.0] * 5)
    similarity = read_table(made / "figure4.csv")
    assert len(similarity) == 3 * 6 * 3
    cka = [float(r["value"]) for r in similarity if r["variant"] == "CKA" and r["client"] == "MNLI"]
    assert cka == approx([36.0, 37.0, 38.0]), "of Table 1, not of Figure 3"
    assert {row["variant"] for row in read_table(made / "figure5.csv")} == {"mean", "CLS"}


def test_tables_without_runs_are_left_out(tmp_path, capsys):
    sweep = made_sweep(tmp_path / "a", {"fedavg": 0.5, "fedlr": 0.4})
    SCRIPT["main"]([str(sweep), "--out", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert "table2: left out, no runs of fedmcp, without_contrast, without_second" in shown
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("table1.csv", "table1.md", "table1.tex")
    ]


def test_the_page_has_the_validation_of_each_rate():
    """Two lower rates than the grid's, with seed 0, and the best of each method in bold."""
    folder = Path(__file__).parents[1] / "experiments" / "fedmcp"
    rows = read_table(folder / "results" / "long_choice_runs.csv")
    page = (folder / "README.md").read_text()
    table = [
        line.strip(" |").split(" | ") for line in page.split("each alone | FedAP")[1].split("\n")
    ]
    adapters = ["fedmcp", "fedavg", "local", "fedap", "fedrep", "fedmatch"]
    for cells in table[2:5]:
        for at, methods in ((0, adapters), (7, ["fedft"])):
            for k, method in enumerate(methods):
                own = {float(x["rate"]): x for x in rows if x["method"] == method}
                scores = {r: float(x["client_validation_accuracy_mean"]) for r, x in own.items()}
                rate = float(cells[at])
                told = f"{100 * scores[rate]:.1f}"
                best = max(scores, key=scores.__getitem__) == rate
                assert cells[at + 1 + k] == (f"**{told}**" if best else told), (method, rate)
