"""``fedjax-peft config upgrade``: config files of an earlier version in their present form.

A statement keeps its place, its value and its comment; only its key changes. The result is compared
with the conversion of the file's content, :func:`fedjax_peft.simulation.storage.earlier.upgrade`.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedjax_peft.simulation.storage import earlier
from fedjax_peft.support.errors import InputError
from fedjax_peft.support.files import replace_file

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_KEY = rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*"
_STATEMENT = re.compile(rf"(\s*)({_KEY})(\s*=.*)", re.DOTALL)
_HEADER = re.compile(rf"(\s*\[\s*)({_KEY})(\s*\].*)", re.DOTALL)


def upgrade_file(path: Path) -> list[str]:
    """Rewrites a config file and returns its changes, such as ``lanes -> placement.lanes``.

    The file then has its old content or its new one, also after a crash. A file that has present
    keys only is left alone.

    Raises:
      InputError: the file is not a config, or it cannot be rewritten statement by statement.
    """
    if (path.parent / "environment.json").exists():
        raise InputError(f"{path} is the config of a run, which can be read as it is.")
    try:
        text = path.read_bytes().decode()
        new, changes = upgraded(text)
    except ValueError as error:
        raise InputError(f"{path} is not a TOML file: {error}.") from None
    except InputError as error:
        raise InputError(f"{path} is left as it was. {error}") from None
    if changes:
        replace_file(path, new.encode())
    return changes


def upgraded(text: str) -> tuple[str, list[str]]:
    """Returns the text of a config with present keys, and what has changed.

    Raises:
      ValueError: the text is not TOML.
      InputError: a key is in a place that cannot be rewritten, such as an inline table.
    """
    expected = earlier.upgrade(tomllib.loads(text))
    header: list[str] = []
    parts, changes = [], []
    for statement in _statements(text):
        if found := _HEADER.fullmatch(statement):
            header = _split(found[2])
            new, change = _rewritten(found.groups(), [], {})
        elif found := _STATEMENT.fullmatch(statement):
            new, change = _rewritten(found.groups(), header, _value(statement, found[2]))
        else:
            new, change = statement, []
        parts.append(new)
        changes += change
    new = "".join(parts)
    try:
        same = tomllib.loads(new) == expected
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"With its keys renamed it would not be TOML: {error}.") from None
    if not same:
        raise InputError(
            "It has an earlier key inside an inline table, such as {lanes = 2}: write a table or a"
            " dotted key instead, one key in a line."
        )
    return new, changes


def _statements(text: str) -> Iterator[str]:
    """Yields the statements of a TOML text; a value can have several lines."""
    pending = ""
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        pending += line
        try:
            tomllib.loads(pending)
        except tomllib.TOMLDecodeError:
            continue
        yield pending
        pending = ""
    yield pending


def _rewritten(
    statement: Sequence[str], header: Sequence[str], value: Any
) -> tuple[str, list[str]]:
    """Returns a statement with present keys, and what has changed.

    Args:
      statement: what stands before its key, the key, and the rest.
      header: the names of the table that it is in.
      value: its value; ``{}`` for the header of a table.
    """
    before, written, rest = statement
    *tables, last = path = [*header, *_split(written)]
    place = tables[2:] if path[0] == "methods" else tables
    if place == ["sweep"] and last == "constants" and isinstance(value, list):
        changed = {key: earlier.new_key(key) for key in value if isinstance(key, str)}
        changed = {key: new for key, new in changed.items() if key != new}
        for key, new in changed.items():
            rest = re.sub(rf"""(["']){re.escape(key)}\1""", rf"\1{new}\1", rest)
        return f"{before}{written}{rest}", [f"{key} -> {new}" for key, new in changed.items()]
    quoted = place in (["sweep", "grid"], ["system_changes"])
    if not quoted and (place or len(tables) == 1):  # a key of a table, or the name of a method
        return f"{before}{written}{rest}", []
    new = earlier.new_key(last, value)
    if new == last:
        return f"{before}{written}{rest}", []
    key = f'"{new}"' if quoted and "." in new else new
    return f"{before}{re.sub(rf'{_PART}$', key, written)}{rest}", [f"{'.'.join(path)} -> {new}"]


def _split(key: str) -> list[str]:
    """Returns the parts of a dotted key, without quotes."""
    return [part.strip("\"'") for part in re.findall(_PART, key)]


def _value(statement: str, key: str) -> Any:
    """Returns the value of a statement with this key."""
    value: Any = tomllib.loads(statement)
    for part in _split(key):
        value = value[part]
    return value
