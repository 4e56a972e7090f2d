"""Curves of runs as matplotlib figures, for notebooks, papers and the report."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_peft.report import wording
from fedjax_peft.report.drawing import Rows, Runs, key, legend_below, panels, plain_log, styled
from fedjax_peft.report.figure_files import (
    INK,
    MUTED,
    PAPER,
    bands,
    dash,
    line_look,
    rolling,
    styles,
)
from fedjax_peft.simulation.rows import field_is_lower_better, headline, headline_is_lower_better
from fedjax_peft.simulation.summaries import series

if TYPE_CHECKING:  # matplotlib imports slowly, and most commands draw no figure
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOG_FROM = 30
"""A cost axis is logarithmic if the runs' totals differ at least by this factor."""


class _Line(NamedTuple):
    """The points of a curve."""

    xs: list[float]
    by_seed: dict[Any, list[float]]
    """Seed -> one value for each of ``xs``."""

    @property
    def end(self) -> float:
        """The last value, a mean over seeds."""
        return sum(ys[-1] for ys in self.by_seed.values()) / len(self.by_seed)


def curves(
    runs: Mapping[str, Rows],
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
        runs: Name -> rows, in the order of the labels. The styles are those of
            :func:`fedjax_peft.report.figure_files.styles`.
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
    lines = {
        name: _points({None: rows}, x, fields[name], smooth=smooth) for name, rows in runs.items()
    }
    lower = all(map(headline_is_lower_better, runs.values())) and metric is None and bool(runs)
    shown = wording.common(fields.values(), "test_score")
    return _figure(lines, x, shown, means=False, lower=lower, narrow=narrow)


def mean_curves(
    runs: Runs, x: str, metric: str, *, narrow: bool = False, smooth: int = 1
) -> "Figure":
    """Returns a figure of the mean of a metric over seeds, with a band of one standard deviation.

    The points are the rounds that all seeds of a method have evaluated. On a cost axis, a point is
    at the mean cost of the seeds. The other arguments are those of :func:`curves`.

    Args:
        smooth: As in :func:`curves`; each seed is smoothed.

    Raises:
        InputError: ``x`` is another word.
    """
    lines = {name: _points(by_seed, x, metric, smooth=smooth) for name, by_seed in runs.items()}
    every = [rows for by_seed in runs.values() for rows in by_seed.values()]
    lower = bool(every) and all(field_is_lower_better(rows, metric) for rows in every)
    return _figure(lines, x, metric, means=True, lower=lower, narrow=narrow)


def curve_data(
    runs: Mapping[str, Rows], x: str, metric: str | None = None, *, smooth: int = 1
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


def mean_curve_data(runs: Runs, x: str, metric: str, *, smooth: int = 1) -> list[dict[str, Any]]:
    """Returns the points behind :func:`mean_curves`: a row for each point of each seed."""
    return [
        {"name": name, "seed": seed, **point}
        for name, by_seed in runs.items()
        for seed, rows in by_seed.items()
        for point in _data(rows, x, metric, smooth)
    ]


def _data(rows: Rows, x: str, metric: str, smooth: int) -> list[dict[str, Any]]:
    xs, ys = series(rows, x, metric)
    columns = {x: xs, metric: ys}
    if smooth > 1:
        columns[f"rolling_mean_{smooth}"] = rolling(ys, smooth)
    return [dict(zip(columns, point, strict=True)) for point in zip(*columns.values(), strict=True)]


def _points(by_seed: Mapping[Any, Rows], x: str, metric: str, *, smooth: int) -> _Line:
    """Returns the mean x coordinates and the values at the rounds of all seeds.

    A seed without costs on this axis (not simulated) has no points.
    """
    found: dict[Any, dict[float, tuple[float, float]]] = {}
    for seed, rows in by_seed.items():
        rounds, _ = series(rows, "round", metric)
        xs, ys = series(rows, x, metric)
        if len(xs) > 1 and xs[-1] == 0:
            xs, ys = [], []
        ys = rolling([100 * y for y in ys] if wording.is_share(metric) else ys, smooth)
        found[seed] = dict(zip(rounds, zip(xs, ys, strict=True), strict=False))
    rounds = sorted(set.intersection(*map(set, found.values()))) if found else []
    means = [sum(one[r][0] for one in found.values()) / len(found) for r in rounds]
    return _Line(means, {seed: [one[r][1] for r in rounds] for seed, one in found.items()})


@styled
def _figure(
    lines: Mapping[str, _Line], x: str, metric: str, *, means: bool, lower: bool, narrow: bool
) -> "Figure":
    """Returns a figure of curves.

    Args:
        metric: The metric that names the y axis.
        means: Whether the curves are means over seeds, with bands.
    """
    height = 2.7 + 0.2 * len(lines) if narrow else max(4.0, 0.8 + 0.2 * len(lines))
    fig, (ax,) = panels(1, narrow, height=height)
    unit = _x_axis(ax, x, [line.xs for line in lines.values()])
    if ax.get_xscale() == "log":
        lines = {name: _positive(line) for name, line in lines.items()}
    style = styles(lines)
    drawn = {name: line for name, line in lines.items() if line.xs}
    if means:
        for name, line in drawn.items():
            bands(ax, name, [a / unit for a in line.xs], line.by_seed, number=style[name])
    else:
        order = sorted(drawn, key=lambda name: dash(style[name]))  # densest line first
        for i, name in enumerate(order):
            above = sum(drawn[name] == drawn[other] for other in order[i + 1 :])
            _draw(ax, drawn[name], unit, style[name], above=above)
    _y_axis(ax, metric, lower=lower)
    labels = {name: _label(name, line, means=means) for name, line in lines.items()}
    ends = {name: line.end for name, line in drawn.items()}
    (_name_below if narrow else _name_beside)(ax, labels, ends, style)
    if not drawn:
        ax.set(xticks=[], yticks=[])
        ax.text(0.5, 0.5, "Nothing recorded", ha="center", transform=ax.transAxes)
    return fig


def _positive(line: _Line) -> _Line:
    """Returns the points that a logarithmic axis can show."""
    kept = [i for i, x in enumerate(line.xs) if x]
    by_seed = {seed: [ys[i] for i in kept] for seed, ys in line.by_seed.items()}
    return _Line([line.xs[i] for i in kept], by_seed)


def _x_axis(ax: "Axes", x: str, columns: Sequence[Sequence[float]]) -> float:
    """Sets up the x axis; returns the number of bytes, seconds or rounds in one of its units."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    totals = [xs[-1] for xs in columns if xs]
    largest = max(totals, default=0.0)
    unit, name = 1.0, "Communication round"
    if x == "round":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    else:
        choice = wording.byte_unit(largest) if x == "bytes" else wording.time_unit(largest)
        unit = choice.size
        name = "Communication, up and down" if x == "bytes" else "Simulated time"
        name += f" ({choice.name})"
        positive = [total for total in totals if total > 0]
        if positive and largest >= LOG_FROM * min(positive):
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1.0,)))
            ax.xaxis.minorticks_off()
            plain_log(ax.xaxis)
            name += ", logarithmic"
    if totals and not largest:  # only round 0: avoid an axis of tiny and negative numbers
        ax.set(xlim=(-0.02, 1.0), xticks=[0])
    ax.set_xlabel(name, labelpad=6)
    return unit


def _y_axis(ax: "Axes", metric: str, *, lower: bool) -> None:
    name = wording.capital(wording.word(metric))
    if wording.is_share(metric):
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, -1.0), min(high, 101.0))  # one percent more, for the line width
        name += " (%)"
    ax.set_ylabel(f"{name}, lower is better" if lower else name, labelpad=6)


def _draw(ax: "Axes", line: _Line, unit: float, style: int, *, above: int) -> None:
    """Draws a curve; its line is wider if ``above`` equal curves are drawn on top of it."""
    look = line_look(style)
    marker = look.pop("marker")
    xs, (ys,) = [x / unit for x in line.xs], line.by_seed.values()
    ax.plot(xs, ys, linewidth=1.8 + 2 * above, marker="", solid_capstyle="round", **look)
    dots: dict[str, Any] = {"marker": marker, "linestyle": "none", "color": look["color"]}
    if len(xs) <= 30:  # more dots would overlap
        ax.plot(xs, ys, markersize=3.5 + 2.5 * above, markeredgewidth=0, **dots)
    ends = dots | {"markersize": 6 + 2.5 * above, "markeredgecolor": PAPER, "clip_on": False}
    ax.plot(xs[-1:], ys[-1:], **ends)


# Names of curves.


class _Label(NamedTuple):
    text: str
    color: str


def _label(name: str, line: _Line, *, means: bool) -> _Label:
    """Returns the label of a curve, with the number of seeds of a mean."""
    if not line.xs:
        return _Label(f"{wording.shorten(name)} (no points)", MUTED)
    return _Label(
        f"{wording.shorten(name)} (n = {len(line.by_seed)})" if means else wording.shorten(name),
        INK,
    )


def _name_beside(
    ax: "Axes", labels: Mapping[str, _Label], ends: Mapping[str, float], style: Mapping[str, int]
) -> None:
    """Writes the names at the right, as close to the ends of the curves as space allows.

    Runs without points come last, at the bottom, in grey.
    """
    low, high = ax.get_ylim()
    heights = [(ends[name] - low) / (high - low) if name in ends else 0.0 for name in labels]
    # Height of a line of text, as a fraction of the axes' height (85 % of the figure's height).
    gap = 13 / (0.85 * 72 * ax.figure.get_figheight())  # type: ignore[union-attr]
    for (name, label), y in zip(labels.items(), _separate(heights, gap), strict=True):
        place: dict[str, Any] = {"transform": ax.transAxes}
        if name in ends:
            look = {**line_look(style[name]), "marker": "", "linewidth": 1.8, "clip_on": False}
            ax.plot([1.015, 1.085], [y, y], **look, **place)
        ax.text(1.1, y, label.text, va="center_baseline", color=label.color, **place)


def _name_below(
    ax: "Axes", labels: Mapping[str, _Label], ends: Mapping[str, float], style: Mapping[str, int]
) -> None:
    """Writes the names below the axes."""
    if not labels:
        return
    keys = [key(style[name] if name in ends else None) for name in labels]
    texts = [label.text for label in labels.values()]
    legend = legend_below(ax.figure, keys, texts, size=9)  # type: ignore[arg-type]
    for label, text in zip(labels.values(), legend.get_texts(), strict=True):
        text.set_color(label.color)


def _separate(heights: Sequence[float], gap: float) -> list[float]:
    """Returns heights in [0, 1] in the same order, close to the given ones, at least ``gap`` apart.

    Each height is the mean of its values when all are pushed up and when all are pushed down, so
    that groups stay centred.
    """
    order = np.argsort(heights, kind="stable")
    ys = np.asarray(heights, float)[order]
    ys = (_push_up(ys, gap) + _push_down(ys, gap)) / 2
    ys = _push_down(np.minimum(_push_up(np.maximum(ys, 0.0), gap), 1.0), gap)
    return ys[np.argsort(order)].tolist()


def _push_up(ys: np.ndarray, gap: float) -> np.ndarray:
    """Returns ascending heights, each raised to at least ``gap`` above the one before."""
    steps = gap * np.arange(len(ys))
    return np.maximum.accumulate(ys - steps) + steps


def _push_down(ys: np.ndarray, gap: float) -> np.ndarray:
    """Returns ascending heights, each lowered to at least ``gap`` below the next one."""
    return -_push_up(-ys[::-1], gap)[::-1]
