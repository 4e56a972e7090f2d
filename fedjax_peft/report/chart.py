"""The chart of a report's page: curves against an axis that the reader chooses.

The curves are drawn once for each axis, by the function that draws the figures of papers. A style
sheet shows one of these drawings, fits it to the window, and hides runs that are switched off. Each
value is the title of an invisible mark, so the chart is complete without a script. The page's
script reads these titles, and shows them side by side. A chart library would draw the curves a
second time in another look, and the page would still need these drawings for print.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from fedjax_peft.report import figure_files, plots, wording
from fedjax_peft.report.drawing import Runs
from fedjax_peft.report.inline_svg import svg

SIZE = (6.6, 3.6)
"""Width and height of a drawing in inches."""
MOST_POINTS = 1200
"""About the most points of the curves in a drawing."""


class Chart(NamedTuple):
    """What the template needs of a chart."""

    drawings: dict[str, Markup]
    """Axis -> SVG element."""
    step: int
    """Every point is shown, or every second one and so on, so that the page stays small."""
    keys: list[Markup]
    """Of each run, an SVG element with its line."""
    lasts: list[str]
    """Of each run, the text of its last value; empty without any."""


def chart(runs: Runs, axes: Sequence[str], metric: str | None, *, smooth: int = 1) -> Chart:
    """Returns the chart of runs.

    Args:
        axes: Keys of :data:`fedjax_peft.report.plots.AXES`.
        metric: See :func:`fedjax_peft.report.plots.curves`, also for ``smooth``.
    """
    name, lower = plots.y_axis(runs, metric)
    step = thinning(sum(len(line.xs) for line in plots.lines(runs, "round", metric).values()))
    drawings, lasts = {}, [""] * len(runs)
    for x in axes:
        lines = plots.lines(runs, x, metric, smooth=smooth)
        lines = {run: line.at(_some(len(line.xs), step)) for run, line in lines.items()}
        texts = {run: _texts(name, line) for run, line in lines.items()}
        fig = plots.draw(lines, x, name, lower, size=SIZE, marked=True)
        titles = [
            [
                f"{_place(x, a)}: {y} ({wording.shorten(run)})"
                for a, y in zip(line.xs, texts[run], strict=True)
            ]
            for run, line in lines.items()
        ]
        drawings[x] = Markup(svg(fig, f"{x[0]}-", titles))
        lasts = [new[-1] if new else last for new, last in zip(texts.values(), lasts, strict=True)]
    styles = figure_files.styles(runs)
    return Chart(drawings, step, [_key(styles[run]) for run in runs], lasts)


def thinning(total: int) -> int:
    """Returns n, so that every n-th of ``total`` points are about the most points of a drawing."""
    return max(1, math.ceil(total / MOST_POINTS))


def _some(count: int, step: int) -> list[int]:
    """Returns the places of every ``step``-th of ``count`` points, and of the last one."""
    return [i for i in range(count) if i % step == 0 or i == count - 1]


def _place(x: str, value: float) -> str:
    """Returns a place on an axis in words."""
    return f"Round {value:g}" if x == "round" else wording.amount(x, value)


def _texts(metric: str, line: plots.Line) -> list[str]:
    """Returns the text of each value."""
    form, unit = (".1f", " %") if wording.is_share(metric) else (".4g", "")
    return [
        f"{m:{form}}{f' ± {d:{form}}' if d else ''}{unit}" for m, d in zip(*line.band, strict=True)
    ]


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
