"""HetLoRA's aggregation (Cho et al. 2024): zero-padded factors, weighted by what they hold.

    A = Σ p_k A_k,   B = Σ p_k B_k,   p_k = ‖A_k B_k‖_F / Σ_j ‖A_j B_j‖_F

Clients of a small rank have zeros in the directions that they lack; a product of small norm, which
says little, gets a small weight. The paper writes this for one matrix and does not say what happens
with many: here every adapted matrix has weights of its own. What is not a LoRA pair (a head) has no
such norm and is averaged by the weights of the clients. Where all products are zero those weights
serve the factors too.

From the paper's description and two public reimplementations; the published code of FlexLoRA's
authors weights by size instead.
"""

import jax
import jax.numpy as jnp

from fedjax_peft import tree
from fedjax_peft.lowrank import (
    empty_products,
    matmul,
    pairs,
    product_norms,
    required_pairs,
    scale,
    weighted_product,
)
from fedjax_peft.measures.aggregation_error import error_metrics
from fedjax_peft.typing import Aggregated, Aggregator, Params, PyTree

__all__ = ["hetlora"]

FAINT = 1e-20
"""Of a client's plain weight in that of its product: it counts only where all products are 0."""


def hetlora(*, error: bool = True) -> Aggregator:
    """HetLoRA: mean of zero-padded LoRA factors, weighted by the norms of their products.

    Args:
      error: measure the error, against the average of the products by the same weights.

    Raises:
      InputError: on use, a model without LoRA pairs.
    """

    def zero(template: Params, slots: int) -> PyTree:
        del slots
        found = required_pairs(template, "hetlora")
        none = jnp.zeros((), jnp.float32)
        return {
            "sums": {n: jnp.zeros(x.shape, jnp.float32) for n, x in template.items()},
            "weight": none,
            "norms": dict.fromkeys(found, none),
            "products": empty_products(template) if error else {},
        }

    def add(
        acc: PyTree, uploads: Params, weights: jax.Array, slots: jax.Array, template: Params
    ) -> PyTree:
        del slots
        found = pairs(template)
        by = dict.fromkeys(template, weights)
        norms, products = {}, {}
        for path, (a, b) in found.items():
            own = product_norms(uploads[a], uploads[b])
            own = jnp.where(weights > 0, own, 0.0) + FAINT * weights
            by[a] = by[b] = own
            norms[path] = acc["norms"][path] + jnp.sum(own)
            if error:
                added = weighted_product(uploads[a], uploads[b], own)
                products[path] = acc["products"][path] + added
        sums = {n: acc["sums"][n] + tree.weighted_sum(x, by[n]) for n, x in uploads.items()}
        weight = acc["weight"] + jnp.sum(weights)
        return {"sums": sums, "weight": weight, "norms": norms, "products": products}

    def finish(acc: PyTree, template: Params, fixed: Params) -> Aggregated:
        some = acc["weight"] > 0
        found = pairs(template)
        by = dict.fromkeys(template, acc["weight"])
        for path, (a, b) in found.items():
            by[a] = by[b] = acc["norms"][path]
        result = {
            n: jnp.where(some, acc["sums"][n] / jnp.where(some, by[n], 1.0), x).astype(x.dtype)
            for n, x in template.items()
        }
        errors, exact = {}, {}
        for path, product in acc["products"].items():
            a, b = found[path]
            s = scale(fixed, path)
            exact[path] = s * product / jnp.where(some, by[a], 1.0)
            used = s * matmul(result[a], result[b])
            errors[path] = jnp.where(some, used - exact[path], 0.0)
        return Aggregated(result, error_metrics(errors, exact) if errors else {})

    return Aggregator("hetlora", zero, add, finish, unmasked_policy="zero")
