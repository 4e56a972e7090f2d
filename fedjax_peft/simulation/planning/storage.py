"""How the compiler of each platform stores arrays, as far as the memory plan depends on it.

The rules were found by comparing the plan with the memory that the compilers for a CPU, an H100, an
A100, a T4 and a TPU v5e plan for the same rounds (``experiments/benchmarks/accelerators.py``).
Not counted: while a TPU draws the mask of a dropout, it may hold the random bits with the lanes as
the last axis, padded to 128.
"""

import math
from itertools import permutations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_peft.contracts import Platform


class Storage(NamedTuple):
    """What a compiler stores between the forward and the backward pass, and in how many bytes."""

    fuses: bool
    """Whether the kernels that use a residual make it again from several stored arrays, and run in
    the order of the program. Otherwise what several kernels read is stored, and each kernel runs as
    soon as its inputs are there."""
    product_inputs: bool
    """Whether the inputs of matrix products are stored. Otherwise a product makes its inputs again
    like other kernels."""
    bfloat16: int = 2
    """Bytes of one element of bfloat16."""
    tile: tuple[int, int] = (1, 1)
    """Two axes of an array are padded to multiples of this tile. The compiler chooses the axes."""

    def nbytes(self, aval: Any) -> int:
        """Returns the bytes of an array on the device, from its shape and its dtype."""
        size = plain_nbytes(aval)
        if not size:  # nothing to pad
            return 0
        if aval.dtype == jnp.bfloat16:
            size = size // 2 * self.bfloat16
        return int(size * _padding(aval.shape, self.tile))


def plain_nbytes(aval: Any) -> int:
    """Returns the bytes of an array without padding; keys of random numbers count 0."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 0
    return int(aval.size * dtype.itemsize)


def _padding(shape: tuple[int, ...], tile: tuple[int, int]) -> float:
    """Returns the factor by which padding increases an array, with the axes where it is least."""

    def padded(size: int, multiple: int) -> float:
        return math.ceil(size / multiple) * multiple / size

    rows, columns = tile
    pairs = permutations(shape, 2)
    return min((padded(i, rows) * padded(j, columns) for i, j in pairs), default=1.0)


_CPU = Storage(fuses=False, product_inputs=True)
_GPU = Storage(fuses=True, product_inputs=True)
# GPUs before Ampere have no units for bfloat16: XLA computes in float32, and stores float32.
_OLD_GPU = _GPU._replace(product_inputs=False, bfloat16=4)
_TPU = _GPU._replace(product_inputs=False, tile=(8, 128))
_AMPERE = 8.0
"""The first compute capability with units for bfloat16."""


def storage_on(platform: Platform) -> Storage:
    """Returns how the compiler of a platform stores arrays; an unknown one counts as a CPU's."""
    if platform.name == "gpu":
        # 0 is a GPU of another vendor.
        return _OLD_GPU if 0 < platform.capability < _AMPERE else _GPU
    return _TPU if platform.name == "tpu" else _CPU
