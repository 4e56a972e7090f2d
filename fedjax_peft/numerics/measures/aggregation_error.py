"""The aggregation error: how far the aggregate is from the exact average of the LoRA products.

The error of a matrix is the product that the server uses minus the exact average
``Σ w_k s A_k B_k``, with weights w_k that sum to 1 and LoRA's scale s. All functions here take
mappings from module path to value. They can be called in a compiled function.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array


def error_metrics(errors: Mapping[str, Array], exact: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the aggregation error over all matrices, and each matrix's Frobenius error.

    Args:
      errors: module path -> used product minus exact average of the products ``s·AB``,
        ``[in, out]``.
      exact: module path -> exact average.
    """
    frobenius = {p: jnp.sqrt(jnp.sum(e**2)) for p, e in errors.items()}
    largest = {p: jnp.max(jnp.abs(e)) for p, e in errors.items()}
    norms = {p: jnp.sqrt(jnp.sum(x**2)) for p, x in exact.items()}
    return summarise(frobenius, largest, norms)


def truncation_metrics(
    frobenius: Mapping[str, Array], largest: Mapping[str, Array], norms: Mapping[str, Array]
) -> dict[str, Array]:
    """Returns :func:`summarise`'s metrics, and the share of the spectrum that was kept.

    ``spectrum_kept`` is ``Σ_{j≤r} σ_j² / Σ σ_j²`` over all matrices, 0 where nothing was learned.
    """
    metrics = summarise(frobenius, largest, norms)
    some = jnp.any(jnp.stack(list(norms.values())) > 0)
    lost = metrics["aggregation_error_relative"] ** 2
    return metrics | {"spectrum_kept": jnp.where(some, 1 - lost, 0.0)}


def summarise(
    frobenius: Mapping[str, Array], largest: Mapping[str, Array], norms: Mapping[str, Array]
) -> dict[str, Array]:
    """Returns the metrics of an aggregation error from its values per matrix.

    Args:
      frobenius: module path -> Frobenius norm of the error.
      largest: module path -> largest absolute entry of the error.
      norms: module path -> Frobenius norm of the exact average.
    """

    def joint(parts: Mapping[str, Array]) -> Array:
        return jnp.sqrt(jnp.sum(jnp.stack(list(parts.values())) ** 2))

    total, norm = joint(frobenius), joint(norms)
    metrics = {
        "aggregation_error": total,
        "aggregation_error_relative": jnp.where(norm > 0, total / jnp.where(norm > 0, norm, 1), 0),
        "aggregation_error_max": jnp.max(jnp.stack(list(largest.values()))),
    }
    return metrics | {f"aggregation_error/{p}": e for p, e in frobenius.items()}
