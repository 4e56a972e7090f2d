"""Algebra of LoRA pairs: which leaves form a pair, its scale s, and products ``A·B`` of factors.

A is ``[in, r]`` and B is ``[r, out]``; the adapted weight is ``W + s·AB``.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from fedjax_peft.contracts import Params
from fedjax_peft.support.errors import InputError

__all__ = [
    "empty_products",
    "matmul",
    "pairs",
    "pairs_by_shape",
    "product_norms",
    "required_pairs",
    "scale",
    "weighted_product",
]


def pairs(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns the LoRA pairs among leaf names: module path -> (name of A, name of B)."""
    names = set(names)
    stems = sorted(n.removesuffix(".lora_a") for n in names if n.endswith(".lora_a"))
    return {p: (f"{p}.lora_a", f"{p}.lora_b") for p in stems if f"{p}.lora_b" in names}


def required_pairs(names: Iterable[str], aggregator: str) -> dict[str, tuple[str, str]]:
    """Returns the LoRA pairs among the names of the shared leaves.

    Args:
      names: of the shared leaves.
      aggregator: the name of the aggregator that needs pairs, for the message.

    Raises:
      InputError: there are no pairs to combine.
    """
    found = pairs(names)
    if not found:
        raise InputError(
            f"The aggregator {aggregator!r} needs LoRA factors A and B that are both shared, and"
            " this model and algorithm share none. Use 'mean', or attach LoRA."
        )
    return found


def pairs_by_shape(leaves: Params) -> dict[tuple, list[str]]:
    """Returns the module paths of the LoRA pairs, sorted, by the shapes of their factors."""
    shapes: dict[tuple, list[str]] = {}
    for path, (a, b) in pairs(leaves).items():
        shapes.setdefault((leaves[a].shape, leaves[b].shape), []).append(path)
    return shapes


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
    """Returns ``Σ w_k A_k B_k``, ``[in, out]``.

    Args:
      a: ``[clients, in, r]``.
      b: ``[clients, r, out]``.
      weights: float32 ``[clients]``.
    """
    weighted = a * weights[:, None, None]
    return jnp.einsum("kir,kro->io", weighted, b, precision="highest")


def product_norms(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns ``‖A_k B_k‖_F``, ``[clients]``, from ``tr(AᵀA BBᵀ)``: no dense product is formed.

    Args:
      a: ``[clients, in, r]``.
      b: ``[clients, r, out]``.
    """
    grams = jnp.einsum("kir,kiq->krq", a, a, precision="highest")
    others = jnp.einsum("kro,kqo->krq", b, b, precision="highest")
    return jnp.sqrt(jnp.maximum(jnp.sum(grams * others, axis=(1, 2)), 0.0))


def scale(fixed: Params, path: str) -> jax.Array:
    """Returns the LoRA scale s of the module ``path``, a scalar; 1 if the model has no scale."""
    name = f"{path}.lora_scale"
    # Directions that a client does not own have scale 0; the others share s.
    return jnp.max(fixed[name]) if name in fixed else jnp.ones(())
