"""Passwords and tokens, which are neither recorded nor printed."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
"""What stands for a password or a token."""
_USER = re.compile(r"""(\b[\w+.-]+://)(?:[^\s/?#"]*|[^\s/?#"@:]*:(?!\d*[/?#])[^\s"]*)@""")
_NAMED = r"pass(?:word|wd|phrase)?|pwd|secret|token|api_?key|credentials?"
_QUERY = re.compile(rf"([?&;#][\w.-]*(?:{_NAMED}|key|auth|sig|signature)=)[^&;#\s\"']+", re.I)
_KEY = re.compile(rf"(?:.*[._-])?(?:{_NAMED})s?", re.I)


def hide(text: str) -> str:
    """Returns a text with ``***`` for what addresses in it have of users, passwords and tokens.

    These are what stands before an @, as in ``https://user:password@host``, and the values of such
    parameters as ``?token=``.
    """
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", text))


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config with ``***`` for the secrets of its tables ``trackers``.

    Other texts decide what is trained, so they stay as they are.
    """
    return {
        key: _hidden(value)
        if "trackers" in key.split(".")
        else without_secrets(value)
        if isinstance(value, Mapping)
        else value
        for key, value in config.items()
    }


def hidden_option(options: Mapping[str, Any]) -> str | None:
    """Returns the first option whose secret is not known, because it was read from a run."""
    return next((key for key, value in options.items() if HIDDEN in str(value)), None)


def _hidden(value: Any) -> Any:
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, list | tuple):
        return [*map(_hidden, value)]
    if not isinstance(value, Mapping):
        return value
    return {
        key: HIDDEN if isinstance(x, str) and x and _KEY.fullmatch(key) else _hidden(x)
        for key, x in value.items()
    }
