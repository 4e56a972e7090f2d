"""Figures of a report beyond its curves: distributions over clients, local models, spectra, layers.

Each function takes name -> seed -> rows, and returns None if no rows hold its data. A drawn figure
comes with its data and with a caption that says what is shown.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from fedjax_peft.report import drawing, plots
from fedjax_peft.report.figure_files import INK, MUTED, bands, line_look, rolling, styles
from fedjax_peft.report.layers import HEAT_MAPS, heat_map
from fedjax_peft.report.wording import MISSING, capital, is_share, score_text, shorten, word
from fedjax_peft.simulation.rows import client_names, headline, headline_is_lower_better, number
from fedjax_peft.simulation.summaries import worst_tenth
from fedjax_peft.support.display import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points: TypeAlias = list[tuple[int, float]]
"""(round, value) of a curve."""

WORST = 0.1
"""The share of clients that counts as the worst ones."""
MOST_CLIENTS = 6
"""Most clients whose local models have a line each; of more clients, the mean has a band."""
MOST_ROWS = 500
"""Most clients in the table of single clients."""
_GLOBAL: dict[str, Any] = {"color": INK, "linewidth": 1.1, "linestyle": (0, (6, 2)), "marker": ""}
"""The line of the global model."""


def details(runs: drawing.Runs, *, smooth: int = 1) -> Iterator[drawing.Detail]:
    """Yields the figures that the rows hold data for.

    Args:
        smooth: Width of the rolling mean of curves, in evaluated rounds.
    """
    found = [client_distribution(runs), local_models(runs, smooth=smooth), spectra(runs)]
    found += [heat_map(runs, kind) for kind in HEAT_MAPS]
    yield from (one for one in found if one is not None)


# Clients.


def client_distribution(runs: drawing.Runs) -> drawing.Detail | None:
    """Returns the distribution of the headline over clients, in the last evaluation of each run.

    The lines are empirical distribution functions: the share of clients with at most a value. The
    clients of all seeds of a method are pooled. The worst tenth of the clients is shaded.

    Args:
        runs: Name -> seed -> rows; ``client_tests`` holds the clients' values.
    """
    every, metric = _every(runs), _headline(_every(runs))
    lower = bool(every) and all(map(headline_is_lower_better, every))
    data = [
        {"name": name, "seed": seed, **_named(client, client_names(rows)), metric: x}
        for name, by_seed in runs.items()
        for seed, rows in by_seed.items()
        for client, x in _last_tests(rows, metric)
    ]
    values = {name: sorted(row[metric] for row in data if row["name"] == name) for name in runs}
    values = {name: xs for name, xs in values.items() if len(xs) > 1}
    if not values:
        return None
    scale, unit = (100, " %") if is_share(metric) else (1, "")
    worst = {name: scale * worst_tenth(xs, lower=lower) for name, xs in values.items()}
    tails = (f"{name} {x:.3g}{unit}" for name, x in worst.items())
    several = any(len(by_seed) > 1 for by_seed in runs.values())
    pooled = "; the clients of all seeds are pooled" if several else ""
    caption = (
        f"Share of clients whose own test {word(metric)} is at most the value, in the last"
        f" evaluation{pooled}. The worst tenth of the clients is shaded; their mean:"
        f" {', '.join(tails)}."
    )
    return drawing.Detail(
        "clients",
        f"Distribution of the clients’ {word(metric)}",
        caption,
        lambda narrow: _draw_distribution(values, metric, lower, narrow),
        [row for row in data if row["name"] in values],
    )


class ClientScores(NamedTuple):
    """The scores of single clients on their own tests, as a table."""

    metric: str
    rows: list[tuple[int | str, list[str]]]
    """Name or number of a client, and the text of its score for each method, a mean over seeds."""
    more: int
    """Number of clients that are left out."""


def client_scores(runs: drawing.Runs) -> ClientScores | None:
    """Returns the scores of the clients in the last evaluation; None without any."""
    metric = _headline(_every(runs))
    found: dict[int, dict[str, list[float]]] = {}
    for name, by_seed in runs.items():
        for rows in by_seed.values():
            for client, x in _last_tests(rows, metric):
                found.setdefault(client, {}).setdefault(name, []).append(x)
    if not found:
        return None
    text, names = score_text(is_share(metric), ""), _common_names(runs)
    cells = [
        (
            _named(client, names).get("client_name", client),
            [text(float(np.mean(one[name]))) if name in one else MISSING for name in runs],
        )
        for client, one in sorted(found.items())
    ]
    title = f"{capital(word(metric))}{' (%)' if is_share(metric) else ''}"
    return ClientScores(title, cells[:MOST_ROWS], max(0, len(cells) - MOST_ROWS))


def _common_names(runs: drawing.Runs) -> tuple[str, ...]:
    """Returns the names of the clients; none if a number is another client in another run."""
    found = {client_names(rows) for rows in _every(runs) if rows}
    return found.pop() if len(found) == 1 else ()


def _named(client: int, names: Sequence[str]) -> dict[str, Any]:
    """Returns the columns of a client: its number, and its name if it has one."""
    named = {"client_name": one_line(names[client])} if 0 <= client < len(names) else {}
    return {"client": client, **named}


def _every(runs: drawing.Runs) -> list[drawing.Rows]:
    """Returns the rows of all runs."""
    return [rows for by_seed in runs.values() for rows in by_seed.values()]


def _headline(runs: Iterable[drawing.Rows]) -> str:
    """Returns the metric of the first run that has rows."""
    return next((headline(rows) for rows in runs if rows), "accuracy")


def _last_tests(rows: drawing.Rows, metric: str) -> list[tuple[int, float]]:
    """Returns (client, value) of the last row with values of single clients."""
    for row in reversed(rows):
        tests = row.get("client_tests")
        if isinstance(tests, Mapping) and metric in tests:
            pairs = zip(tests["client"], tests[metric], strict=False)
            return [(client, float(x)) for client, x in pairs if isinstance(x, int | float)]
    return []


@drawing.styled
def _draw_distribution(
    values: Mapping[str, Sequence[float]], metric: str, lower: bool, narrow: bool
) -> "Figure":
    fig, (ax,) = drawing.panels(1, narrow, height=3.4, legend=len(values))
    shaded = (100 - 100 * WORST, 100) if lower else (0, 100 * WORST)
    ax.axhspan(*shaded, color=MUTED, alpha=0.15, linewidth=0)
    scale, unit = (100, " (%)") if is_share(metric) else (1, "")
    low, high = (pick(pick(xs) for xs in values.values()) * scale for pick in (min, max))
    room = 0.03 * (high - low or 1)
    style = styles(values)
    for name, xs in values.items():
        ends = [low - room, *(scale * x for x in xs), high + room]
        shares = [0.0, *(100 * (i + 1) / len(xs) for i in range(len(xs))), 100.0]
        marks = [*range(1, len(xs) + 1, max(1, len(xs) // 8))]  # not the two ends
        look = line_look(style[name])
        ax.plot(ends, shares, drawstyle="steps-post", markevery=marks, label=name, **look)
    ax.set(ylim=(0, 101), xlim=(low - room, high + room), ylabel="Clients (%)")
    ax.set_xlabel(f"{capital(word(metric))} on the client’s own test{unit}")
    _legend(fig, [ax])
    return fig


def local_models(runs: drawing.Runs, *, smooth: int = 1) -> drawing.Detail | None:
    """Returns curves of the clients' local models before the aggregation, on the test set.

    Few clients have a line each. Many clients have their mean, with a band of one standard
    deviation over the participants of a round. The global model after the aggregation is beside
    them. Of several seeds, the first one is drawn.

    Args:
        runs: Name -> seed -> rows of runs with ``diagnostics=["local"]``.
        smooth: Width of the rolling mean, in evaluated rounds.
    """
    first = {name: next(iter(by_seed.values()), []) for name, by_seed in runs.items()}
    metric = _headline(first.values())
    field = f"local_{metric}"
    first = {name: rows for name, rows in first.items() if any(field in row for row in rows)}
    if not first:
        return None
    lines = {name: _of_clients(rows, field) for name, rows in first.items()}
    data = [
        {"name": name, **_named(client, client_names(first[name])), "round": r, field: x}
        for name, by_client in lines.items()
        for client, points in by_client.items()
        for r, x in points
    ]
    seeds = " The first seed is shown." if any(len(by) > 1 for by in runs.values()) else ""
    smoothed = f" Lines are rolling means over {smooth} evaluated rounds." if smooth > 1 else ""
    many = len(_ids(lines)) > MOST_CLIENTS
    shown = "the mean and one standard deviation over the round’s clients" if many else "clients"
    caption = (
        f"Test {word(metric)} of the clients’ local models before the aggregation ({shown}), and"
        f" of the global model after it.{smoothed}{seeds}"
    )
    return drawing.Detail(
        "local_models",
        "Local models before the aggregation",
        caption,
        lambda narrow: _draw_local(first, lines, _common_names(runs), metric, smooth, narrow),
        data,
    )


def _ids(lines: Mapping[str, Mapping[int, Any]]) -> list[int]:
    """Returns the clients of all methods."""
    return sorted(set().union(*lines.values()))


def _of_clients(rows: drawing.Rows, field: str) -> dict[int, Points]:
    """Returns client -> (round, value) of a field with one value for each of ``clients``."""
    found: dict[int, Points] = {}
    for row in rows:
        if isinstance(row.get(field), list):
            for client, x in zip(row["clients"], row[field], strict=False):
                if isinstance(x, int | float):
                    found.setdefault(client, []).append((row["round"], float(x)))
    return dict(sorted(found.items()))


@drawing.styled
def _draw_local(
    rows: Mapping[str, drawing.Rows],
    lines: Mapping[str, Mapping[int, Points]],
    named: Sequence[str],
    metric: str,
    smooth: int,
    narrow: bool,
) -> "Figure":
    scale, unit = (100, " (%)") if is_share(metric) else (1, "")
    ids = _ids(lines)
    few = len(ids) <= MOST_CLIENTS
    titles = (_named(i, named).get("client_name", f"Client {i}") for i in ids)
    names = [shorten(title, 24) for title in titles] if few else ["Clients"]
    fig, axes = drawing.panels(len(rows), narrow, height=2.7, legend=len(names) + 1, sharey=True)
    for ax, (name, by_client) in zip(axes, lines.items(), strict=True):
        if few:
            for client, points in by_client.items():
                ys = rolling([scale * x for _, x in points], smooth)
                _plot(ax, [r for r, _ in points], ys, ids.index(client))
        else:
            _draw_cohort(ax, by_client, scale, smooth)
        points = [
            (row["round"], scale * x)
            for row in rows[name]
            if (x := number(row, f"global_test_{metric}")) is not None
        ]
        ax.plot([r for r, _ in points], rolling([y for _, y in points], smooth), **_GLOBAL)
        drawing.title(ax, shorten(name, 24))
    drawing.name_axes(axes, "Communication round", f"{capital(word(metric))}{unit}")
    global_line = drawing.key(None)
    global_line.set(**_GLOBAL)
    keys = [*map(drawing.key, range(len(names))), global_line]
    drawing.legend_below(fig, keys, [*names, "Global model"])
    return fig


def _draw_cohort(ax: "Axes", by_client: Mapping[int, Points], scale: float, smooth: int) -> None:
    """Draws mean and standard deviation over the participants of each round."""
    by_round: dict[int, list[float]] = {}
    for points in by_client.values():
        for r, x in points:
            by_round.setdefault(r, []).append(scale * x)
    rounds = sorted(by_round)
    mean = np.array(rolling([float(np.mean(by_round[r])) for r in rounds], smooth))
    spread = np.array(rolling([float(np.std(by_round[r])) for r in rounds], smooth))
    _plot(ax, rounds, mean, 0)
    color = line_look(0)["color"]
    ax.fill_between(rounds, mean - spread, mean + spread, color=color, alpha=0.14, lw=0)


def _plot(ax: "Axes", xs: Sequence[float], ys: Sequence[float] | np.ndarray, style: int) -> None:
    every = max(1, math.ceil(len(xs) / 30))
    ax.plot(xs, ys, markersize=3.5, markeredgewidth=0, markevery=every, **line_look(style))


# Spectra.

_SPECTRA = {
    "effective_rank": ("Effective rank", 1),
    "spectrum_kept": ("Squared singular values kept (%)", 100),
    "residual_relative": ("Folded into frozen weights (%)", 100),
}
"""Field -> title of its panel, and a factor."""


def spectra(runs: drawing.Runs) -> drawing.Detail | None:
    """Returns curves of the spectrum of LoRA's products over rounds, with bands over seeds.

    The curves are the mean effective rank (``diagnostics=["spectrum"]``) and the share of the
    squared singular values that aggregators such as FRA keep.
    """
    data = [
        {"name": name, "seed": seed, "round": row["round"]} | found
        for name, by_seed in runs.items()
        for seed, rows in by_seed.items()
        for row in rows
        if (found := {f: x for f in _SPECTRA if (x := number(row, f)) is not None})
    ]
    shown = [field for field in _SPECTRA if any(field in row for row in data)]
    if shown in ([], ["residual_relative"]):
        return None
    texts = ", ".join(_SPECTRA[field][0].removesuffix(" (%)").lower() for field in shown)
    caption = f"Spectrum of LoRA’s products in each round: {texts}."
    if any(len(by_seed) > 1 for by_seed in runs.values()):
        caption += " Lines are means over seeds, bands one standard deviation."
    data = [row | {field: row.get(field) for field in shown} for row in data]
    return drawing.Detail(
        "spectra", "Spectra", caption, lambda narrow: _draw_spectra(runs, shown, narrow), data
    )


@drawing.styled
def _draw_spectra(runs: drawing.Runs, shown: Sequence[str], narrow: bool) -> "Figure":
    fig, axes = drawing.panels(len(shown), narrow, height=2.9, legend=len(runs))
    style = styles(runs)
    for ax, field in zip(axes, shown, strict=True):
        text, scale = _SPECTRA[field]
        for name, line in plots.lines(runs, "round", field).items():
            if line.xs:
                values = {seed: [scale * y for y in ys] for seed, ys in line.by_seed.items()}
                bands(ax, name, line.xs, values, number=style[name])
        drawing.title(ax, text)
    drawing.name_axes(axes, "Communication round", "")
    _legend(fig, axes)
    return fig


def _legend(fig: "Figure", axes: Sequence["Axes"]) -> None:
    """Writes the names of all lines below the axes, each once."""
    found: dict[str, Any] = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        for label, handle in zip(labels, handles, strict=True):
            found.setdefault(shorten(label), handle)
    drawing.legend_below(fig, list(found.values()), list(found))
