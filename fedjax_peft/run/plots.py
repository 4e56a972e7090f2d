"""Curves of runs as matplotlib figures, for notebooks, papers and the report.

Figures are made as objects, without pyplot: no global state, no display, no figure to close.
"""

import functools
import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_peft.display import one_line
from fedjax_peft.files import replace_file
from fedjax_peft.run.history import headline, series

if TYPE_CHECKING:  # matplotlib takes a while to import, and most commands draw nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Unit",
    "byte_unit",
    "common",
    "curves",
    "figure_class",
    "lettering",
    "one_line",
    "save",
    "svg",
    "time_unit",
]

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's colours, safe for colour-blind readers; without yellow, too pale on paper."""
DASHES: tuple[Any, ...] = ("solid", (0, (4, 1.5)), (0, (1, 1.2)))
"""The line styles that tell apart runs of the same colour."""
INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
FONT = "DejaVu Sans"  # the one that matplotlib brings along
NAME_LENGTH = 30  # characters of a run's name beside its curve
LOG_FROM = 30  # a cost axis is logarithmic from this ratio between the runs' totals


class Unit(NamedTuple):
    """A unit to print amounts in."""

    size: float
    """How many bytes or seconds one unit is."""
    symbol: str
    name: str


_BYTES = [Unit(1, "B", "bytes"), Unit(1e3, "kB", "kB"), Unit(1e6, "MB", "MB")]
_BYTES += [Unit(1e9, "GB", "GB"), Unit(1e12, "TB", "TB")]
_SECONDS = [Unit(1, "s", "seconds"), Unit(60, "min", "minutes"), Unit(3600, "h", "hours")]


def byte_unit(largest: float) -> Unit:
    """Returns the decimal unit (kB, MB ...) for amounts up to ``largest`` bytes."""
    return _unit(_BYTES, largest)


def time_unit(largest: float) -> Unit:
    """Returns the unit (seconds, minutes, hours) for durations up to ``largest`` seconds."""
    return _unit(_SECONDS, largest / 2)  # 90 seconds read better than 1.5 minutes


def curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], x: str, metric: str | None = None
) -> "Figure":
    """Returns a figure of one metric of each run, against rounds or against what they cost.

    Args:
        runs: Name -> rows, in the order of the colours.
        x: ``"round"``, ``"bytes"`` or ``"simulated_seconds"``, the latter two accumulated. A cost
            is drawn on a logarithmic axis where the runs' totals are far apart.
        metric: A numeric field of the rows, by default what the runs' tasks are judged by on the
            test set. Fractions are drawn in percent.

    Raises:
        InputError: if ``x`` is none of these.
    """
    fields = {name: metric or f"test_{headline(rows)}" for name, rows in runs.items()}
    lines = {name: _points(rows, x, fields[name]) for name, rows in runs.items()}
    fig = figure_class()(
        figsize=(7.2, max(4.0, 0.8 + 0.2 * len(runs))), layout="constrained", facecolor=PAPER
    )
    ax = fig.add_subplot()
    _dress(ax)
    unit = _x_axis(ax, x, [xs for xs, _ in lines.values()])
    ends = {}
    for i, (name, (xs, ys)) in enumerate(lines.items()):
        shown = [(a / unit, b) for a, b in zip(xs, ys, strict=True) if a or not _is_log(ax)]
        if shown:
            _draw(ax, shown, i)
            ends[name] = shown[-1][1]
    _y_axis(ax, common(fields.values(), "test_score"))
    _label(ax, list(lines), ends)
    if not ends:
        ax.set(xticks=[], yticks=[])
        ax.text(0.5, 0.5, "Nothing recorded", ha="center", transform=ax.transAxes, **lettering())
    return fig


def save(fig: "Figure", path: str | os.PathLike[str]) -> None:
    """Writes a figure as a PNG of 150 dots per inch, atomically."""
    replace_file(path, _render(fig, "png", metadata={"Software": None}))


def svg(fig: "Figure") -> str:
    """Returns a figure as an ``<svg>`` element to put into a page.

    Its colours are CSS variables (``--ink``, ``--muted``, ``--grid``, ``--paper``, ``--run-0`` ...)
    that fall back to those of the figure, so that a page can restyle it, say for a dark screen.
    """
    nothing = dict.fromkeys(["Creator", "Date", "Format", "Type"])
    text = _render(fig, "svg", metadata=nothing).decode()
    text = re.sub(r"<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    theme = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}
    theme |= {color: f"run-{i}" for i, color in enumerate(PALETTE)}
    return re.sub(
        "|".join(theme), lambda color: f"var(--{theme[color[0]]}, {color[0]})", text
    ).strip()


def common(names: Iterable[str], otherwise: str) -> str:
    """Returns the one name that all have, or another word if they differ."""
    found = set(names)
    return found.pop() if len(found) == 1 else otherwise


@functools.cache
def figure_class() -> "type[Figure]":
    from matplotlib.figure import Figure

    class Curves(Figure):
        """A figure that a notebook shows although pyplot was never imported."""

        def _repr_png_(self) -> bytes:
            return _render(self, "png")

    return Curves


def _render(fig: "Figure", form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    fig.savefig(buffer, format=form, dpi=150, facecolor=fig.get_facecolor(), **options)
    return buffer.getvalue()


def _unit(units: Sequence[Unit], largest: float) -> Unit:
    return next((unit for unit in reversed(units) if unit.size <= largest), units[0])


def _points(
    rows: Sequence[Mapping[str, Any]], x: str, metric: str
) -> tuple[list[float], list[float]]:
    """Returns the points to draw: none if training costs nothing on this axis (not simulated)."""
    xs, ys = series(rows, x, metric)
    if len(xs) > 1 and xs[-1] == 0:
        return [], []
    return xs, [100 * y for y in ys] if _is_share(metric) else ys


def _is_share(metric: str) -> bool:
    """Returns whether a metric is a fraction that readers know in percent."""
    return any(word in metric for word in ("accuracy", "f1", "exact_match", "score"))


def _is_log(ax: "Axes") -> bool:
    return ax.get_xscale() == "log"


def lettering(size: float = 9, color: str = INK) -> dict[str, Any]:
    # A name may hold a dollar sign, which must not start a formula.
    return {"family": FONT, "fontsize": size, "color": color, "parse_math": False}


def _dress(ax: "Axes") -> None:
    """Takes away what carries no data."""
    ax.set_facecolor(PAPER)
    ax.set_axisbelow(True)
    ax.margins(x=0.02)
    ax.grid(True, which="major", color=GRID, linewidth=0.6, linestyle="solid")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set(color=MUTED, linewidth=0.8)
    ax.tick_params(which="both", length=0, labelsize=8.5, labelcolor=MUTED, labelfontfamily=FONT)
    ax.tick_params(axis="x", which="major", length=3, color=MUTED)


def _x_axis(ax: "Axes", x: str, columns: Sequence[Sequence[float]]) -> float:
    """Sets up the x axis; returns how many bytes or seconds (or rounds) one of its units is."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    totals = [xs[-1] for xs in columns if xs]
    largest = max(totals, default=0.0)
    positive = [total for total in totals if total > 0]
    if x == "round":
        unit, title = 1.0, "Communication round"
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    else:
        choice = byte_unit(largest) if x == "bytes" else time_unit(largest)
        unit = choice.size
        title = "Communication, up and down" if x == "bytes" else "Simulated time"
        title += f" ({choice.name})"
        if positive and largest >= LOG_FROM * min(positive):
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1.0,)))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.xaxis.minorticks_off()
            title += ", logarithmic"
    if totals and not largest:  # only the start: no axis of tiny and negative numbers
        ax.set(xlim=(-0.02, 1.0), xticks=[0])
    ax.set_xlabel(title, labelpad=6, **lettering())
    return unit


def _y_axis(ax: "Axes", metric: str) -> None:
    title = one_line(metric.replace("_", " ")).capitalize().replace("f1", "F1")
    if _is_share(metric):
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, -1.0), min(high, 101.0))  # room for the line width, no more
        title += " (%)"
    ax.set_ylabel(title, labelpad=6, **lettering())


def _draw(ax: "Axes", points: Sequence[tuple[float, float]], index: int) -> None:
    style = _style(index)
    xs, ys = [x for x, _ in points], [y for _, y in points]
    ax.plot(xs, ys, linewidth=1.8, solid_capstyle="round", **style)
    dots = {"marker": "o", "linestyle": "none", "color": style["color"]}
    if len(xs) <= 30:  # show what was measured, unless the dots would merge
        ax.plot(xs, ys, markersize=3, markeredgewidth=0, **dots)
    ax.plot(xs[-1:], ys[-1:], markersize=6, markeredgecolor=PAPER, clip_on=False, **dots)


def _style(index: int) -> dict[str, Any]:
    turn, color = divmod(index, len(PALETTE))
    return {"color": PALETTE[color], "linestyle": DASHES[turn % len(DASHES)]}


def _label(ax: "Axes", names: Sequence[str], ends: Mapping[str, float]) -> None:
    """Names the curves at the right, each as close to its end as the others let it be.

    Runs without points come last, at the bottom and in grey, so that nobody looks for them.
    """
    low, high = ax.get_ylim()
    heights = [(ends[name] - low) / (high - low) if name in ends else 0.0 for name in names]
    # A line of text, as a part of the axes' height (about 85 % of the figure's).
    gap = 13 / (0.85 * 72 * ax.figure.get_figheight())  # type: ignore[union-attr]
    for i, (name, y) in enumerate(zip(names, _spread(heights, gap), strict=True)):
        there: dict[str, Any] = {"transform": ax.transAxes}
        if name in ends:
            ax.plot([1.015, 1.05], [y, y], linewidth=1.8, clip_on=False, **there, **_style(i))
        text, color = (
            (_short(name), INK) if name in ends else (f"{_short(name)} (no points)", MUTED)
        )
        ax.text(1.065, y, text, va="center_baseline", **there, **lettering(color=color))


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Returns heights in [0, 1] at least ``gap`` apart, in the same order and close to the given.

    The mean of pushing everything up and pushing everything down keeps groups centred.
    """
    order = sorted(range(len(heights)), key=heights.__getitem__)
    ys = [heights[i] for i in order]
    up, down = _push(ys, gap), [-y for y in _push([-y for y in ys[::-1]], gap)[::-1]]
    ys = [(a + b) / 2 for a, b in zip(up, down, strict=True)]
    ys = _push([max(y, 0.0) for y in ys], gap)
    ys = [-y for y in _push([-min(y, 1.0) for y in ys[::-1]], gap)[::-1]]
    return [y for _, y in sorted(zip(order, ys, strict=True))]


def _push(ys: Sequence[float], gap: float) -> list[float]:
    """Returns ascending heights, each raised to at least ``gap`` above the one before."""
    out: list[float] = []
    for y in ys:
        out.append(max(y, out[-1] + gap) if out else y)
    return out


def _short(name: str) -> str:
    """Returns a name that fits beside a curve and that the font can show."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont(FONT))
    name = "".join(c if font.get_char_index(ord(c)) else "\N{WHITE SQUARE}" for c in one_line(name))
    if len(name) <= NAME_LENGTH:
        return name
    keep = (NAME_LENGTH - 1) / 2  # both ends: runs of a sweep often differ in the last characters
    return f"{name[: math.ceil(keep)]}…{name[-math.floor(keep) :]}"
