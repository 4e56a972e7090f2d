"""FRA-LoRA's tables and figures from sweeps, with the paper's numbers beside ours.

    python experiments/fra/tables.py runs/fra/small/* --out experiments/fra/results/small

Writes what the given sweeps have runs for: ``table1`` to ``table4`` (Markdown, CSV, LaTeX) and
``figure3`` to ``figure7`` (PNG, SVG, PDF, and their data as CSV). With several learning rates, a
method's rate is the one with the best mean validation accuracy over seeds. ± is the standard
deviation over seeds.
"""

import argparse
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_peft.config import config as configs
from fedjax_peft.report.figure_files import bands, rolling, save, style, subplots
from fedjax_peft.report.printed import read_printed
from fedjax_peft.report.study import Cell, Study, paired, read_study, summarise
from fedjax_peft.report.table_files import TextTable
from fedjax_peft.support.errors import InputError

NAMES = {"sst2": "SST-2", "mnli": "MNLI"}
METHODS = {
    "centralised": "centralised",
    "fedavg": "FedAvg-LoRA",
    "ffa": "FFA-LoRA",
    "fra": "FRA-LoRA",
}
PAPER = read_printed(Path(__file__).parents[1] / "papers" / "fra.csv")
LABELS = {
    "sst2": ("II", ("negative", "positive")),
    "mnli": ("IV", ("entailment", "neutral", "contradiction")),
}
"""Data -> the paper's table of its shares, and its labels."""
SHARES = {
    data: {x: [round(100 * PAPER.value(n, x, f"client {k}")) for k in (1, 2)] for x in labels}
    for data, (n, labels) in LABELS.items()
}
"""Data -> label -> the paper's shares of the two clients, in %."""
FIGURES = {("sst2", "iid"): 3, ("mnli", "iid"): 4, ("sst2", "skew"): 5, ("mnli", "skew"): 6}
WIDTH = 7
"""Rounds of the rolling mean in Figures 3 to 6."""
FIRST = 10
"""Rounds that Figure 7 shows."""

ALL = [*(f"table{n}" for n in range(1, 5)), *(f"figure{n}" for n in range(3, 8))]
"""The names of all tables and figures."""

Split = tuple[str, str]
"""(data, ``iid`` or ``skew``)."""


class Results(NamedTuple):
    """The chosen settings of one data set and split."""

    cells: dict[str, Cell]
    """Method -> its chosen setting."""
    notes: list[str]


# ------------------------------------------------------------------------------------ reading runs


def studies(paths: Iterable[Path]) -> list[Study]:
    """Returns a study for each sweep at or below the paths, or for a path without a sweep."""
    found = []
    for path in paths:
        sweeps = sorted(file.parent for file in path.rglob("sweep.toml"))
        found += [read_study(sweep) for sweep in sweeps or [path]]
    return [study for study in found if study.cells]


def split_of(study: Study) -> Split:
    """Returns the data set and split of a sweep; the centralised run says nothing of the split."""
    runs = [run.config for cell in study.cells for run in cell.runs.values()]
    splits = {one["partition"]["name"] for one in runs}
    return runs[0]["data"]["name"], "skew" if "label_share" in splits else "iid"


def tested(study: Study) -> tuple[Any, ...]:
    """Returns the rounds and the number of test examples of a sweep's runs."""
    run = study.cells[0].first
    return run.config["rounds"], run.config["data"].get("test_examples")


def results(found: Sequence[Study]) -> dict[Split, Results]:
    """Returns the chosen settings by data set and split.

    If a method is in several sweeps, the sweep with the most settings counts. Sweeps with other
    rounds or test examples than that one, such as those of Figures 3 to 6, are not mixed with it.
    The centralised method knows no split, so that of the IID sweep is also in the skewed results.
    """
    made: dict[Split, Results] = {}
    settings: dict[Split, Any] = {}
    for study in sorted(found, key=lambda one: -len(one.cells)):
        split = split_of(study)
        if settings.setdefault(split, tested(study)) != tested(study):
            continue
        into = made.setdefault(split, Results({}, []))
        choice = study.choice()
        new = {name: cell for name, cell in choice.cells.items() if name not in into.cells}
        into.cells.update(new)
        if new:
            into.notes.extend(x for x in (*study.notes, *choice.notes) if x not in into.notes)
    for (data, split), one in made.items():
        other = made.get((data, "iid"))
        if split == "skew" and other is not None and "centralised" in other.cells:
            one.cells.setdefault("centralised", other.cells["centralised"])
    return made


# ------------------------------------------------------------------------------------------ tables


def accuracy_table(number: str, split: str, made: Mapping[Split, Results]) -> TextTable:
    """Returns Table I (IID) or III (skewed labels): best and final accuracy of each method."""
    used = {data: made[data, split] for data in NAMES if (data, split) in made}
    header = ["method"]
    for data in used:
        columns = ("best", "paper: best", "final", "minus FedAvg", "learning rate")
        header += [f"{NAMES[data]}: {column}" for column in columns]
    rows = []
    for name, label in METHODS.items():
        row = [label]
        for data, one in used.items():
            printed = f"{PAPER.value(number, label, NAMES[data]):.2f}"
            if (cell := one.cells.get(name)) is None:
                row += ["-", printed, "-", "-", "-"]
                continue
            best, final = (cell.values("test_accuracy", at) for at in ("best", "final"))
            gap = "-"
            if name != "fedavg" and "fedavg" in one.cells:
                base = one.cells["fedavg"].values("test_accuracy")
                gap = paired(final, base).text(100)
            rate = cell.learning_rate
            texts = [summarise(x).text(100) for x in (best, final)]
            row += [texts[0], printed, texts[1], gap, f"{rate:g}"]
        rows.append(row)
    cells = [cell for one in used.values() for cell in one.cells.values()]
    seeds = sorted({len(cell.runs) for cell in cells})
    models = sorted({Path(r.config["model"]["name"]).name for c in cells for r in c.runs.values()})
    notes = dict.fromkeys(note for one in used.values() for note in one.notes)
    about = (
        f"Accuracy of the global model in %; mean ± standard deviation over"
        f" {' or '.join(map(str, seeds))} seeds. Model: {', '.join(models)}. The best of the"
        " evaluated rounds is chosen on test examples, so it is optimistic. Differences are of"
        " final accuracies, in points, paired by seed, with the 95 % t interval. The rows with"
        " differential privacy are in the tables of private.py."
    )
    words = {"iid": "IID", "skew": "skewed labels"}[split]
    return TextTable(f"FRA-LoRA, Table {number}: {words}", header, rows, [about, *notes])


def label_table(number: str, data: str, one: Results) -> TextTable:
    """Returns Table II (SST-2) or IV (MNLI): the examples of each label on the two clients.

    The counts are those of the runs' own training examples, which are read again. Without the
    examples, the table has the shares only.
    """
    notes = ["The shares are the paper's."]
    cell = next(one.cells[name] for name in one.cells if name != "centralised")
    config = cell.first.config
    counts = None
    try:
        _, clients = configs.federation(configs.resolve_recorded(config))
        labels = clients.data.labels
        counts = [np.bincount(labels[rows], minlength=9) for rows in clients.indices]
        notes.append(f"Counts: {len(labels):,} training examples of the runs, seed 0.")
    except InputError as error:
        notes.append(f"The training examples could not be read, so there are no counts: {error}")
    header = ["label", "paper: client 1 %", "paper: client 2 %", "ours: client 1", "ours: client 2"]
    rows = []
    for label, (name, shares) in enumerate(SHARES[data].items()):
        ours = ["-", "-"] if counts is None else [str(found[label]) for found in counts]
        rows.append([name, *map(str, shares), *ours])
    title = f"FRA-LoRA, Table {number}: {NAMES[data]} with skewed labels"
    return TextTable(title, header, rows, notes)


# ----------------------------------------------------------------------------------------- figures


def legend(figure: Any, axes: Any) -> None:
    """Draws one legend for all panels, below them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def local_figure(study: Study, title: str, stem: Path) -> None:
    """Writes one of Figures 3 to 6: each client's accuracy before aggregation, rolling mean."""
    data: list[dict[str, Any]] = []
    with style():
        fig, axes = subplots(1, 2, size=(9.0, 3.6), sharey=True)
        for client, ax in enumerate(axes):
            for name, cell in study.chosen().items():
                by_seed: dict[Any, list[float]] = {}
                rounds: list[int] = []
                for seed, run in cell.runs.items():
                    rows = [row for row in run.rows if "local_accuracy" in row]
                    rounds = [row["round"] for row in rows]
                    values = [row["local_accuracy"][row["clients"].index(client)] for row in rows]
                    percent = [math.nan if x is None else 100 * x for x in values]
                    by_seed[seed] = rolling(percent, WIDTH)
                if rounds:
                    drawn = bands(ax, METHODS.get(name, name), rounds, by_seed)
                    data += [{"client": client + 1, **row} for row in drawn]
            ax.set(title=f"{title}, client {client + 1}", xlabel="Communication round")
            ax.xaxis.get_major_locator().set_params(integer=True)
        axes[0].set(ylabel=f"Accuracy before aggregation (%),\nrolling mean of {WIDTH} rounds")
        legend(fig, axes[0])
    save(fig, stem, data)


def error_figure(one: Results, stem: Path) -> None:
    """Writes Figure 7: aggregation errors of FedAvg and FRA in the first rounds."""
    metrics = {
        "aggregation_error": "Aggregation error (Frobenius)",
        "aggregation_error_relative": "Error / norm of the exact average",
    }
    data: list[dict[str, Any]] = []
    with style():
        fig, axes = subplots(1, 2, size=(9.0, 3.6))
        for (metric, label), ax in zip(metrics.items(), axes, strict=True):
            for name in ("fedavg", "fra"):
                by_seed, rounds = {}, []
                for seed, run in one.cells[name].runs.items():
                    rows = [row for row in run.rows[1 : FIRST + 1] if metric in row]
                    rounds = [row["round"] for row in rows]
                    by_seed[seed] = [row[metric] for row in rows]
                drawn = bands(ax, METHODS[name], rounds, by_seed)
                data += [{"metric": metric, **row} for row in drawn]
            ax.set(xlabel="Communication round", ylabel=label)
            ax.set_ylim(bottom=0)
            ax.xaxis.get_major_locator().set_params(integer=True)
        legend(fig, axes[0])
    save(fig, stem, data)


def parts(found: Sequence[Study], out: Path) -> dict[str, Callable[[], TextTable | None]]:
    """Returns name -> a function that makes the table or writes the figure, of what has runs."""
    made = results(found)
    known: dict[str, Callable[[], TextTable | None]] = {}
    for n, number, split in ((1, "I", "iid"), (3, "III", "skew")):
        if {(data, split) for data in NAMES} & made.keys():
            known[f"table{n}"] = functools.partial(accuracy_table, number, split, made)
    for n, number, data in ((2, "II", "sst2"), (4, "IV", "mnli")):
        if one := made.get((data, "skew")):
            known[f"table{n}"] = functools.partial(label_table, number, data, one)
    for study in found:
        if "local_accuracy_mean" in study.metrics:
            data, split = split_of(study)
            name = f"figure{FIGURES[data, split]}"
            title = f"{NAMES[data]}, {'IID' if split == 'iid' else 'skewed'}"
            known[name] = functools.partial(local_figure, study, title, out / name)
    errors = made.get(("mnli", "skew"))
    if errors is not None and {"fedavg", "fra"} <= errors.cells.keys():
        known["figure7"] = functools.partial(error_figure, errors, out / "figure7")
    return known


def main(words: Sequence[str] | None = None) -> None:
    """Writes all tables and figures that the given sweeps have runs for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sweeps", nargs="+", type=Path, help="directories of sweeps")
    parser.add_argument("--out", required=True, type=Path, help="directory for the files")
    parser.add_argument("--only", metavar="NAME", help="write this one alone, such as table1")
    a = parser.parse_args(words)
    a.out.mkdir(parents=True, exist_ok=True)
    known = parts(studies(a.sweeps), a.out)
    wanted = ALL if a.only is None else [a.only]
    for name in (name for name in wanted if name in known):
        if (table := known[name]()) is not None:
            table.write(a.out / name)
            print(table.markdown())
        else:
            print(f"{name}: {a.out}/{name}.png, .svg, .pdf and .csv\n")
    if absent := [name for name in wanted if name not in known]:
        print(f"left out, no runs: {', '.join(absent)}")


if __name__ == "__main__":
    main()
