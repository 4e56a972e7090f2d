"""The exact average change of LoRA products, for servers that optimise the product itself.

    change of a product   Σ w_k (A_k B_k - A B)  =  Σ w_k (A_k - A) B_k  +  A Σ w_k (B_k - B)
    change of a leaf      Σ w_k (θ_k - θ)

The weights sum to 1; A, B and θ are the received leaves. The right-hand side is exactly 0 where no
client has changed anything. So a server optimizer that divides by small numbers (Adam) does not
amplify rounding errors. The uploads are streamed: one dense matrix is held for each product, or the
factors of all clients where these are smaller. A robust aggregator of products gives its own change
instead.
"""

import jax.numpy as jnp

from fedjax_peft.contracts.aggregator import Aggregated, Aggregator, Product, Total
from fedjax_peft.contracts.server import RoundContext
from fedjax_peft.contracts.types import Params, PyTree
from fedjax_peft.numerics.lowrank import matmul, pairs, required_pairs, scale

PRODUCT = ".product"
"""Suffix of the name of a product: module path + ``.product``."""


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
    if base.finish_products is not None:
        return base._replace(finish=base.finish_products)

    def lift(upload: Params, template: Params, fixed: Params) -> PyTree:
        changes = {n: x - template[n] for n, x in upload.items()}
        products = {
            path: Product(changes.pop(a), upload[b])
            for path, (a, b) in required_pairs(template, base.name).items()
        }
        return {"changes": changes, "products": products}

    def finish(total: Total, template: Params, context: RoundContext, state: PyTree) -> Aggregated:
        by = jnp.where(total.weight > 0, total.weight, 1.0)
        change = {n: x / by for n, x in total.value["changes"].items()}
        scales = {}
        for path, (a, b) in pairs(template).items():
            moved = matmul(template[a], change.pop(b))
            change[path + PRODUCT] = total.value["products"][path] / by + moved
            scales[path] = scale(context.fixed, path)
        return Aggregated({"change": change, "scale": scales}, {}, state)

    def whole(upload: Params, template: Params, fixed: Params) -> PyTree:
        """Lifts with one entry for each product: ``[A_k - A, A] [B_k; B_k - B]``."""
        changes = {n: x - template[n] for n, x in upload.items()}
        products = {}
        for path, (a, b) in required_pairs(template, base.name).items():
            left = jnp.concatenate([changes.pop(a), template[a]], axis=1)
            products[path] = Product(left, jnp.concatenate([upload[b], changes.pop(b)], axis=0))
        return {"changes": changes, "products": products}

    def finish_whole(
        total: Total, template: Params, context: RoundContext, state: PyTree
    ) -> Aggregated:
        by = jnp.where(total.weight > 0, total.weight, 1.0)
        change = {n: x / by for n, x in total.value["changes"].items()}
        change |= {path + PRODUCT: x / by for path, x in total.value["products"].items()}
        scales = {path: scale(context.fixed, path) for path in pairs(template)}
        return Aggregated({"change": change, "scale": scales}, {}, state)

    plain = base._replace(
        init=lambda template: (), needs_all_uploads=False, linear=False, unmeasured=None
    )
    return plain._replace(
        lift=lift, finish=finish, unmeasured=plain._replace(lift=whole, finish=finish_whole)
    )
