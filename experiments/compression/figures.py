"""Accuracy against bytes for every compressor and three ways to train LoRA: a figure and a table.

    python experiments/compression/figures.py runs/compression/20news --out DIR

Writes ``accuracy_by_bytes`` (PNG, SVG, PDF, and its data as CSV) and ``compressors`` (Markdown,
CSV, LaTeX). Methods of the sweep are named WAY-COMPRESSOR.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_peft.report.figure_files import PALETTE, save, style, subplots
from fedjax_peft.report.study import Cell, paired, read_study, summarise
from fedjax_peft.report.table_files import TextTable

sys.path.append(str(Path(__file__).parents[1]))
import paper

WAYS = {"lora": "FedAvg-LoRA", "ffa": "FFA-LoRA", "fra": "FRA-LoRA"}
COMPRESSORS = {
    "none": "none (float32)",
    "quantize8": "QSGD, 8 bits",
    "quantize4": "QSGD, 4 bits",
    "quantize2": "QSGD, 2 bits",
    "int8": "int8 blocks",
    "nf4": "NF4 blocks",
    "sign": "EF-SignSGD",
    "ternary": "TernGrad",
    "top10": "top-k, 10 %",
    "random10": "random-k, 10 %",
    "directions2": "2 of 8 directions",
    "powersgd1": "PowerSGD, rank 1",
    "flasc25": "FLASC, 25 % both ways",
}
MARKERS = "*osD^v<>pPXdh"
"""A marker for each compressor."""
TICKS = [m * 10.0**e for e in range(-4, 6) for m in (1, 2, 5)]
"""Megabytes that an axis can name."""

Cells = Mapping[tuple[str, str], Cell]
"""(way, compressor) -> its runs."""


def cells_of(path: Path) -> dict[tuple[str, str], Cell]:
    """Returns the finished runs of a sweep, in the order of the table."""
    chosen = read_study(path).chosen()
    pairs = [(way, name) for way in WAYS for name in COMPRESSORS]
    return {pair: chosen["-".join(pair)] for pair in pairs if "-".join(pair) in chosen}


def megabytes(cell: Cell, direction: str) -> dict[Any, float]:
    """Returns seed -> megabytes that all clients sent (``up``) or received (``down``)."""
    return {
        seed: sum(row.get(f"bytes_{direction}", 0) for row in run.rows) / 1e6
        for seed, run in cell.runs.items()
    }


def draw(cells: Cells, stem: Path) -> None:
    """Writes the figure: one panel for each way; bars are 95 % t intervals over seeds."""
    ways = [way for way in WAYS if any(way == one for one, _ in cells)]
    data: list[dict[str, Any]] = []
    with style():
        fig, axes = subplots(
            1, len(ways), size=(3.1 * len(ways) + 1.9, 3.8), sharey=True, squeeze=False
        )
        for way, ax in zip(ways, axes[0], strict=True):
            for i, (name, label) in enumerate(COMPRESSORS.items()):
                if (cell := cells.get((way, name))) is None:
                    continue
                sent, scores = megabytes(cell, "up"), cell.values("test_accuracy")
                found = summarise(scores)
                if found.mean is None:
                    continue
                bar = 0.0 if found.high is None else found.high - found.mean
                look: dict[str, Any] = {"marker": MARKERS[i], "color": PALETTE[i % len(PALETTE)]}
                look |= {"markersize": 7, "linestyle": "none", "capsize": 2, "elinewidth": 0.8}
                mean = float(np.mean([*sent.values()]))
                ax.errorbar(mean, 100 * found.mean, yerr=100 * bar, label=label, **look)
                data += [
                    {"way": way, "compressor": name, "seed": s, "megabytes": sent[s], "accuracy": y}
                    for s, y in scores.items()
                ]
            ax.set_xscale("log")
            low, high = ax.get_xlim()
            paper.log_ticks(ax, [tick for tick in TICKS if low <= tick <= high])
            ax.set(xlabel="Megabytes up, all rounds", title=WAYS[way])
        axes[0][0].set_ylabel("Test accuracy (%)")
        handles: dict[str, Any] = {}
        for ax in axes[0]:
            handles |= {label: h for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        fig.legend(handles.values(), handles, loc="outside right center")
    save(fig, stem, data)


def table(cells: Cells) -> TextTable:
    """Returns the table: bytes, relative error, accuracy, and the difference to no compression."""
    header = ["method", "compressor", "MB up", "times smaller", "MB down", "error", "accuracy %"]
    header += ["minus none, points"]
    rows = []
    for (way, name), cell in cells.items():
        scores, plain = cell.values("test_accuracy"), cells.get((way, "none"))
        up = float(np.mean([*megabytes(cell, "up").values()]))
        down = float(np.mean([*megabytes(cell, "down").values()]))
        smaller = difference = "-"
        if plain is not None:
            smaller = f"{float(np.mean([*megabytes(plain, 'up').values()])) / up:.1f}"
            if name != "none":
                difference = paired(scores, plain.values("test_accuracy")).text(100)
        errors = [
            float(np.mean([row["compression_error"] for row in run.rows if _has_error(row)]))
            for run in cell.runs.values()
            if any(map(_has_error, run.rows))
        ]
        error = f"{float(np.mean(errors)):.3f}" if errors else "-"
        texts = [f"{up:.2f}", smaller, f"{down:.2f}", error, summarise(scores).text(100)]
        rows.append([WAYS[way], COMPRESSORS[name], *texts, difference])
    note = (
        "20 Newsgroups, 20 clients, 5 in a round. Accuracy of the global model after the last"
        f" round, mean ± standard deviation over {paper.seeds(cells.values())} seeds. MB: decimal"
        " megabytes of all clients and rounds. error: mean over rounds of compression_error, the"
        " relative error of what a client wants to send, memory included. Differences are paired by"
        " seed, with the 95 % t interval."
    )
    return TextTable("Compressed uploads", header, rows, [note])


def _has_error(row: Mapping[str, Any]) -> bool:
    return row.get("compression_error") is not None


def main(words: Sequence[str] | None = None) -> None:
    """Writes the figure and the table."""
    a = paper.arguments(__doc__, "sweep").parse_args(words)
    cells = cells_of(a.sweep)
    draw(cells, a.out / "accuracy_by_bytes")
    paper.write(table(cells), a.out / "compressors")
    absent = [f"{w}-{c}" for w in WAYS for c in COMPRESSORS if (w, c) not in cells]
    if absent:
        print(f"left out, no runs: {', '.join(absent)}")


if __name__ == "__main__":
    main()
