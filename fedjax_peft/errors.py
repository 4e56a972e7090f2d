"""The one exception of bad input, and the helper that words its advice."""

import difflib
from collections.abc import Iterable

__all__ = ["InputError", "nearest"]


class InputError(ValueError):
    """What the user gave cannot be used.

    The message is one clear paragraph that names the thing and, where there is one, the nearest
    right one. The command line prints it without a traceback and exits with code 2.
    """


def nearest(name: str, known: Iterable[str], *, shown: int = 12) -> str:
    """Returns advice for an unknown ``name``: the closest known ones, or the known ones."""
    known = sorted(set(known))
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(map(repr, close))}?"
    if not known:
        return "There are none."
    rest = f" and {len(known) - shown} more" if len(known) > shown else ""
    return f"Known: {', '.join(known[:shown])}{rest}."
