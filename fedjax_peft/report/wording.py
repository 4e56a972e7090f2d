"""Numbers, units and names as reports write them."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from fedjax_peft.support.display import one_line, plural

MISSING = "-"
"""The text of a cell without a value."""
NAME_LENGTH = 30
"""Most characters of a name in a figure."""


class Unit(NamedTuple):
    """A unit for bytes or seconds."""

    size: float
    """Bytes or seconds in one unit."""
    symbol: str
    name: str


_BYTES = [Unit(1, "B", "bytes"), Unit(1e3, "kB", "kB"), Unit(1e6, "MB", "MB")]
_BYTES += [Unit(1e9, "GB", "GB"), Unit(1e12, "TB", "TB")]
_SECONDS = [Unit(1, "s", "seconds"), Unit(60, "min", "minutes"), Unit(3600, "h", "hours")]


UNITS = {"bytes": _BYTES, "simulated_seconds": _SECONDS, "wall_seconds": _SECONDS}
"""Cost -> its units, the smallest first."""


def unit_of(cost: str, largest: float) -> Unit:
    """Returns the unit (kB, MB ..., or seconds, minutes, hours) for amounts up to ``largest``.

    Args:
        cost: A key of :data:`UNITS`.
    """
    if cost != "bytes":
        largest /= 2  # below two minutes, print seconds
    units = UNITS[cost]
    return next((unit for unit in reversed(units) if unit.size <= largest), units[0])


def amount(cost: str, value: float) -> str:
    """Returns bytes or seconds as a number and its unit."""
    unit = unit_of(cost, value)
    return f"{digits(value / unit.size)} {unit.symbol}"


def digits(value: float) -> str:
    """Returns a number with about three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    if value >= 0.1:
        return f"{value:.2f}"
    return "0" if value == 0 else f"{value:.3f}" if value >= 0.001 else "<0.001"


def is_share(metric: str) -> bool:
    """Returns whether a metric is a fraction that is printed in percent."""
    return any(word in metric for word in ("accuracy", "f1", "exact_match", "score"))


def percent(share: float) -> str:
    """Returns a fraction in percent, without the sign."""
    return f"{100 * share:.1f}"


def score_text(share: bool, sign: str = " %") -> Callable[[float], str]:
    """Returns the function that prints a score; a ``share`` is in percent, with this sign."""
    return (lambda value: f"{percent(value)}{sign}") if share else "{:.4g}".format


def signed(difference: float, share: bool) -> str:
    """Returns a difference of scores with its sign; that of shares is in points."""
    return (f"{100 * difference:+.1f}" if share else f"{difference:+.3g}").replace("-", "−")


def word(metric: str) -> str:
    """Returns a metric's name as it is written in a sentence."""
    return re.sub(r"\bf1\b", "F1", one_line(metric.replace("_", " ")))


def capital(text: str) -> str:
    """Returns a text with a capital first letter."""
    return text[:1].upper() + text[1:]


def common(names: Iterable[str], otherwise: str) -> str:
    """Returns the name if all names are equal, otherwise ``otherwise``."""
    found = set(names)
    return found.pop() if len(found) == 1 else otherwise


def listing(items: Sequence[str], shown: int = 5) -> str:
    """Returns text such as "a, b and c" or "a, b and 7 more"."""
    if len(items) > shown:
        items = [*items[: shown - 1], f"{len(items) - shown + 1} more"]
    return " and ".join(filter(None, [", ".join(items[:-1]), items[-1]]))


def numbered(noun: str, numbers: Collection[int], shown: int = 8) -> str:
    """Returns text such as "round 3" or "rounds 3, 4 and 2 more"."""
    more = f" and {len(numbers) - shown} more" if len(numbers) > shown else ""
    first = ", ".join(map(str, sorted(numbers)[:shown]))
    return f"{plural(noun, len(numbers))} {first}{more}"


def are(subjects: Sequence[object]) -> str:
    """Returns the verb after the names of these subjects."""
    return "is" if len(subjects) == 1 else "are"


def shorten(name: str, length: int = NAME_LENGTH) -> str:
    """Returns a name with at most ``length`` characters; the start and the end are kept."""
    name = one_line(name)
    if len(name) <= length:
        return name
    half = (length - 1) / 2  # names in a sweep often differ in their last characters
    return f"{name[: math.ceil(half)]}…{name[-math.floor(half) :]}"


_HEADS = {
    "Best": "the best of all evaluated rounds, and which one; chosen by the score itself",
    "Tuned": "of models that the clients have adapted once more, just for the last evaluation",
    "Clients’ mean": "the mean of the clients’ scores, each on the client’s own test",
    "Weighted by test size": "the clients’ mean, weighted by the sizes of their tests",
    "Worst 10 %": "the mean of the tenth of the clients (at least one) with the worst scores",
    "Difference to": "the mean difference over the seeds that both have",
    "95 % interval (t)": "of the difference, by Student’s t",
    "95 % interval (bootstrap)": "of the difference, by drawing the seeds again and again",
    "Margin from": "which chance the margin counts",
    "Margin": "what a difference must be larger than",
    "Result": "separated: the difference is larger than chance explains",
    "Privacy": "the guarantee after the last round; smaller numbers protect more",
    "Upload per client and round": "what a client sends on average",
    "Total up / down": "bytes of all clients and rounds to the server, and back",
    "Simulated time": "by the time model of the clients’ devices and links, not of this machine",
    "Wall time": "of this machine, with compiling and evaluating",
    "Slots in use": "the share of the places for local steps in the compiled program that did work",
    "Mean aggregation error": "distance of the aggregated LoRA from the exact average of the"
    " clients’",
}
"""Start of a heading -> what it means; without headings that say it themselves."""


def explained(title: str) -> str:
    """Returns what a heading means; empty if it says it itself."""
    return next((text for start, text in _HEADS.items() if title.startswith(start)), "")
