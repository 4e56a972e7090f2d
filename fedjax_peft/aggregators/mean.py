"""The weighted mean of uploads (FedAvg, McMahan et al. 2017; FedLR / FedIT on LoRA factors)."""

import jax
import jax.numpy as jnp

from fedjax_peft import tree
from fedjax_peft.lowrank import empty_products, matmul, pairs, scale, weighted_product
from fedjax_peft.measures.aggregation_error import error_metrics
from fedjax_peft.typing import Aggregated, Aggregator, Params, PyTree

__all__ = ["mean", "product_errors"]


def mean(*, error: bool = True) -> Aggregator:
    """Weighted mean of everything that is shared: ``Σ w_k θ_k / Σ w_k``.

    Averaging LoRA's factors one by one is not averaging the updates that they stand for. With
    ``error`` the exact difference ``B̄Ā - Σ w_k B_k A_k`` is measured (FRA-LoRA, Eq 1), at the cost
    of one dense matrix for each adapted layer; nothing grows with the number of clients. Where one
    factor is fixed, and so the same for all, the average is exact and the error 0.

    Args:
      error: measure the aggregation error of LoRA factors.
    """

    def zero(template: Params, slots: int) -> PyTree:
        del slots
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), template)
        products = empty_products(template) if error else {}
        return {"sums": sums, "weight": jnp.zeros((), jnp.float32), "products": products}

    def add(
        acc: PyTree, uploads: Params, weights: jax.Array, slots: jax.Array, template: Params
    ) -> PyTree:
        del slots
        # Of what changed: what nobody changed then stays as it is, bit for bit.
        changes = jax.tree.map(lambda x, y: x - y[None], uploads, template)
        sums = jax.tree.map(jnp.add, acc["sums"], tree.weighted_sum(changes, weights))
        products = {}
        for path, total in acc["products"].items():
            # Moved to the broadcast's frame: the error is second order in these, so nothing
            # cancels. E = Σ w dA_k dB_k - dĀ dB̄ is the same in every frame.
            a, b = pairs(template)[path]
            products[path] = total + weighted_product(changes[a], changes[b], weights)
        return {"sums": sums, "weight": acc["weight"] + jnp.sum(weights), "products": products}

    def finish(acc: PyTree, template: Params, fixed: Params) -> Aggregated:
        total = acc["weight"]
        some = total > 0
        by = jnp.where(some, total, 1.0)
        result = {
            name: jnp.where(some, x + acc["sums"][name] / by, x).astype(x.dtype)
            for name, x in template.items()
        }
        if not error:
            return Aggregated(result, {})
        errors, exact = product_errors(acc, result, template, fixed)
        known = {**fixed, **result}
        for path, (a, b) in pairs(known).items():
            if (a in template) != (b in template):
                errors[path] = jnp.zeros(())
                exact[path] = scale(fixed, path) * matmul(known[a], known[b])
        return Aggregated(result, error_metrics(errors, exact) if errors else {})

    return Aggregator("mean", zero, add, finish, linear=True)


def product_errors(
    acc: PyTree, new: Params, template: Params, fixed: Params
) -> tuple[Params, Params]:
    """Returns the error ``s·ĀB̄ - Σ w_k s A_k B_k`` and the exact average, by module path.

    Args:
      acc: of :func:`mean`.
      new: its means.
      like: the broadcast.
      fixed: LoRA's scales among others.
    """
    by = jnp.where(acc["weight"] > 0, acc["weight"], 1.0)
    errors, exact = {}, {}
    for path, product in acc["products"].items():
        a, b = pairs(template)[path]
        s = scale(fixed, path)
        errors[path] = s * (matmul(new[a] - template[a], new[b] - template[b]) - product / by)
        exact[path] = s * matmul(new[a], new[b]) - errors[path]
    return errors, exact
