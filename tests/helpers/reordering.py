"""Another processor, imitated: half of all programs add their float32 sums in another order.

Vector units of another width sum in another order, so two programs that agree in every bit on one
processor differ on the next. The compiler's flags show little of this, because products of matrices
are computed by libraries that choose their kernels by themselves. With ``REORDERED_SUMS=SEED`` in
the environment this changes the lowering instead: a dot product or sum of n terms becomes that of
the second half plus that of the first. A program's jaxpr and the seed decide whether it is one of
those, so that equal programs still have equal bits, and different ones mostly have not.
"""

import hashlib
import os
import re

import jax.numpy as jnp
from jax import lax
from jax._src.interpreters import mlir

__all__ = ["reorder_sums"]

_active = False


def reorder_sums(seed: str) -> None:
    """Changes how JAX lowers sums from now on in this process."""
    lower_module = mlir.lower_jaxpr_to_module

    def lower(name, jaxpr, **options):
        global _active
        text = re.sub(r"0x[0-9a-f]+", "", f"{seed} {jaxpr}")
        _active = hashlib.sha256(text.encode()).digest()[0] % 2 == 1
        try:
            return lower_module(name, jaxpr, **options)
        finally:
            _active = False

    mlir.lower_jaxpr_to_module = lower
    _register(lax.dot_general_p, _dot_in_halves)
    _register(lax.reduce_sum_p, _sum_in_halves)


def _register(primitive, in_halves):
    """Lowers a primitive through ``in_halves`` in the programs that are chosen."""
    usual = mlir._platform_specific_lowerings["cpu"].get(primitive) or mlir._lowerings[primitive]
    another = mlir.lower_fun(in_halves, multiple_results=False)

    def rule(ctx, *operands, **params):
        global _active
        if not _active or ctx.avals_out[0].dtype != jnp.float32:
            return usual.rule(ctx, *operands, **params)
        _active = False  # the halves are lowered as usual
        try:
            return another(ctx, *operands, **params)
        finally:
            _active = True

    mlir.register_lowering(primitive, rule, platform="cpu")


def _dot_in_halves(x, y, *, dimension_numbers, **params):
    """Returns a ``dot_general`` whose first contracted axis is split in two."""
    (of_x, of_y), _ = dimension_numbers
    params["dimension_numbers"] = dimension_numbers
    n = x.shape[of_x[0]] if of_x else 0
    if n < 2:
        return lax.dot_general_p.bind(x, y, **params)
    first, second = (
        lax.dot_general_p.bind(
            lax.slice_in_dim(x, *part, axis=of_x[0]),
            lax.slice_in_dim(y, *part, axis=of_y[0]),
            **params,
        )
        for part in ((0, n // 2), (n // 2, n))
    )
    return second + first


def _sum_in_halves(x, *, axes, **params):
    """Returns a sum whose longest axis is split in two."""
    axis = max(axes, key=lambda i: x.shape[i], default=None)
    if axis is None or x.shape[axis] < 2:
        return lax.reduce_sum_p.bind(x, axes=axes, **params)
    n = x.shape[axis]
    first, second = (
        lax.reduce_sum_p.bind(lax.slice_in_dim(x, *part, axis=axis), axes=axes, **params)
        for part in ((0, n // 2), (n // 2, n))
    )
    return second + first


if "REORDERED_SUMS" in os.environ:
    reorder_sums(os.environ["REORDERED_SUMS"])
