"""Figures of LoRA's factors: their spectra over rounds, and heat maps of single layers.

Each function takes name -> seed -> rows, and returns None if no rows hold its data.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_peft.report import drawing, plots
from fedjax_peft.report.figure_files import bands, styles
from fedjax_peft.report.wording import shorten
from fedjax_peft.simulation.rows import number
from fedjax_peft.support.display import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    return drawing.Detail("spectra", "Spectra", caption, _draw_spectra(runs, shown), data)


@drawing.styled
def _draw_spectra(runs: drawing.Runs, shown: Sequence[str]) -> "Figure":
    fig, axes = drawing.panels(len(shown), height=2.9, legend=len(runs))
    style = styles(runs)
    for ax, field in zip(axes, shown, strict=True):
        text, scale = _SPECTRA[field]
        for name, line in plots.lines(runs, "round", field).items():
            if line.xs:
                values = {seed: [scale * y for y in ys] for seed, ys in line.by_seed.items()}
                bands(ax, name, line.xs, values, number=style[name])
        ax.set_title(text, fontsize=9)
    drawing.name_axes(axes, "Communication round", "")
    drawing.legend_of(axes)
    return fig


# Heat maps.


def heat_map(runs: drawing.Runs, kind: str) -> drawing.Detail | None:
    """Returns heat maps of a measure over layers and rounds, one for each method.

    The values are means over seeds. All maps of the figure have the same colours, from dark (small)
    to light.

    Args:
        kind: A key of :data:`HEAT_MAPS`.
    """
    from pandas import DataFrame

    maps = {}
    for name, by_seed in runs.items():
        values = [
            (one_line(layer), row["round"], float(x))
            for rows in by_seed.values()
            for row in rows
            if isinstance(row.get("layers"), Mapping)
            for layer, x in (row["layers"].get(kind) or {}).items()
            if isinstance(x, int | float) and math.isfinite(x)
        ]
        if values:
            frame = DataFrame(values, columns=["layer", "round", "x"])
            found = frame.pivot_table("x", "layer", "round")
            maps[name] = found.loc[sorted(found.index, key=_natural)]
    if not maps:
        return None
    name, meaning = HEAT_MAPS[kind]
    data = [
        {"name": method, "layer": layer, "round": r, kind: x}
        for method, one in maps.items()
        for layer, row in one.iterrows()
        for r, x in row.items()
    ]
    known = np.array([x for row in data if math.isfinite(x := row[kind])])
    positive = known[known > 0]
    log = bool(len(positive)) and positive.max() >= plots.LOG_FROM * positive.min()
    averaged = ", means over seeds" if any(len(seeds) > 1 for seeds in runs.values()) else ""
    scale = ", on a logarithmic scale" if log else ""
    caption = f"{meaning}, for each adapted module and round{averaged}{scale}."
    figure = _draw(maps, name, positive if log else known, log)
    return drawing.Detail(f"layers_{kind}", name, caption, figure, data)


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a key that sorts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


@drawing.styled
def _draw(maps: Mapping[str, Any], label: str, values: np.ndarray, log: bool) -> "Figure":
    """Returns a figure of tables ``[layers, rounds]``, whose colours cover ``values``."""
    from matplotlib.colors import LogNorm, Normalize

    layers = max(map(len, maps.values()))
    fig, axes = drawing.panels(len(maps), height=min(6.0, max(1.9, 1.1 + 0.17 * layers)))
    norm = (LogNorm if log else Normalize)(values.min(), values.max(), clip=log)
    first = next(iter(maps.values()))
    alike = all(one.index.equals(first.index) for one in maps.values())
    look: dict[str, Any] = {"aspect": "auto", "cmap": "cividis", "interpolation": "none"}
    for i, (ax, (name, one)) in enumerate(zip(axes, maps.items(), strict=True)):
        image = ax.imshow(one.to_numpy(), norm=norm, **look)
        drawing.bare(ax)
        ax.set_title(shorten(name, 24), fontsize=9)
        _name_cells(ax, one, layers=i % drawing.COLUMNS == 0 or not alike)
    drawing.name_axes(axes, "Communication round", "")
    bar = drawing.colour_bar(image, axes, fraction=0.05, pad=0.02, aspect=30)
    bar.set_label(label, fontsize=8.5)
    if log:
        drawing.plain_log(bar.ax.yaxis)
    return fig


def _name_cells(ax: "Axes", one: Any, *, layers: bool) -> None:
    """Writes some rounds below a heat map, and with ``layers`` some layers at its left."""
    every, step = max(1, math.ceil(one.shape[1] / 6)), max(1, math.ceil(len(one) / 26))
    ax.set_xticks(range(0, one.shape[1], every), [str(r) for r in one.columns[::every]])
    names = _short_names([*one.index])[::step] if layers else []
    ax.set_yticks(range(0, len(one), step)[: len(names)], names)
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
