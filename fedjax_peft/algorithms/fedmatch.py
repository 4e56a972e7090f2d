"""FedMatch (Chen et al. 2021): a shared backbone, and a private patch for every client.

    client:  θ_k ← θ;  for each local step:  (θ_k, p_k, head_k) ← optimizer step on F_k
    server:  θ ← (1/|S|) Σ θ_k;  the patch p_k and the head never leave the client

This is the baseline of FedMCP (Zhao et al. 2024). Every site has two adapters that run together:
the global one is shared, the private one is the patch. FedMCP's table counts the traffic of two
adapters for this baseline; with a private patch it is one. The unweighted mean, the private patch
and the private prediction layer follow the authors' code for question answering.
"""

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, dual_adapters
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.numerics.roles import HeadPolicy, dual_roles


@checked
def fedmatch(
    optimizer: c.Optimizer,
    *,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "private",
    weights: c.Weights = "uniform",
) -> c.Algorithm:
    """FedMatch: a global and a private adapter, trained together (needs ``dual``).

    Args:
      aggregator: how the global adapters combine; by default their mean.
    """
    rules, check = dual_roles(head), dual_adapters("fedmatch")
    return averaging("fedmatch", optimizer, rules, aggregator, weights=weights, check=check)
