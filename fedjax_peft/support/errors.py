"""The exception for bad input, advice on unknown names, and the place that a warning names."""

import difflib
import sys
from collections.abc import Iterable
from typing import Any

from fedjax_peft.support.display import paragraph, show


class InputError(ValueError):
    """An input of the user is wrong.

    The message is one paragraph that names the wrong thing, the nearest right one if there is one,
    and the remedy. It is made safe to print, and values of thousands of characters are shortened.
    The command line prints it without a traceback and exits with code 2.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(paragraph(str(message)))


class MissingPath(InputError):
    """There is no file or folder at a path of the user, relative to the working directory."""


def nearest(name: str, known: Iterable[str], *, shown: int = 12) -> str:
    """Returns advice for an unknown ``name``: the closest known ones, or the known ones."""
    known = sorted(set(known))
    if close := similar(name, known):
        return close
    if not known:
        return "There are none."
    rest = f" and {len(known) - shown} more" if len(known) > shown else ""
    return f"Known: {', '.join(known[:shown])}{rest}."


def similar(name: str, known: Iterable[str]) -> str:
    """Returns the question for the known names that are close to ``name``; empty without any."""
    # The time of a comparison grows with the names' lengths; no known name is this long.
    known, words = list(known), name[:100].split("_")
    close = difflib.get_close_matches(name[:100], known, n=3, cutoff=0.6)
    close += [word for word in words if len(words) > 1 and word in known and word not in close]
    return f"Did you mean {' or '.join(map(show, close))}?" if close else ""


def check_known(what: str, name: Any, known: Iterable[str], after: str = "") -> None:
    """Raises InputError for a name that is none of the known ones.

    Args:
      what: the kind of the named thing, such as ``metric``.
      after: what stands behind the name in the message.
    """
    names = list(known)
    if name not in names:
        raise InputError(f"There is no {what} {name!r}{after}. {nearest(str(name), names)}")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def users_level() -> int:
    """Returns the ``stacklevel`` that makes a warning point at the user's line of code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("fedjax_peft."):
        level, frame = level + 1, frame.f_back
    return level
