"""FLoRA (Wang et al. 2024): stack the clients' factors, fold their product into the frozen weight.

    client:  A_k ← new random values, B_k ← 0;  (A_k, B_k) ← optimizer steps on F_k
    server:  W ← W + s Σ w_k A_k B_k  =  W + s [w_1 A_1 … w_K A_K] [B_1; …; B_K]

Stacked factors of any ranks multiply to the exact average. Every client receives the whole stack,
folds it into its frozen weight and starts anew, so the downlink has rank Σ r_k. The simulation sums
the dense product instead, one matrix for each layer, which gives the same result.

The new values have the distribution of the adapter's start, whatever its ``init`` was: each entry
of A_k is drawn from those of the same column of the initial A, with replacement.

If B ≠ 0 at the start (FeDeRA, or a trained adapter), clients start from the received A and B: they
are part of the model until the first fold. Afterwards the global model's B is 0.

This was checked against the authors' formulas. The branch without stacking in their code averages
one client only, so it was not used for a comparison.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.common import merge_into_frozen
from fedjax_peft.algorithms.fedavg import client
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.lowrank import factors_apart, pairs, product_norms, scale
from fedjax_peft.numerics.random import stream
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def flora(
    optimizer: c.Optimizer,
    *,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """FLoRA: stacked LoRA factors of any ranks, folded into the frozen weights; exact.

    Raises:
      InputError: a kept optimizer; on use, a model without LoRA, or with more than LoRA.
    """

    def bound(context: c.ClientContext) -> c.ClientUpdate:
        inner = client(optimizer, context)

        def init(broadcast: c.Params, private: c.Params, key: c.Key) -> c.PyTree:
            return inner.init(_restarted(broadcast, key), private, key)

        return inner._replace(init=init)

    return c.Algorithm(
        "flora",
        head_roles(head),
        bound,
        _stacking(),
        merge_into_frozen()._replace(update_norm=_update_norm),
        weights=weights,
        traffic=c.Traffic(relayed_leaves=r"\.lora_[ab]$", redrawn_leaves=r"\.lora_[ab]$"),
        check=lora_model("flora", alone=True),
        incompatible={
            c.Feature.KEPT_OPTIMIZER: "In FLoRA every client starts each round from a random A of"
            " its own and B = 0, so gradients of earlier rounds belong to other factors. Use"
            " 'fedex' or 'fedavg'.",
            c.Feature.TRANSFORMS: "In FLoRA every client starts from a random A of its own, and"
            " uploads are stacked: what a client sends minus what it received is not what it"
            " learned. Use 'fedex' or 'fedavg'.",
        },
    )


def _restarted(broadcast: c.Params, key: c.Key) -> c.Params:
    """Returns the leaves with a random A, distributed as the initial A, wherever B is 0."""
    new = dict(broadcast)
    for a, b in pairs(broadcast).values():
        initial = broadcast[a]  # the server never changes it
        rows = jax.random.randint(stream(key, a), initial.shape, 0, len(initial))
        fresh = jnp.take_along_axis(initial, rows, axis=0)
        new[a] = jnp.where(jnp.any(broadcast[b] != 0), initial, fresh)
    return new


def _update_norm(upload: c.Params, template: c.Params, fixed: c.Params) -> Array:
    """Returns the norm of the change of the products ``s·AB`` and of all other leaves.

    A change of the factors means little: every client has a different random A.
    """
    found = pairs(template)
    factors = {name for pair in found.values() for name in pair}
    rest = [name for name in template if name not in factors]
    squares = tree.distance(tree.select(upload, rest), tree.select(template, rest)) ** 2
    for path, (a, b) in found.items():
        # A_k B_k - A B = A_k (B_k - B) + (A_k - A) B: exactly 0 where nothing was learned.
        left = jnp.concatenate([upload[a], upload[a] - template[a]], axis=1)
        right = jnp.concatenate([upload[b] - template[b], template[b]], axis=0)
        squares += (scale(fixed, path) * product_norms(left[None], right[None])[0]) ** 2
    return jnp.sqrt(squares)


def _stacking() -> c.Aggregator:
    """Returns the aggregator that sums products exactly and averages the other leaves.

    Its update is ``{"model": leaves with B = 0, "fold": s Σ w_k A_k B_k by module path}``.
    """

    def lift(upload: c.Params, template: c.Params, fixed: c.Params) -> c.PyTree:
        rest, factors = factors_apart(upload, "flora")
        return {"rest": rest, "products": {p: c.Product(*ab) for p, ab in factors.items()}}

    def finish(
        total: c.Total, template: c.Params, context: c.RoundContext, state: c.PyTree
    ) -> c.Aggregated:
        some = total.weight > 0
        by = jnp.where(some, total.weight, 1.0)
        new = {
            n: jnp.where(some, x / by, template[n]).astype(template[n].dtype)
            for n, x in total.value["rest"].items()
        }
        products = total.value["products"]
        folded = {p: scale(context.fixed, p) * x / by for p, x in products.items()}
        for a, b in pairs(template).values():
            new[a], new[b] = template[a], jnp.where(some, 0, template[b])
        return c.Aggregated({"model": new, "fold": folded}, {}, state)

    return c.Aggregator("flora", lift, finish, unmasked_policy="zero")
