"""Checks that there is enough memory, before it is allocated."""

import contextlib
import os
import re
from pathlib import Path

from fedjax_peft.support.errors import InputError

_CONTAINER = Path("/sys/fs/cgroup")
"""Where Linux says how much memory a container may use (cgroup 2)."""


def available() -> int | None:
    """Returns the bytes of main memory that this process can still allocate; None if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        limit, used = (int((_CONTAINER / f"memory.{x}").read_text()) for x in ("max", "current"))
        cached = re.search(r"^inactive_file (\d+)", (_CONTAINER / "memory.stat").read_text(), re.M)
        found.append(max(0, limit - used + int(cached[1] if cached else 0)))
    with contextlib.suppress(OSError, ValueError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        if match := re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE):
            found.append(1024 * int(match[1]))
    with contextlib.suppress(ValueError, OSError, AttributeError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def is_exhausted(error: BaseException) -> bool:
    """Returns whether an exception says that there is not enough memory."""
    words = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "bad_alloc")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def require(size: float, what: str, advice: str) -> None:
    """Raises InputError if a setting needs more memory than is available.

    Args:
      size: bytes; a lower bound is enough.
      what: the setting and its value, as the subject of a sentence.
      advice: the remedy, as a sentence.
    """
    free = available()
    if free is not None and size > free:
        raise InputError(
            f"{what} needs at least {gigabytes(size)} of memory, and {gigabytes(free)} are"
            f" available. {advice}"
        )


def gigabytes(size: float) -> str:
    """Returns a number of bytes in words, in gigabytes."""
    return f"{size / 1e9:,.1f} GB" if size < 1e15 else f"{size / 1e9:.1e} GB"


def in_bytes(size: float) -> str:
    """Returns a number of bytes in words, in gigabytes or megabytes, to two places."""
    unit, power = ("GB", 1e9) if size >= 1e9 else ("MB", 1e6)
    return f"{size / power:,.2f} {unit}"
