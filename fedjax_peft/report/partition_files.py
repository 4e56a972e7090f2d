"""The figures of a partition, and the files of its report."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_peft.data import heterogeneity
from fedjax_peft.report.drawing import bare, colour_bar, styled
from fedjax_peft.report.figure_files import GRID, INK, MUTED, PAPER, save, subplots
from fedjax_peft.report.partition import PartitionReport, summary
from fedjax_peft.report.wording import NAME_LENGTH, shorten
from fedjax_peft.support.display import one_line
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLORED, BARS = 20, 300
"""Most classes with different colours, and most clients with a bar."""
CLASS_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours of areas: those of Okabe and Ito, which are brighter than the colours of lines. Twenty
classes cannot differ in grey."""
NAMED = 30
"""Most clients whose names are written below their bars; more names would overlap."""


def write(report: PartitionReport, folder: str | os.PathLike[str]) -> list[Path]:
    """Writes ``partition.json``, and the figures as PNG, SVG and PDF with their data as CSV.

    Returns the paths of ``partition.json`` and of the PNGs.

    Raises:
      InputError: the folder cannot be created.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The folder {folder} cannot be created: {error.strerror}.") from None
    paths = [folder / "partition.json"]
    replace_file(paths[0], json.dumps(summary(report)).encode())
    if report.classes:
        classes, pairs = folder / "partition_classes", folder / "partition_divergence"
        paths.append(save(composition(report), classes, _counts(report))[0])
        paths.append(save(heat_map(report), pairs, _distances(report))[0])
    return paths


def _counts(report: PartitionReport) -> Iterator[dict[str, Any]]:
    """Yields the number of examples of each class of each client, without zeros."""
    for client, kind in np.argwhere(report.histogram).tolist():
        names = {"client": report.names[client], "class": report.classes[kind]}
        yield {**names, "examples": int(report.histogram[client, kind])}


def _distances(report: PartitionReport) -> Iterator[dict[str, Any]]:
    """Yields the distance of each pair of clients; of very many clients, their mean distances."""
    names = [report.names[client] for client in report.compared]
    if len(names) > BARS:
        means = report.divergence.sum(axis=1) / (len(names) - 1)
        yield from ({"client": n, "mean_distance": d} for n, d in zip(names, means, strict=True))
        return
    for i, j in zip(*np.triu_indices(len(names), k=1), strict=True):
        yield {"a": names[i], "b": names[j], "distance": float(report.divergence[i, j])}


@styled
def heat_map(report: PartitionReport) -> "Figure":
    """Returns FeDeRA's figure 7: distances of all pairs of clients, most distant ones first."""
    order = heterogeneity.sorted_order(report.divergence)
    _, ax = subplots(size=(5.6, 4.8))
    bare(ax)
    image = ax.imshow(report.divergence[order][:, order], cmap="Blues", vmin=0, vmax=report.limit)
    sampled = report.sampled(len(report.compared))
    ax.set_xlabel(f"Clients by their mean distance{sampled}", labelpad=6)
    ax.set_ylabel("Clients", labelpad=6)
    names = [report.names[client] for client in report.compared[order]]
    _name(ax.xaxis, names)
    _name(ax.yaxis, names, turned=False)
    bar = colour_bar(image, ax, fraction=0.046, pad=0.03)
    bar.set_label(f"{report.measure}, mean {report.mean_divergence:.3f}", labelpad=8)
    ax.set_title(one_line(report.title))
    return ax.figure


@styled
def composition(report: PartitionReport) -> "Figure":
    """Returns a figure with the size and the class shares of each client.

    Clients are sorted by their largest class, so that similar clients are neighbours. If there are
    very many clients, the figure shows a subset at regular positions in this order.
    """
    from matplotlib.ticker import MaxNLocator

    names, counts = report.largest(COLORED)
    sizes = counts.sum(axis=1)
    order = np.lexsort((-counts.max(axis=1) / np.maximum(1, sizes), counts.argmax(axis=1)))
    every = np.linspace(0, len(order) - 1, min(len(order), BARS)).round().astype(int)
    shown = order[every]
    counts, sizes = counts[shown], sizes[shown]
    fig, (above, below) = subplots(2, 1, size=(8, 4.6), sharex=True, height_ratios=[1, 3.2])
    for ax in (above, below):
        bare(ax)
    _steps(above, [sizes], [MUTED])
    above.set_ylim(0, None)
    above.yaxis.set_major_locator(MaxNLocator(integer=True))
    above.set_ylabel("Examples", labelpad=6)
    above.set_title(one_line(report.title))
    shares = 100 * counts / np.maximum(1, sizes)[:, None]
    colors = _colors(len(names), rest=len(names) < len(report.classes))
    _steps(below, shares.T, colors)
    below.set(ylim=(0, 100), xlim=(-0.5, len(sizes) - 0.5))
    below.set_ylabel(f"{one_line(report.by).capitalize()} (%)", labelpad=6)
    below.set_xlabel(f"Clients by their largest class{report.sampled(len(sizes))}", labelpad=6)
    _name(below.xaxis, [report.names[client] for client in shown])
    _legend(fig, names, colors)
    return fig


def _name(axis: "Axis", clients: Sequence[str], *, turned: bool = True) -> None:
    """Writes the name of each client at its position; for many clients, the axis has no labels."""
    few = clients if len(clients) <= NAMED else ()
    named = [shorten(name, 7) for name in few]
    axis.set_ticks(range(len(named)), named)
    if turned and any(len(name) > 3 for name in named):
        axis.set_tick_params(rotation=90)


def _legend(fig: "Figure", names: Sequence[str], colors: Sequence[str]) -> None:
    """Adds a legend of the colours at the right, in the order of the layers from top to bottom."""
    from matplotlib.patches import Patch

    shown = [shorten(name, NAME_LENGTH) for name in reversed(names)]
    patches = [Patch(color=color) for color in reversed(colors)]
    fig.legend(patches, shown, loc="outside right center", handlelength=1.0)


def _steps(ax: "Axes", layers: Any, colors: Sequence[str]) -> None:
    """Draws layers ``[layers][clients]`` as stacked bars, with gaps if there are few clients."""
    edges = np.arange(len(layers[0]) + 1) - 0.5
    ended = np.pad(layers, ((0, 0), (0, 1)), mode="edge")  # the last step needs an end point
    ax.stackplot(edges, ended, colors=colors, step="post", linewidth=0)
    if len(layers[0]) <= 150:
        ax.vlines(edges, 0, 1, PAPER, linewidth=0.8, transform=ax.get_xaxis_transform())


def _colors(n: int, rest: bool) -> list[str]:
    """Returns the colours of n classes; with ``rest``, the last one is the grey of other classes.

    The colours are :data:`CLASS_COLORS`, their light and dark shades, and the two text colours.
    """
    from matplotlib.colors import to_hex, to_rgb

    base = np.array([to_rgb(color) for color in CLASS_COLORS])
    shades = [*base, *(base + 0.55 * (1 - base)), *(0.55 * base)]
    colors = [*map(to_hex, shades), MUTED, INK]
    return [*colors[: n - 1], GRID] if rest else colors[:n]
