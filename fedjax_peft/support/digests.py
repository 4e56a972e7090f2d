"""Short digests of arrays and texts."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

_MOST_BYTES, _PIECES = 1 << 30, 1024
"""Of a larger array, this number of evenly spaced pieces of this total size is hashed."""


def digest(value: Any) -> str:
    """Returns a digest of an array, of bytes, or of plain values, 64 bits in hexadecimal."""
    if not isinstance(value, np.ndarray):
        text = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
        value = np.frombuffer(text, np.uint8)
    found = hashlib.sha256()  # processors have instructions for it
    for piece in _pieces(value):
        found.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:16]


def _pieces(x: np.ndarray) -> Iterator[np.ndarray]:
    """Yields an array, or evenly spaced rows of one that is too large to be read at once."""
    if x.nbytes <= _MOST_BYTES or x.ndim == 0:
        yield x
        return
    rows = max(1, len(x) * _MOST_BYTES // x.nbytes // _PIECES)
    for start in np.linspace(0, len(x) - rows, min(_PIECES, len(x))).astype(int):
        yield x[start : start + rows]
