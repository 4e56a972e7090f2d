"""What every aggregator of LoRA factors needs: the pairs, their scale, and error measures.

The aggregation error of a matrix is what was used minus the exact average ``Σ w_k s A_k B_k``.
"""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from fedjax_peft.errors import InputError
from fedjax_peft.typing import Params

__all__ = [
    "empty_products",
    "error_metrics",
    "matmul",
    "pairs",
    "required_pairs",
    "scale",
    "summarise",
    "truncation_metrics",
    "weighted_product",
]


def pairs(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns the LoRA pairs among leaf names: module path -> (name of A, name of B)."""
    names = set(names)
    stems = sorted(n.removesuffix(".lora_a") for n in names if n.endswith(".lora_a"))
    return {p: (f"{p}.lora_a", f"{p}.lora_b") for p in stems if f"{p}.lora_b" in names}


def required_pairs(names: Iterable[str], aggregator: str) -> dict[str, tuple[str, str]]:
    """Returns the LoRA pairs among the names of what is shared.

    Raises:
      InputError: there are none for ``aggregator`` to combine.
    """
    found = pairs(names)
    if not found:
        raise InputError(
            f"The aggregator {aggregator!r} needs LoRA factors A and B that are both shared, and"
            " this model and algorithm share none. Use 'mean', or attach LoRA."
        )
    return found


def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the product in full float32, also where the hardware would round its inputs."""
    return jnp.matmul(x, y, precision="highest")


def empty_products(template: Params) -> dict[str, jax.Array]:
    """Returns module path -> zeros of the size of its LoRA product, float32 ``[in, out]``."""
    return {
        p: jnp.zeros((template[a].shape[0], template[b].shape[1]), jnp.float32)
        for p, (a, b) in pairs(template).items()
    }


def weighted_product(a: jax.Array, b: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns ``Σ w_k A_k B_k`` of stacked factors; ``weights`` is ``[k]``."""
    weighted = a * weights[:, None, None]
    return jnp.einsum("kir,kro->io", weighted, b, precision="highest")


def scale(fixed: Params, path: str) -> jax.Array:
    """Returns the LoRA scale s of a module (1 if the model has no such leaf)."""
    name = f"{path}.lora_scale"
    # Directions that a client does not own have scale 0; the others share s.
    return jnp.max(fixed[name]) if name in fixed else jnp.ones(())


def error_metrics(
    errors: Mapping[str, jax.Array], exact: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns the aggregation error over all matrices, and each matrix's Frobenius error.

    Args:
      errors: module path -> used minus exact average of the products ``s·AB``, ``[in, out]``.
      exact: module path -> exact average.
    """
    frobenius = {p: jnp.sqrt(jnp.sum(e**2)) for p, e in errors.items()}
    largest = {p: jnp.max(jnp.abs(e)) for p, e in errors.items()}
    norms = {p: jnp.sqrt(jnp.sum(x**2)) for p, x in exact.items()}
    return summarise(frobenius, largest, norms)


def truncation_metrics(
    frobenius: Mapping[str, jax.Array],
    largest: Mapping[str, jax.Array],
    norms: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """Returns :func:`summarise`'s metrics, and the share of the spectrum that was kept.

    ``spectrum_kept`` is ``Σ_{j≤r} σ_j² / Σ σ_j²`` over all matrices, 0 where nothing was learned.
    """
    metrics = summarise(frobenius, largest, norms)
    some = jnp.any(jnp.stack(list(norms.values())) > 0)
    lost = metrics["aggregation_error_relative"] ** 2
    return metrics | {"spectrum_kept": jnp.where(some, 1 - lost, 0.0)}


def summarise(
    frobenius: Mapping[str, jax.Array],
    largest: Mapping[str, jax.Array],
    norms: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """Returns the metrics of an aggregation error from its per-matrix figures.

    Args:
      frobenius: module path -> Frobenius norm of the error.
      largest: module path -> largest absolute entry of the error.
      norms: module path -> Frobenius norm of the exact average.
    """

    def joint(parts: Mapping[str, jax.Array]) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.stack(list(parts.values())) ** 2))

    total, norm = joint(frobenius), joint(norms)
    metrics = {
        "aggregation_error": total,
        "aggregation_error_relative": jnp.where(norm > 0, total / jnp.where(norm > 0, norm, 1), 0),
        "aggregation_error_max": jnp.max(jnp.stack(list(largest.values()))),
    }
    return metrics | {f"aggregation_error/{p}": e for p, e in frobenius.items()}
