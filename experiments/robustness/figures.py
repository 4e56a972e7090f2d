"""Heat map and tables of attacks against defences, from sweeps.

    python experiments/robustness/figures.py runs/robustness --out experiments/robustness/results

Each sweep has one attack, or none. Writes ``heat_map`` (PNG, SVG, PDF, CSV) and the tables
``accuracy``, ``spaces``, ``backdoor`` and ``shares`` (Markdown, CSV, LaTeX), as far as there are
runs. ± is the standard deviation over seeds.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedjax_peft.report.figure_files import save, style, subplots
from fedjax_peft.report.study import Cell, paired, summarise
from fedjax_peft.report.table_files import TextTable

sys.path.append(str(Path(__file__).parents[1]))
import paper

ATTACKS = {
    "none": "none",
    "label_flip": "label flip",
    "sign_flip": "sign flip",
    "gaussian": "Gaussian",
    "scaled": "scaled",
    "alie": "ALIE",
    "ipm": "IPM",
    "min_max": "Min-Max",
    "backdoor": "backdoor",
}
RULES = {
    "mean": "mean",
    "fra": "mean",
    "median": "median",
    "trimmed_mean": "trimmed mean",
    "krum": "Krum",
    "multi_krum": "Multi-Krum",
    "bulyan": "Bulyan",
    "geometric_median": "geometric median",
    "centred_clipping": "centred clipping",
    "norm_bounding": "norm bounding",
    "fltrust": "FLTrust",
}
"""Aggregator -> its name in the figures; ``fra`` is the mean over products."""
SHARE = 0.2
"""The share of hostile clients of the heat map."""

Cells = dict[tuple[str, float, str], Cell]
"""(attack, share of hostile clients, method) -> its runs."""


def cells(folders: Iterable[Path]) -> Cells:
    """Returns the runs of all sweeps at or below the folders."""
    found: Cells = {}
    for cell in (cell for study in paper.read(folders) for cell in study.cells):
        attack = cell.first.config.get("attack") or {}
        share = float(attack.get("share", 0.0))
        found[attack.get("name", "none"), share, cell.name] = cell
    return found


def at_share(found: Cells, share: float = SHARE) -> dict[tuple[str, str], Cell]:
    """Returns (attack, method) -> runs with this share of hostile clients; ``none`` has share 0."""
    return {(a, m): cell for (a, s, m), cell in found.items() if a == "none" or s == share}


def label(method: str) -> str:
    """Returns the name of a defence, such as ``Krum, products``."""
    rule = method.removesuffix("_product")
    space = "products" if rule != method or method == "fra" else "factors"
    return f"{RULES.get(rule, rule)}, {space}"


def present(found: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Returns the attacks and the methods that there are, in the order of the figures."""
    pairs = list(found)
    attacks = [name for name in ATTACKS if name in {a for a, _ in pairs}]
    order = [m for rule in RULES for m in (rule, f"{rule}_product")]
    return attacks, [m for m in order if m in {m for _, m in pairs}]


def text(cell: Cell | None, metric: str) -> str:
    """Returns mean and deviation of a metric in %, ``-`` without runs."""
    return "-" if cell is None else summarise(cell.values(metric)).text(scale=100)


def heat_map(found: dict[tuple[str, str], Cell], stem: Path) -> None:
    """Writes the heat map of the test accuracy."""
    attacks, methods = present(found)
    data: list[dict[str, Any]] = []
    grid = [[math.nan] * len(attacks) for _ in methods]
    for i, method in enumerate(methods):
        for j, attack in enumerate(attacks):
            cell = found.get((attack, method))
            values = {} if cell is None else cell.values("test_accuracy")
            mean = summarise(values).mean
            grid[i][j] = math.nan if mean is None else 100 * mean
            data += [
                {"attack": attack, "defence": method, "seed": seed, "accuracy": value}
                for seed, value in values.items()
            ]
    with style():
        size = (2.6 + 0.75 * len(attacks), 1.4 + 0.3 * len(methods))
        fig, ax = subplots(1, 1, size=size)
        image = ax.imshow(grid, cmap="cividis", aspect="auto", interpolation="none")
        ax.grid(False)
        ax.set_xticks(range(len(attacks)), [ATTACKS[a] for a in attacks], rotation=30, ha="right")
        ax.set_yticks(range(len(methods)), [label(m) for m in methods])
        low, high = image.get_clim()
        for i, row in enumerate(grid):
            for j, value in enumerate(row):
                if not math.isnan(value):
                    dark = value < (low + high) / 2
                    ax.text(
                        *(j, i, f"{value:.0f}"),
                        **{"ha": "center", "va": "center", "fontsize": 8},
                        color="white" if dark else "black",
                    )
        fig.colorbar(image, ax=ax).set_label("Test accuracy (%)")
    save(fig, stem, data)


def accuracy_table(found: dict[tuple[str, str], Cell]) -> TextTable:
    """Returns the test accuracy of every defence under every attack."""
    attacks, methods = present(found)
    rows = [
        [label(m), *(text(found.get((a, m)), "test_accuracy") for a in attacks)] for m in methods
    ]
    header = ["defence", *(ATTACKS[a] for a in attacks)]
    title = f"Test accuracy (%), {SHARE:.0%} of the clients hostile"
    return TextTable(title, header, rows, ["± is the standard deviation over seeds."])


def spaces_table(found: dict[tuple[str, str], Cell]) -> TextTable:
    """Returns accuracy over products minus accuracy over factors, paired by seed."""
    attacks, methods = present(found)
    rows = []
    for rule, name in RULES.items():
        product = "fra" if rule == "mean" else f"{rule}_product"
        if rule not in methods or product not in methods:
            continue
        row = [name]
        for attack in attacks:
            pair = [found.get((attack, method)) for method in (product, rule)]
            if pair[0] is None or pair[1] is None:
                row.append("-")
                continue
            difference = paired(*(cell.values("test_accuracy") for cell in pair if cell))
            row.append(difference.text(scale=100))
        rows.append(row)
    title = "Accuracy over products minus accuracy over factors (points)"
    notes = ["Paired by seed; in brackets the 95 % interval by Student's t."]
    return TextTable(title, ["rule", *(ATTACKS[a] for a in attacks)], rows, notes)


def backdoor_table(found: dict[tuple[str, str], Cell]) -> TextTable:
    """Returns accuracy and success of the backdoor."""
    rows = []
    for method in present(found)[1]:
        cell, clean = found.get(("backdoor", method)), found.get(("none", method))
        if cell is not None:
            metrics = ("test_accuracy", "test_backdoor_success")
            row = [text(clean, metrics[0]), *(text(cell, metric) for metric in metrics)]
            rows.append([label(method), *row])
    header = ["defence", "accuracy without attack", "accuracy", "backdoor success"]
    notes = ["Success: examples of the other class that the trigger turns into the target."]
    return TextTable("The backdoor (%)", header, rows, notes)


def shares_table(found: Cells) -> TextTable | None:
    """Returns the accuracy by the share of hostile clients; None with one share."""
    shares = sorted({share for attack, share, _ in found if attack != "none"})
    if len(shares) < 2:
        return None
    few = {(a, m) for a, s, m in found if a != "none" and s != SHARE}
    rows = []
    for attack, method in sorted(few, key=lambda pair: (pair[0], label(pair[1]))):
        each = [text(found.get((attack, share, method)), "test_accuracy") for share in shares]
        none = text(found.get(("none", 0.0, method)), "test_accuracy")
        rows.append([f"{ATTACKS[attack]}: {label(method)}", none, *each])
    header = ["attack: defence", "0 %", *(f"{share:.0%}".replace("%", " %") for share in shares)]
    return TextTable("Test accuracy (%) by the share of hostile clients", header, rows)


def main(words: Sequence[str] | None = None) -> None:
    """Writes the figure and the tables that the given sweeps have runs for."""
    parser = paper.arguments(__doc__, "runs+")
    a = parser.parse_args(words)
    every = cells(a.runs)
    found = at_share(every)
    if not found:
        parser.error("there are no finished runs")
    a.out.mkdir(parents=True, exist_ok=True)
    heat_map(found, a.out / "heat_map")
    tables = {"accuracy": accuracy_table(found), "spaces": spaces_table(found)}
    tables |= {"backdoor": backdoor_table(found), "shares": shares_table(every)}
    for name, table in tables.items():
        if table is not None and table.rows:
            paper.write(table, a.out / name)


if __name__ == "__main__":
    main()
