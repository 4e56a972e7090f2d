"""Curves of runs as matplotlib figures, for notebooks, papers and the report.

Figures are created without pyplot, so there is no global state and no figure to close.
"""

import functools
import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_peft.display import one_line
from fedjax_peft.files import replace_file
from fedjax_peft.rows import headline, headline_is_lower_better, series

if TYPE_CHECKING:  # matplotlib imports slowly, and most commands draw no figure
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Unit",
    "amount",
    "byte_unit",
    "common",
    "curves",
    "digits",
    "drawable",
    "figure_class",
    "is_share",
    "lettering",
    "one_line",
    "save",
    "styles",
    "svg",
    "time_unit",
]

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's colours for colour-blind readers, without yellow, which is too pale on paper."""
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
NAME_LENGTH = 30
"""Most characters of a run's name beside its curve."""
LOG_FROM = 30
"""A cost axis is logarithmic if the runs' totals differ at least by this factor."""


_NO_METADATA = dict.fromkeys(["Creator", "Date", "Format", "Type"])


class Unit(NamedTuple):
    """A unit for bytes or seconds."""

    size: float
    """Bytes or seconds in one unit."""
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
    return _unit(_SECONDS, largest / 2)  # below two minutes, print seconds


def amount(value: float, unit: Unit) -> str:
    """Returns bytes or seconds as a number and its unit."""
    return f"{digits(value / unit.size)} {unit.symbol}"


def digits(value: float) -> str:
    """Returns a number with about three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    if value >= 0.1:
        return f"{value:.2f}"
    return "0" if value == 0 else f"{value:.3f}" if value >= 0.001 else "<0.001"


def curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    x: str,
    metric: str | None = None,
    *,
    narrow: bool = False,
) -> "Figure":
    """Returns a figure of one metric of each run, against rounds, bytes or simulated seconds.

    Curves that coincide are drawn with different line widths, the thinnest on top, so that all of
    them are visible.

    Args:
        runs: Name -> rows, in the order of the labels. The styles are those of :func:`styles`.
        x: ``"round"``, ``"bytes"`` or ``"simulated_seconds"``; the latter two are accumulated. A
            cost axis is logarithmic if the runs' totals differ much.
        metric: A numeric field of the rows; by default the headline metric on the test set.
            Fractions are drawn in percent.
        narrow: Whether the figure is for a narrow screen, with the names below the axes.

    Raises:
        InputError: ``x`` is another word.
    """
    fields = {name: metric or f"test_{headline(rows)}" for name, rows in runs.items()}
    lines = {name: _points(rows, x, fields[name]) for name, rows in runs.items()}
    width, height = (3.7, 2.7 + 0.2 * len(runs)) if narrow else (7.2, 0.8 + 0.2 * len(runs))
    fig = figure_class()(
        figsize=(width, height if narrow else max(4.0, height)),
        layout="constrained",
        facecolor=PAPER,
    )
    ax = fig.add_subplot()
    _dress(ax)
    unit = _x_axis(ax, x, [xs for xs, _ in lines.values()])
    style = styles(runs)
    ends, drawn = {}, []
    for name in sorted(lines, key=lambda name: _dash(style[name])):  # densest line first
        shown = [(a / unit, b) for a, b in zip(*lines[name], strict=True) if a or not _is_log(ax)]
        if shown:
            drawn.append((name, shown))
            ends[name] = shown[-1][1]
    for i, (name, shown) in enumerate(drawn):
        _draw(ax, shown, style[name], above=sum(shown == other for _, other in drawn[i + 1 :]))
    lower = all(map(headline_is_lower_better, runs.values())) and metric is None and bool(runs)
    _y_axis(ax, common(fields.values(), "test_score"), lower=lower)
    if narrow:
        _legend(fig, list(lines), ends, style)
    else:
        _label(ax, list(lines), ends, style)
    if not ends:
        ax.set(xticks=[], yticks=[])
        ax.text(0.5, 0.5, "Nothing recorded", ha="center", transform=ax.transAxes, **lettering())
    return fig


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


def save(fig: "Figure", path: str | os.PathLike[str]) -> None:
    """Writes a figure atomically: as SVG if the path ends in ``.svg``, otherwise as PNG (150 dpi).

    Equal figures give equal bytes.
    """
    if os.fspath(path).endswith(".svg"):
        replace_file(path, _render(fig, "svg", metadata=_NO_METADATA))
    else:
        replace_file(path, _render(fig, "png", metadata={"Software": None}))


def svg(fig: "Figure", prefix: str = "") -> str:
    """Returns a figure as an ``<svg>`` element for an HTML page.

    The colours are CSS variables (``--ink``, ``--muted``, ``--grid``, ``--paper``, ``--run-0`` ...)
    with the figure's colours as defaults, so that a page can change them for a dark screen.

    Args:
        fig: The figure.
        prefix: Text before each id of the element; the ids in a page must differ.
    """
    text = _render(fig, "svg", metadata=_NO_METADATA).decode()
    text = re.sub(r"<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", text)
    theme = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}
    theme |= {color: f"run-{i}" for i, color in enumerate(PALETTE)}
    return re.sub(
        "|".join(theme), lambda color: f"var(--{theme[color[0]]}, {color[0]})", text
    ).strip()


def common(names: Iterable[str], otherwise: str) -> str:
    """Returns the name if all names are equal, otherwise ``otherwise``."""
    found = set(names)
    return found.pop() if len(found) == 1 else otherwise


@functools.cache
def figure_class() -> "type[Figure]":
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    class Curves(Figure):
        """A figure that a notebook can show without pyplot.

        Dollar signs in texts do not start formulas, and characters that the font lacks are drawn as
        empty squares.
        """

        def draw(self, renderer: Any) -> None:
            for text in self.findobj(Text):
                text.set_parse_math(False)
                text.set_text(drawable(text.get_text()))
            super().draw(renderer)

        def _repr_png_(self) -> bytes:
            return _render(self, "png")

    return Curves


def _render(fig: "Figure", form: str, **options: Any) -> bytes:
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "fedjax_peft"}):  # otherwise ids would be random
        fig.savefig(buffer, format=form, dpi=150, facecolor=fig.get_facecolor(), **options)
    return buffer.getvalue()


def _unit(units: Sequence[Unit], largest: float) -> Unit:
    return next((unit for unit in reversed(units) if unit.size <= largest), units[0])


def _points(
    rows: Sequence[Mapping[str, Any]], x: str, metric: str
) -> tuple[list[float], list[float]]:
    """Returns the points of a curve; none if the run has no costs on this axis (not simulated)."""
    xs, ys = series(rows, x, metric)
    if len(xs) > 1 and xs[-1] == 0:
        return [], []
    return xs, [100 * y for y in ys] if is_share(metric) else ys


def is_share(metric: str) -> bool:
    """Returns whether a metric is a fraction that is printed in percent."""
    return any(word in metric for word in ("accuracy", "f1", "exact_match", "score"))


def _is_log(ax: "Axes") -> bool:
    return ax.get_xscale() == "log"


def lettering(size: float = 9, color: str = INK) -> dict[str, Any]:
    return {"family": FONT, "fontsize": size, "color": color}


def _dress(ax: "Axes") -> None:
    """Removes frame lines and ticks, and sets the colours."""
    ax.set_facecolor(PAPER)
    ax.set_axisbelow(True)
    ax.margins(x=0.02)
    ax.grid(True, which="major", color=GRID, linewidth=0.6, linestyle="solid")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set(color=MUTED, linewidth=0.8)
    ax.tick_params(which="both", length=0, labelsize=8.5, labelcolor=MUTED, labelfontfamily=FONT)
    ax.tick_params(axis="x", which="major", length=3, color=MUTED)


def _x_axis(ax: "Axes", x: str, columns: Sequence[Sequence[float]]) -> float:
    """Sets up the x axis; returns the number of bytes, seconds or rounds in one of its units."""
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
    if totals and not largest:  # only round 0: avoid an axis of tiny and negative numbers
        ax.set(xlim=(-0.02, 1.0), xticks=[0])
    ax.set_xlabel(title, labelpad=6, **lettering())
    return unit


def _y_axis(ax: "Axes", metric: str, *, lower: bool) -> None:
    title = one_line(metric.replace("_", " ")).capitalize().replace("f1", "F1")
    if is_share(metric):
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, -1.0), min(high, 101.0))  # one percent more, for the line width
        title += " (%)"
    if lower:
        title += ", lower is better"
    ax.set_ylabel(title, labelpad=6, **lettering())


def _draw(ax: "Axes", points: Sequence[tuple[float, float]], style: int, *, above: int) -> None:
    """Draws a curve; its line is wider if ``above`` equal curves are drawn on top of it."""
    look = _look(style)
    xs, ys = [x for x, _ in points], [y for _, y in points]
    ax.plot(xs, ys, linewidth=1.8 + 2 * above, solid_capstyle="round", **look)
    dots: dict[str, Any] = {"marker": _marker(style), "linestyle": "none", "color": look["color"]}
    if len(xs) <= 30:  # more dots would overlap
        ax.plot(xs, ys, markersize=3.5 + 2.5 * above, markeredgewidth=0, **dots)
    ends = dots | {"markersize": 6 + 2.5 * above, "markeredgecolor": PAPER, "clip_on": False}
    ax.plot(xs[-1:], ys[-1:], **ends)


def _look(style: int) -> dict[str, Any]:
    return {"color": PALETTE[style % len(PALETTE)], "linestyle": DASHES[_dash(style)]}


def _dash(style: int) -> int:
    """Returns the index of the line style; runs with the same colour have different ones."""
    turn, color = divmod(style, len(PALETTE))
    return (color + turn) % len(DASHES)


def _marker(style: int) -> str:
    return MARKERS[_dash(style)]


def _label(
    ax: "Axes", names: Sequence[str], ends: Mapping[str, float], style: Mapping[str, int]
) -> None:
    """Writes the names at the right, as close to the ends of the curves as space allows.

    Runs without points come last, at the bottom, in grey.
    """
    low, high = ax.get_ylim()
    heights = [(ends[name] - low) / (high - low) if name in ends else 0.0 for name in names]
    # Height of a line of text, as a fraction of the axes' height (85 % of the figure's height).
    gap = 13 / (0.85 * 72 * ax.figure.get_figheight())  # type: ignore[union-attr]
    for name, y in zip(names, _separate(heights, gap), strict=True):
        place: dict[str, Any] = {"transform": ax.transAxes}
        if name in ends:
            look = {"linewidth": 1.8, "clip_on": False, **place, **_look(style[name])}
            ax.plot([1.015, 1.085], [y, y], **look)
        text, color = _label_text(name, name in ends)
        ax.text(1.1, y, text, va="center_baseline", **place, **lettering(color=color))


def _legend(
    fig: "Figure", names: Sequence[str], ends: Mapping[str, float], style: Mapping[str, int]
) -> None:
    """Writes the names of the curves below the axes."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [], [], linewidth=1.8, marker=_marker(style[name]), markersize=4, **_look(style[name])
        )
        if name in ends
        else Line2D([], [], linestyle="none")
        for name in names
    ]
    if not handles:
        return
    legend = fig.legend(
        handles,
        ["-"] * len(names),  # replaced below, because matplotlib omits labels with a leading _
        loc="outside lower left",
        frameon=False,
        handlelength=3.2,
        labelspacing=0.3,
    )
    for name, text in zip(names, legend.get_texts(), strict=True):
        words, color = _label_text(name, name in ends)
        text.set(text=words, **lettering(color=color))


def _label_text(name: str, has_points: bool) -> tuple[str, str]:
    """Returns the text and the colour of a curve's label."""
    return (_short(name), INK) if has_points else (f"{_short(name)} (no points)", MUTED)


def _separate(heights: Sequence[float], gap: float) -> list[float]:
    """Returns heights in [0, 1] in the same order, close to the given ones, at least ``gap`` apart.

    Each height is the mean of its values when all are pushed up and when all are pushed down, so
    that groups stay centred.
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


def drawable(text: str) -> str:
    """Returns the text with a square in place of each character that the font lacks."""
    if text.isascii() and text.isprintable():
        return text
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont(FONT))
    return "".join(
        c if c == "\n" or font.get_char_index(ord(c)) else "\N{WHITE SQUARE}" for c in text
    )


def _short(name: str) -> str:
    """Returns a name with at most ``NAME_LENGTH`` characters; the start and the end are kept."""
    name = one_line(name)
    if len(name) <= NAME_LENGTH:
        return name
    half = (NAME_LENGTH - 1) / 2  # names in a sweep often differ in their last characters
    return f"{name[: math.ceil(half)]}…{name[-math.floor(half) :]}"
