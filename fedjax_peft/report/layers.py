"""Heat maps of measures of single layers over rounds."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedjax_peft.report import drawing
from fedjax_peft.report.figure_files import drawable
from fedjax_peft.report.wording import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


class _Map(NamedTuple):
    layers: list[str]
    rounds: list[int]
    values: np.ndarray
    """float ``[layers, rounds]``: means over seeds, NaN where there is no value."""


def heat_map(runs: drawing.Runs, kind: str) -> drawing.Detail | None:
    """Returns heat maps of a measure over layers and rounds, one for each method.

    The values are means over seeds. All maps of the figure have the same colours, from dark (small)
    to light.

    Args:
        kind: A key of :data:`HEAT_MAPS`.
    """
    found = {name: _map(list(by_seed.values()), kind) for name, by_seed in runs.items()}
    maps = {name: one for name, one in found.items() if one is not None}
    if not maps:
        return None
    name, meaning = HEAT_MAPS[kind]
    data = [
        {"name": method, "layer": layer, "round": r, kind: float(one.values[i, j])}
        for method, one in maps.items()
        for i, layer in enumerate(one.layers)
        for j, r in enumerate(one.rounds)
    ]
    averaged = ", means over seeds" if any(len(seeds) > 1 for seeds in runs.values()) else ""
    scale = ", on a logarithmic scale" if _is_log(maps.values()) else ""
    caption = f"{meaning}, for each adapted module and round{averaged}{scale}."
    return drawing.Detail(
        f"layers_{kind}", name, caption, lambda narrow: _draw(maps, name, narrow), data
    )


def _map(runs: Sequence[drawing.Rows], kind: str) -> _Map | None:
    """Returns the means over the runs of a method; None if no row has the measure."""
    cells: dict[tuple[str, int], list[float]] = {}
    for rows in runs:
        for row in rows:
            layers = row.get("layers")
            for layer, x in (layers.get(kind) or {}).items() if isinstance(layers, Mapping) else ():
                if isinstance(x, int | float):
                    cells.setdefault((layer, row["round"]), []).append(float(x))
    if not cells:
        return None
    names = sorted(dict.fromkeys(layer for layer, _ in cells), key=_natural)
    rounds = sorted({r for _, r in cells})
    values = [[np.mean(cells.get((layer, r), [math.nan])) for r in rounds] for layer in names]
    return _Map(names, rounds, np.array(values, float))


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a key that sorts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _finite(maps: Collection[_Map]) -> np.ndarray:
    return np.concatenate([one.values[np.isfinite(one.values)] for one in maps])


def _is_log(maps: Collection[_Map]) -> bool:
    values = _finite(maps)
    positive = values[values > 0]
    return bool(len(positive) and positive.max() >= LOG_FROM * positive.min())


@drawing.styled
def _draw(maps: Mapping[str, _Map], label: str, narrow: bool) -> "Figure":
    from matplotlib.colors import LogNorm, Normalize

    layers = max(len(one.layers) for one in maps.values())
    fig, axes = drawing.panels(len(maps), narrow, height=min(6.0, max(1.9, 1.1 + 0.17 * layers)))
    values, log = _finite(maps.values()), _is_log(maps.values())
    if log:
        values = values[values > 0]
    norm = (LogNorm if log else Normalize)(values.min(), values.max(), clip=log)
    alike = all(one.layers == next(iter(maps.values())).layers for one in maps.values())
    columns = 1 if narrow else min(3, len(maps))
    for i, (ax, (name, one)) in enumerate(zip(axes, maps.items(), strict=True)):
        image = ax.imshow(
            one.values, aspect="auto", norm=norm, cmap="cividis", interpolation="none"
        )
        drawing.bare(ax)
        drawing.title(ax, shorten(name, 24))
        _name_cells(ax, one, layers=i % columns == 0 or not alike)
    drawing.name_axes(axes, "Communication round", "")
    bar = drawing.colour_bar(image, axes, fraction=0.05, pad=0.02, aspect=30)
    bar.set_label(label, fontsize=8.5)
    if log:
        drawing.plain_log(bar.ax.yaxis)
    return fig


def _name_cells(ax: "Axes", one: _Map, *, layers: bool) -> None:
    """Writes some rounds below a heat map, and with ``layers`` some layers at its left."""
    every = max(1, math.ceil(len(one.rounds) / 6))
    ax.set_xticks(range(0, len(one.rounds), every), [str(r) for r in one.rounds[::every]])
    step = max(1, math.ceil(len(one.layers) / 26))
    names = _short_names(one.layers)[::step]
    texts = [drawable(name) if layers else "" for name in names]
    ax.set_yticks(range(0, len(one.layers), step), texts)
    ax.tick_params(axis="y", labelsize=7)


def _short_names(paths: Sequence[str]) -> list[str]:
    """Returns module paths without the parts that all of them have in common."""
    parts = [path.split(".") for path in paths]
    if len(parts) < 2:
        return [".".join(one[-3:]) for one in parts]
    start = _equal_parts(parts)
    stop = _equal_parts([one[start:][::-1] for one in parts])
    return [shorten(".".join(one[start : len(one) - stop]), 28) for one in parts]


def _equal_parts(paths: Sequence[Sequence[str]]) -> int:
    """Returns the number of first parts that all paths have in common; 0 if one has no others."""
    same = [len(set(column)) == 1 for column in zip(*paths, strict=False)]
    return same.index(False) if False in same else 0
