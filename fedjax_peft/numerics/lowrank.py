"""Algebra of LoRA pairs: which leaves form a pair, its scale s, and products ``A·B`` of factors.

A is ``[in, r]`` and B is ``[r, out]``; the adapted weight is ``W + s·AB``.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft.contracts import Params, PyTree
from fedjax_peft.support.errors import InputError


def pairs(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns the LoRA pairs among leaf names: module path -> (name of A, name of B)."""
    names = set(names)
    stems = sorted(n.removesuffix(".lora_a") for n in names if n.endswith(".lora_a"))
    return {p: (f"{p}.lora_a", f"{p}.lora_b") for p in stems if f"{p}.lora_b" in names}


def required_pairs(names: Iterable[str], aggregator: str) -> dict[str, tuple[str, str]]:
    """Returns the LoRA pairs among the names of the shared leaves."""
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


def factors_apart(leaves: Params, aggregator: str) -> tuple[Params, dict[str, tuple[Array, Array]]]:
    """Returns the leaves outside of LoRA pairs, and module path -> (A, B).

    Raises:
      InputError: as :func:`required_pairs`.
    """
    rest, found = dict(leaves), required_pairs(leaves, aggregator)
    return rest, {path: (rest.pop(a), rest.pop(b)) for path, (a, b) in found.items()}


def one_by_one(function: Callable[[Any], PyTree], matrices: Mapping[str, Any]) -> dict[str, PyTree]:
    """Returns path -> ``function(matrix)``, computed for one matrix of a shape at a time.

    That needs less memory, and concurrent batched LAPACK calls deadlock small CPU thread pools.

    Args:
      matrices: path -> one matrix, as a tree of arrays, such as its factors.
    """
    alike: dict[tuple, list[str]] = {}
    for path, parts in matrices.items():
        alike.setdefault(tuple(x.shape for x in jax.tree.leaves(parts)), []).append(path)
    made: dict[str, PyTree] = {}
    for paths in alike.values():
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *(matrices[p] for p in paths))
        results = jax.lax.map(function, stacked)
        made |= {p: jax.tree.map(lambda x, i=i: x[i], results) for i, p in enumerate(paths)}
    return made


def matmul(x: Array, y: Array) -> Array:
    """Returns the product in full float32, also where the hardware would round its inputs."""
    return jnp.matmul(x, y, precision="highest")


def empty_products(template: Params) -> dict[str, Array]:
    """Returns module path -> zeros of the size of its LoRA product, float32 ``[in, out]``."""
    return {
        p: jnp.zeros((template[a].shape[0], template[b].shape[1]), jnp.float32)
        for p, (a, b) in pairs(template).items()
    }


def weighted_product(a: Array, b: Array, weights: Array) -> Array:
    """Returns ``Σ w_k A_k B_k``, ``[in, out]``.

    Args:
      a: ``[clients, in, r]``.
      b: ``[clients, r, out]``.
      weights: float32 ``[clients]``.
    """
    weighted = a * weights[:, None, None]
    return jnp.einsum("kir,kro->io", weighted, b, precision="highest")


def product_norms(a: Array, b: Array) -> Array:
    """Returns ``‖A_k B_k‖_F``, ``[clients]``, from ``tr(AᵀA BBᵀ)``: no dense product is formed.

    Args:
      a: ``[clients, in, r]``.
      b: ``[clients, r, out]``.
    """
    grams = jnp.einsum("kir,kiq->krq", a, a, precision="highest")
    others = jnp.einsum("kro,kqo->krq", b, b, precision="highest")
    return jnp.sqrt(jnp.maximum(jnp.sum(grams * others, axis=(1, 2)), 0.0))


def scale(fixed: Params, path: str) -> Array:
    """Returns the LoRA scale s of the module ``path``, a scalar; 1 if the model has no scale."""
    name = f"{path}.lora_scale"
    # Directions that a client does not own have scale 0; the others share s.
    return jnp.max(fixed[name]) if name in fixed else jnp.ones(())
