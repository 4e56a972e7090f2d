"""FedMCP's tables and figures from sweeps, with the paper's numbers beside ours.

    python experiments/fedmcp/tables.py runs/fedmcp/small/* --out experiments/fedmcp/results/small

Writes what the given sweeps have runs for: ``table1`` and ``table2`` (Markdown, CSV, LaTeX),
``figure3``, ``figure4`` and ``figure5`` (PNG, SVG, PDF, and their data as CSV). A method's learning
rate is the one with the best mean validation accuracy over seeds and clients. Accuracies are those
of the last round, on each client's own test examples; ± is the standard deviation over seeds.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft.data.catalog import DATASETS
from fedjax_peft.report.figure_files import line_look, save, style, subplots
from fedjax_peft.report.study import Cell, Study, summarise
from fedjax_peft.report.table_files import TextTable

sys.path.append(str(Path(__file__).parents[1]))
import paper

TASKS = DATASETS["glue_silo"].parts
CLIENTS = sorted(TASKS)
"""The task of client 0, 1 and so on: ``partition.natural`` sorts them."""
NAMES = {
    "rte": "RTE",
    "mrpc": "MRPC",
    "sst2": "SST-2",
    "qnli": "QNLI",
    "qqp": "QQP",
    "mnli": "MNLI",
}
PAPER = paper.printed("fedmcp")
METHODS = {
    "fedft": "FedAvg (full)",
    "local": "Local",
    "fedavg": "FedAvg (PEFT)",
    "fedlr": "FedLR",
    "fedap": "FedAP",
    "moon": "MOON",
    "fedrep": "FedRep",
    "fedmatch": "FedMatch",
    "fedmcp": "FedMCP",
}
ABLATION = {
    "without_contrast": ("without contrastive loss (μ = 0)", "without contrastive loss"),
    "without_second": ("without second classifier's loss (γ = 0)", "without backbone loss"),
    "fedmcp": ("complete", "complete"),
}
"""Method -> its name in our Table II, and the paper's row."""
SIMILARITIES = {"fedmcp": "CKA", "cosine": "cosine", "cka_debiased": "debiased CKA (ours)"}
ALL = ["table1", "table2", "figure3", "figure4", "figure5"]
POOLINGS = {"fedmcp": "mean", "cls": "CLS"}


# ------------------------------------------------------------------------------------ reading runs


def per_client(cell: Cell, metric: str = "accuracy") -> dict[Any, np.ndarray]:
    """Returns seed -> the metric of each client in the last round, in the order of ``CLIENTS``."""
    tests = {seed: run.rows[-1]["client_tests"] for seed, run in cell.runs.items()}
    return {seed: np.array(one[metric], float) for seed, one in tests.items() if metric in one}


def average(cell: Cell) -> dict[Any, float]:
    """Returns seed -> the mean over clients."""
    return {seed: float(one.mean()) for seed, one in per_client(cell).items()}


def second(cell: Cell) -> Cell:
    """Returns the runs with the accuracies of the second classifier in place of the first one's."""
    runs = {}
    for seed, run in cell.runs.items():
        tests = run.rows[-1]["client_tests"]
        last = {**run.rows[-1], "client_tests": tests | {"accuracy": tests["accuracy_global"]}}
        runs[seed] = run._replace(rows=[*run.rows[:-1], last])
    return cell._replace(runs=runs)


def footprint(cell: Cell) -> tuple[float, float]:
    """Returns the trained and the sent parameters of a client in % of the backbone's.

    The head, which stays with its client, is not counted.
    """
    run = cell.first
    parameters, row = run.rows[0]["parameters"], run.rows[1]
    # With full fine-tuning, the whole backbone is trained.
    backbone = parameters["frozen"] or parameters["adapter"]
    sent = row["bytes_up"] / 4 / len(row["clients"])  # float32
    return 100 * parameters["adapter"] / backbone, 100 * sent / backbone


# ------------------------------------------------------------------------------------------ tables


def accuracies() -> dict[str, paper.Column]:
    """Returns the columns of the six tasks and of their average, mean ± sd in %."""

    def text(cell: Cell, client: int) -> str:
        return summarise(one[client] for one in per_client(cell).values()).text(100)

    found = {
        NAMES[task]: paper.of_runs(functools.partial(text, client=CLIENTS.index(task)))
        for task in TASKS
    }
    return found | {"average": paper.of_runs(lambda cell: summarise(average(cell)).text(100))}


def facts(cells: Iterable[Cell], notes: Sequence[str]) -> list[str]:
    """Returns the notes that every table has."""
    cells = list(cells)
    return [
        f"Accuracy in % on each client's own test examples after the last round; mean ± standard"
        f" deviation over {paper.seeds(cells)} seeds. Model: {paper.models(cells)}."
        " Differences are of averages, in points, paired by seed, with the 95 % t interval.",
        *notes,
    ]


def table1(cells: Mapping[str, Cell], notes: Sequence[str]) -> TextTable:
    """Returns Table I: nine methods on six tasks."""
    used, labels = {}, {}
    for name, label in METHODS.items():
        if name not in cells:
            continue
        used[name], labels[name] = cells[name], label
        if per_client(cells[name], "accuracy_global"):
            used[f"{name}, second"] = second(cells[name])
            labels[f"{name}, second"] = f"{label}, second classifier"
    columns: dict[str, paper.Column] = {}

    def beside(head: str, ours: paper.Column) -> None:
        columns[head] = ours
        columns[f"paper: {head}"] = paper.of_paper(PAPER, "I", labels, head)

    for head, ours in accuracies().items():
        beside(head, ours)
    columns["minus FedAvg (PEFT)"] = paper.minus("fedavg", used, average)
    columns["paper: minus FedAvg (PEFT)"] = lambda method, cell: paper_gap(labels[method])
    columns["learning rate"] = paper.RATE
    beside("trained %", paper.of_runs(lambda cell: f"{footprint(cell)[0]:.3f}"))
    beside("sent %", paper.of_runs(lambda cell: f"{footprint(cell)[1]:.3f}"))
    notes = [*facts(used.values(), notes)]
    notes.append("The paper: RoBERTa-base, mean ± deviation over three runs.")
    return paper.table("FedMCP, Table I", labels, used, columns, notes)


def paper_gap(label: str) -> str:
    """Returns the paper's average of a method minus that of FedAvg (PEFT), if it prints both."""
    base = METHODS["fedavg"]
    if label == base or ("I", label, "average") not in PAPER.cells:
        return "-"
    return f"{PAPER.value('I', label, 'average') - PAPER.value('I', base, 'average'):+.2f}"


def table2(cells: Mapping[str, Cell], notes: Sequence[str]) -> TextTable:
    """Returns Table II: FedMCP without one of its losses."""
    used = {name: cells[name] for name in ABLATION if name in cells}
    labels, printed = ({name: ABLATION[name][i] for name in used} for i in (0, 1))
    columns = accuracies() | {
        "paper: average": paper.of_paper(PAPER, "II", printed, "average"),
        "minus complete": paper.minus("fedmcp", used, average),
        "learning rate": paper.RATE,
    }
    own = facts(used.values(), notes)
    return paper.table("FedMCP, Table II", labels, used, columns, own, "variant")


# ----------------------------------------------------------------------------------------- figures


def curves(found: Sequence[Study]) -> dict[str, Cell]:
    """Returns FedAvg and FedMCP at the setting that Figure 3 shows.

    Of several sweeps, the one with the most evaluated rounds counts.
    """

    def evaluated(cell: Cell) -> int:
        return max(sum("client_tests" in row for row in run.rows) for run in cell.runs.values())

    best: dict[str, Cell] = {}
    for study in found:
        for name, cell in study.chosen().items():
            if name in ("fedavg", "fedmcp") and (
                name not in best or evaluated(cell) > evaluated(best[name])
            ):
                best[name] = cell
    return best


def figure3(cells: Mapping[str, Cell], stem: Path) -> None:
    """Writes Figure 3: accuracy of each client in every round, mean and deviation over seeds."""

    def curve(cell: Cell, client: int) -> paper.Points:
        by_seed, rounds = {}, []
        for seed, run in cell.runs.items():
            rows = [row for row in run.rows if "client_tests" in row]
            rounds = [row["round"] for row in rows]
            values = [row["client_tests"]["accuracy"][client] for row in rows]
            by_seed[seed] = [None if x is None else 100 * x for x in values]
        return rounds, by_seed

    panels = []
    for task in TASKS:
        shown = [name for name in ("fedavg", "fedmcp") if name in cells]
        curves = {METHODS[x]: curve(cells[x], CLIENTS.index(task)) for x in shown}
        look = {"xlabel": "Communication round", "ylabel": "Test accuracy (%)"}
        panels.append(paper.Panel(curves, {"title": NAMES[task], **look}, {"task": NAMES[task]}))
    paper.draw(stem, panels, (2, 3), size=(9.0, 5.2))


def by_client(cells: Mapping[str, Cell], names: Mapping[str, str], stem: Path) -> None:
    """Writes a figure of each client's accuracy with several variants: mean ± sd over seeds."""
    data: list[dict[str, Any]] = []
    used = [name for name in names if name in cells]
    with style():
        fig, ax = subplots(size=(7.2, 3.6))
        for i, name in enumerate(used):
            values = per_client(cells[name])
            found = [
                summarise(100 * one[CLIENTS.index(task)] for one in values.values())
                for task in TASKS
            ]
            places = np.arange(len(TASKS)) + 0.16 * (i - (len(used) - 1) / 2)
            look = line_look(i) | {"linestyle": "none"}
            means, errors = [one.mean for one in found], [one.sd or 0.0 for one in found]
            label = f"{names[name]} (n = {len(values)})"
            ax.errorbar(places, means, yerr=errors, label=label, capsize=3, **look)
            data += [
                {"variant": names[name], "client": NAMES[task], "seed": seed, "value": 100 * x}
                for seed, one in values.items()
                for task in TASKS
                for x in [one[CLIENTS.index(task)]]
            ]
        ax.set_xticks(range(len(TASKS)), [NAMES[task] for task in TASKS])
        ax.set(ylabel="Test accuracy (%)")
        paper.below(fig, ax)
    save(fig, stem, data)


def parts(found: Sequence[Study], out: Path) -> dict[str, Callable[[], Any] | str]:
    """Returns name -> a function that makes the table or the figure, or which runs are missing."""
    cells, notes = paper.choose(found)
    known: dict[str, tuple[set[str], int, Callable[[], Any]]] = {
        "table1": (set(METHODS), 1, lambda: table1(cells, notes)),
        "table2": (set(ABLATION), 2, lambda: table2(cells, notes)),
        "figure3": ({"fedavg", "fedmcp"}, 2, lambda: figure3(curves(found), out / "figure3")),
        "figure4": (set(SIMILARITIES), 2, lambda: by_client(cells, SIMILARITIES, out / "figure4")),
        "figure5": (set(POOLINGS), 2, lambda: by_client(cells, POOLINGS, out / "figure5")),
    }
    return {
        name: make
        if len(wanted & cells.keys()) >= least
        else f"no runs of {', '.join(sorted(wanted - cells.keys()))}"
        for name, (wanted, least, make) in known.items()
    }


def main(words: Sequence[str] | None = None) -> None:
    """Writes all tables and figures that the given sweeps have runs for."""
    paper.report(words, __doc__, ALL, parts)


if __name__ == "__main__":
    main()
