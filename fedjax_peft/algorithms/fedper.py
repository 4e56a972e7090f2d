"""FedPer (Arivazhagan et al. 2019): a common body, and one head for every client.

    client:  (body, head_k) ← optimizer steps on F_k, both together
    server:  body ← Σ w_k body_k, w_k ∝ n_k;  head_k never leaves the client

The paper's body is the network up to its last layers; here it is the adapters, because the
rest is frozen. This is FedAvg with a private head, under its name in the literature.
"""

from typing import Literal

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.numerics.roles import head_roles


@checked
def fedper(
    optimizer: c.Optimizer,
    *,
    aggregator: c.Aggregator | None = None,
    head: Literal["private"] = "private",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """FedPer: adapters are averaged, every client has its own head.

    Args:
      aggregator: how adapters combine; by default their mean.
      head: only ``private``, which defines the algorithm.
    """
    return averaging("fedper", optimizer, head_roles(head), aggregator, weights=weights)
