"""Reading and writing TOML."""

import os
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w

from fedjax_peft.support.files import read_text


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the content of a TOML file.

    Raises:
      OSError: the file does not exist or cannot be read.
      ValueError: the file is not TOML in UTF-8; the message gives the reason.
    """
    return _loads(read_text(path))


def parse_value(text: str) -> Any:
    """Returns the value that a TOML expression such as ``[1, 2]`` stands for.

    A text that is not TOML is returned as it is: a word on a command line needs no quotes.

    Raises:
      ValueError: the expression is TOML without a usable value, such as an integer of 5,000 digits.
    """
    try:
        return _loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def literal(value: Any) -> str:
    """Returns a value as a TOML expression on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{_key(name)} = {literal(x)}" for name, x in value.items())
        return f"{{{', '.join(pairs)}}}"
    return tomli_w.dumps({"x": value})[4:].strip()


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else literal(name)


def _loads(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
