"""The exact average change of LoRA products, for servers that optimise the product itself.

    change of a product   Σ w_k (A_k B_k - A B)  =  Σ w_k (A_k - A) B_k  +  A Σ w_k (B_k - B)
    change of a leaf      Σ w_k (θ_k - θ)

with weights that sum to 1 and the received A, B and θ. The right-hand side is exactly 0 where no
client has changed anything, so that a server optimizer which divides by small numbers (Adam) does
not amplify rounding errors. It streams: only sums are held, one dense matrix for each product.
"""

import jax
import jax.numpy as jnp

from fedjax_peft import tree
from fedjax_peft.lowrank import (
    empty_products,
    matmul,
    pairs,
    required_pairs,
    scale,
    weighted_product,
)
from fedjax_peft.typing import Aggregated, Aggregator, Params, PyTree

__all__ = ["PRODUCT", "product_changes", "with_products"]

PRODUCT = ".product"
"""Ends the name of a product: module path + ``.product``."""


def with_products(leaves: Params) -> Params:
    """Returns the leaves with each LoRA pair replaced by its product A·B, float32 ``[in, out]``."""
    found = pairs(leaves)
    factors = {name for pair in found.values() for name in pair}
    rest = {n: x for n, x in leaves.items() if n not in factors}
    return rest | {p + PRODUCT: matmul(leaves[a], leaves[b]) for p, (a, b) in found.items()}


def product_changes(base: Aggregator) -> Aggregator:
    """Returns the aggregator of the changes of products and of the other leaves.

    Its update is ``{"change": ..., "scale": ...}``: the change of every leaf of
    :func:`with_products`, and module path -> LoRA's s. Everything else is as ``base`` declares it.

    Raises:
      InputError: on use, a model without LoRA pairs.
    """

    def zero(template: Params, slots: int) -> PyTree:
        del slots
        found = required_pairs(template, base.name)
        first = {a for a, _ in found.values()}
        sums = {n: jnp.zeros(x.shape, jnp.float32) for n, x in template.items() if n not in first}
        weight = jnp.zeros((), jnp.float32)
        return {"sums": sums, "products": empty_products(template), "weight": weight}

    def add(
        acc: PyTree, uploads: Params, weights: jax.Array, slots: jax.Array, template: Params
    ) -> PyTree:
        del slots
        changes = {n: x - template[n][None] for n, x in uploads.items()}
        products = {
            path: acc["products"][path] + weighted_product(changes[a], uploads[b], weights)
            for path, (a, b) in pairs(template).items()
        }
        sums = {n: x + tree.weighted_sum(changes[n], weights) for n, x in acc["sums"].items()}
        return {"sums": sums, "products": products, "weight": acc["weight"] + jnp.sum(weights)}

    def finish(acc: PyTree, template: Params, fixed: Params) -> Aggregated:
        by = jnp.where(acc["weight"] > 0, acc["weight"], 1.0)
        change = {n: x / by for n, x in acc["sums"].items()}
        scales = {}
        for path, (a, b) in pairs(template).items():
            change[path + PRODUCT] = acc["products"][path] / by + matmul(template[a], change.pop(b))
            scales[path] = scale(fixed, path)
        return Aggregated({"change": change, "scale": scales}, {})

    return base._replace(zero=zero, add=add, finish=finish, linear=False)
