"""Parts that the runs of a sweep share: data sets, models, functions of the run-time values."""

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

Part = TypeVar("Part")


class Parts:
    """Parts that were made before, found by their descriptions.

    A sweep passes one object to all of its runs, so that equal data sets and models are made once.
    A new object shares nothing.

    Args:
      most: the parts of one kind that are kept, because data sets and models are large.
    """

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._made: dict[str, OrderedDict[str, Any]] = {}

    def get(self, kind: str, description: Any, make: Callable[[], Part]) -> Part:
        """Returns the part of this description, which is made if it is not known.

        Args:
          kind: such as ``data``; only the newest parts of a kind are kept.
          description: everything that the part depends on, as values of a config.
        """
        key = fingerprint(description)
        known = self._made.setdefault(kind, OrderedDict())
        if key in known:
            known.move_to_end(key)
        else:
            while len(known) >= self._most:  # two large models may not fit
                known.popitem(last=False)
            known[key] = make()
        part: Part = known[key]
        return part


def fingerprint(description: Any) -> str:
    """Returns a text that is equal for equal values of a config.

    The order of keys does not count, except that of transforms, which are applied in it.
    """
    return json.dumps(_ordered(description), default=str)


def _ordered(value: Any, name: str = "") -> Any:
    """Returns a value of the key ``name`` whose tables, except transforms, have sorted keys."""
    if isinstance(value, dict):
        keys = value if name == "transforms" else sorted(value)
        return {key: _ordered(value[key], key) for key in keys}
    return [_ordered(one) for one in value] if isinstance(value, list | tuple) else value
