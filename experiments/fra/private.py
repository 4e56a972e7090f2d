"""FRA-LoRA's rows with differential privacy: accuracy against ε, as a table and a figure.

    python experiments/fra/private.py runs/fra/small/private_* --out experiments/fra/results/small

A sweep has several ε (``inf``: no noise) and several values of other settings. Each method has, for
each ε, the setting with the best mean validation accuracy over seeds. ``private_NAME`` (Markdown,
CSV, LaTeX) is the table of the sweep ``private_NAME``; ``private`` (PNG, SVG, PDF, CSV) is the
figure of all given sweeps.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedjax_peft.report.figure_files import save
from fedjax_peft.report.study import Cell, Study, paired, read_study, summarise
from fedjax_peft.report.table_files import TextTable

sys.path.append(str(Path(__file__).parents[1]))
import paper

METHODS = {"fedavg": "FedAvg-LoRA", "ffa": "FFA-LoRA", "fra": "FRA-LoRA"}
UNITS = {"client": "whole clients are private", "example": "single examples are private"}

Chosen = Mapping[str, Mapping[float, Cell]]
"""Method -> ε -> its chosen setting."""


def chosen(study: Study) -> Chosen:
    """Returns for each method and ε the setting with the best mean validation accuracy."""
    found: dict[str, dict[float, Cell]] = {}
    for name in METHODS:
        cells = study.methods.get(name, [])
        for epsilon in sorted({cell.settings["privacy.epsilon"] for cell in cells}):
            own = [c for c in cells if c.settings["privacy.epsilon"] == epsilon]
            best = study._replace(cells=own).chosen("validation_accuracy")
            if name in best:
                found.setdefault(name, {})[epsilon] = best[name]
    return found


def number(epsilon: float) -> str:
    """Returns ε as text."""
    return "∞" if math.isinf(epsilon) else f"{epsilon:g}"


def setting(cell: Cell) -> str:
    """Returns the chosen setting in words, without ε."""
    noise = ("privacy.epsilon", "privacy.noise_multiplier")  # the second follows from the first
    rest = {key: x for key, x in cell.settings.items() if key not in noise}
    return cell._replace(settings=rest).label or "-"


def final(cell: Cell, metric: str) -> float | None:
    """Returns the mean over seeds of a metric in the last round that has it; None without one."""
    values = list(cell.values(metric).values())
    return float(np.mean(values)) if values else None


def table(study: Study, cells: Chosen, title: str) -> TextTable:
    """Returns accuracy, differences and chosen setting by method and ε."""
    rows = []
    for name, by in cells.items():
        for epsilon, cell in by.items():
            scores = cell.values("test_accuracy")
            base = cells.get("fedavg", {}).get(epsilon)
            gap = "-"
            if name != "fedavg" and base is not None:
                gap = paired(scores, base.values("test_accuracy")).text(100)
            free = by.get(math.inf)
            loss = "-"
            if free is not None and not math.isinf(epsilon):
                loss = paired(scores, free.values("test_accuracy")).text(100)
            snr = final(cell, "snr")
            rows.append(
                [
                    METHODS[name],
                    number(epsilon),
                    summarise(scores).text(100),
                    gap,
                    loss,
                    setting(cell),
                    "-" if snr is None else f"{snr:.2g}",
                ]
            )
    header = ["method", "ε", "accuracy", "minus FedAvg", "minus own ε = ∞", "setting", "snr"]
    one = study.cells[0].first
    about = (
        f"Test accuracy of the last round in %; mean ± standard deviation over"
        f" {paper.seeds(c for by in cells.values() for c in by.values())} seeds,"
        f" δ = {one.config['privacy']['delta']:g}."
        " Differences are in points, paired by seed, with the 95 % t interval."
    )
    if any(setting(cell) != "-" for by in cells.values() for cell in by.values()):
        about += (
            " The setting was chosen for each method and ε on validation examples; this choice is"
            " not private."
        )
    if "snr" in study.metrics:
        about += (
            " snr: the smallest kept singular value of the noisy average product over the spectral"
            " norm of one round's noise."
        )
    return TextTable(title, header, rows, [about, *study.notes])


def figure(found: Mapping[str, tuple[str, Chosen]], stem: Path) -> None:
    """Writes accuracy against ε, one panel for each sweep; the last place is ε = ∞."""
    panels = []
    places = [sorted({e for by in cells.values() for e in by}) for _, cells in found.values()]
    for (title, cells), own in zip(found.values(), places, strict=True):
        curves = {}
        for name, by in cells.items():
            values = [by[e].values("test_accuracy") if e in by else {} for e in own]
            curves[METHODS[name]] = range(len(own)), paper.by_seed(values)
        look = {"title": title, "xlabel": "ε", "ylabel": "Test accuracy (%)"}
        ticks = {i: number(epsilon) for i, epsilon in enumerate(own)}
        panels.append(paper.Panel(curves, look, {"sweep": title}, ticks=ticks))
    size = (max(4.6 * len(found), 6.4), 3.6)
    drawn, data = paper.draw(None, panels, (1, len(found)), size=size)
    epsilons = dict(zip((title for title, _ in found.values()), places, strict=True))
    rows = [
        {"sweep": row["sweep"], "epsilon": f"{epsilons[row['sweep']][row['x']]:g}", **row}
        for row in data
    ]
    save(drawn, stem, rows)


def main(words: Sequence[str] | None = None) -> None:
    """Writes the table of each sweep and the figure of all."""
    a = paper.arguments(__doc__, "sweeps+").parse_args(words)
    a.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for path in a.sweeps:
        study = read_study(path)
        unit = "example" if "example" in path.name else "client"
        cells = chosen(study)
        made = table(study, cells, f"FRA-LoRA with differential privacy: {UNITS[unit]}")
        paper.write(made, a.out / path.name)
        found[path.name] = (UNITS[unit].capitalize(), cells)
    figure(found, a.out / "private")
    paper.write(None, a.out / "private")


if __name__ == "__main__":
    main()
