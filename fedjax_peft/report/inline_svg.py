"""Figures as SVG elements inside an HTML page, as small as they look the same."""

import base64
import io
import itertools
import math
import re
from hashlib import sha256
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np

from fedjax_peft.report import figure_files
from fedjax_peft.report.figure_files import GRID, INK, MUTED, PALETTE, PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_THEME = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}
_THEME |= {color: f"run-{i}" for i, color in enumerate(PALETTE)}
_COMMON = ("class", "clip-path")
_PIXELS = 128
"""The most columns of an image: about the pixels that a panel has on a screen."""


def svg(fig: "Figure", prefix: str = "", images: dict[str, str] | None = None) -> str:
    """Returns a figure as an ``<svg>`` element for an HTML page, whose texts are texts, not shapes.

    The colours are CSS variables (``--ink``, ``--muted``, ``--grid``, ``--paper``, ``--run-0`` ...)
    with the figure's colours as defaults, so that a page can change them for a dark screen. What
    has the gid ``run-0`` has this class, so that a page can hide it. Columns of images beyond
    128 are merged.

    Args:
        prefix: Text before each id and class of the element; those in a page must differ.
        images: Id -> ``<image>`` element. The figure's images are added, and the page has to define
            them (:func:`shared`), each once. By default they are in the figure itself.
    """
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        root = ElementTree.fromstring(figure_files.render(fig, "svg"))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for name in [name for name in element.attrib if name.startswith("{")]:
            element.set(name.rpartition("}")[2], element.attrib.pop(name))
    _rename(root, prefix)
    _clean(root)
    for element in root.iter("image"):
        _share(element, images)
    text = ElementTree.tostring(root, encoding="unicode").replace(" />", "/>")
    return re.sub("|".join(_THEME), lambda found: f"var(--{_THEME[found[0]]}, {found[0]})", text)


def shared(images: dict[str, str]) -> str:
    """Returns an element, of no size itself, with the images that figures of a page refer to."""
    inside = "".join(images.values())
    return f'<svg class="images" aria-hidden="true"><defs>{inside}</defs></svg>'


def _rename(root: ElementTree.Element, prefix: str) -> None:
    """Gives short names to ids that are referred to, drops the others, and makes styles classes."""
    pattern, places = re.compile(r"(?<=url\(#)[^)]+|(?<=^#).+"), ("href", "clip-path")
    used: dict[str, str] = {}
    for element in root.iter():
        for found in (pattern.search(element.get(name, "")) for name in places):
            if found:
                used.setdefault(found[0], f"{prefix}{len(used)}")
    rules: dict[str, str] = {}
    for element in root.iter():
        classes, known = [], element.attrib.pop("id", "")
        if known in used:
            element.set("id", used[known])
        elif re.fullmatch(r"run-\d+", known):
            classes.append(known)
        for name in places:
            if value := element.get(name):
                element.set(name, pattern.sub(lambda found: used[found[0]], value))
        if style := element.attrib.pop("style", ""):
            classes.append(rules.setdefault(style, f"{prefix}s{len(rules)}"))
        if classes:
            element.set("class", " ".join(classes))
    sheet = ElementTree.SubElement(root, "style")
    sheet.text = "".join(f".{name}{{{style}}}" for style, name in rules.items())


def _clean(element: ElementTree.Element) -> None:
    """Removes white space and groups without effect, and shortens numbers."""
    element.tail = None
    if element.text and not element.text.strip():
        element.text = None
    children = []
    for child in element:
        _clean(child)
        plain = child.tag in ("metadata", "g", "defs") and not child.attrib
        children += list(child) if plain and (child.tag == "g" or not len(child)) else [child]
    element[:] = _grouped(children)
    if path := element.get("d"):
        element.set("d", _relative(path))
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    for name in ("x", "y"):
        if value := element.get(name):
            element.set(name, f"{round(float(value), 1):g}")


def _grouped(children: list[ElementTree.Element]) -> list[ElementTree.Element]:
    """Returns elements with their common class and clip path at a group around them."""
    found = []
    for _, several in itertools.groupby(children, lambda one: [one.get(x) for x in _COMMON]):
        alike = list(several)
        common = {x: value for x in _COMMON if (value := alike[0].get(x)) is not None}
        if len(alike) > 1 and common:
            group = ElementTree.Element("g", common)
            for one in alike:
                one.attrib = {x: value for x, value in one.items() if x not in common}
            group[:] = alike
            alike = [group]
        found += alike
    return found


def _relative(path: str) -> str:
    """Returns the data of a path with lines relative to each other, in tenths of a point.

    That is too small to be seen, but markers are small shapes, and get hundredths.
    """
    scale = 10 if len(path) > 500 else 100
    found, at = [], (0, 0)
    for letter, words in re.findall(r"([A-Za-z])([^A-Za-z]*)", path):
        numbers = [round(scale * float(word)) for word in words.split()]
        if letter == "L":
            step = [x - y for x, y in zip(numbers, at, strict=True)]
            found.append("l" + _joined(step, scale))
        else:
            found.append(letter + _joined(numbers, scale))
        if numbers:
            at = (numbers[-2], numbers[-1])
    return "".join(found)


def _joined(numbers: list[int], scale: int) -> str:
    """Returns numbers as a path has them, without zeros and spaces that it does not need."""
    words = [re.sub(r"^(-?)0\.", r"\1.", f"{x / scale:g}") for x in numbers]
    return re.sub(r" (?=-)", "", " ".join(words))


def _share(element: ElementTree.Element, images: dict[str, str] | None) -> None:
    """Makes an image smaller; with ``images``, it becomes a reference to one of them."""
    from PIL import Image

    data = base64.b64decode(element.attrib["href"].partition(",")[2])
    image = Image.open(io.BytesIO(data)).convert("RGBA")
    size = {key: element.attrib[key] for key in ("width", "height")}  # of pixels, or in points
    place = {**size, "preserveAspectRatio": "none"}
    small = image.reduce((math.ceil(image.width / _PIXELS), 1))
    text = f"data:image/png;base64,{base64.b64encode(_png(np.asarray(small))).decode()}"
    element.attrib.update(place, href=text)
    if images is None:
        return
    name = f"i{sha256(f'{size}{text}'.encode()).hexdigest()[:8]}"
    look = {"href": text, "id": name, "style": "image-rendering:pixelated"}
    alone = ElementTree.Element("image", place | look)
    images[name] = ElementTree.tostring(alone, encoding="unicode")
    where = {key: x for key, x in element.items() if key in ("x", "y", "transform")}
    element.tag, element.attrib = "use", {"href": f"#{name}", **where}


def _png(pixels: np.ndarray) -> bytes:
    """Returns a PNG file of RGBA pixels whose colours are a palette, 64 of them at most."""
    from PIL import Image

    out = io.BytesIO()
    image = Image.fromarray(pixels, "RGBA").quantize(64, method=Image.Quantize.FASTOCTREE)
    image.save(out, "png", optimize=True)
    return out.getvalue()
