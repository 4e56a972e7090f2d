"""FeDeRA's figures from sweeps and from the data, as PNG, SVG and PDF with their data as CSV.

    python experiments/federa/figures.py F1 F3 F5 F6 --runs runs/federa/small --out DIR
    python experiments/federa/figures.py F7 --data DIR_OF_DATA --out DIR

``--runs`` and ``--data`` are those of ``tables.py``. Figures whose sweeps are missing are named and
left out. The plots of the paper have no printed values, so there is nothing to draw beside ours;
``README.md`` says what each one shows there.
"""

import functools
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import federations
from printed import FEDERATIONS, METHODS
from tables import Source, command, method_name, reached, rounds_of, settings, sweep

from fedjax_peft import InputError, heterogeneity
from fedjax_peft.report.figure_files import bands, line_look, save, style, subplots
from fedjax_peft.report.study import Cell, Study, summarise
from fedjax_peft.simulation.rows import number

sys.path.append(str(Path(__file__).parents[1]))
import paper

Rows = list[dict[str, Any]]
Drawn = tuple[Any, Rows, str]
"""A figure, the rows of its CSV, and a caption."""

MODULES = {"query": "q", "q_lin": "q", "query_proj": "q"} | dict.fromkeys(
    ("value", "v_lin", "value_proj"), "v"
)
LOOKS = {name: i for i, name in enumerate(METHODS.values())}
"""Method -> the number of its style, the same in all figures."""
BESIDE = "outside right center"
"""The place of the legends."""
TARGETS = (0.76, 0.80)
"""Accuracies of Figures 6b and 6c."""


class Missing(Exception):
    """A figure cannot be drawn; the text says what is missing."""


def need(source: Source, *names: str) -> Study:
    """Returns the first sweep of these names that was run.

    Raises:
      Missing: none was run.
    """
    for name in names:
        if (study := sweep(source, name)) is not None:
            return study
    raise Missing(f"no sweep {' or '.join(map(repr, names))}")


# ----------------------------------------------------------------- accuracy against a swept setting


def by_setting(study: Study, key: str) -> dict[str, dict[Any, Cell]]:
    """Returns method -> value of a swept key -> its cell with the best validation score.

    If only this key was swept, there is one cell for each value and nothing is chosen.
    """
    criterion = study.choose_by or f"validation_{study.headline}"
    best: dict[str, dict[Any, tuple[float, Cell]]] = {}
    for cell in study.cells:
        mean = summarise(cell.values(criterion)).mean
        score = -math.inf if mean is None else mean
        found = best.setdefault(method_name(cell), {})
        value = cell.settings[key]
        if value not in found or score > found[value][0]:
            found[value] = (score, cell)
    names = [name for name in METHODS.values() if name in best]
    return {name: {v: best[name][v][1] for v in sorted(best[name])} for name in names}


def against(
    study: Study, key: str, label: str, rounds: Sequence[int], methods: Iterable[str]
) -> tuple[Any, Rows]:
    """Returns a figure of the score against a swept key: one panel for each round."""
    found, panels = by_setting(study, key), []
    for at in rounds:
        curves = {}
        for name, cells in ((name, found[name]) for name in methods if name in found):
            values = [cell.values(f"test_{study.headline}", at) for cell in cells.values()]
            curves[name] = list(cells), paper.by_seed(values)
        look = {"xlabel": label, "title": f"Round {at}"}
        if at == rounds[0]:
            look["ylabel"] = f"Test {study.headline} (%)"
        panels.append(paper.Panel(curves, look, {"round": at}, key, "log"))
    size = (3.2 * len(rounds) + 1.6, 3.4)
    options = {"legend": BESIDE, "numbers": LOOKS, "size": size, "sharey": True}
    return paper.draw(None, panels, (1, len(rounds)), **options)


def figure1(source: Source) -> Drawn:
    """Draws Figure 1: PEFT and full fine-tuning against alpha."""
    study = need(source, "alpha_distilbert", "alpha")
    names = [name for name in METHODS.values() if name != "FeDeRA"]
    fig, rows = against(
        study, "partition.alpha", "Alpha", rounds_of(study, (200, 500), study.headline), names
    )
    return fig, rows, f"Figure 1: accuracy by alpha, without FeDeRA. {settings(study)}"


def figure5(source: Source) -> Drawn:
    """Draws Figure 5: all methods against alpha."""
    study = need(source, "alpha")
    rounds = rounds_of(study, (200, 500, 1000), study.headline)
    fig, rows = against(study, "partition.alpha", "Alpha", rounds, METHODS.values())
    return fig, rows, f"Figure 5: accuracy by alpha. {settings(study)}"


def figure_clients(source: Source) -> Drawn:
    """Draws accuracy against the number of clients, which the paper does not study."""
    study = need(source, "clients")
    rounds = rounds_of(study, (1000,), study.headline)
    fig, rows = against(study, "partition.clients", "Clients", rounds, METHODS.values())
    return fig, rows, f"Accuracy by the number of clients (not in the paper). {settings(study)}"


# ------------------------------------------------------------------------------- Figure 6: budgets


def by_budget(study: Study) -> dict[str, dict[int, Cell]]:
    """Returns method -> trained parameters without the head -> the cell that validation chose."""
    found: dict[str, dict[int, Cell]] = {}
    for cell in study.chosen().values():
        run = cell.first
        size = int(run.rows[0]["parameters"]["adapter"])
        found.setdefault(method_name(cell), {})[size] = cell
    names = [name for name in METHODS.values() if name in found]
    return {name: dict(sorted(found[name].items())) for name in names}


def figure6(source: Source) -> Drawn:
    """Draws Figure 6: accuracy, and time to two targets, by the number of trained parameters.

    If no method reaches the smaller target of the paper, the targets are 90 and 95 percent of the
    best final mean.
    """
    study = need(source, "budget")
    found = by_budget(study)
    score = f"test_{study.headline}"
    finals = [
        summarise(c.values(score)).mean or 0.0 for one in found.values() for c in one.values()
    ]
    targets = TARGETS if max(finals) >= TARGETS[0] else (0.90 * max(finals), 0.95 * max(finals))
    rows: Rows = []
    with style():
        fig, axes = subplots(1, 3, size=(11, 3.4), sharex=True)
        for name, cells in found.items():
            sizes = list(cells)
            scores = [cell.values(score) for cell in cells.values()]
            seeds = sorted({seed for one in scores for seed in one}, key=str)
            rows += _panel(axes[0], name, sizes, scores, seeds, 100, study.headline)
            for ax, target in zip(axes[1:], targets, strict=True):
                hours = [_hours(cell, score, target) for cell in cells.values()]
                rows += _panel(ax, name, sizes, hours, seeds, 1, f"hours to {target:.3f}")
        axes[0].set_ylabel(f"Test {study.headline} (%)")
        for ax, target in zip(axes[1:], targets, strict=True):
            ax.set_ylabel(f"Hours to {100 * target:.1f} %")
            if not any(line.get_xdata().size for line in ax.lines):
                words = "no setting reaches it\nwith every seed"
                ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center")
                ax.set_yticks([])
        for ax in axes:
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(lambda size, _: _short(size))
            ax.set_xlabel("Trained parameters")
        paper.below(fig, axes[0], BESIDE)
    caption = (
        "Figure 6: accuracy and simulated time by budget; times where all seeds reach the target."
    )
    return fig, rows, f"{caption} {settings(study)}"


def _short(size: float) -> str:
    """Returns a number of parameters in thousands or millions."""
    return f"{size / 1e6:g}M" if size >= 1e6 else f"{size / 1e3:g}k"


def _panel(
    ax: Any,
    name: str,
    sizes: Sequence[int],
    values: Sequence[Mapping[Any, float]],
    seeds: Sequence[Any],
    scale: float,
    quantity: str,
) -> Rows:
    """Draws a method's values by size where all seeds have one, and returns the rows of the CSV."""
    by_seed = {s: [scale * one[s] if s in one else None for one in values] for s in seeds}
    data = bands(ax, name, sizes, by_seed, number=LOOKS[name])
    if len(sizes) == 1 and len(data) == len(seeds) > 1:  # a band has no width at one point
        found = summarise(row["value"] for row in data)
        bar = {"fmt": "none", "ecolor": line_look(LOOKS[name])["color"]}
        ax.errorbar(sizes, [found.mean], [found.sd], **bar)
    return [{"quantity": quantity, "parameters": row.pop("x"), **row} for row in data]


def _hours(cell: Cell, metric: str, target: float) -> dict[Any, float]:
    """Returns seed -> simulated hours until the target, for the seeds that reach it."""
    times = reached(cell, metric, target)
    pairs = zip(cell.runs, times, strict=True)
    return {seed: one.seconds / 3600 for seed, one in pairs if one is not None}


# -------------------------------------------------------------- Figures 3, 4, 8, 9: variation plots


def variation(source: Source, measure: str, between: bool, number_: int) -> Drawn:
    """Draws how far the factors of each layer move in each round.

    Args:
      source: of the sweeps.
      measure: ``magnitude`` (ΔM, Eq 11 and 12) or ``direction`` (ΔD, Eq 13 and 14).
      between: draw the layers between the first and the last one, instead of these two.
      number_: of the figure.
    """
    study = need(source, "variation")
    of_method = {method_name(cell): cell.runs for cell in study.cells}
    runs = {name: of_method[name] for name in METHODS.values() if name in of_method}
    first = next(iter(next(iter(runs.values())).values()))
    paths = list(first.rows[1]["layers"][f"variation_{measure}_a"])
    layers = sorted({_layer(path) for path in paths})
    shown = layers[1:-1] if between else sorted({layers[0], layers[-1]})
    shown_paths = [path for path in paths if _layer(path) in shown]
    if not shown_paths:
        raise Missing("the model has no layers between the first and the last one")
    height = len(shown_paths) // 2
    grid = [(factor, path) for path in shown_paths for factor in ("a", "b")]
    panels = []
    for i, (factor, path) in enumerate(grid):
        field = f"layers.variation_{measure}_{factor}.{path}"
        module = MODULES[path.rpartition(".")[2]]
        where = f"layer {_layer(path)}, {module}, lora_{factor.upper()}"
        curves = {}
        for name, by_seed in runs.items():
            values = {s: _moves(run.rows, field) for s, run in by_seed.items()}
            curves[name] = range(1, 1 + max(map(len, values.values()))), values
        look = {"title": where}
        if i >= len(grid) - 4:
            look["xlabel"] = "Communication round"
        if i % 4 == 0:
            look["ylabel"] = "ΔM" if measure == "magnitude" else "ΔD"
        panels.append(paper.Panel(curves, look, {"module": where}, "round", None))
    options = {"legend": BESIDE, "numbers": LOOKS, "size": (12, 2.4 * height + 0.6)}
    fig, rows = paper.draw(None, panels, (height, 4), **options)
    caption = f"Figure {number_}: change of {measure} in each round. {settings(study)}"
    return fig, rows, caption + _less(rows)


def _less(rows: Rows) -> str:
    """Returns the change of FeDeRA's factors over FedLR's, of the means over rounds and modules."""
    values: dict[tuple[str, str, Any], list[float]] = {}
    for row in rows:
        key = (row["module"][-1], row["name"], row["seed"])
        values.setdefault(key, []).append(row["value"])
    means = {key: statistics.fmean(found) for key, found in values.items()}
    seeds = sorted({seed for _, _, seed in means}, key=str)
    shares = []
    for factor in ("A", "B"):
        pairs = [[means.get((factor, name, s)) for name in ("FeDeRA", "FedLR")] for s in seeds]
        found = summarise(a / b for a, b in pairs if a is not None and b)
        if found.low is not None:
            shares.append(f"{factor} {found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]")
    return f" FeDeRA over FedLR: {', '.join(shares)}." if shares else ""


def _layer(path: str) -> int:
    found = re.search(r"\blayer\.(\d+)", path)
    return int(found.group(1)) if found else 0


def _moves(rows: Sequence[Mapping[str, Any]], field: str) -> list[float | None]:
    """Returns a field of the rounds 1, 2, ..."""
    return [number(row, field) for row in rows if row["round"] > 0]


# ------------------------------------------------------------------------------ Figure 7: heat maps


def figure7(source: Source, name: str) -> Drawn:
    """Draws a row of Figure 7: distances of all pairs of clients for four alphas."""
    federation = FEDERATIONS[name]
    try:
        corpus = federations.read(name, source.data)
    except InputError as error:
        raise Missing(str(error).splitlines()[0]) from error
    panels = len(federation.alphas)
    fig, axes = subplots(1, panels, size=(2.9 * panels + 0.8, 3.5))
    rows: Rows = []
    with style():
        for ax, alpha in zip(axes, federation.alphas, strict=True):
            table = federations.distances(corpus, federation.clients, alpha)
            mean = heterogeneity.mean_pairwise(table)
            # Without interpolation, SVG and PDF contain one pixel for each pair.
            image = ax.imshow(table, cmap="cividis", vmin=0, vmax=1, interpolation="none")
            ax.grid(False)
            ax.set(title=f"alpha {alpha:g}: mean {mean:.3f}", xlabel="Clients")
            to_others = table.sum(axis=1) / max(1, len(table) - 1)
            rows += [
                {"alpha": alpha, "place": i, "mean_distance": float(one)}
                for i, one in enumerate(to_others)
            ]
        fig.colorbar(image, ax=axes, fraction=0.02, pad=0.01).set_label("Jensen-Shannon, base 2")
        axes[0].set_ylabel(f"{federation.label}: clients")
    caption = (
        f"Figure 7, {federation.label}: {corpus.train:,} training examples, {federation.clients}"
        " clients, sorted by their mean distance. The CSV has these means."
    )
    return fig, rows, caption


# ---------------------------------------------------------------------------------- command line

FIGURES: dict[str, Callable[[Source], Drawn]] = {
    "F1": figure1,
    "F3": lambda source: variation(source, "magnitude", False, 3),
    "F4": lambda source: variation(source, "direction", False, 4),
    "F5": figure5,
    "F6": figure6,
    **{f"F7_{name}": functools.partial(figure7, name=name) for name in FEDERATIONS},
    "F8": lambda source: variation(source, "magnitude", True, 8),
    "F9": lambda source: variation(source, "direction", True, 9),
    "clients": figure_clients,
}


def main(words: Sequence[str] | None = None) -> None:
    """Draws the figures that are named on the command line."""
    names, given = command(words, __doc__, FIGURES, out=True)
    given.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        try:
            fig, rows, caption = FIGURES[name](Source(given.runs, given.data))
        except Missing as missing:
            print(f"{name}: not drawn, {missing}")
            continue
        stem = given.out / f"figure_{name.removeprefix('F')}"
        save(fig, stem, rows)
        print(f"{stem}.png  {caption}")


if __name__ == "__main__":
    main()
