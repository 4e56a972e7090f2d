"""Figures as SVG elements inside an HTML page: what matplotlib writes, with CSS variables."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from fedjax_peft.report import figure_files
from fedjax_peft.report.figure_files import GRID, INK, MUTED, PALETTE, PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_THEME = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}
_THEME |= {color: f"run-{i}" for i, color in enumerate(PALETTE)}
_GROUPS = ("run-", "values-")
"""Starts of the gids that become classes, which several artists can have."""


def svg(fig: "Figure", prefix: str = "", values: Iterable[Iterable[str]] = ()) -> str:
    """Returns a figure as an ``<svg>`` element for an HTML page, whose texts are texts, not shapes.

    The colours are CSS variables (``--ink``, ``--muted``, ``--grid``, ``--paper``, ``--run-0`` ...)
    with the figure's colours as defaults, so that a page can change them for a dark screen. What
    has the gid ``run-0`` has this class, so that a page can hide it.

    Args:
        prefix: Text before each id of the element; those in a page must differ.
        values: For each run, the texts of the marks with the gid ``values-0`` and so on. They
            become titles, which a browser shows for the mark under the pointer.
    """
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        root = ElementTree.fromstring(figure_files.render(fig, "svg"))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for name, value in [*element.items()]:
            del element.attrib[name]
            if name == "id" and value.startswith(_GROUPS):
                element.set("class", value)
                continue
            value = f"{prefix}{value}" if name == "id" else value
            value = re.sub(r"(?<=url\(#)|^#(?=\w{11}$)", rf"\g<0>{prefix}", value)
            # Places need no more digits. Texts, such as scores and rates, keep theirs.
            value = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", value)
            element.set(name.rpartition("}")[2], value)
    for i, texts in enumerate(values):
        marks = root.iterfind(f".//g[@class='values-{i}']//use")
        for mark, text in zip(marks, texts, strict=False):  # an empty figure has none
            del mark.attrib["style"]
            ElementTree.SubElement(mark, "title").text = text
    text = ElementTree.tostring(root, encoding="unicode")
    text = re.sub(r">\s+<", "><", text)
    return re.sub("|".join(_THEME), lambda found: f"var(--{_THEME[found[0]]}, {found[0]})", text)
