"""HetLoRA's aggregation (Cho et al. 2024): zero-padded factors, weighted by product norms.

    A = Σ p_k A_k,   B = Σ p_k B_k,   p_k = ‖A_k B_k‖_F / Σ_j ‖A_j B_j‖_F

Clients of a small rank have zeros in the directions that they lack. A product of small norm carries
little information and gets a small weight. The paper defines this for one matrix and does not
specify it for several: here every adapted matrix has its own weights. Leaves outside of LoRA pairs
(a head) have no product norm; they are averaged with the clients' weights. If all products are
zero, the factors are averaged with the clients' weights too.

This follows the paper's description and two public reimplementations. The published code of
FlexLoRA's authors uses weights by size instead.
"""

import jax.numpy as jnp

from fedjax_peft.contracts.aggregator import Aggregated, Aggregator, Product, Total, Weighted
from fedjax_peft.contracts.part import part
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Params, PyTree
from fedjax_peft.numerics.lowrank import factors_apart, matmul, pairs, product_norms, scale
from fedjax_peft.numerics.measures.aggregation_error import error_metrics


@part
def hetlora(*, error: bool = True) -> Aggregator:
    """HetLoRA: mean of zero-padded LoRA factors, weighted by the norms of their products.

    Args:
      error: measure the error against the average of the products with the same weights.

    Raises:
      InputError: on use, a model without LoRA pairs.
    """

    def lift(upload: Params, template: Params, fixed: Params) -> PyTree:
        rest, factors = factors_apart(upload, "hetlora")
        matrices = {}
        for path, (a, b) in factors.items():
            value: PyTree = {"a": a, "b": b}
            if error:
                value["product"] = Product(a, b)
            matrices[path] = Weighted(product_norms(a[None], b[None])[0], value)
        return {"rest": rest, "matrices": matrices}

    def finish(total: Total, template: Params, context: RoundContext, state: PyTree) -> Aggregated:
        some = total.weight > 0
        matrices, found = total.value["matrices"], pairs(template)
        sums, by = dict(total.value["rest"]), dict.fromkeys(template, total.weight)
        for path, (a, b) in found.items():
            sums[a], sums[b] = matrices[path].value["a"], matrices[path].value["b"]
            by[a] = by[b] = matrices[path].weight
        new = {
            n: jnp.where(some, sums[n] / jnp.where(some, by[n], 1.0), x).astype(x.dtype)
            for n, x in template.items()
        }
        if not error:
            return Aggregated(new, {}, state)
        errors, exact = {}, {}
        for path, (a, b) in found.items():
            s = scale(context.fixed, path)
            exact[path] = s * matrices[path].value["product"] / jnp.where(some, by[a], 1.0)
            used = s * matmul(new[a], new[b])
            errors[path] = jnp.where(some, used - exact[path], 0.0)
        return Aggregated(new, error_metrics(errors, exact), state)

    return Aggregator("hetlora", lift, finish, unmasked_policy="zero")
