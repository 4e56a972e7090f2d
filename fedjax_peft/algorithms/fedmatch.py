"""FedMatch (Chen et al. 2021): a shared backbone, and a private patch for every client.

    client:  θ_k ← θ;  for each local step:  (θ_k, p_k, head_k) ← optimizer step on F_k
    server:  θ ← (1/|S|) Σ θ_k;  the patch p_k and the head never leave the client

As FedMCP's (Zhao et al. 2024) baseline: shared is the global one of two adapters at every site,
the patch is the private one, and both run together. FedMCP's table gives this baseline the traffic
of two adapters; with a private patch it is one. The mean without weights, the private patch and the
private prediction layer are those of the authors' code for question answering.
"""

import optax

from fedjax_peft.algorithms.checks import checked, dual_adapters
from fedjax_peft.algorithms.common import Weights
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.roles import HeadPolicy, dual_roles
from fedjax_peft.typing import Aggregator, Algorithm

__all__ = ["fedmatch"]


@checked
def fedmatch(
    optimizer: optax.GradientTransformation,
    *,
    aggregator: Aggregator | None = None,
    head: HeadPolicy = "private",
    weights: Weights = "uniform",
) -> Algorithm:
    """FedMatch: one adapter for all and a private one, trained together (needs ``dual``).

    Args:
      optimizer: the clients' optimizer.
      aggregator: how the global adapters combine; by default their mean.
    """
    algorithm = averaging("fedmatch", optimizer, dual_roles(head), aggregator)
    return algorithm._replace(weights=weights, check=dual_adapters("fedmatch"))
