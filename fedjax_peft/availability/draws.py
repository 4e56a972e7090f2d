"""Random numbers of clients as a function of their number: vectorised, and without a state."""

import zlib

import numpy as np

_ODD = np.uint64(0x9E3779B97F4A7C15)
"""The increment of splitmix64, which is odd and has no pattern of bits."""


def uniforms(seed: int, name: str, *indices: np.ndarray | np.integer) -> np.ndarray:
    """Returns numbers in [0, 1), float64, in the common shape of the indices.

    The number at a place depends on the seed, the name and the indices at this place only. It is
    a hash of them: the output function of splitmix64 (Steele, Lea and Flood 2014) after each word.
    """
    shape = np.broadcast_shapes(*(np.shape(x) for x in indices))
    state: np.ndarray = np.full(shape, np.uint64(seed), np.uint64)
    with np.errstate(over="ignore"):
        for word in (zlib.crc32(name.encode()), *indices):
            # Negative indices, such as blocks before the start, wrap around.
            state = _mixed(state + _ODD) ^ np.asarray(word).astype(np.int64).astype(np.uint64)
        state = _mixed(_mixed(state + _ODD) + _ODD)
    return (state >> np.uint64(11)) * 2.0**-53


def _mixed(x: np.ndarray) -> np.ndarray:
    """Returns the output function of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
