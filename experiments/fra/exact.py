"""Exact aggregation against the mean of the factors, by learning rate and rank: tables and figure.

    python experiments/fra/exact.py runs/fra/exact --out experiments/fra/results/small

The folder has the sweeps ``rankR`` (every rate) and ``fresh_rankR`` (other seeds at the chosen
rates) of ``small/exact.toml``; a rank or a sweep may be missing. ``exact_rankR`` (Markdown, CSV,
LaTeX) compares the methods at every rate, ``exact_chosen_rankR`` at the chosen rates;
``exact`` (PNG, SVG, PDF, CSV) is the figure, ``exact_runs.csv`` has the numbers of every run.
"""

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_peft.report.figure_files import line_look, save, style, subplots, table_csv
from fedjax_peft.report.study import At, Cell, Study, paired, read_study, summarise
from fedjax_peft.report.table_files import TextTable
from fedjax_peft.support.files import replace_file

sys.path.append(str(Path(__file__).parents[1]))
import paper
from significance import differences_in_words

METHODS = {
    "fedavg": "FedAvg-LoRA",
    "fra": "FRA-LoRA",
    "fedex": "FedEx-LoRA",
    "ffa": "FFA-LoRA",
    "lora_fair": "LoRA-FAIR",
    "flora": "FLoRA",
}
OUTCOMES: dict[At, str] = {"final": "last round", "mean": "mean of evaluations"}
"""The two outcomes that were declared before the runs."""
RATE = "optimizer.learning_rate"
ERROR = "aggregation_error"


class Rank(NamedTuple):
    """The runs of one rank."""

    rank: int
    study: Study
    fresh: Study | None
    """Other seeds, at the chosen rates."""

    def cells(self, method: str) -> dict[float, Cell]:
        """Returns learning rate -> the runs of a method."""
        found = self.study.methods.get(method, [])
        return {cell.learning_rate: cell for cell in found}

    @property
    def chosen(self) -> dict[str, Cell]:
        """Method -> the rate with the best mean validation accuracy, in the order of METHODS."""
        cells = self.study.chosen("validation_accuracy")
        return {name: cells[name] for name in METHODS if name in cells}

    def fresh_cell(self, method: str) -> Cell | None:
        """Returns the runs of a method with other seeds, at its chosen rate."""
        cells = [] if self.fresh is None else self.fresh.methods.get(method, [])
        rate = self.chosen[method].learning_rate
        return next((cell for cell in cells if cell.learning_rate == rate), None)


def read(root: Path) -> list[Rank]:
    """Returns the ranks below a folder, the largest first."""
    found = []
    for path in root.glob("rank*"):
        if match := re.fullmatch(r"rank(\d+)", path.name):
            other = root / f"fresh_{path.name}"
            fresh = read_study(other) if other.is_dir() else None
            found.append(Rank(int(match[1]), read_study(path), fresh))
    return sorted(found, key=lambda one: -one.rank)


def outcome(cell: Cell | None, at: At) -> dict[Any, float]:
    """Returns seed -> the outcome of each run; nothing without a cell."""
    return {} if cell is None else cell.values("test_accuracy", at)


def error(cell: Cell, last: bool, relative: bool = True) -> dict[Any, float]:
    """Returns seed -> the aggregation error of the first or the last round."""
    name = f"{ERROR}_relative" if relative else ERROR
    curves = cell.series(name)
    return {seed: ys[-1 if last else 0] for seed, (_, ys) in curves.items() if ys}


# ------------------------------------------------------------------------------------------ tables


def against(rows: Sequence[tuple[Cell | None, Cell | None]]) -> list[list[str]]:
    """Returns for each pair (method, FedAvg) the texts of both outcomes' differences."""
    pairs = [(outcome(a, x), outcome(b, x)) for a, b in rows for x in OUTCOMES]
    texts = differences_in_words(pairs, 100)
    return [texts[2 * i : 2 * i + 2] for i in range(len(rows))]


def facts(rank: Rank) -> list[str]:
    """Returns the notes that every table has."""
    run = rank.study.cells[0].first
    tested = run.config["data"].get("test_examples") or 0
    error_of = f"{100 * math.sqrt(0.25 / tested):.1f}" if tested else "unknown"
    return [
        f"Test accuracy in %, mean ± standard deviation over seeds; LoRA of rank {rank.rank}."
        f" Differences are in points, paired by seed, with the 95 % t interval; p by a paired t"
        f" test, with Holm's correction over all differences of this table. An accuracy on"
        f" {tested:,} test documents has a standard error of at most {error_of} points; all seeds"
        " and methods share these documents.",
        "Declared before the runs: both outcomes, the pairs and the choice of the rate on"
        " validation documents.",
        *rank.study.notes,
    ]


def rate_table(rank: Rank) -> TextTable:
    """Returns the methods at every rate, and their differences to FedAvg at the same rate."""
    base = rank.cells("fedavg")
    found = [(m, rate, c) for m in METHODS for rate, c in sorted(rank.cells(m).items())]
    compared = [one for one in found if one[0] != "fedavg" and one[1] in base]
    texts = against([(cell, base[rate]) for _, rate, cell in compared])
    differences = {one[:2]: text for one, text in zip(compared, texts, strict=True)}
    rows = []
    for method, rate, cell in found:
        row = [METHODS[method], f"{rate:g}", str(len(cell.runs))]
        row.append(summarise(cell.values("validation_accuracy")).text(100))
        for i, name in enumerate(OUTCOMES):
            row.append(summarise(outcome(cell, name)).text(100))
            row.append(differences.get((method, rate), ["-", "-"])[i])
        ends = [summarise(error(cell, last)).mean for last in (False, True)]
        row += ["-" if x is None else f"{x:.3f}" for x in ends]
        rows.append(row)
    header = ["method", "rate", "n", "validation"]
    header += [x for o in OUTCOMES.values() for x in (o, f"{o} − FedAvg at this rate")]
    header += ["error, round 1", "error, last round"]
    notes = [
        *facts(rank),
        "Error: the norm of the aggregation error over that of the exact average of the products.",
    ]
    title = f"Exact aggregation by learning rate, rank {rank.rank}"
    return TextTable(title, header, rows, notes)


def chosen_table(rank: Rank) -> TextTable:
    """Returns the methods at their chosen rates: fresh seeds alone, and all seeds."""
    chosen = rank.chosen
    fresh = {name: rank.fresh_cell(name) for name in chosen}
    both = {
        name: cell if fresh[name] is None else cell._replace(runs={**cell.runs, **fresh[name].runs})
        for name, cell in chosen.items()
    }
    names = [name for name in chosen if name != "fedavg"]
    alone = against([(fresh[name], fresh.get("fedavg")) for name in names])
    together = against([(both[name], both.get("fedavg")) for name in names])
    rows = []
    for name, cell in both.items():
        row = [METHODS[name], f"{cell.learning_rate:g}", str(len(cell.runs))]
        row += [summarise(outcome(cell, one)).text(100) for one in OUTCOMES]
        i = names.index(name) if name in names else None
        row += ["-"] * 4 if i is None else [*together[i], *alone[i]]
        rows.append(row)
    header = ["method", "chosen rate", "n", *OUTCOMES.values()]
    header += [f"{x} − FedAvg, all seeds" for x in OUTCOMES.values()]
    header += [f"{x} − FedAvg, fresh seeds" for x in OUTCOMES.values()]
    notes = [
        *facts(rank),
        "Fresh seeds had no part in the choice of the rate; Holm's correction is over the"
        " differences of all seeds, and separately over those of fresh seeds.",
    ]
    return TextTable(
        f"Exact aggregation at the chosen rates, rank {rank.rank}", header, rows, notes
    )


def runs(ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    """Returns a row for every run."""
    rows = []
    for rank in ranks:
        for kind, study in (("choice", rank.study), ("fresh", rank.fresh)):
            for cell in [] if study is None else study.cells:
                columns = {
                    "validation": cell.values("validation_accuracy"),
                    "last": outcome(cell, "final"),
                    "mean": outcome(cell, "mean"),
                    "error_first": error(cell, False),
                    "error_last": error(cell, True),
                }
                key = {"rank": rank.rank, "method": cell.name, "rate": cell.learning_rate}
                for seed in cell.runs:
                    values = {name: found.get(seed) for name, found in columns.items()}
                    rows.append({**key, "seeds": kind, "seed": seed, **values})
    return rows


# ------------------------------------------------------------------------------------------ figure


def figure(ranks: Sequence[Rank], stem: Path) -> None:
    """Draws FRA − FedAvg by rate with its t intervals, and below it FedAvg's aggregation error."""
    data: list[dict[str, Any]] = []
    with style():
        fig, axes = subplots(2, len(ranks), size=(4.8 * len(ranks), 5.6), squeeze=False)
        for (top, below), rank in zip(axes.T, ranks, strict=True):
            fra, base = rank.cells("fra"), rank.cells("fedavg")
            rates = sorted(fra.keys() & base.keys())
            for k, (name, label) in enumerate(OUTCOMES.items()):
                found = [paired(outcome(fra[x], name), outcome(base[x], name)) for x in rates]
                ys = [100 * (one.mean or 0.0) for one in found]
                margins = [100 * ((one.high or 0.0) - (one.mean or 0.0)) for one in found]
                shifted = [x * (0.96, 1.04)[k] for x in rates]
                top.errorbar(shifted, ys, margins, label=label, capsize=3, **line_look(k))
                data += [
                    {"rank": rank.rank, "quantity": f"FRA - FedAvg, {label}", "rate": x, "value": y}
                    | {"margin": margin, "n": one.n}
                    for x, y, margin, one in zip(rates, ys, margins, found, strict=True)
                ]
            top.axhline(0, color="black", linewidth=0.8)
            top.set(title=f"FRA-LoRA minus FedAvg-LoRA, rank {rank.rank}", ylabel="Points")
            top.legend()
            for k, (last, label) in enumerate(((False, "round 1"), (True, "last round"))):
                ys = [summarise(error(base[x], last)).mean or math.nan for x in rates]
                below.plot(rates, ys, label=f"FedAvg, {label}", **line_look(2 + k))
                data += [
                    {"rank": rank.rank, "quantity": f"error, {label}", "rate": x, "value": y}
                    for x, y in zip(rates, ys, strict=True)
                ]
            below.set(ylabel="Aggregation error / exact average", xlabel="Learning rate")
            below.set_ylim(bottom=0)
            below.legend()
            for ax in (top, below):
                paper.log_ticks(ax, rates)
    save(fig, stem, data)


def main(words: Sequence[str] | None = None) -> None:
    """Writes the tables of each rank and the figure of all."""
    a = paper.arguments(__doc__, "runs").parse_args(words)
    ranks = read(a.runs)
    for rank in ranks:
        for made, kind in ((rate_table(rank), ""), (chosen_table(rank), "chosen_")):
            paper.write(made, a.out / f"exact_{kind}rank{rank.rank}")
    replace_file(a.out / "exact_runs.csv", table_csv(runs(ranks)).encode())
    if drawn := [one for one in ranks if {"fra", "fedavg"} <= one.study.methods.keys()]:
        figure(drawn, a.out / "exact")


if __name__ == "__main__":
    main()
