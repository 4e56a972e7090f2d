"""Figures in one style, as PNG, SVG and PDF, each with its data as CSV.

The style prints well in grey: methods differ in colour, in lightness, in the dashes of their lines
and in their markers. A script draws a figure like this::

    with style():
        fig, ax = subplots()
        data = bands(ax, "FedAvg", rounds, {0: [...], 1: [...], 2: [...]})
        data += bands(ax, "FedProx", rounds, {0: [...], 1: [...], 2: [...]})
        ax.set(xlabel="Communication round", ylabel="Test accuracy (%)")
        ax.legend()
    save(fig, "results/figure_3", data)

Figures are created without pyplot, so there is no global state and no figure to close.
"""

import functools
import io
import math
import os
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_peft.report.table_files import csv_text
from fedjax_peft.support.files import replace_file

if TYPE_CHECKING:  # matplotlib imports slowly, and most commands draw no figure
    from contextlib import AbstractContextManager

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#004488", "#ddaa33", "#994455", "#6699cc", "#1b1b3a", "#997700")
"""Colours for colour-blind readers whose lightness differs by at least 10 (of 100) in each pair, so
that they also differ in grey; from the high and medium contrast schemes of Paul Tol (2021), with a
dark blue."""
DASHES: tuple[Any, ...] = (
    "solid",
    (0, (9, 1.5)),
    (0, (5, 2)),
    (0, (5, 1.5, 1, 1.5)),
    (0, (2.5, 1.5)),
    (0, (1, 1.3)),
)
"""One line style for each colour, for prints in grey; the densest line first."""
MARKERS = ("o", "s", "^", "D", "v", "P")
"""One marker for each colour."""
INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
FONT = "DejaVu Sans"  # included in matplotlib
SIZE = (7.2, 4.0)
"""Width and height of a figure in inches."""
DPI = 200
"""Dots per inch of a PNG."""
_MOST_MARKERS = 30
"""Most points of a line that are all marked; more markers would overlap."""


def style() -> "AbstractContextManager[None]":
    """Returns a context in which figures are drawn in the style of all figures here."""
    from cycler import cycler
    from matplotlib import rc_context

    cycle = cycler(color=PALETTE) + cycler(linestyle=DASHES) + cycler(marker=MARKERS)
    return rc_context(
        {
            "axes.axisbelow": True,
            "axes.edgecolor": MUTED,
            "axes.facecolor": PAPER,
            "axes.grid": True,
            "axes.labelcolor": INK,
            "axes.labelsize": 9,
            "axes.prop_cycle": cycle,
            "axes.spines.left": False,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlelocation": "left",
            "axes.titlesize": 10,
            "axes.xmargin": 0.02,
            "figure.constrained_layout.use": True,
            "figure.facecolor": PAPER,
            "font.family": FONT,
            "font.size": 9,
            "grid.color": GRID,
            "grid.linewidth": 0.6,
            "hatch.linewidth": 0.6,
            "image.cmap": "cividis",
            "legend.fontsize": 8.5,
            "legend.frameon": False,
            "legend.handlelength": 3.4,
            "lines.linewidth": 1.8,
            "lines.markersize": 4,
            "pdf.fonttype": 42,  # TrueType, which journals ask for
            "svg.hashsalt": "fedjax_peft",  # otherwise ids would be random
            "text.color": INK,
            "text.parse_math": False,  # dollar signs in names start no formulas
            "xtick.color": MUTED,
            "xtick.labelsize": 8.5,
            "ytick.color": MUTED,
            "ytick.labelsize": 8.5,
            "ytick.left": False,
        }
    )


def subplots(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float] = SIZE, **options: Any
) -> tuple["Figure", Any]:
    """Returns a figure and its axes, as ``matplotlib.pyplot.subplots`` does, without pyplot.

    Args:
        size: Width and height in inches.
        **options: For ``Figure.subplots``, such as ``sharey=True``.
    """
    with style():
        fig = figure_class()(figsize=size)
        return fig, fig.subplots(rows, columns, **options)


def bands(
    axes: "Axes",
    name: str,
    xs: Sequence[float],
    values_by_seed: Mapping[Any, Sequence[float | None]],
    *,
    number: int | None = None,
) -> list[dict[str, Any]]:
    """Draws the mean over seeds as a line, with a band of one standard deviation on each side.

    The line covers the points that all seeds have: the mean of other seeds would jump there. The
    label for a legend is the name with the number of seeds. A single seed has no band.

    Args:
        values_by_seed: Seed -> one value for each of ``xs``; ``None`` or NaN where there is none.
            A shorter sequence has no values for the last points.
        number: Number of the style; by default, names of one figure are numbered in their order.

    Returns:
        The data of the lines for :func:`save`: a row for each point of each seed, with ``name``,
        ``seed``, ``x`` and ``value``.
    """
    values = {seed: _filled(ys, len(xs)) for seed, ys in values_by_seed.items()}
    look = line_look(_number(axes, name) if number is None else number)
    mean, deviation = mean_band(list(values.values()))
    shown = np.isfinite(mean)
    places, mean, deviation = np.asarray(xs, float)[shown], mean[shown], deviation[shown]
    plain: dict[str, Any] = {"linewidth": 1.8, "markersize": 4, "markeredgewidth": 0}
    label = f"{name} (n = {len(values)})"
    every = max(1, math.ceil(len(places) / _MOST_MARKERS))
    with style():
        axes.plot(places, mean, label=label, markevery=every, **plain, **look)
        if len(values) > 1:
            band: dict[str, Any] = {"color": look["color"], "alpha": 0.14, "linewidth": 0}
            axes.fill_between(places, mean - deviation, mean + deviation, **band)
    return [
        {"name": name, "seed": seed, "x": x, "value": y}
        for seed, ys in values.items()
        for x, y in zip(xs, ys.tolist(), strict=True)
        if math.isfinite(y)
    ]


def mean_band(
    values: Sequence[Sequence[float | None] | np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and sample standard deviation over seeds, each ``[points]``.

    Both are NaN where a seed has no value; the deviation of a single seed is 0.

    Args:
        values: One sequence for each seed. The points after the end of the shortest one are NaN.
    """
    length = max(map(len, values), default=0)
    if not values:
        return np.zeros(0), np.zeros(0)
    table = np.stack([_filled(ys, length) for ys in values])
    spread = table.std(axis=0, ddof=1) if len(table) > 1 else 0 * table[0]
    return table.mean(axis=0), spread


def rolling(values: Sequence[float], width: int) -> list[float]:
    """Returns the rolling mean: at each point the mean of the last ``width`` values.

    The first ``width - 1`` points are means of the values so far, so no point is lost. A width of 1
    returns the values.
    """
    if width < 1:
        raise ValueError(f"width must be 1 or more, not {width}")
    return [float(np.mean(values[max(0, end - width) : end])) for end in range(1, len(values) + 1)]


def save(
    figure: "Figure", stem: str | os.PathLike[str], data: Iterable[Mapping[str, Any]]
) -> list[Path]:
    """Writes a figure as ``.png`` (200 dpi), ``.svg`` and ``.pdf``, and its data as ``.csv``.

    Each file is replaced atomically. Equal figures and data give equal bytes.

    Args:
        stem: The path of the files without their suffix; missing folders are created.
        data: The rows of the CSV file: column -> value.

    Returns:
        The paths of the four files.
    """
    paths = [Path(f"{os.fspath(stem)}.{form}") for form in (*_METADATA, "csv")]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for path, form in zip(paths, _METADATA, strict=False):
        replace_file(path, render(figure, form))
    replace_file(paths[-1], table_csv(data).encode())
    return paths


def table_csv(data: Iterable[Mapping[str, Any]]) -> str:
    """Returns rows as CSV: a column for each key, in the order in which the keys first occur.

    Numbers have nine significant digits, which identify a float32. A missing value, ``None`` or NaN
    is an empty cell.
    """
    rows = list(data)
    header = list(dict.fromkeys(key for row in rows for key in row))
    return csv_text([header, *([_cell(row.get(key)) for key in header] for row in rows)])


_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": dict.fromkeys(["Creator", "Date", "Format", "Type"]),
    "pdf": dict.fromkeys(["Creator", "Producer", "CreationDate"]),
}
"""Form of a file -> the metadata that it must not have, because they differ from day to day or from
version to version."""


def render(fig: "Figure", form: str, dpi: int = DPI) -> bytes:
    """Returns the file of a figure in a form: ``png``, ``svg`` or ``pdf``."""
    buffer = io.BytesIO()
    options: dict[str, Any] = {"format": form, "dpi": dpi, "metadata": _METADATA[form]}
    with style():
        fig.savefig(buffer, facecolor=fig.get_facecolor(), **options)
    return buffer.getvalue()


def styles(names: Iterable[str]) -> dict[str, int]:
    """Returns name -> the number of the run's style.

    The style follows from the name, so a run looks the same in every report. If several names have
    the same colour, the later ones (in the order of their hashes) get the next free colour. From
    the seventh run on, colours are used again with another line style.
    """
    n = len(PALETTE)
    hashes = {
        name: int.from_bytes(sha256(name.encode(errors="replace")).digest()) for name in names
    }
    found: dict[str, int] = {}
    for i, name in enumerate(sorted(hashes, key=hashes.__getitem__)):
        turn, used = i // n, set(found.values())
        candidates = (turn * n + (hashes[name] + step) % n for step in range(n))
        found[name] = next(style for style in candidates if style not in used)
    return {name: found[name] for name in hashes}


def line_look(number: int) -> dict[str, Any]:
    """Returns the colour, the line style and the marker of a style, as matplotlib's arguments."""
    line = dash(number)
    return {
        "color": PALETTE[number % len(PALETTE)],
        "linestyle": DASHES[line],
        "marker": MARKERS[line],
    }


def dash(number: int) -> int:
    """Returns the index of a style's line; styles with the same colour have different ones."""
    turn, color = divmod(number, len(PALETTE))
    return (color + turn) % len(DASHES)


@functools.cache
def figure_class() -> "type[Figure]":
    """Returns the class of all figures."""
    from matplotlib.figure import Figure

    class Curves(Figure):
        """A figure that a notebook can show without pyplot."""

        def draw(self, renderer: Any) -> None:
            with style(), warnings.catch_warnings():  # ticks are made now
                # A character that the font lacks is drawn as an empty square.
                warnings.filterwarnings("ignore", "Glyph .* missing from font")
                super().draw(renderer)

        def _repr_png_(self) -> bytes:
            return render(self, "png", 150)

    return Curves


def _number(axes: "Axes", name: Hashable) -> int:
    """Returns the number of a name's style; the names of a figure are numbered in their order."""
    numbers: dict[Hashable, int] = vars(axes.figure).setdefault("_style_numbers", {})
    return numbers.setdefault(name, len(numbers))


def _filled(values: Sequence[float | None] | np.ndarray, length: int) -> np.ndarray:
    """Returns values as floats ``[length]``, NaN where there is none."""
    if len(values) > length:
        raise ValueError(f"there are {len(values)} values for {length} points")
    return np.pad(np.asarray(values, float), (0, length - len(values)), constant_values=np.nan)


def _cell(value: Any) -> str:
    """Returns the text of a value in a CSV file."""
    if value is None or (isinstance(value, float | np.floating) and not math.isfinite(value)):
        return ""
    return format(value, ".9g") if isinstance(value, float | np.floating) else str(value)
