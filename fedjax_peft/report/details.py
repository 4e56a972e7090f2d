"""Figures and tables of single clients: the distribution of their scores, and local models.

Each function takes name -> seed -> rows, and returns None if no rows hold its data. A figure comes
with its data and with a caption that says what is shown.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from fedjax_peft.report import drawing
from fedjax_peft.report.columns import Frame, texts
from fedjax_peft.report.figure_files import INK, MUTED, line_look, rolling, styles
from fedjax_peft.report.layers import HEAT_MAPS, heat_map, spectra
from fedjax_peft.report.wording import MISSING, capital, is_share, score_text, shorten, word
from fedjax_peft.simulation.rows import client_names, headline, headline_is_lower_better
from fedjax_peft.simulation.score_names import Score, of_global, worst_tenth
from fedjax_peft.simulation.summaries import series
from fedjax_peft.support.display import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORST = 0.1
"""The share of clients that counts as the worst ones."""
MOST_CLIENTS = 6
"""Most clients whose local models have a line each; of more clients, the mean has a band."""
MOST_ROWS = 500
"""Most clients in the table of single clients."""
_GLOBAL: dict[str, Any] = {"color": INK, "linewidth": 1.1, "linestyle": (0, (6, 2)), "marker": ""}
"""The line of the global model."""


def details(runs: drawing.Runs, *, smooth: int = 1) -> Iterator[drawing.Detail]:
    """Yields the figures of clients and layers that the rows hold data for.

    Args:
        smooth: Width of the rolling mean of curves, in evaluated rounds.
    """
    found = [client_distribution(runs), local_models(runs, smooth=smooth), spectra(runs)]
    found += [heat_map(runs, kind) for kind in HEAT_MAPS]
    yield from (one for one in found if one is not None)


# The last evaluation.


def client_distribution(runs: drawing.Runs) -> drawing.Detail | None:
    """Returns the distribution of the headline over clients, in the last evaluation of each run.

    The lines are empirical distribution functions: the share of clients with at most a value. The
    clients of all seeds of a method are pooled. The worst tenth of the clients is shaded.

    Args:
        runs: Name -> seed -> rows; ``client_tests`` holds the clients' values.
    """
    metric, data = _last_tests(runs)
    lower = all(headline_is_lower_better(rows) for rows in _every(runs))
    values = {name: sorted(row[metric] for row in data if row["name"] == name) for name in runs}
    values = {name: xs for name, xs in values.items() if len(xs) > 1}
    if not values:
        return None
    scale, unit = (100, " %") if is_share(metric) else (1, "")
    worst = {name: scale * worst_tenth(xs, lower=lower) for name, xs in values.items()}
    tails = (f"{name} {x:.3g}{unit}" for name, x in worst.items())
    pooled = "; the clients of all seeds are pooled" if _has_seeds(runs) else ""
    caption = (
        f"Share of clients whose own test {word(metric)} is at most the value, in the last"
        f" evaluation{pooled}. The worst tenth of the clients is shaded; their mean:"
        f" {', '.join(tails)}."
    )
    title = f"Distribution of the clients’ {word(metric)}"
    figure = _draw_distribution(values, metric, lower)
    data = [row for row in data if row["name"] in values]
    return drawing.Detail("clients", title, caption, figure, data)


class ClientScores(NamedTuple):
    """The scores of single clients on their own tests, as a table."""

    metric: str
    frame: Frame
    """A row for each client, with its score for each method, a mean over seeds."""
    more: int
    """Number of clients that are left out."""


def client_scores(runs: drawing.Runs) -> ClientScores | None:
    """Returns the scores of the clients in the last evaluation; None without any."""
    metric, data = _last_tests(runs)
    if not data:
        return None
    found: dict[int, dict[str, list[float]]] = {}
    for row in data:
        found.setdefault(row["client"], {}).setdefault(row["name"], []).append(row[metric])
    text, names = score_text(is_share(metric), ""), _common_names(runs)
    shown = sorted(found)[:MOST_ROWS]
    columns = [
        texts(name, [text(fmean(x)) if (x := found[i].get(name)) else MISSING for i in shown])
        for name in runs
    ]
    title = f"{capital(word(metric))}{' (%)' if is_share(metric) else ''}"
    frame = Frame("Client", [str(_name(client, names, client)) for client in shown], columns)
    return ClientScores(title, frame, len(found) - len(shown))


def _last_tests(runs: drawing.Runs) -> tuple[str, list[dict[str, Any]]]:
    """Returns the metric, and a row for each client in the last evaluation of each run."""
    metric = _headline(_every(runs))
    found = []
    for name, by_seed in runs.items():
        for seed, rows in by_seed.items():
            tests = (row.get("client_tests") for row in reversed(rows))
            last = next((t for t in tests if isinstance(t, Mapping) and metric in t), None)
            for client, x in zip(last["client"], last[metric], strict=False) if last else ():
                if isinstance(x, int | float):
                    of = {"name": name, "seed": seed, **_client(client, client_names(rows))}
                    found.append(of | {metric: float(x)})
    return metric, found


def _common_names(runs: drawing.Runs) -> tuple[str, ...]:
    """Returns the names of the clients; none if a number is another client in another run."""
    found = {client_names(rows) for rows in _every(runs) if rows}
    return found.pop() if len(found) == 1 else ()


def _name(client: int, names: Sequence[str], otherwise: Any) -> Any:
    """Returns the name of a client on one line; ``otherwise`` without one."""
    return one_line(names[client]) if 0 <= client < len(names) else otherwise


def _client(client: int, names: Sequence[str]) -> dict[str, Any]:
    """Returns the columns of a client: its number, and its name if it has one."""
    name = _name(client, names, None)
    return {"client": client} | ({} if name is None else {"client_name": name})


def _every(runs: drawing.Runs) -> list[drawing.Rows]:
    """Returns the rows of all runs."""
    return [rows for by_seed in runs.values() for rows in by_seed.values()]


def _has_seeds(runs: drawing.Runs) -> bool:
    return any(len(by_seed) > 1 for by_seed in runs.values())


def _headline(runs: Iterable[drawing.Rows]) -> str:
    """Returns the metric of the first run that has rows."""
    return next((headline(rows) for rows in runs if rows), "accuracy")


@drawing.styled
def _draw_distribution(values: Mapping[str, Sequence[float]], metric: str, lower: bool) -> "Figure":
    fig, (ax,) = drawing.panels(1, height=3.4, legend=len(values))
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
    drawing.legend_of([ax])
    return fig


# Local models.


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
    field = Score("local", metric).name
    data = [
        {"name": name, **_client(client, client_names(rows)), "round": row["round"], field: x}
        for name, rows in first.items()
        for row in rows
        if isinstance(row.get(field), list)
        for client, x in zip(row["clients"], row[field], strict=False)
        if isinstance(x, int | float)
    ]
    if not data:
        return None
    order = {name: i for i, name in enumerate(first)}
    data.sort(key=lambda row: (order[row["name"]], row["client"]))
    clients = sorted({row["client"] for row in data})
    seeds = " The first seed is shown." if _has_seeds(runs) else ""
    smoothed = f" Lines are rolling means over {smooth} evaluated rounds." if smooth > 1 else ""
    many = len(clients) > MOST_CLIENTS
    shown = "the mean and one standard deviation over the round’s clients" if many else "clients"
    caption = (
        f"Test {word(metric)} of the clients’ local models before the aggregation ({shown}), and"
        f" of the global model after it.{smoothed}{seeds}"
    )
    names = [shorten(_name(i, _common_names(runs), f"Client {i}"), 24) for i in clients]
    lines = dict.fromkeys(clients, "Clients") if many else dict(zip(clients, names, strict=True))
    figure = _draw_local(first, data, lines, metric, smooth)
    title = "Local models before the aggregation"
    return drawing.Detail("local_models", title, caption, figure, data)


@drawing.styled
def _draw_local(
    runs: Mapping[str, drawing.Rows],
    data: Sequence[Mapping[str, Any]],
    lines: Mapping[int, str],
    metric: str,
    smooth: int,
) -> "Figure":
    """Returns curves of local models; clients of one name in ``lines`` are drawn together."""
    from pandas import DataFrame

    field = Score("local", metric).name
    labels = [*dict.fromkeys(lines.values())] if len(lines) > MOST_CLIENTS else [*lines.values()]
    scale, unit = (100, " (%)") if is_share(metric) else (1, "")
    names = [*dict.fromkeys(row["name"] for row in data)]
    fig, axes = drawing.panels(len(names), height=2.7, legend=len(labels) + 1, sharey=True)
    for ax, name in zip(axes, names, strict=True):
        own = [[row[k] for k in ("round", "client", field)] for row in data if row["name"] == name]
        frame = DataFrame(own, columns=["round", "client", field])
        scores = scale * frame.pivot_table(field, "round", "client")
        if len(lines) > MOST_CLIENTS:
            mean, deviation = (
                rolling([*x], smooth) for x in (scores.mean(axis=1), scores.std(axis=1, ddof=0))
            )
            _plot(ax, [*scores.index], mean, 0, deviation)
        else:
            for client, column in scores.items():
                known = column.dropna()
                _plot(ax, [*known.index], rolling([*known], smooth), [*lines].index(client))
        rounds, ys = series(runs[name], "round", of_global(Score("test", metric).name))
        ax.plot(rounds, rolling([scale * y for y in ys], smooth), **_GLOBAL)
        ax.set_title(shorten(name, 24), fontsize=9)
    drawing.name_axes(axes, "Communication round", f"{capital(word(metric))}{unit}")
    global_line = drawing.key(None)
    global_line.set(**_GLOBAL)
    keys = [*map(drawing.key, range(len(labels))), global_line]
    drawing.legend(fig, keys, [*labels, "Global model"])
    return fig


def _plot(
    ax: "Axes",
    xs: Sequence[float],
    ys: Sequence[float],
    style: int,
    deviation: Sequence[float] | None = None,
) -> None:
    """Draws a line, with a band of ``deviation`` on each side."""
    every, look = max(1, math.ceil(len(xs) / 30)), line_look(style)
    ax.plot(xs, ys, markersize=3.5, markeredgewidth=0, markevery=every, **look)
    if deviation is not None:
        low, high = ([y + sign * d for y, d in zip(ys, deviation, strict=True)] for sign in (-1, 1))
        ax.fill_between(xs, low, high, color=look["color"], alpha=0.14, lw=0)
