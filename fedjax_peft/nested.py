"""Nested dicts with dotted keys, such as configs."""

import copy
from collections.abc import Mapping
from typing import Any

__all__ = ["flatten", "merge", "unset"]


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted key -> value, with keys such as ``peft.rank``."""
    result: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            result |= flatten(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of ``base`` updated with the values of ``over``, recursively."""
    result = copy.deepcopy(dict(base))
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge(result[key], value) if both else copy.deepcopy(value)
    return result


def unset(table: Mapping[str, Any], key: str) -> tuple[dict[str, Any], bool]:
    """Returns a copy without a dotted key or table, and whether ``table`` contained it."""
    result = copy.deepcopy(dict(table))
    *tables, last = key.split(".")
    node: Any = result
    for name in tables:
        node = node.get(name)
        if not isinstance(node, dict):
            return result, False
    return result, node.pop(last, None) is not None
