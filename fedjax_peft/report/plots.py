"""Curves of runs as matplotlib figures, for notebooks, papers and the report."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_peft.report.figure_files import (
    INK,
    MUTED,
    PAPER,
    bands,
    dash,
    dress,
    figure_class,
    lettering,
    line_look,
    rolling,
    styles,
)
from fedjax_peft.simulation.rows import field_is_lower_better, headline, headline_is_lower_better
from fedjax_peft.simulation.summaries import series
from fedjax_peft.support.display import one_line

if TYPE_CHECKING:  # matplotlib imports slowly, and most commands draw no figure
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Unit",
    "amount",
    "byte_unit",
    "common",
    "curve_data",
    "curves",
    "digits",
    "is_share",
    "mean_curve_data",
    "mean_curves",
    "one_line",
    "shorten",
    "time_unit",
]

NAME_LENGTH = 30
"""Most characters of a run's name beside its curve."""
LOG_FROM = 30
"""A cost axis is logarithmic if the runs' totals differ at least by this factor."""


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
    smooth: int = 1,
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
        smooth: Width of the rolling mean of each curve, in evaluated rounds.

    Raises:
        InputError: ``x`` is another word.
    """
    fields = {name: metric or f"test_{headline(rows)}" for name, rows in runs.items()}
    lines = {}
    for name, rows in runs.items():
        xs, ys = _points(rows, x, fields[name])
        lines[name] = (xs, rolling(ys, smooth))
    fig, ax = _begin(len(runs), narrow)
    unit = _x_axis(ax, x, [xs for xs, _ in lines.values()])
    style = styles(runs)
    ends, drawn = {}, []
    for name in sorted(lines, key=lambda name: dash(style[name])):  # densest line first
        shown = [(a / unit, b) for a, b in zip(*lines[name], strict=True) if a or not _is_log(ax)]
        if shown:
            drawn.append((name, shown))
            ends[name] = shown[-1][1]
    for i, (name, shown) in enumerate(drawn):
        _draw(ax, shown, style[name], above=sum(shown == other for _, other in drawn[i + 1 :]))
    lower = all(map(headline_is_lower_better, runs.values())) and metric is None and bool(runs)
    _y_axis(ax, common(fields.values(), "test_score"), lower=lower)
    labels = {name: _label_text(name, name in ends) for name in lines}
    _finish(fig, labels, ends, style, narrow)
    return fig


def curve_data(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    x: str,
    metric: str | None = None,
    *,
    smooth: int = 1,
) -> list[dict[str, Any]]:
    """Returns the points of :func:`curves`, a row for each point: ``name``, ``x`` and the metric.

    Bytes and seconds are in these units, and fractions are not in percent. Of smooth curves, a
    further column has the rolling means.
    """
    return [
        {"name": name, **point}
        for name, rows in runs.items()
        for point in _data(rows, x, metric or f"test_{headline(rows)}", smooth)
    ]


def _data(
    rows: Sequence[Mapping[str, Any]], x: str, metric: str, smooth: int
) -> list[dict[str, Any]]:
    xs, ys = series(rows, x, metric)
    points = [{x: a, metric: b} for a, b in zip(xs, ys, strict=True)]
    if smooth > 1:
        column = f"rolling_mean_{smooth}"
        points = [
            {**point, column: y} for point, y in zip(points, rolling(ys, smooth), strict=True)
        ]
    return points


def mean_curves(
    runs: Mapping[str, Mapping[Any, Sequence[Mapping[str, Any]]]],
    x: str,
    metric: str,
    *,
    narrow: bool = False,
    smooth: int = 1,
) -> "Figure":
    """Returns a figure of the mean of a metric over seeds, with a band of one standard deviation.

    The points are the rounds that all seeds of a method have evaluated. On a cost axis, a point is
    at the mean cost of the seeds.

    Args:
        runs: Name -> seed -> rows, in the order of the labels.
        x: As in :func:`curves`.
        metric: A numeric field of the rows. Fractions are drawn in percent.
        narrow: As in :func:`curves`.
        smooth: As in :func:`curves`; each seed is smoothed.

    Raises:
        InputError: ``x`` is another word.
    """
    fig, ax = _begin(len(runs), narrow)
    lines = {
        name: _common_points(list(by_seed.values()), x, metric, smooth)
        for name, by_seed in runs.items()
    }
    unit = _x_axis(ax, x, [xs for xs, _ in lines.values()])
    style, ends = styles(runs), {}
    for name, (xs, columns) in lines.items():
        start = 1 if _is_log(ax) and xs and not xs[0] else 0
        if xs[start:]:
            values = dict(zip(runs[name], (ys[start:] for ys in columns), strict=True))
            bands(ax, name, [a / unit for a in xs[start:]], values, number=style[name])
            ends[name] = sum(ys[-1] for ys in columns) / len(columns)
    every = [rows for by_seed in runs.values() for rows in by_seed.values()]
    _y_axis(ax, metric, lower=bool(every) and all(field_is_lower_better(r, metric) for r in every))
    labels = {name: _label_text(name, name in ends, len(runs[name])) for name in lines}
    _finish(fig, labels, ends, style, narrow)
    return fig


def _common_points(
    runs: Sequence[Sequence[Mapping[str, Any]]], x: str, metric: str, smooth: int
) -> tuple[list[float], list[list[float]]]:
    """Returns the mean x coordinates, and the values of each run, at the rounds of all runs."""
    found: list[dict[float, tuple[float, float]]] = []
    for rows in runs:
        rounds, _ = series(rows, "round", metric)
        xs, ys = _points(rows, x, metric)
        found.append(dict(zip(rounds, zip(xs, rolling(ys, smooth), strict=True), strict=False)))
    rounds = sorted(set.intersection(*map(set, found))) if found else []
    xs = [sum(one[r][0] for one in found) / len(found) for r in rounds]
    return xs, [[one[r][1] for r in rounds] for one in found]


def mean_curve_data(
    runs: Mapping[str, Mapping[Any, Sequence[Mapping[str, Any]]]],
    x: str,
    metric: str,
    *,
    smooth: int = 1,
) -> list[dict[str, Any]]:
    """Returns the points behind :func:`mean_curves`: a row for each point of each seed."""
    return [
        {"name": name, "seed": seed, **point}
        for name, by_seed in runs.items()
        for seed, rows in by_seed.items()
        for point in _data(rows, x, metric, smooth)
    ]


def common(names: Iterable[str], otherwise: str) -> str:
    """Returns the name if all names are equal, otherwise ``otherwise``."""
    found = set(names)
    return found.pop() if len(found) == 1 else otherwise


def _begin(curves: int, narrow: bool) -> tuple["Figure", "Axes"]:
    """Returns an empty figure for a number of curves, and its axes."""
    width, height = (3.7, 2.7 + 0.2 * curves) if narrow else (7.2, 0.8 + 0.2 * curves)
    fig = figure_class()(
        figsize=(width, height if narrow else max(4.0, height)),
        layout="constrained",
        facecolor=PAPER,
    )
    ax = fig.add_subplot()
    dress(ax)
    return fig, ax


def _finish(
    fig: "Figure",
    labels: "Mapping[str, _Label]",
    ends: Mapping[str, float],
    style: Mapping[str, int],
    narrow: bool,
) -> None:
    """Writes the labels of the curves, which are given by name."""
    (ax,) = fig.axes
    if narrow:
        _legend(fig, labels, ends, style)
    else:
        _label(ax, labels, ends, style)
    if not ends:
        ax.set(xticks=[], yticks=[])
        ax.text(0.5, 0.5, "Nothing recorded", ha="center", transform=ax.transAxes, **lettering())


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
    look = line_look(style)
    marker = look.pop("marker")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    ax.plot(xs, ys, linewidth=1.8 + 2 * above, solid_capstyle="round", **look)
    dots: dict[str, Any] = {"marker": marker, "linestyle": "none", "color": look["color"]}
    if len(xs) <= 30:  # more dots would overlap
        ax.plot(xs, ys, markersize=3.5 + 2.5 * above, markeredgewidth=0, **dots)
    ends = dots | {"markersize": 6 + 2.5 * above, "markeredgecolor": PAPER, "clip_on": False}
    ax.plot(xs[-1:], ys[-1:], **ends)


def _label(
    ax: "Axes",
    labels: "Mapping[str, _Label]",
    ends: Mapping[str, float],
    style: Mapping[str, int],
) -> None:
    """Writes the names at the right, as close to the ends of the curves as space allows.

    Runs without points come last, at the bottom, in grey.
    """
    low, high = ax.get_ylim()
    heights = [(ends[name] - low) / (high - low) if name in ends else 0.0 for name in labels]
    # Height of a line of text, as a fraction of the axes' height (85 % of the figure's height).
    gap = 13 / (0.85 * 72 * ax.figure.get_figheight())  # type: ignore[union-attr]
    for name, y in zip(labels, _separate(heights, gap), strict=True):
        place: dict[str, Any] = {"transform": ax.transAxes}
        if name in ends:
            look = {**line_look(style[name]), "marker": "", "linewidth": 1.8, "clip_on": False}
            ax.plot([1.015, 1.085], [y, y], **look, **place)
        text, color = labels[name]
        ax.text(1.1, y, text, va="center_baseline", **place, **lettering(color=color))


def _legend(
    fig: "Figure",
    labels: "Mapping[str, _Label]",
    ends: Mapping[str, float],
    style: Mapping[str, int],
) -> None:
    """Writes the names of the curves below the axes."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linewidth=1.8, markersize=4, **line_look(style[name]))
        if name in ends
        else Line2D([], [], linestyle="none")
        for name in labels
    ]
    if not handles:
        return
    legend = fig.legend(
        handles,
        ["-"] * len(labels),  # replaced below, because matplotlib omits labels with a leading _
        loc="outside lower left",
        frameon=False,
        handlelength=3.2,
        labelspacing=0.3,
    )
    for (words, color), text in zip(labels.values(), legend.get_texts(), strict=True):
        text.set(text=words, **lettering(color=color))


class _Label(NamedTuple):
    text: str
    color: str


def _label_text(name: str, has_points: bool, seeds: int | None = None) -> _Label:
    """Returns the label of a curve, with the number of seeds of a mean."""
    if not has_points:
        return _Label(f"{shorten(name)} (no points)", MUTED)
    return _Label(shorten(name) if seeds is None else f"{shorten(name)} (n = {seeds})", INK)


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


def shorten(name: str, length: int = NAME_LENGTH) -> str:
    """Returns a name with at most ``length`` characters; the start and the end are kept."""
    name = one_line(name)
    if len(name) <= length:
        return name
    half = (length - 1) / 2  # names in a sweep often differ in their last characters
    return f"{name[: math.ceil(half)]}…{name[-math.floor(half) :]}"
