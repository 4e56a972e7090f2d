"""Text of users made safe to print: no control characters, and not too long.

A name, a label or a path may hold terminal escapes, line breaks or lone surrogates, and a value may
have a million characters. Errors, tables and pages show them through these functions.
"""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TextIO

from fedjax_peft.support.secrets import hide

WORD, MESSAGE = 400, 6000
"""Most characters of a word, and of a whole message, in :func:`paragraph`."""
_JOINERS = "\u200c\u200d"
"""Invisible, but part of the spelling in Persian and in Indian scripts, and of emoji."""


def redraws(file: TextIO | None = None) -> bool:
    """Returns whether a line can be updated in place: in a terminal, and on stderr in a notebook.

    Args:
      file: by default stderr.
    """
    if file is not None and file is not sys.stderr:
        return file.isatty()
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    in_notebook = getattr(shell, "kernel", None) is not None  # IPython in a terminal is not
    return sys.stderr.isatty() or in_notebook


def printable(text: str) -> str:
    r"""Returns text with an escape such as ``\x1b`` for each character that does not print.

    These are control characters, line breaks, lone surrogates, and marks that change the direction
    of the text. Letters of all scripts and all kinds of spaces stay.
    """
    if text.isprintable():
        return text
    return "".join(c if _prints(c) else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """Returns text on one line, with a space for white space and for what does not print."""
    return " ".join("".join(c if _prints(c) else " " for c in text).split())


def markdown(text: str) -> str:
    """Returns text on one line in which Markdown and HTML see no marks of theirs."""
    return _MARKS.sub(r"\\\g<0>", one_line(text))


_MARKS = re.compile(r"[\\|*_`<>\[\]~$]|&(?=#?\w+;)")


def plural(noun: str, count: int) -> str:
    """Returns a noun as it is written after a number."""
    return noun if count == 1 else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Returns text such as "1 worker" or "1,200 workers"."""
    return f"{count:,} {plural(noun, count)}"


def shorten(text: str, limit: int) -> str:
    """Returns at most about ``limit`` characters of a text: its start, a note, and its end."""
    if len(text) <= limit:
        return text
    head, tail = limit * 3 // 4, limit // 4
    return f"{text[:head]}[... {len(text) - head - tail:,} characters ...]{text[-tail:]}"


def show(value: object, limit: int = 120) -> str:
    """Returns the ``repr`` of a value, printable and of at most about ``limit`` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write whole numbers of more than 4,300 digits
        text = f"a {type(value).__name__} that is too long to write"
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deeply to write"
    return shorten(printable(text), limit)


def argument(path: str | os.PathLike[str]) -> str:
    """Returns a path as an argument of a command: quoted for a shell, and never an option."""
    text = os.fspath(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def program() -> str:
    """Returns the word that calls the command line in the user's shell.

    It is ``fedjax-peft`` if the shell finds the program that runs, such as in an active
    environment, and otherwise its path, such as ``.venv/bin/fedjax-peft``.
    """
    name, called = "fedjax-peft", Path(sys.argv[0])
    found = shutil.which(name)
    if called.name == name and not (found and os.path.realpath(found) == os.path.realpath(called)):
        return argument(called)
    return name


def paragraph(text: str) -> str:
    """Returns a message that is safe to print; very long words, and long messages, are shortened.

    Line breaks stay. Passwords in addresses are hidden.
    """
    text = hide(text)
    lines = text.split("\n")
    if any(len(word) > WORD for word in text.split()):
        lines = [" ".join(shorten(word, WORD // 2) for word in line.split(" ")) for line in lines]
    return shorten("\n".join(map(printable, lines)), MESSAGE)


def _prints(character: str) -> bool:
    return character.isprintable() or character in _JOINERS or _is_space(character)


def _is_space(character: str) -> bool:
    # Excludes line and paragraph separators and ASCII's separators, which are white space too.
    return character.isspace() and character > "\x9f" and character not in "\u2028\u2029"
