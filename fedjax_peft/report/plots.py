"""Curves of runs as matplotlib figures, for notebooks, papers and the report."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_peft.report import wording
from fedjax_peft.report.drawing import Rows, Runs, key, legend, panels, plain_log, styled
from fedjax_peft.report.figure_files import (
    PAPER,
    bands,
    dash,
    line_look,
    mean_band,
    rolling,
    styles,
)
from fedjax_peft.simulation.rows import field_is_lower_better, headline
from fedjax_peft.simulation.run import Run
from fedjax_peft.simulation.score_names import Score
from fedjax_peft.simulation.summaries import series

if TYPE_CHECKING:  # matplotlib imports slowly, and most commands draw no figure
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOG_FROM = 30
"""A cost axis is logarithmic if the runs' totals differ at least by this factor."""
FEW = 10
"""Most evaluations of a curve whose marks stand out: between two of them, nothing is known."""


class Axis(NamedTuple):
    """A choice of the x axis."""

    ending: str
    """End of the files' names, after the metric."""
    title: str
    """The label of the choice."""
    name: str
    """The name of the axis; that of a cost without its unit."""


AXES = {
    "round": Axis("vs_round", "Rounds", "Communication round"),
    "bytes": Axis("vs_bytes", "Bytes", "Communication, up and down"),
    "simulated_seconds": Axis("vs_time", "Simulated time", "Simulated time"),
    "wall_seconds": Axis("vs_wall", "Wall time", "Wall time"),
}


class Line(NamedTuple):
    """The points of a curve."""

    xs: list[float]
    by_seed: dict[Any, list[float]]
    """Seed -> one value for each of ``xs``; fractions are in percent."""

    @property
    def band(self) -> tuple[list[float], list[float]]:
        """The means over seeds and the standard deviations, 0 for one seed."""
        mean, deviation = mean_band(list(self.by_seed.values()))
        return mean.tolist(), deviation.tolist()

    def at(self, places: Sequence[int]) -> "Line":
        """Returns the line with the points at these places alone."""
        by_seed = {seed: [ys[i] for i in places] for seed, ys in self.by_seed.items()}
        return Line([self.xs[i] for i in places], by_seed)


def curves(
    runs: Mapping[str, Rows] | Runs, x: str, metric: str | None = None, *, smooth: int = 1
) -> "Figure":
    """Returns a figure of one metric of each run, against rounds, bytes or seconds.

    The curve of several seeds is their mean, with a band of one standard deviation. Its points are
    the rounds that all seeds of a method have evaluated, on a cost axis at their mean cost. Curves
    of single runs that coincide are drawn with different line widths, the thinnest on top, so that
    all of them are visible.

    Args:
        runs: Name -> rows, or name -> seed -> rows, in the order of the legend. The styles are
            those of :func:`fedjax_peft.report.figure_files.styles`.
        x: ``"round"``, ``"bytes"``, ``"simulated_seconds"`` or ``"wall_seconds"``; costs are
            accumulated. A cost axis is logarithmic if the runs' totals differ much.
        metric: A numeric field of the rows; by default the headline metric on the test set.
            Fractions are drawn in percent.
        smooth: Width of the rolling mean of each seed's curve, in evaluated rounds.

    Raises:
        InputError: ``x`` is another word.
    """
    found = lines(runs, x, metric, smooth=smooth)
    size = (7.2, max(4.0, 0.8 + 0.2 * len(found)))
    fig, style = draw(found, x, *y_axis(runs, metric), size=size), styles(found)
    counts = (f" (n = {len(one.by_seed)})" * (None not in one.by_seed) for one in found.values())
    names = [
        f"{wording.shorten(name)}{count if line.xs else ' (no points)'}"
        for (name, line), count in zip(found.items(), counts, strict=True)
    ]
    handles = [key(style[name] if line.xs else None) for name, line in found.items()]
    if found:
        legend(fig, handles, names, place="outside right upper")
    return fig


def lines(
    runs: Mapping[str, Rows] | Runs, x: str, metric: str | None = None, *, smooth: int = 1
) -> dict[str, Line]:
    """Returns the curves of :func:`curves`: x coordinates in rounds, bytes or seconds."""
    found = {
        name: _points(by_seed, x, metric or _headline(by_seed), smooth=smooth)
        for name, by_seed in _seeds(runs).items()
    }
    if _is_log(x, found.values()):
        found = {n: line.at([i for i, x in enumerate(line.xs) if x]) for n, line in found.items()}
    return found


def plot(run: Run, x: str = "round") -> "Figure":
    """Returns the curve of a run; see :meth:`fedjax_peft.Run.plot`."""
    return curves({run.algorithm.name: run.metrics}, x)


def _is_log(x: str, found: Iterable[Line]) -> bool:
    """Returns whether the x axis of curves is logarithmic: costs that differ much."""
    totals = [line.xs[-1] for line in found if line.xs and line.xs[-1] > 0]
    return x != "round" and bool(totals) and max(totals) >= LOG_FROM * min(totals)


def recorded_axes(runs: Runs, metric: str | None) -> list[str]:
    """Returns the axes along which some run has points, at least that of the rounds."""
    costs = [
        x
        for x in AXES
        if x != "round" and any(line.xs and line.xs[-1] for line in lines(runs, x, metric).values())
    ]
    return ["round", *costs]


def y_axis(runs: Mapping[str, Rows] | Runs, metric: str | None) -> tuple[str, bool]:
    """Returns the metric that names the y axis, and whether its lower values are better."""
    names, every = [], []
    for by_seed in _seeds(runs).values():
        names.append(metric or _headline(by_seed))
        every += [field_is_lower_better(rows, names[-1]) for rows in by_seed.values()]
    return wording.common(names, "test_score"), bool(every) and all(every)


def curve_data(
    runs: Mapping[str, Rows] | Runs, x: str, metric: str | None = None, *, smooth: int = 1
) -> list[dict[str, Any]]:
    """Returns the points of :func:`curves`, a row for each point of each seed.

    The columns are ``name``, ``seed`` (if the runs have seeds), ``x`` and the metric. Bytes and
    seconds are in these units, and fractions are not in percent. Of smooth curves, a further column
    has the rolling means.
    """
    found = []
    for name, by_seed in _seeds(runs).items():
        for seed, rows in by_seed.items():
            field = metric or _headline(by_seed)
            xs, ys = series(rows, x, field)
            columns = {x: xs, field: ys}
            if smooth > 1:
                columns[f"rolling_mean_{smooth}"] = rolling(ys, smooth)
            of = {"name": name} | ({} if seed is None else {"seed": seed})
            points = zip(*columns.values(), strict=True)
            found += [of | dict(zip(columns, point, strict=True)) for point in points]
    return found


def _seeds(runs: Mapping[str, Any]) -> dict[str, Mapping[Any, Rows]]:
    """Returns name -> seed -> rows; the seed of rows without one is None."""
    return {n: one if isinstance(one, Mapping) else {None: one} for n, one in runs.items()}


def _headline(by_seed: Mapping[Any, Rows]) -> str:
    return Score("test", headline(next(iter(by_seed.values()), []))).name


def _points(by_seed: Mapping[Any, Rows], x: str, metric: str, *, smooth: int) -> Line:
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
    return Line(means, {seed: [one[r][1] for r in rounds] for seed, one in found.items()})


@styled
def draw(
    found: Mapping[str, Line],
    x: str,
    metric: str,
    lower: bool,
    *,
    size: tuple[float, float],
    marked: bool = False,
) -> "Figure":
    """Returns a figure of curves without their names; what shows curve i has the gid ``run-i``.

    Args:
        metric: The metric that names the y axis.
        lower: Whether its lower values are better.
        size: Width and height in inches.
        marked: Whether each point also has an invisible mark; those of curve i have the gid
            ``values-i``.
    """
    fig, (ax,) = panels(1, size=size)
    unit = _x_axis(ax, x, found.values()).size
    style, names = styles(found), list(found)
    drawn = {name: line for name, line in found.items() if line.xs}
    order = sorted(drawn, key=lambda name: dash(style[name]))  # densest line first
    for i, name in enumerate(order):
        line, before = drawn[name], ax.get_children()
        xs = [a / unit for a in line.xs]
        if None in line.by_seed:
            above = sum(line == drawn[other] for other in order[i + 1 :])
            _draw(ax, xs, line.by_seed[None], style[name], above=above)
        else:
            bands(ax, name, xs, line.by_seed, number=style[name])
        for artist in ax.get_children():
            if artist not in before:
                artist.set_gid(f"run-{names.index(name)}")
        if marked:
            gid = f"values-{names.index(name)}"
            ax.plot(xs, line.band[0], "o", markersize=12, alpha=0, clip_on=False, gid=gid)
    _y_axis(ax, metric, lower=lower)
    if not drawn:
        ax.set(xticks=[], yticks=[])
        ax.text(0.5, 0.5, "Nothing recorded", ha="center", transform=ax.transAxes)
    return fig


def _x_axis(ax: "Axes", x: str, found: Collection[Line]) -> wording.Unit:
    """Sets up the x axis; returns its unit, that of rounds without a symbol."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    totals = [line.xs[-1] for line in found if line.xs]
    unit, name = wording.Unit(1.0, "", ""), AXES[x].name
    if x == "round":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    else:
        unit = wording.unit_of(x, max(totals, default=0.0))
        name = f"{name} ({unit.name})"
        if _is_log(x, found):
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1.0,)))
            ax.xaxis.minorticks_off()
            plain_log(ax.xaxis)
            name += ", logarithmic"
    if totals and not max(totals):  # only round 0: avoid an axis of tiny and negative numbers
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


def _draw(ax: "Axes", xs: Sequence[float], ys: Sequence[float], style: int, *, above: int) -> None:
    """Draws a curve; its line is wider if ``above`` equal curves are drawn on top of it."""
    look = line_look(style)
    marker = look.pop("marker")
    ax.plot(xs, ys, linewidth=1.8 + 2 * above, marker="", solid_capstyle="round", **look)
    dots: dict[str, Any] = {"marker": marker, "linestyle": "none", "color": look["color"]}
    if len(xs) <= 30:  # more dots would overlap
        size, edge = (5.5, 0.8) if len(xs) <= FEW else (3.5, 0)
        paper = {"markeredgecolor": PAPER, "markeredgewidth": edge, "clip_on": not edge}
        ax.plot(xs, ys, markersize=size + 2.5 * above, **dots | paper)
    ends = dots | {"markersize": 6 + 2.5 * above, "markeredgecolor": PAPER, "clip_on": False}
    ax.plot(xs[-1:], ys[-1:], **ends)
