"""Parts that the figures of reports share: panels, names of axes, legends and colour bars."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

from fedjax_peft.report.figure_files import MUTED, line_look, style, subplots
from fedjax_peft.report.wording import shorten

if TYPE_CHECKING:  # matplotlib imports slowly, and most commands draw no figure
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")
Rows: TypeAlias = Sequence[Mapping[str, Any]]
Runs: TypeAlias = Mapping[str, Mapping[Any, Rows]]
"""Name of a method or run -> seed -> rows."""
COLUMNS = 3
"""Most panels side by side."""


class Detail(NamedTuple):
    """A figure, its data and its caption."""

    stem: str
    """Name of its files, without the suffix."""
    title: str
    caption: str
    figure: "Figure"
    data: list[dict[str, Any]]


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Returns a function that draws in the style of all figures."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
        with style():
            return draw(*args, **kwargs)

    return drawn


def panels(
    count: int,
    *,
    height: float = 0.0,
    legend: int = 0,
    sharey: bool = False,
    size: tuple[float, float] | None = None,
) -> tuple["Figure", list["Axes"]]:
    """Returns a figure of ``count`` axes in up to three columns, and the axes row by row.

    Args:
        height: Height of a row in inches.
        legend: Number of entries of the legend below the axes.
        size: Width and height of the figure in inches, in place of ``height`` and ``legend``.
    """
    columns = min(COLUMNS, count)
    rows = math.ceil(count / columns)
    size = size or (7.2, rows * height + 0.22 * math.ceil(legend / 3))
    fig, axes = subplots(rows, columns, size=size, squeeze=False, sharey=sharey)
    for ax in axes.flat:
        ax.tick_params(which="both", length=0)
        ax.tick_params(axis="x", which="major", length=3)
    for ax in axes.flat[count:]:
        ax.set_axis_off()
    return fig, list(axes.flat[:count])


def bare(ax: "Axes") -> None:
    """Removes the grid, the frame and the ticks, which would cover an image."""
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)


def name_axes(axes: Sequence["Axes"], x: str, y: str) -> None:
    """Writes the names of the axes of panels below each column and at the left of each row."""
    from matplotlib.ticker import MaxNLocator

    columns = min(COLUMNS, len(axes))
    x = x.replace("Communication round", "Round") if columns > 2 else x
    for i, ax in enumerate(axes):
        if i + columns >= len(axes):
            ax.set_xlabel(x)
        if i % columns == 0:
            ax.set_ylabel(y)
        if not ax.images:
            ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def plain_log(axis: Any) -> None:
    """Writes the powers of ten of a logarithmic axis as plain numbers."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def key(style: int | None) -> Any:
    """Returns the line of a style for a legend; an invisible one for None."""
    from matplotlib.lines import Line2D

    look = {"linestyle": "none"} if style is None else line_look(style)
    return Line2D([], [], linewidth=1.8, markersize=4, **look)


@styled
def legend(
    fig: Any, handles: Sequence[Any], labels: Sequence[str], place: Any = "outside lower left"
) -> None:
    """Adds a legend outside of all axes; below them, it has up to three columns."""
    below = "lower" in place
    found = fig.legend(
        handles,
        ["-"] * len(labels),  # replaced below, because matplotlib omits labels with a leading _
        loc=place,
        ncols=min(3, len(labels)) if below else 1,
        handlelength=3.2,
        labelspacing=0.3 if below else 0.5,
    )
    for label, text in zip(labels, found.get_texts(), strict=True):
        text.set_text(label)


def legend_of(axes: Sequence["Axes"]) -> None:
    """Adds a legend below the axes with the names of all their lines, each once."""
    found: dict[str, Any] = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        for label, handle in zip(labels, handles, strict=True):
            found.setdefault(shorten(label), handle)
    legend(axes[0].get_figure(root=True), list(found.values()), list(found))


def colour_bar(image: Any, axes: Any, **place: Any) -> Any:
    """Returns the scale of an image's colours that it adds beside axes.

    Args:
        **place: Place of the scale, for ``Figure.colorbar``.
    """
    bar = image.figure.colorbar(image, ax=axes, **place)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelcolor=MUTED)
    return bar
