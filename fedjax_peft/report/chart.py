"""The chart of a report's page: curves against an axis that the reader chooses.

The curves are drawn once for each axis, for wide and for narrow windows, by the functions that draw
the figures of papers. A style sheet shows one of these drawings and hides runs that are switched
off, so the chart is complete without a script. With it, the values under the pointer or the
keyboard's cursor are shown. A chart library would draw the curves a second time in another look,
and the page would still need these drawings for print and for readers without scripts.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from fedjax_peft.report import figure_files, plots, wording
from fedjax_peft.report.drawing import Runs
from fedjax_peft.report.inline_svg import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZES = {"wide": (8.6, 4.2), "narrow": (3.7, 3.1)}
"""Kind of window -> width and height of the drawing in inches."""

MOST_POINTS = 1200
"""About the most points of the curves in a drawing."""


class Axis(NamedTuple):
    """A choice of the x axis."""

    ending: str
    """End of the files' names, after the metric."""
    title: str
    """The label of the choice."""


AXES = {
    "round": Axis("vs_round", "Rounds"),
    "bytes": Axis("vs_bytes", "Bytes"),
    "simulated_seconds": Axis("vs_time", "Simulated time"),
    "wall_seconds": Axis("vs_wall", "Wall time"),
}


class Chart(NamedTuple):
    """What the template needs of a chart."""

    drawings: dict[str, dict[str, Markup]]
    """Axis -> kind of window -> SVG element."""
    step: int
    """Every point is shown, or every second one and so on, so that the page stays small."""
    keys: list[Markup]
    """Of each run, an SVG element with its line."""
    lasts: list[str]
    """Of each run, the text of its last value; empty without any."""
    data: Markup
    """What the script reads, as JSON: ``names``, the ``texts`` of each run's values, and of each
    axis its ``units``, the runs' coordinates (:func:`_distinct`), and the ``scales`` of the
    drawings (see :func:`_scale`)."""


def recorded_axes(runs: Runs, metric: str | None) -> list[str]:
    """Returns the axes along which some run has points, at least that of the rounds."""
    found = {x: plots.lines(runs, x, metric).values() for x in AXES}
    costs = [x for x, lines in found.items() if any(line.xs and line.xs[-1] for line in lines)]
    return ["round", *(x for x in costs if x != "round")]


def chart(runs: Runs, axes: Sequence[str], metric: str | None, *, smooth: int = 1) -> Chart:
    """Returns the chart of runs.

    Args:
        axes: Keys of :data:`AXES`; the first one is shown at first.
        metric: See :func:`fedjax_peft.report.plots.curves`, also for ``smooth``.
    """
    name, lower = plots.y_axis(runs, metric)
    drawings: dict[str, dict[str, Markup]] = {}
    by_axis: dict[str, Any] = {}
    texts: list[list[str]] = [[] for _ in runs]
    total = sum(len(line.xs) for line in plots.lines(runs, "round", metric).values())
    step = thinning(total)
    for x in axes:
        lines = plots.lines(runs, x, metric, smooth=smooth)
        lines = {run: line.at(_some(len(line.xs), step)) for run, line in lines.items()}
        unit = plots.x_unit(x, lines.values()).size
        scales, drawings[x] = {}, {}
        for kind, size in SIZES.items():
            fig = plots.draw(lines, x, name, lower, size=size)
            element = svg(fig, f"{x[0]}{kind[0]}")
            drawings[x][kind], scales[kind] = Markup(element), _scale(fig.axes[0], unit)
        by_axis[x] = {
            "units": [[one.size, one.symbol] for one in wording.UNITS.get(x, ())],
            **_distinct([_short(line.xs) for line in lines.values()]),
            "scales": scales,
        }
        shown = [_texts(name, *line.band) for line in lines.values()]
        texts = [max(pair, key=len) for pair in zip(texts, shown, strict=True)]
    data = {"names": list(runs), "texts": texts, "axes": by_axis}
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    styles = figure_files.styles(runs)
    keys, lasts = [_key(styles[run]) for run in runs], [one[-1] if one else "" for one in texts]
    return Chart(drawings, step, keys, lasts, Markup(text))


def thinning(total: int) -> int:
    """Returns n, so that every n-th of ``total`` points are about the most points of a drawing."""
    return max(1, math.ceil(total / MOST_POINTS))


def _some(count: int, step: int) -> list[int]:
    """Returns the places of every ``step``-th of ``count`` points, and of the last one."""
    return [i for i in range(count) if i % step == 0 or i == count - 1]


def _distinct(several: Sequence[list[float]]) -> dict[str, Any]:
    """Returns the different lists, ``xs``, and the number of each run's list among them, ``of``."""
    known = {tuple(xs): xs for xs in several}
    places = {key: i for i, key in enumerate(known)}
    return {"xs": [*known.values()], "of": [places[tuple(xs)] for xs in several]}


def _short(values: Sequence[float]) -> list[float]:
    """Returns values with the digits that a screen needs."""
    return [float(f"{value:.5g}") for value in values]


def _texts(metric: str, mean: Sequence[float], deviation: Sequence[float]) -> list[str]:
    """Returns the text of each value."""
    share = wording.is_share(metric)
    form, unit = (".1f", " %") if share else (".4g", "")
    return [
        f"{m:{form}}{f' ± {d:{form}}' if d else ''}{unit}"
        for m, d in zip(mean, deviation, strict=True)
    ]


def _scale(ax: "Axes", unit: float) -> dict[str, Any]:
    """Returns where a drawn figure, in whose axis ``unit`` is 1, has a point in its SVG element.

    The place of x is ``x[0] + x[1] * x`` (of log10 x with ``log``) and that of y likewise; ``box``
    has the left, top, right and bottom of the axes.
    """
    fig, log = ax.figure, ax.get_xscale() == "log"
    points = 72 / fig.dpi
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    corners = ax.transData.transform([(left, low), (right, high)]) * points
    (x0, y0), (x1, y1) = corners.tolist()
    height = fig.get_figheight() * 72  # type: ignore[union-attr]
    y0, y1, left, right = height - y0, height - y1, left * unit, right * unit
    if log:
        left, right = math.log10(left), math.log10(right)
    across, down = (x1 - x0) / (right - left), (y1 - y0) / (high - low)
    return {
        "log": log,
        "x": [x0 - across * left, across],
        "y": [y0 - down * low, down],
        "box": [round(value, 1) for value in (x0, y1, x1, y0)],
    }


def _key(style: int) -> Markup:
    """Returns a short line in a style, as an SVG element."""
    look: Mapping[str, Any] = figure_files.line_look(style)
    dashes = () if look["linestyle"] == "solid" else look["linestyle"][1]
    array = " ".join(f"{2 * length:g}" for length in dashes)
    color = f"var(--run-{style % len(figure_files.PALETTE)}, {look['color']})"
    return Markup(
        '<svg class="key" viewBox="0 0 30 8" aria-hidden="true"><path d="M1 4H29" fill="none"'
        f' stroke="{color}" stroke-width="2" stroke-dasharray="{array}"/></svg>'
    )
