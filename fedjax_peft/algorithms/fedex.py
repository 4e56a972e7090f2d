"""FedEx-LoRA (Singhal et al. 2025): average the factors, fold the error into the frozen weight.

    client:  (A_k, B_k) ← optimizer steps on F_k from (A, B)
    server:  A ← Σ w_k A_k,   B ← Σ w_k B_k
             W ← W + s (Σ w_k A_k B_k - A B)                  so that W + s A B is the exact average

The paper averages with equal weights w_k = 1/K, and so does the default here. The rank of the
residual is at most the rank of all factors stacked, so the server sends the factors of all clients
to every client. The residual is computed from the changes since the broadcast. It is of second
order in them, so no large terms cancel.

Clients of different ranks are refused: the residual would add directions to a client's frozen
weight that the client does not own. This was checked against the authors' code, which has
transposes only because of its weight layout.
"""

import jax
import jax.numpy as jnp

from fedjax_peft import contracts as c
from fedjax_peft.aggregators import mean
from fedjax_peft.aggregators.mean import product_errors
from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.common import merge_into_frozen
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.numerics.lowrank import required_pairs
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def fedex(
    optimizer: c.Optimizer,
    *,
    head: HeadPolicy = "shared",
    weights: c.Weights = "uniform",
) -> c.Algorithm:
    """FedEx-LoRA: factors are averaged, their error is folded into the frozen weights; exact.

    The metric ``residual`` is the Frobenius norm of the residual that a round folds in.

    Raises:
      InputError: on use, a model without LoRA, or with more than LoRA; ``client_ranks``.
    """
    algorithm = averaging("fedex", optimizer, head_roles(head), _with_residual())
    return algorithm._replace(
        server=merge_into_frozen(),
        weights=weights,
        traffic=c.Traffic(relayed_leaves=r"\.lora_[ab]$"),
        check=lora_model("fedex", alone=True),
    )


def _with_residual() -> c.Aggregator:
    """Returns the mean whose update is ``{"model": means, "fold": residuals by module path}``."""
    inner = mean()

    def lift(upload: c.Params, template: c.Params, fixed: c.Params) -> c.PyTree:
        required_pairs(template, "fedex")
        return inner.lift(upload, template, fixed)

    def finish(
        total: c.Total, template: c.Params, context: c.RoundContext, state: c.PyTree
    ) -> c.Aggregated:
        averaged = inner.finish(total, template, context, state)
        errors, _ = product_errors(total, averaged.update, template, context.fixed)
        metrics = {
            "residual": averaged.metrics["aggregation_error"],
            "residual_relative": averaged.metrics["aggregation_error_relative"],
        }
        residuals = jax.tree.map(jnp.negative, errors)
        return c.Aggregated({"model": averaged.update, "fold": residuals}, metrics, state)

    return c.Aggregator("fedex", lift, finish, unmasked_policy="refused")
