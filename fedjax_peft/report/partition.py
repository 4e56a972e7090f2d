"""The report of a partition: sizes, classes of each client, and distances between clients."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from fedjax_peft.data import heterogeneity, keys, partition
from fedjax_peft.data.dataset import Clients
from fedjax_peft.numerics.random import host_rng
from fedjax_peft.report.figure_files import (
    FONT,
    GRID,
    INK,
    MUTED,
    PAPER,
    drawable,
    figure_class,
    lettering,
    save,
)
from fedjax_peft.report.plots import NAME_LENGTH, one_line
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = [
    "Measure",
    "PartitionReport",
    "class_table",
    "classes_key",
    "composition",
    "distinct_partitions",
    "heat_map",
    "inspect",
    "size_table",
    "summary",
    "title",
    "write",
]

Measure = Literal["js", "js_sqrt", "jeffreys"]

COMPARED = 1000
"""Most clients that are compared in pairs; of more clients, a random sample is compared."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TABLE_CLASSES, TABLE_CLIENTS = 20, 6
"""Number of the largest classes and of the first clients in the table, which fit 80 columns."""
COLORED, BARS = 20, 300
"""Most classes with different colours, and most clients with a bar, in the figure."""
CLASS_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours of areas: those of Okabe and Ito, which are brighter than the colours of lines. Twenty
classes cannot differ in grey."""
NAMED = 30
"""Most clients whose names are written below their bars; more names would overlap."""


class PartitionReport(NamedTuple):
    """The figures of a partition."""

    title: str
    names: tuple[str, ...]
    """Names of the clients."""
    examples: int
    """Number of examples, including those that belong to no client."""
    sizes: np.ndarray
    """Examples of each client, int ``[clients]``."""
    by: str
    """The source of the classes: ``"label"`` or a key."""
    classes: tuple[str, ...]
    """Names of the classes; empty if the examples have no classes."""
    histogram: np.ndarray
    """Examples per client and class, int ``[clients, classes]``."""
    measure: str
    """The divergence in words."""
    limit: float | None
    """The largest possible divergence; None if it is not bounded."""
    compared: np.ndarray
    """The clients that are compared, int ``[compared]``, ascending; all have examples."""
    divergence: np.ndarray
    """The divergence of each pair of them, float ``[compared, compared]``."""


def distinct_partitions(configs: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the resolved configs by name, without those whose partition equals an earlier one."""
    firsts: dict[str, str] = {}
    for name, config in configs.items():
        model = {key: config["model"][key] for key in ("name", "source")}  # for its tokenizer
        parts = [model, config["data"], config["partition"], config["seed"]]
        firsts.setdefault(json.dumps(parts, sort_keys=True, default=str), name)
    return {name: configs[name] for name in firsts.values()}


def title(config: Mapping[str, Any]) -> str:
    """Returns the data set and the call of the partition of a resolved config, in one line.

    Arguments with their default values are omitted.
    """
    name = config["partition"]["name"]
    defaults = {k: p.default for k, p in signature(getattr(partition, name)).parameters.items()}
    given = {k: v for k, v in config["partition"].items() if k in defaults and v is not None}
    call = ", ".join(f"{k}={v!r}" for k, v in given.items() if v != defaults[k])
    return f"{Path(config['data']['name']).name}: {name}({call})"


def classes_key(config: Mapping[str, Any]) -> str | None:
    """Returns the key whose values are the classes of a resolved config's partition, if any."""
    of_users = config["partition"]["name"] in ("natural", "grouped")
    return None if of_users else config["partition"].get("by")


def inspect(
    clients: Clients[Any],
    title: str = "",
    *,
    by: str | None = None,
    measure: Measure = "js",
    base: float = 2,
) -> PartitionReport:
    """Returns the report of a partition.

    Args:
      clients: the clients of a partition.
      title: the title of the figures.
      by: a key of ``data.meta`` whose values are the classes. None: the labels are the classes, and
        data with several labels per example, or none, have no classes.
      measure: Jensen-Shannon, its square root, or half of the Jeffreys divergence.
      base: the base of the logarithm in Jensen-Shannon.

    Raises:
      InputError: the key does not exist.
    """
    histogram, classes = (
        heterogeneity.histograms(clients, by)
        if by is not None or keys.has_labels(clients.data)
        else (np.zeros((len(clients), 0), np.int64), ())
    )
    compared = np.flatnonzero(clients.sizes) if classes else np.zeros(0, np.int64)
    if len(compared) > COMPARED:
        drawn = host_rng(0, "partition report").choice(compared, COMPARED, replace=False)
        compared = np.sort(drawn)
    return PartitionReport(
        title,
        clients.names or tuple(map(str, range(len(clients)))),
        len(clients.data),
        clients.sizes,
        by or "label",
        classes,
        histogram,
        _measure_name(measure, base),
        None if measure == "jeffreys" else float(_divergence(np.eye(2), measure, base)[0, 1]),
        compared,
        _divergence(histogram[compared], measure, base),
    )


def summary(report: PartitionReport) -> dict[str, Any]:
    """Returns the content of ``partition.json``; of the divergences it has only the mean."""
    sizes = report.sizes
    return {
        "title": report.title,
        "examples": report.examples,
        "unowned": report.examples - int(sizes.sum()),
        "clients": len(sizes),
        "size": {
            "min": int(sizes.min()),
            "mean": float(sizes.mean()),
            "max": int(sizes.max()),
            "quantiles": {str(q): float(np.quantile(sizes, q)) for q in QUANTILES},
        },
        "by": report.by,
        "measure": report.measure,
        "compared_clients": len(report.compared),
        "mean_divergence": _mean(report),
        "classes": list(report.classes),
        "client_names": list(report.names),
        "client_sizes": sizes.tolist(),
        "histogram": report.histogram.tolist(),
    }


def size_table(report: PartitionReport) -> Table:
    """Returns a table for a terminal with the sizes and the mean divergence."""
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    out.add_column(style="bold")
    out.add_column()
    sizes = report.sizes
    unowned = report.examples - int(sizes.sum())
    rest = f", {unowned:,} of them without a client" if unowned else ""
    rows = {"Partition": report.title} if report.title else {}
    rows |= {
        "Clients": f"{len(sizes):,}",
        "Examples": f"{report.examples:,}{rest}",
        "Per client": f"{sizes.min():,} to {sizes.max():,}, mean {sizes.mean():,.1f}",
        "Quantiles": ", ".join(f"{q:.0%} {np.quantile(sizes, q):,.0f}" for q in QUANTILES),
    }
    if report.classes:
        sampled = _sample_note(len(report.compared), len(sizes))
        rows["Classes"] = f"{len(report.classes):,} by {report.by}"
        rows["Divergence"] = f"{_mean(report):.3f} ({report.measure}; mean of all pairs{sampled})"
    for name, value in rows.items():
        out.add_row(name, Text(one_line(value)))
    return out


def class_table(report: PartitionReport) -> Table:
    """Returns a table for a terminal: examples per class, in total and for the first clients."""
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    out.add_column(Text(f"\n{one_line(report.by).capitalize()}"), no_wrap=True)
    out.add_column("\nTotal", justify="right")
    shown = report.names[:TABLE_CLIENTS]
    for i, name in enumerate(shown):
        title = Text(f"{'' if i else 'Client'}\n{_short(name, 7)}")
        out.add_column(title, justify="right", no_wrap=True)
    names, counts = _largest(report, TABLE_CLASSES)
    for name, column in zip(names, counts.T, strict=True):
        cells = [f"{n:,}" if n else "-" for n in column[: len(shown)]]
        out.add_row(Text(_short(name, 24)), f"{column.sum():,}", *cells)
    sizes = [f"{n:,}" for n in report.sizes[: len(shown)]]
    out.add_row("Total", f"{report.sizes.sum():,}", *sizes, style="bold")
    if more := len(report.sizes) - len(shown):
        out.caption = f"{more:,} more clients are in partition.json."
        out.caption_justify = "left"
    return out


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


def heat_map(report: PartitionReport) -> "Figure":
    """Returns FeDeRA's figure 7: distances of all pairs of clients, most distant ones first."""
    order = heterogeneity.sorted_order(report.divergence)
    fig = figure_class()(figsize=(5.6, 4.8), layout="constrained", facecolor=PAPER)
    ax = fig.add_subplot()
    _dress(ax)
    distances = report.divergence[order][:, order]
    image = ax.imshow(distances, cmap="Blues", vmin=0, vmax=report.limit)
    sampled = _sample_note(len(report.compared), len(report.sizes))
    ax.set_xlabel(f"Clients by their mean distance{sampled}", labelpad=6, **lettering())
    ax.set_ylabel("Clients", labelpad=6, **lettering())
    names = [_short(report.names[client], 7) for client in report.compared[order]]
    _name(ax.xaxis, names)
    _name(ax.yaxis, names, turned=False)
    bar = fig.colorbar(image, ax=ax, fraction=0.046, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8.5, labelcolor=MUTED)
    bar.set_label(f"{report.measure}, mean {_mean(report):.3f}", labelpad=8, **lettering())
    _title(ax, report.title)
    return fig


def composition(report: PartitionReport) -> "Figure":
    """Returns a figure with the size and the class shares of each client.

    Clients are sorted by their largest class, so that similar clients are neighbours. If there are
    very many clients, the figure shows a subset at regular positions in this order.
    """
    from matplotlib.ticker import MaxNLocator

    names, counts = _largest(report, COLORED)
    sizes = counts.sum(axis=1)
    order = np.lexsort((-counts.max(axis=1) / np.maximum(1, sizes), counts.argmax(axis=1)))
    every = np.linspace(0, len(order) - 1, min(len(order), BARS)).round().astype(int)
    counts, sizes = counts[order[every]], sizes[order[every]]
    fig = figure_class()(figsize=(8, 4.6), layout="constrained", facecolor=PAPER)
    above, below = fig.subplots(2, 1, sharex=True, height_ratios=[1, 3.2])
    for ax in (above, below):
        _dress(ax)
    _steps(above, [sizes], [MUTED])
    above.set_ylim(0, None)
    above.yaxis.set_major_locator(MaxNLocator(integer=True))
    above.set_ylabel("Examples", labelpad=6, **lettering())
    _title(above, report.title)
    shares = 100 * counts / np.maximum(1, sizes)[:, None]
    colors = _colors(len(names), rest=len(names) < len(report.classes))
    _steps(below, shares.T, colors)
    below.set(ylim=(0, 100), xlim=(-0.5, len(sizes) - 0.5))
    below.set_ylabel(f"{one_line(report.by).capitalize()} (%)", labelpad=6, **lettering())
    sampled = _sample_note(len(sizes), len(report.sizes))
    below.set_xlabel(f"Clients by their largest class{sampled}", labelpad=6, **lettering())
    _name(below.xaxis, [_short(report.names[client], 7) for client in order[every]])
    _legend(fig, names, colors)
    return fig


def _name(axis: "Axis", clients: Sequence[str], *, turned: bool = True) -> None:
    """Writes the name of each client at its position; for many clients, the axis has no labels."""
    named = [drawable(name) for name in clients] if len(clients) <= NAMED else []
    axis.set_ticks(range(len(named)), named)
    if turned and any(len(name) > 3 for name in named):
        axis.set_tick_params(rotation=90)


def _legend(fig: "Figure", names: Sequence[str], colors: Sequence[str]) -> None:
    """Adds a legend of the colours at the right, in the order of the layers from top to bottom."""
    from matplotlib.patches import Patch

    shown = [_short(name, NAME_LENGTH) for name in reversed(names)]
    patches = [Patch(color=color) for color in reversed(colors)]
    font = {"family": FONT, "size": 8.5}
    legend = fig.legend(
        patches, shown, loc="outside right center", frameon=False, prop=font, handlelength=1.0
    )
    for text in legend.get_texts():
        text.set_color(INK)


def _steps(ax: "Axes", layers: Any, colors: Sequence[str]) -> None:
    """Draws layers ``[layers][clients]`` as stacked bars, with gaps if there are few clients."""
    edges = np.arange(len(layers[0]) + 1) - 0.5
    top = np.zeros(len(layers[0]))
    for layer, color in zip(layers, colors, strict=True):
        bottom, top = top, top + layer
        # The last step needs an end point.
        low, high = np.append(bottom, bottom[-1]), np.append(top, top[-1])
        ax.fill_between(edges, low, high, step="post", color=color, linewidth=0)
    if len(layers[0]) <= 150:
        ax.vlines(edges, 0, 1, PAPER, linewidth=0.8, transform=ax.get_xaxis_transform())


def _dress(ax: "Axes") -> None:
    ax.set_facecolor(PAPER)
    ax.spines[["top", "right", "left", "bottom"]].set_visible(False)
    ax.tick_params(length=0, labelsize=8.5, labelcolor=MUTED, labelfontfamily=FONT)


def _title(ax: "Axes", title: str) -> None:
    ax.set_title(one_line(title), loc="left", **lettering(10))


def _colors(n: int, rest: bool) -> list[str]:
    """Returns the colours of n classes; with ``rest``, the last one is the grey of other classes.

    The colours are :data:`CLASS_COLORS`, their light and dark shades, and the two text colours.
    """
    from matplotlib.colors import to_hex, to_rgb

    base = np.array([to_rgb(color) for color in CLASS_COLORS])
    shades = [*base, *(base + 0.55 * (1 - base)), *(0.55 * base)]
    colors = [*map(to_hex, shades), MUTED, INK]
    return [*colors[: n - 1], GRID] if rest else colors[:n]


def _largest(report: PartitionReport, most: int) -> tuple[list[str], np.ndarray]:
    """Returns the names of the largest classes and the others, and counts ``[clients, names]``."""
    order = np.argsort(-report.histogram.sum(axis=0), kind="stable")
    if len(order) <= most:
        return [report.classes[i] for i in order], report.histogram[:, order]
    shown, rest = order[: most - 1], order[most - 1 :]
    other = report.histogram[:, rest].sum(axis=1, keepdims=True)
    names = [report.classes[i] for i in shown]
    return [*names, f"{len(rest):,} others"], np.hstack([report.histogram[:, shown], other])


def _divergence(histogram: np.ndarray, measure: Measure, base: float) -> np.ndarray:
    if not histogram.size:
        return np.zeros((0, 0))
    if measure == "jeffreys":
        return heterogeneity.jeffreys(histogram)
    return heterogeneity.js_divergence(histogram, base, sqrt=measure == "js_sqrt")


def _measure_name(measure: Measure, base: float) -> str:
    if measure == "jeffreys":
        return "Jeffreys / 2"
    root = ", square root" if measure == "js_sqrt" else ""
    return f"Jensen-Shannon{root}, base {'e' if base == math.e else f'{base:g}'}"


def _mean(report: PartitionReport) -> float:
    return heterogeneity.mean_pairwise(report.divergence) if len(report.divergence) else 0.0


def _sample_note(shown: int, of: int) -> str:
    return "" if shown == of else f", {shown:,} of {of:,} clients"


def _short(name: str, most: int) -> str:
    """Returns a name with at most ``most`` characters; the start and the end are kept."""
    name = one_line(name)
    end = (most - 1) // 2
    return name if len(name) <= most else f"{name[: most - 1 - end]}…{name[-end:]}"
