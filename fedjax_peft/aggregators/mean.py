"""The weighted mean of uploads (FedAvg, McMahan et al. 2017; FedLR / FedIT on LoRA factors).

It sums the changes of the leaves, ``Σ w_k (θ_k - θ)``. The received leaves are added at the end, so
that entries that no client has changed stay the same bit for bit.
"""

import jax
import jax.numpy as jnp

from fedjax_peft.contracts.aggregator import Aggregated, Aggregator, Product, Total
from fedjax_peft.contracts.part import part
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Params, PyTree
from fedjax_peft.numerics.lowrank import matmul, pairs, scale
from fedjax_peft.numerics.measures.aggregation_error import error_metrics


@part
def mean(*, error: bool = True) -> Aggregator:
    """Weighted mean of everything that is shared: ``Σ w_k θ_k / Σ w_k``.

    The product of the mean LoRA factors is not the mean of the products.
    With ``error`` the exact difference ``ĀB̄ - Σ w_k A_k B_k`` is measured (FRA-LoRA, Eq 1). It
    costs the factors of all clients of the round, or one dense matrix for each adapted layer where
    that is smaller; the matrices are made at the end in any case. Where one factor is fixed, and so
    the same for all clients, the average is exact and the error 0.

    Args:
      error: measure the aggregation error of LoRA factors.
    """

    def lift(upload: Params, template: Params, fixed: Params) -> PyTree:
        changes = jax.tree.map(jnp.subtract, upload, template)
        # The error is computed from changes. It is of second order in them, so no large terms
        # cancel. E = Σ w dA_k dB_k - dĀ dB̄ does not depend on which matrices are subtracted.
        found = pairs(template) if error else {}
        products = {path: Product(changes[a], changes[b]) for path, (a, b) in found.items()}
        return {"changes": changes, "products": products}

    def finish(total: Total, template: Params, context: RoundContext, state: PyTree) -> Aggregated:
        some = total.weight > 0
        by = jnp.where(some, total.weight, 1.0)
        changes = total.value["changes"]
        new = {
            name: jnp.where(some, x + changes[name] / by, x).astype(x.dtype)
            for name, x in template.items()
        }
        if not error:
            return Aggregated(new, {}, state)
        fixed = context.fixed
        errors, exact = product_errors(total, new, template, fixed)
        known = {**fixed, **new}
        for path, (a, b) in pairs(known).items():
            if (a in template) != (b in template):
                errors[path] = jnp.zeros(())
                exact[path] = scale(fixed, path) * matmul(known[a], known[b])
        return Aggregated(new, error_metrics(errors, exact) if errors else {}, state)

    unmeasured = mean(error=False) if error else None
    return Aggregator("mean", lift, finish, linear=True, unmeasured=unmeasured)


def product_errors(
    total: Total, new: Params, template: Params, fixed: Params
) -> tuple[Params, Params]:
    """Returns the error ``s·ĀB̄ - Σ w_k s A_k B_k`` and the exact average, by module path.

    Args:
      total: the sum of :func:`mean`.
    """
    by = jnp.where(total.weight > 0, total.weight, 1.0)
    errors, exact = {}, {}
    for path, product in total.value["products"].items():
        a, b = pairs(template)[path]
        s = scale(fixed, path)
        errors[path] = s * (matmul(new[a] - template[a], new[b] - template[b]) - product / by)
        exact[path] = s * matmul(new[a], new[b]) - errors[path]
    return errors, exact
