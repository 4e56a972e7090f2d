"""FRA-LoRA's tables and figures from sweeps, with the paper's numbers beside ours.

    python experiments/fra/tables.py runs/fra/small/* --out experiments/fra/results/small

Writes what the given sweeps have runs for: ``table1`` to ``table4`` (Markdown, CSV, LaTeX) and
``figure3`` to ``figure7`` (PNG, SVG, PDF, and their data as CSV). With several learning rates, a
method's rate is the one with the best mean validation accuracy over seeds. ± is the standard
deviation over seeds.
"""

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_peft.config import config as configs
from fedjax_peft.report.figure_files import rolling
from fedjax_peft.report.study import Cell, Study
from fedjax_peft.report.table_files import TextTable
from fedjax_peft.support.errors import InputError

sys.path.append(str(Path(__file__).parents[1]))
import paper

NAMES = {"sst2": "SST-2", "mnli": "MNLI"}
METHODS = {
    "centralised": "centralised",
    "fedavg": "FedAvg-LoRA",
    "ffa": "FFA-LoRA",
    "fra": "FRA-LoRA",
}
PAPER = paper.printed("fra")
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
TEST = "test_accuracy"
FIGURES = {("sst2", "iid"): 3, ("mnli", "iid"): 4, ("sst2", "skew"): 5, ("mnli", "skew"): 6}
WIDTH = 7
"""Rounds of the rolling mean in Figures 3 to 6."""
RELATIVE = "aggregation_error_relative"
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
    groups: dict[Split, list[Study]] = {}
    for study in sorted(found, key=lambda one: -len(one.cells)):
        group = groups.setdefault(split_of(study), [study])
        if study is not group[0] and tested(study) == tested(group[0]):
            group.append(study)
    made = {split: Results(*paper.choose(group)) for split, group in groups.items()}
    for (data, split), one in made.items():
        other = made.get((data, "iid"))
        if split == "skew" and other is not None and "centralised" in other.cells:
            one.cells.setdefault("centralised", other.cells["centralised"])
    return made


# ------------------------------------------------------------------------------------------ tables


def accuracy_table(number: str, split: str, made: Mapping[Split, Results]) -> TextTable:
    """Returns Table I (IID) or III (skewed labels): best and final accuracy of each method."""
    used = {data: made[data, split] for data in NAMES if (data, split) in made}
    columns: dict[str, paper.Column] = {}
    for data, one in used.items():
        own = {
            "best": paper.score(TEST, "best"),
            "paper: best": printed(number, data),
            "final": paper.score(TEST),
            "minus FedAvg": paper.minus("fedavg", one.cells, lambda cell: cell.values(TEST)),
            "learning rate": paper.RATE,
        }
        columns |= {f"{NAMES[data]}: {x}": paper.among(one.cells, own[x]) for x in own}
    cells = [cell for one in used.values() for cell in one.cells.values()]
    notes = dict.fromkeys(note for one in used.values() for note in one.notes)
    about = (
        f"Accuracy of the global model in %; mean ± standard deviation over"
        f" {paper.seeds(cells)} seeds. Model: {paper.models(cells)}. The best of the"
        " evaluated rounds is chosen on test examples, so it is optimistic. Differences are of"
        " final accuracies, in points, paired by seed, with the 95 % t interval. The rows with"
        " differential privacy are in the tables of private.py."
    )
    words = {"iid": "IID", "skew": "skewed labels"}[split]
    title = f"FRA-LoRA, Table {number}: {words}"
    return paper.table(title, METHODS, {}, columns, [about, *notes])


def printed(number: str, data: str) -> paper.Column:
    """Returns the column of the paper's best accuracies."""
    return lambda method, _: f"{PAPER.value(number, METHODS[method], NAMES[data]):.2f}"


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


def local_figure(study: Study, title: str, stem: Path) -> None:
    """Writes one of Figures 3 to 6: each client's accuracy before aggregation, rolling mean."""

    def curve(cell: Cell, client: int) -> paper.Points:
        by_seed: dict[Any, list[float]] = {}
        rounds: list[int] = []
        for seed, run in cell.runs.items():
            rows = [row for row in run.rows if "local_accuracy" in row]
            rounds = [row["round"] for row in rows]
            values = [row["local_accuracy"][row["clients"].index(client)] for row in rows]
            percent = [math.nan if x is None else 100 * x for x in values]
            by_seed[seed] = rolling(percent, WIDTH)
        return rounds, by_seed

    panels = []
    for client in (0, 1):
        found = {METHODS.get(x, x): curve(cell, client) for x, cell in study.chosen().items()}
        look = {"title": f"{title}, client {client + 1}", "xlabel": "Communication round"}
        if client == 0:
            look["ylabel"] = f"Accuracy before aggregation (%),\nrolling mean of {WIDTH} rounds"
        curves = {label: points for label, points in found.items() if points[0]}
        panels.append(paper.Panel(curves, look, {"client": client + 1}))
    paper.draw(stem, panels, (1, 2), size=(9.0, 3.6), sharey=True)


def error_figure(one: Results, stem: Path) -> None:
    """Writes Figure 7: aggregation errors of FedAvg and FRA in the first rounds."""

    def curve(cell: Cell, metric: str) -> paper.Points:
        rows = {
            seed: [row for row in run.rows[1 : FIRST + 1] if metric in row]
            for seed, run in cell.runs.items()
        }
        rounds = [row["round"] for row in [*rows.values()][-1]]
        return rounds, {seed: [row[metric] for row in found] for seed, found in rows.items()}

    labels = ("Aggregation error (Frobenius)", "Error / norm of the exact average")
    panels = []
    for metric, label in zip(("aggregation_error", RELATIVE), labels, strict=True):
        curves = {METHODS[x]: curve(one.cells[x], metric) for x in ("fedavg", "fra")}
        look = {"xlabel": "Communication round", "ylabel": label, "ylim": (0, None)}
        panels.append(paper.Panel(curves, look, {"metric": metric}))
    paper.draw(stem, panels, (1, 2), size=(9.0, 3.6))


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
    paper.report(words, __doc__, ALL, parts)


if __name__ == "__main__":
    main()
