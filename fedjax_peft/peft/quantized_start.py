"""Starts of LoRA that make up for the quantisation of the frozen weights: LoftQ and QPiSSA.

LoftQ (Li et al. 2024, Algorithm 1) alternates between quantisation q and a truncated SVD::

    A_0 B_0 = 0
    for t = 1 ... T:   Q_t = q(W - s·A_{t-1} B_{t-1}),   s·A_t B_t = SVD_r(W - Q_t)

and freezes Q_T, so that Q_T + s·A_T B_T is close to W. With T = 1, Q is q(W).

QPiSSA (Meng et al. 2024, section 4) quantises what the SVD start leaves, which has a smaller range
than W: s·A B = SVD_r(W), Q = q(W - s·A B). FeDeRA's start (``init="svd"``) is the same SVD, so
``init="svd"`` on a quantised base is QPiSSA with one iteration. ``init="qr"`` is the same with the
first directions of a QR decomposition in the place of SVD_r.

Both need W itself, which is read again from the checkpoint, one kernel at a time. The papers write
A Bᵀ without a scale; here the singular values are divided by s, so that the start holds for every
alpha. They are split evenly between A and B, as in both papers.
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import Array

from fedjax_peft.models.quantized import QuantizedLinear, quantize_kernel
from fedjax_peft.support.errors import InputError

Factors = Mapping[str, tuple[Array, Array]]

_CHANGED = 0.02
"""Relative difference between the held weights and those that are read again, above which they
count as other weights. Rounding to bfloat16 before quantisation makes less than 0.5 %."""


def quantized_start(
    path: str,
    site: QuantizedLinear,
    init: str,
    iterations: int,
    truncated: Callable[[Array], tuple[Factors, Array]],
) -> Factors:
    """Returns the factors of a quantised layer, and changes its frozen kernel.

    Args:
      init: ``loftq``, ``svd`` or ``qr``.
      truncated: matrix ``[in, out]`` -> the factors of its directions by name, and the matrix less
        their products.
    """
    if site.original is None:
        raise InputError(
            f"init = {init!r} needs the weights of {path!r} as they were before they were"
            " quantised, and this model does not know where to read them: it was not made by"
            " load_model. Attach LoRA with init='svd' first, and then call fp.quantize."
        )
    weights, kind = site.original(), site.kind
    plain = quantize_kernel(weights, kind)
    held = site.kernel[...]
    if not jnp.linalg.norm(plain[...] - held) <= _CHANGED * jnp.linalg.norm(held):
        raise InputError(
            f"init = {init!r} reads the weights of {path!r} again, and they are not those that were"
            " quantised: the model was changed after loading, or its file was."
        )
    if init != "loftq":
        factors, rest = truncated(weights)
        site.kernel = quantize_kernel(rest, kind)
        return factors
    kernel = plain
    apart = weights - kernel[...]
    factors, rest = truncated(apart)
    for _ in range(iterations - 1):
        kernel = quantize_kernel(weights - (apart - rest), kind)
        apart = weights - kernel[...]
        factors, rest = truncated(apart)
    site.kernel = kernel
    return factors
