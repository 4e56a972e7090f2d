"""FedMCP's tables and figures from sweeps, with the paper's numbers beside ours.

    python experiments/fedmcp/tables.py runs/fedmcp/small/* --out experiments/fedmcp/results/small

Writes what the given sweeps have runs for: ``table1`` and ``table2`` (Markdown, CSV, LaTeX),
``figure3``, ``figure4`` and ``figure5`` (PNG, SVG, PDF, and their data as CSV). A method's learning
rate is the one with the best mean validation accuracy over seeds and clients. Accuracies are those
of the last round, on each client's own test examples; ± is the standard deviation over seeds.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft.data.catalog import DATASETS
from fedjax_peft.report.figure_files import bands, line_look, save, style, subplots
from fedjax_peft.report.printed import read_printed
from fedjax_peft.report.study import Cell, Study, paired, read_study, summarise
from fedjax_peft.report.table_files import TextTable

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
PAPER = read_printed(Path(__file__).parents[1] / "papers" / "fedmcp.csv")
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
POOLINGS = {"fedmcp": "mean", "cls": "CLS"}


# ------------------------------------------------------------------------------------ reading runs


def studies(paths: Iterable[Path]) -> list[Study]:
    """Returns a study for each sweep at or below the paths, or for a path without a sweep."""
    found = []
    for path in paths:
        sweeps = sorted(file.parent for file in path.rglob("sweep.toml"))
        found += [read_study(sweep) for sweep in sweeps or [path]]
    return found


def chosen(found: Sequence[Study]) -> tuple[dict[str, Cell], list[str]]:
    """Returns method -> its chosen setting, and sentences about the choice.

    If a method is in several sweeps, the sweep with the most settings counts.
    """
    cells: dict[str, Cell] = {}
    notes: dict[str, None] = {}
    for study in sorted(found, key=lambda one: -len(one.cells)):
        choice = study.choice()
        new = {name: cell for name, cell in choice.cells.items() if name not in cells}
        cells |= new
        if new:
            notes |= dict.fromkeys([*study.notes, *choice.notes])
    return cells, list(notes)


def per_client(cell: Cell, metric: str = "accuracy") -> dict[Any, np.ndarray]:
    """Returns seed -> the metric of each client in the last round, in the order of ``CLIENTS``."""
    tests = {seed: run.rows[-1]["client_tests"] for seed, run in cell.runs.items()}
    return {seed: np.array(one[metric], float) for seed, one in tests.items() if metric in one}


def averages(values: Mapping[Any, np.ndarray]) -> dict[Any, float]:
    """Returns seed -> the mean over clients."""
    return {seed: float(one.mean()) for seed, one in values.items()}


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


def rate(cell: Cell) -> str:
    """Returns the learning rate of a setting."""
    run = cell.first
    return f"{run.config['optimizer']['learning_rate']:g}"


# ------------------------------------------------------------------------------------------ tables


def accuracies(values: Mapping[Any, np.ndarray]) -> list[str]:
    """Returns the cells of the six tasks and of their average, mean ± sd in %."""
    columns = [{s: one[CLIENTS.index(task)] for s, one in values.items()} for task in TASKS]
    return [summarise(one).text(100) for one in [*columns, averages(values)]]


def facts(cells: Iterable[Cell], notes: Sequence[str]) -> list[str]:
    """Returns the notes that every table has."""
    cells = list(cells)
    seeds = sorted({len(cell.runs) for cell in cells})
    models = sorted({Path(r.config["model"]["name"]).name for c in cells for r in c.runs.values()})
    return [
        f"Accuracy in % on each client's own test examples after the last round; mean ± standard"
        f" deviation over {' or '.join(map(str, seeds))} seeds. Model: {', '.join(models)}."
        " Differences are of averages, in points, paired by seed, with the 95 % t interval.",
        *notes,
    ]


def table1(cells: Mapping[str, Cell], notes: Sequence[str]) -> TextTable:
    """Returns Table I: nine methods on six tasks."""
    used = {name: cells[name] for name in METHODS if name in cells}
    base = averages(per_client(used["fedavg"])) if "fedavg" in used else None
    columns = [*(NAMES[task] for task in TASKS), "average"]
    rows = []

    def add(label: str, cell: Cell, values: Mapping[Any, np.ndarray]) -> None:
        row = [label]
        for column, ours in zip(columns, accuracies(values), strict=True):
            row += [ours, PAPER("I", label, column)]
        gap = "-"
        if base is not None and label != METHODS["fedavg"]:
            gap = paired(averages(values), base).text(100)
        row += [gap, paper_gap(label), rate(cell)]
        for column, ours in zip(("trained %", "sent %"), footprint(cell), strict=True):
            row += [f"{ours:.3f}", PAPER("I", label, column)]
        rows.append(row)

    for name, cell in used.items():
        add(METHODS[name], cell, per_client(cell))
        if second := per_client(cell, "accuracy_global"):
            add(f"{METHODS[name]}, second classifier", cell, second)
    header = ["method", *(x for column in columns for x in (column, f"paper: {column}"))]
    header += ["minus FedAvg (PEFT)", "paper: minus FedAvg (PEFT)", "learning rate"]
    header += ["trained %", "paper: trained %", "sent %", "paper: sent %"]
    ours = "The paper: RoBERTa-base, mean ± deviation over three runs."
    return TextTable("FedMCP, Table I", header, rows, [*facts(used.values(), notes), ours])


def paper_gap(label: str) -> str:
    """Returns the paper's average of a method minus that of FedAvg (PEFT), if it prints both."""
    base = METHODS["fedavg"]
    if label == base or ("I", label, "average") not in PAPER.cells:
        return "-"
    return f"{PAPER.value('I', label, 'average') - PAPER.value('I', base, 'average'):+.2f}"


def table2(cells: Mapping[str, Cell], notes: Sequence[str]) -> TextTable:
    """Returns Table II: FedMCP without one of its losses."""
    used = {name: cells[name] for name in ABLATION if name in cells}
    base = averages(per_client(used["fedmcp"])) if "fedmcp" in used else None
    rows = []
    for name, cell in used.items():
        label, paper = ABLATION[name]
        values = per_client(cell)
        gap = "-" if name == "fedmcp" or base is None else paired(averages(values), base).text(100)
        rows.append([label, *accuracies(values), PAPER("II", paper, "average"), gap, rate(cell)])
    header = ["variant", *(NAMES[task] for task in TASKS), "average", "paper: average"]
    header += ["minus complete", "learning rate"]
    return TextTable("FedMCP, Table II", header, rows, facts(used.values(), notes))


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


def legend(figure: Any, axes: Any) -> None:
    """Draws one legend for all panels, below them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def figure3(cells: Mapping[str, Cell], stem: Path) -> None:
    """Writes Figure 3: accuracy of each client in every round, mean and deviation over seeds."""
    data: list[dict[str, Any]] = []
    with style():
        fig, axes = subplots(2, 3, size=(9.0, 5.2))
        for task, ax in zip(TASKS, axes.flat, strict=True):
            client = CLIENTS.index(task)
            for name in ("fedavg", "fedmcp"):
                if name not in cells:
                    continue
                by_seed, rounds = {}, []
                for seed, run in cells[name].runs.items():
                    rows = [row for row in run.rows if "client_tests" in row]
                    rounds = [row["round"] for row in rows]
                    values = [row["client_tests"]["accuracy"][client] for row in rows]
                    by_seed[seed] = [None if x is None else 100 * x for x in values]
                drawn = bands(ax, METHODS[name], rounds, by_seed)
                data += [{"task": NAMES[task], **row} for row in drawn]
            ax.set(title=NAMES[task], xlabel="Communication round", ylabel="Test accuracy (%)")
            ax.xaxis.get_major_locator().set_params(integer=True)
        legend(fig, axes.flat[0])
    save(fig, stem, data)


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
        legend(fig, ax)
    save(fig, stem, data)


def main(words: Sequence[str] | None = None) -> None:
    """Writes all tables and figures that the given sweeps have runs for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sweeps", nargs="+", type=Path, help="directories of sweeps")
    parser.add_argument("--out", required=True, type=Path, help="directory for the files")
    parser.add_argument("--only", metavar="NAME", help="write this one alone, such as table1")
    a = parser.parse_args(words)
    a.out.mkdir(parents=True, exist_ok=True)
    found = studies(a.sweeps)
    cells, notes = chosen(found)
    parts: list[tuple[str, set[str], int, Callable[[Path], Any]]] = [
        ("table1", set(METHODS), 1, lambda stem: table1(cells, notes)),
        ("table2", set(ABLATION), 2, lambda stem: table2(cells, notes)),
        ("figure3", {"fedavg", "fedmcp"}, 2, lambda stem: figure3(curves(found), stem)),
        ("figure4", set(SIMILARITIES), 2, lambda stem: by_client(cells, SIMILARITIES, stem)),
        ("figure5", set(POOLINGS), 2, lambda stem: by_client(cells, POOLINGS, stem)),
    ]
    for name, wanted, least, make in parts:
        if a.only not in (None, name):
            continue
        if len(wanted & cells.keys()) < least:
            print(f"{name}: left out, no runs of {', '.join(sorted(wanted - cells.keys()))}\n")
            continue
        made = make(a.out / name)
        if isinstance(made, TextTable):
            made.write(a.out / name)
            print(made.markdown())
        else:
            print(f"{name}: {a.out / name}.png, .svg, .pdf and .csv\n")


if __name__ == "__main__":
    main()
