"""Accuracy against simulated time of servers that wait, and of servers that do not.

    python experiments/asynchronous/figures.py runs/asynchronous/20news --out DIR

Writes ``accuracy_by_time`` (PNG, SVG, PDF, and its data as CSV) and ``time_to_target`` (Markdown,
CSV, LaTeX). The learning rate of each method is the one with the best mean validation accuracy at
the end of the common time.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft.report.figure_files import PALETTE, save, style, subplots
from fedjax_peft.report.study import Cell, Study, paired, read_study, summarise
from fedjax_peft.report.table_files import TextTable

sys.path.append(str(Path(__file__).parents[1]))
import paper

METHODS = {
    "fedavg": "FedAvg, waits for all",
    "partial": "FedAvg, 5 s, partial work",
    "semi_synchronous": "semi-synchronous, every 5 s",
    "fedbuff": "FedBuff, K = 5",
    "fedasync": "FedAsync, α = 0.6",
}
END = 200.0
"""Simulated seconds that every run lasts for at least."""
TARGETS = (0.2, 0.3, 0.4)
"""Test accuracies whose times the table shows."""

Curves = Mapping[Any, tuple[list[float], list[float]]]
"""seed -> (simulated seconds, values), ascending."""


def at(curve: tuple[list[float], list[float]], time: float) -> float:
    """Returns the value of the last evaluation up to a time: the model that is there then."""
    seconds, values = curve
    return values[max(int(np.searchsorted(seconds, time, "right")) - 1, 0)]


def reached(curve: tuple[list[float], list[float]], target: float) -> float | None:
    """Returns when a curve first has the target, None if it never has within the common time."""
    return next((t for t, y in zip(*curve, strict=True) if y >= target and t <= END), None)


def chosen(study: Study) -> dict[str, Cell]:
    """Returns method -> the cell with the best mean validation accuracy at the end."""

    def score(cell: Cell) -> float:
        curves = cell.series("validation_accuracy", "simulated_seconds")
        return float(np.mean([at(curve, END) for curve in curves.values()]))

    found = study.methods
    return {name: max(found[name], key=score) for name in METHODS if name in found}


def draw(cells: Mapping[str, Cell], stem: Path) -> None:
    """Writes the figure, one panel for each server beside the first one, which waits.

    Lines are means over seeds, and bands are 95 % t intervals.
    """
    first, *others = cells
    data: list[dict[str, Any]] = []
    with style():
        rows = -(-max(len(others), 1) // 2)
        fig, axes = subplots(
            rows, 2, size=(7.0, 2.6 * rows), squeeze=False, sharex=True, sharey=True
        )
        for ax, name in zip(axes.flat, others, strict=False):
            for color, one in zip(PALETTE, (first, name), strict=False):
                _curve(ax, cells[one], color, METHODS[one])
            ax.set(xlim=(0, END), ylim=(0, None))
            ax.legend(loc="lower right")
        fig.supxlabel("Simulated seconds", fontsize="medium")
        fig.supylabel("Test accuracy (%)", fontsize="medium")
    for name, cell in cells.items():
        data += [
            {"method": name, "seed": seed, "seconds": t, "test_accuracy": y}
            for seed, curve in cell.series("test_accuracy", "simulated_seconds").items()
            for t, y in zip(*curve, strict=True)
        ]
    save(fig, stem, data)


def _curve(ax: Any, cell: Cell, color: str, label: str) -> None:
    """Draws the mean over seeds and its interval."""
    grid = np.linspace(0, END, 81)
    curves = cell.series("test_accuracy", "simulated_seconds")
    values = np.array([[100 * at(curve, t) for t in grid] for curve in curves.values()])
    ax.plot(grid, values.mean(axis=0), color=color, label=label, marker="", drawstyle="steps-post")
    if len(values) > 1:
        low, high = zip(*((s.low, s.high) for s in map(summarise, values.T)), strict=True)
        ax.fill_between(grid, low, high, color=color, alpha=0.2, linewidth=0, step="post")


def table(cells: Mapping[str, Cell]) -> TextTable:
    """Returns the table: accuracy at the end, and the times to the targets."""
    header = ["method", "learning rate", f"accuracy % at {END:g} s", "minus FedAvg, points"]
    header += [f"s to {100 * target:g} %" for target in TARGETS]
    header += ["uploads", "staleness"]
    curves = {
        name: cell.series("test_accuracy", "simulated_seconds") for name, cell in cells.items()
    }
    ends = {
        name: {seed: at(curve, END) for seed, curve in found.items()}
        for name, found in curves.items()
    }
    rows = []
    for name, cell in cells.items():
        difference = "-"
        if name != "fedavg" and "fedavg" in ends:
            difference = paired(ends[name], ends["fedavg"]).text(100)
        times = [_time(curves[name], target) for target in TARGETS]
        rate = cell.settings.get("optimizer.learning_rate", "-")
        parts = [f"{rate:g}" if isinstance(rate, float) else str(rate)]
        parts += [summarise(ends[name]).text(100), difference, *times, *_work(cell)]
        rows.append([METHODS[name], *parts])
    note = (
        "20 Newsgroups, 50 clients, 10 at work. Accuracy of the newest evaluated model after"
        f" {END:g} simulated seconds, mean ± standard deviation over"
        f" {paper.seeds(cells.values())} seeds; differences are paired by seed, with the 95 % t"
        " interval. s to x %: simulated seconds until an evaluation first has this test accuracy,"
        " mean over the seeds that reach it (their number in brackets if it is not all)."
        f" uploads and staleness: number, and mean, of the uploads in {END:g} s."
    )
    return TextTable("Waiting and not waiting", header, rows, [note])


def _time(curves: Curves, target: float) -> str:
    """Returns the mean time to a target in words."""
    times = [t for curve in curves.values() if (t := reached(curve, target)) is not None]
    if not times:
        return "-"
    some = "" if len(times) == len(curves) else f" ({len(times)} of {len(curves)})"
    return f"{np.mean(times):.0f}{some}"


def _work(cell: Cell) -> tuple[str, str]:
    """Returns the number of uploads until the end, and their mean staleness, over seeds."""
    uploads, staleness = [], []
    for run in cell.runs.values():
        ends = np.cumsum([row["simulated_seconds"] for row in run.rows])
        rows = [row for row, end in zip(run.rows, ends, strict=True) if end <= END]
        counts = [len(row.get("clients", ())) for row in rows]
        uploads.append(sum(counts))
        total = sum(row.get("staleness_mean", 0.0) * n for row, n in zip(rows, counts, strict=True))
        staleness.append(total / max(sum(counts), 1))
    return f"{np.mean(uploads):.0f}", f"{np.mean(staleness):.1f}"


def main(words: Sequence[str] | None = None) -> None:
    """Writes the figure and the table."""
    a = paper.arguments(__doc__, "sweep").parse_args(words)
    cells = chosen(read_study(a.sweep))
    draw(cells, a.out / "accuracy_by_time")
    paper.write(table(cells), a.out / "time_to_target")
    absent = [name for name in METHODS if name not in cells]
    if absent:
        print(f"left out, no runs: {', '.join(absent)}")


if __name__ == "__main__":
    main()
