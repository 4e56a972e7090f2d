"""Nested dicts with dotted keys, such as configs, and mappings that note what is read."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


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


def unset(table: Mapping[str, Any], parts: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Returns a copy without a key or table, and whether ``table`` contained it.

    Args:
      parts: of the dotted key.
    """
    result = copy.deepcopy(dict(table))
    *tables, last = parts
    node: Any = result
    for name in tables:
        node = node.get(name)
        if not isinstance(node, dict):
            return result, False
    return result, node.pop(last, None) is not None


class Watched(Mapping[str, Any]):
    """A mapping that notes which of its values are read, in whatever way. It cannot be changed."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        self.read.add(name)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self) | dict(other)

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return dict(other) | dict(self)

    def copy(self) -> dict[str, Any]:
        """Returns all values in a dict."""
        return dict(self)

    def __reduce__(self) -> Any:  # of copy, deepcopy and pickle
        return dict, (dict(self),)

    def __repr__(self) -> str:
        return repr(dict(self))
