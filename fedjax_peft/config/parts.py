"""Parts that the runs of a sweep share: data sets, models, functions of the run-time values."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

Part = TypeVar("Part")
_MOST = 4
"""The parts of one kind that are kept, because data sets and models are large."""


class Parts:
    """Parts that were made before, found by their descriptions.

    A sweep passes one object to all of its runs, so that equal data sets and models are made once.
    A new object shares nothing.
    """

    def __init__(self) -> None:
        self._made: dict[str, OrderedDict[str, Any]] = {}
        self._lock = threading.RLock()

    def get(self, kind: str, description: Any, make: Callable[[], Part]) -> Part:
        """Returns the part of this description, which is made if it is not known.

        Args:
          kind: such as ``data``; only the newest parts of a kind are kept.
          description: everything that the part depends on, as values of a config.
        """
        key = fingerprint(description)
        with self._lock:  # runs side by side are threads
            known = self._made.setdefault(kind, OrderedDict())
            part = known.pop(key) if key in known else make()
            known[key] = part
            while len(known) > _MOST:
                known.popitem(last=False)
        return part


def fingerprint(description: Any) -> str:
    """Returns a text that is equal for equal values of a config."""
    return json.dumps(description, sort_keys=True, default=str)
