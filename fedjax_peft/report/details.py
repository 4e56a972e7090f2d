"""Figures of a report beyond its curves: distributions over clients, layers, spectra, local models.

Each function takes name -> seed -> rows, and returns None if no rows hold its data. A drawn figure
comes with its data and with a caption that says what is shown.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from fedjax_peft.report.figure_files import (
    FONT,
    INK,
    MUTED,
    PAPER,
    bands,
    drawable,
    dress,
    figure_class,
    lettering,
    line_look,
    rolling,
    styles,
)
from fedjax_peft.report.plots import is_share, shorten
from fedjax_peft.simulation.rows import headline, headline_is_lower_better, number
from fedjax_peft.support.display import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "WORST",
    "Detail",
    "client_distribution",
    "details",
    "heat_map",
    "local_models",
    "spectra",
]

Rows: TypeAlias = Sequence[Mapping[str, Any]]
Runs: TypeAlias = Mapping[str, Mapping[Any, Rows]]
"""Name of a method or run -> seed -> rows."""

WORST = 0.1
"""The share of clients that counts as the worst ones."""
MOST_CLIENTS = 6
"""Most clients whose local models have a line each; of more clients, the mean has a band."""
LOG_FROM = 30
"""The colours of a heat map are logarithmic if its values differ at least by this factor."""
HEAT_MAPS = {
    "aggregation_error": (
        "Aggregation error",
        "Frobenius norm of the used minus the exact average of LoRA’s products",
    ),
    **{
        f"variation_{kind}_{factor}": (f"Change of {kind}, {factor.upper()}", text)
        for kind, text in (
            ("magnitude", "Mean change of the norms of the factor’s columns in a round"),
            ("direction", "Mean of 1 - cosine between the factor’s columns before and after"),
        )
        for factor in "ab"
    },
    "effective_rank": ("Effective rank", "Effective rank of LoRA’s product"),
    "singular_value": ("Largest singular value", "Largest singular value of LoRA’s product"),
}
"""Field of ``layers`` -> title of the figure, and what its colours show."""


class Detail(NamedTuple):
    """A figure, its data and its caption."""

    stem: str
    """Name of its files, without the suffix."""
    title: str
    caption: str
    draw: Callable[[bool], "Figure"]
    """Whether the figure is for a narrow screen -> figure."""
    data: list[dict[str, Any]]


def details(runs: Runs, *, smooth: int = 1) -> Iterator[Detail]:
    """Yields the figures that the rows hold data for.

    Args:
        runs: Name -> seed -> rows.
        smooth: Width of the rolling mean of curves, in evaluated rounds.
    """
    found = [client_distribution(runs), local_models(runs, smooth=smooth), spectra(runs)]
    found += [heat_map(runs, kind) for kind in HEAT_MAPS]
    yield from (one for one in found if one is not None)


# Clients.


def client_distribution(runs: Runs, metric: str | None = None) -> Detail | None:
    """Returns the distribution of a metric over clients, in the last evaluation of each run.

    The lines are empirical distribution functions: the share of clients with at most a value. The
    clients of all seeds of a method are pooled. The worst tenth of the clients is shaded.

    Args:
        runs: Name -> seed -> rows; ``client_tests`` holds the clients' values.
        metric: By default the headline metric.
    """
    every = [rows for by_seed in runs.values() for rows in by_seed.values()]
    metric = metric or next((headline(rows) for rows in every if rows), "accuracy")
    lower = bool(every) and all(map(headline_is_lower_better, every))
    values = {
        name: sorted(x for rows in by_seed.values() for _, x in _last_tests(rows, metric))
        for name, by_seed in runs.items()
    }
    values = {name: xs for name, xs in values.items() if len(xs) > 1}
    if not values:
        return None
    data = [
        {"name": name, "seed": seed, "client": client, metric: x}
        for name in values
        for seed, rows in runs[name].items()
        for client, x in _last_tests(rows, metric)
    ]
    scale, unit = (100, " %") if is_share(metric) else (1, "")
    tails = (f"{name} {scale * _tail(xs, lower=lower):.3g}{unit}" for name, xs in values.items())
    caption = (
        f"Share of clients whose own test {_words(metric)} is at most the value, in the last"
        f" evaluation{_pooled(runs)}. The worst tenth of the clients is shaded; their mean:"
        f" {', '.join(tails)}."
    )
    return Detail(
        "clients",
        f"Distribution of the clients’ {_words(metric)}",
        caption,
        lambda narrow: _draw_distribution(values, metric, scale, lower, narrow),
        data,
    )


def _last_tests(rows: Rows, metric: str) -> list[tuple[int, float]]:
    """Returns (client, value) of the last row with values of single clients."""
    for row in reversed(rows):
        tests = row.get("client_tests")
        if isinstance(tests, Mapping) and metric in tests:
            pairs = zip(tests["client"], tests[metric], strict=False)
            return [(client, float(x)) for client, x in pairs if isinstance(x, int | float)]
    return []


def _tail(values: Sequence[float], *, lower: bool) -> float:
    """Returns the mean of the worst tenth of ascending values, at least one of them."""
    n = max(1, math.floor(WORST * len(values) + 1e-9))
    return float(np.mean(values[-n:] if lower else values[:n]))


def _draw_distribution(
    values: Mapping[str, Sequence[float]], metric: str, scale: float, lower: bool, narrow: bool
) -> "Figure":
    fig, ((ax,),) = _panels(1, narrow, height=3.4, legend=len(values))
    shaded = (1 - WORST, 1) if lower else (0, WORST)
    ax.axhspan(*(100 * y for y in shaded), color=MUTED, alpha=0.15, linewidth=0)
    style = styles(values)
    low, high = (pick(pick(xs) for xs in values.values()) * scale for pick in (min, max))
    room = 0.03 * (high - low or 1)
    for name, xs in values.items():
        ends = [low - room, *(scale * x for x in xs), high + room]
        shares = [0.0, *(100 * (i + 1) / len(xs) for i in range(len(xs))), 100.0]
        look = line_look(style[name])
        every = max(1, len(xs) // 8)
        ax.plot(
            *(ends, shares),
            **look,
            drawstyle="steps-post",
            linewidth=1.8,
            markersize=4,
            markevery=(1, every),
            label=name,
        )
    ax.set(ylim=(0, 101), xlim=(low - room, high + room))
    unit = " (%)" if is_share(metric) else ""
    ax.set_xlabel(f"{_capital(_words(metric))} on the client’s own test{unit}", **lettering())
    ax.set_ylabel("Clients (%)", **lettering())
    _legend(fig, ax)
    return fig


def local_models(runs: Runs, *, smooth: int = 1) -> Detail | None:
    """Returns curves of the clients' local models before the aggregation, on the test set.

    Few clients have a line each. Many clients have their mean, with a band of one standard
    deviation over the participants of a round. The global model after the aggregation is beside
    them. Of several seeds, the first one is drawn.

    Args:
        runs: Name -> seed -> rows of runs with ``diagnostics=["local"]``.
        smooth: Width of the rolling mean, in evaluated rounds.
    """
    first = {name: next(iter(by_seed.values()), []) for name, by_seed in runs.items()}
    metric = next((headline(rows) for rows in first.values() if rows), "accuracy")
    field = f"local_{metric}"
    first = {name: rows for name, rows in first.items() if any(field in row for row in rows)}
    if not first:
        return None
    lines = {name: _of_clients(rows, field) for name, rows in first.items()}
    data = [
        {"name": name, "client": client, "round": r, field: x}
        for name, by_client in lines.items()
        for client, points in by_client.items()
        for r, x in points
    ]
    seeds = " The first seed is shown." if any(len(by) > 1 for by in runs.values()) else ""
    many = len(_ids(lines)) > MOST_CLIENTS
    shown = "the mean and one standard deviation over the round’s clients" if many else "clients"
    caption = (
        f"Test {_words(metric)} of the clients’ local models before the aggregation ({shown}), and"
        f" of the global model after it.{_smoothed(smooth)}{seeds}"
    )
    return Detail(
        "local_models",
        "Local models before the aggregation",
        caption,
        lambda narrow: _draw_local(first, lines, metric, smooth, narrow),
        data,
    )


def _ids(lines: Mapping[str, Mapping[int, Any]]) -> list[int]:
    """Returns the clients of all methods."""
    return sorted(set().union(*lines.values()))


def _of_clients(rows: Rows, field: str) -> dict[int, list[tuple[int, float]]]:
    """Returns client -> (round, value) of a field with one value for each of ``clients``."""
    found: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        if isinstance(row.get(field), list):
            for client, x in zip(row["clients"], row[field], strict=False):
                if isinstance(x, int | float):
                    found.setdefault(client, []).append((row["round"], float(x)))
    return dict(sorted(found.items()))


def _draw_local(
    rows: Mapping[str, Rows],
    lines: Mapping[str, Mapping[int, list[tuple[int, float]]]],
    metric: str,
    smooth: int,
    narrow: bool,
) -> "Figure":
    scale = 100 if is_share(metric) else 1
    ids = _ids(lines)
    names = [f"Client {i}" for i in ids] if len(ids) <= MOST_CLIENTS else ["Clients"]
    fig, axes = _panels(len(rows), narrow, height=2.7, legend=len(names) + 1, sharey=True)
    flat = [ax for line in axes for ax in line]
    for ax, (name, by_client) in zip(flat, lines.items(), strict=False):
        if len(ids) <= MOST_CLIENTS:
            for client, points in by_client.items():
                look = line_look(ids.index(client))
                ys = rolling([scale * x for _, x in points], smooth)
                ax.plot([r for r, _ in points], ys, **look, **_line(len(ys)))
        else:
            _draw_cohort(ax, by_client, scale, smooth)
        points = [
            (row["round"], scale * x)
            for row in rows[name]
            if (x := number(row, f"test_{metric}")) is not None
        ]
        ys = rolling([y for _, y in points], smooth)
        ax.plot([r for r, _ in points], ys, color=INK, linewidth=1.1, linestyle=(0, (6, 2)))
        _title(ax, shorten(name, 24))
    _name_axes(axes, "Communication round", f"{_capital(_words(metric))}{' (%)' * (scale > 1)}")
    _legend_of_local(fig, names)
    return fig


def _draw_cohort(
    ax: "Axes", by_client: Mapping[int, list[tuple[int, float]]], scale: float, smooth: int
) -> None:
    """Draws mean and standard deviation over the participants of each round."""
    by_round: dict[int, list[float]] = {}
    for points in by_client.values():
        for r, x in points:
            by_round.setdefault(r, []).append(scale * x)
    rounds = sorted(by_round)
    mean = np.array(rolling([float(np.mean(by_round[r])) for r in rounds], smooth))
    spread = np.array(rolling([float(np.std(by_round[r])) for r in rounds], smooth))
    look = line_look(0)
    ax.plot(rounds, mean, **look, **_line(len(rounds)))
    ax.fill_between(rounds, mean - spread, mean + spread, color=look["color"], alpha=0.14, lw=0)


def _legend_of_local(fig: "Figure", names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linewidth=1.8, markersize=4, **line_look(i)) for i in range(len(names))
    ]
    handles.append(Line2D([], [], color=INK, linewidth=1.1, linestyle=(0, (6, 2))))
    _legend_below(fig, handles, [*names, "Global model"])


# Layers.


def heat_map(runs: Runs, kind: str) -> Detail | None:
    """Returns heat maps of a measure over layers and rounds, one for each method.

    The values are means over seeds. All maps of the figure have the same colours, from dark (small)
    to light.

    Args:
        runs: Name -> seed -> rows.
        kind: A key of :data:`HEAT_MAPS`.
    """
    found = {name: _layers(list(by_seed.values()), kind) for name, by_seed in runs.items()}
    maps = {name: one for name, one in found.items() if one is not None and one.values.size}
    if not maps:
        return None
    title, meaning = HEAT_MAPS[kind]
    data = [
        {"name": name, "layer": layer, "round": r, kind: float(one.values[i, j])}
        for name, one in maps.items()
        for i, layer in enumerate(one.layers)
        for j, r in enumerate(one.rounds)
    ]
    scale = ", on a logarithmic scale" if _is_log(maps.values()) else ""
    caption = f"{meaning}, for each adapted module and round{_averaged(runs)}{scale}."
    return Detail(
        f"layers_{kind}", title, caption, lambda narrow: _draw_maps(maps, title, narrow), data
    )


class _Map(NamedTuple):
    layers: list[str]
    rounds: list[int]
    values: np.ndarray
    """float ``[layers, rounds]``: means over seeds, NaN where there is no value."""


def _layers(runs: Sequence[Rows], kind: str) -> _Map | None:
    cells: dict[tuple[str, int], list[float]] = {}
    for rows in runs:
        for row in rows:
            layers = row.get("layers")
            for layer, x in (layers.get(kind) or {}).items() if isinstance(layers, Mapping) else ():
                if isinstance(x, int | float):
                    cells.setdefault((layer, row["round"]), []).append(float(x))
    if not cells:
        return None
    names = list(dict.fromkeys(layer for layer, _ in cells))
    names.sort(key=_natural)
    rounds = sorted({r for _, r in cells})
    values = [[np.mean(cells.get((layer, r), [math.nan])) for r in rounds] for layer in names]
    return _Map(names, rounds, np.array(values, float))


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a key that sorts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _is_log(maps: Any) -> bool:
    values = np.concatenate([one.values[np.isfinite(one.values)] for one in maps])
    positive = values[values > 0]
    return bool(len(positive) and positive.max() >= LOG_FROM * positive.min())


def _draw_maps(maps: Mapping[str, _Map], title: str, narrow: bool) -> "Figure":
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import FuncFormatter, NullFormatter

    layers = max(len(one.layers) for one in maps.values())
    height = min(6.0, max(1.9, 1.1 + 0.17 * layers))
    fig, axes = _panels(len(maps), narrow, height=height, grid=False)
    values = np.concatenate([one.values[np.isfinite(one.values)] for one in maps.values()])
    positive = values[values > 0]
    log = _is_log(maps.values())
    norm = (
        LogNorm(positive.min(), positive.max(), clip=True)
        if log
        else Normalize(values.min(), values.max())
    )
    image = None
    flat = [ax for line in axes for ax in line]
    for i, (ax, (name, one)) in enumerate(zip(flat, maps.items(), strict=False)):
        columns = 1 if narrow else min(3, len(maps))
        image = ax.imshow(
            one.values, aspect="auto", norm=norm, cmap="cividis", interpolation="none"
        )
        _title(ax, shorten(name, 24))
        _ticks(
            ax, one, named=i % columns == 0 or any(m.layers != one.layers for m in maps.values())
        )
    _name_axes(axes, "Communication round", "")
    assert image is not None
    bar = fig.colorbar(image, ax=flat[: len(maps)], fraction=0.05, pad=0.02, aspect=30)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8.5, labelcolor=MUTED, labelfontfamily=FONT)
    if log:
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.set_label(title, **lettering(8.5))
    return fig


def _ticks(ax: "Axes", one: _Map, *, named: bool) -> None:
    """Writes names of layers and some rounds at the axes of a heat map."""
    every = max(1, math.ceil(len(one.rounds) / 6))
    ax.set_xticks(range(0, len(one.rounds), every), [str(r) for r in one.rounds[::every]])
    step = max(1, math.ceil(len(one.layers) / 26))
    names = _short_names(one.layers)
    places = range(0, len(names), step)
    ax.set_yticks(places, [drawable(names[i]) if named else "" for i in places])
    ax.tick_params(axis="y", labelsize=7)


def _short_names(paths: Sequence[str]) -> list[str]:
    """Returns module paths without the parts that all of them have in common."""
    parts = [path.split(".") for path in paths]
    if len(parts) < 2:
        return [".".join(one[-3:]) for one in parts]
    least = min(map(len, parts))
    same = [len({one[i] for one in parts}) == 1 for i in range(least)]
    start = next((i for i, equal in enumerate(same) if not equal), 0)
    ends = [len({one[-1 - i] for one in parts}) == 1 for i in range(least - start)]
    stop = next((i for i, equal in enumerate(ends) if not equal), 0)
    return [shorten(".".join(one[start : len(one) - stop]), 28) for one in parts]


# Spectra.

_SPECTRA = {
    "effective_rank": ("Effective rank", 1),
    "spectrum_kept": ("Squared singular values kept (%)", 100),
    "residual_relative": ("Folded into frozen weights (%)", 100),
}


def spectra(runs: Runs) -> Detail | None:
    """Returns curves of the spectrum of LoRA's products over rounds, with bands over seeds.

    The curves are the mean effective rank (``diagnostics=["spectrum"]``) and the share of the
    squared singular values that aggregators such as FRA keep.
    """
    shown = {
        field: text
        for field, text in _SPECTRA.items()
        if any(number(row, field) is not None for rows in _every(runs) for row in rows)
    }
    if not shown or set(shown) == {"residual_relative"}:
        return None
    data = [
        {"name": name, "seed": seed, "round": row["round"]} | {f: number(row, f) for f in shown}
        for name, by_seed in runs.items()
        for seed, rows in by_seed.items()
        for row in rows
        if any(number(row, field) is not None for field in shown)
    ]
    texts = ", ".join(text.removesuffix(" (%)").lower() for text, _ in shown.values())
    caption = (
        f"Spectrum of LoRA’s products in each round: {texts}. Lines are means over seeds, bands one"
        " standard deviation."
    )
    return Detail(
        "spectra",
        "Spectra",
        caption,
        lambda narrow: _draw_spectra(runs, shown, narrow),
        data,
    )


def _draw_spectra(runs: Runs, shown: Mapping[str, tuple[str, float]], narrow: bool) -> "Figure":
    fig, axes = _panels(len(shown), narrow, height=2.9, legend=len(runs))
    style = styles(runs)
    flat = [ax for line in axes for ax in line]
    for ax, (field, (text, scale)) in zip(flat, shown.items(), strict=False):
        for name, by_seed in runs.items():
            points = [
                {row["round"]: x for row in rows if (x := number(row, field)) is not None}
                for rows in by_seed.values()
            ]
            rounds = sorted(set().union(*points))
            if rounds:
                values = {
                    i: [_times(scale, p.get(r)) for r in rounds] for i, p in enumerate(points)
                }
                bands(ax, name, rounds, values, number=style[name])
        _title(ax, text)
    _name_axes(axes, "Communication round", "")
    _legend(fig, *flat)
    return fig


# Parts.


def _every(runs: Runs) -> list[Rows]:
    return [rows for by_seed in runs.values() for rows in by_seed.values()]


def _times(scale: float, value: float | None) -> float | None:
    return None if value is None else scale * value


def _line(points: int) -> dict[str, Any]:
    every = max(1, math.ceil(points / 30))
    return {"linewidth": 1.8, "markersize": 3.5, "markeredgewidth": 0, "markevery": every}


def _panels(
    count: int,
    narrow: bool,
    *,
    height: float,
    legend: int = 0,
    sharey: bool = False,
    grid: bool = True,
) -> tuple["Figure", Any]:
    """Returns a figure of ``count`` axes, and the axes ``[rows][columns]``.

    Args:
        count: Number of axes.
        narrow: Whether the axes are in one column.
        height: Height of a row in inches.
        legend: Number of entries of the legend below the axes.
        sharey: Whether all axes have the same y scale.
        grid: Whether the axes have a grid; a heat map has none.
    """
    columns = 1 if narrow else min(3, count)
    rows = math.ceil(count / columns)
    width = 3.7 if narrow else 7.2
    below = 0.22 * legend if narrow else 0.22 * math.ceil(legend / 3)
    fig = figure_class()(
        figsize=(width, rows * height + below), layout="constrained", facecolor=PAPER
    )
    axes = fig.subplots(rows, columns, squeeze=False, sharey=sharey)
    for i, ax in enumerate(axes.flat):
        dress(ax)
        if i >= count:
            ax.set_axis_off()
        if not grid:
            ax.grid(False)
            ax.spines[:].set_visible(False)
            ax.tick_params(axis="x", length=0)
    return fig, axes


def _name_axes(axes: Any, x: str, y: str) -> None:
    """Writes the names of the axes at the left and at the bottom of each column."""
    from matplotlib.ticker import MaxNLocator

    x = x.replace("Communication round", "Round") if axes.shape[1] > 2 else x
    for column in range(axes.shape[1]):
        visible = [line[column] for line in axes if line[column].axison]
        if visible:
            visible[-1].set_xlabel(x, **lettering())
    for line in axes:
        if y:
            line[0].set_ylabel(y, **lettering())
        for ax in line:
            if not ax.images:
                ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _title(ax: "Axes", text: str) -> None:
    ax.set_title(text, loc="left", **lettering(9))


def _legend(fig: "Figure", *axes: "Axes") -> None:
    """Writes the names of all lines below the axes, each once."""
    found: dict[str, Any] = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            found.setdefault(label, handle)
    _legend_below(fig, list(found.values()), list(found))


def _legend_below(fig: "Figure", handles: Sequence[Any], labels: Sequence[str]) -> None:
    legend = fig.legend(
        handles,
        ["-"] * len(labels),  # replaced below, because matplotlib omits labels with a leading _
        loc="outside lower left",
        ncols=1 if fig.get_figwidth() < 5 else min(3, len(labels)),
        frameon=False,
        handlelength=3.2,
        labelspacing=0.3,
    )
    for label, text in zip(labels, legend.get_texts(), strict=True):
        text.set(text=shorten(label), **lettering(8.5))


def _words(metric: str) -> str:
    return one_line(metric.replace("_", " ")).replace("f1", "F1")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _pooled(runs: Runs) -> str:
    return "; the clients of all seeds are pooled" if any(len(s) > 1 for s in runs.values()) else ""


def _averaged(runs: Runs) -> str:
    return ", means over seeds" if any(len(by_seed) > 1 for by_seed in runs.values()) else ""


def _smoothed(width: int) -> str:
    return "" if width < 2 else f" Lines are rolling means over {width} evaluated rounds."
