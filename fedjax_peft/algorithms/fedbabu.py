"""FedBABU (Oh et al. 2022): the body is trained with a head that keeps its random initial values.

    client:  body_k ← optimizer steps on F_k, with the same fixed head for all clients
    server:  body ← Σ w_k body_k, w_k ∝ n_k
    after the last round:  every client fine-tunes its head, or everything, on its own data

The body is the adapters here. The fine-tuning is a separate run of one round, which starts from the
result of the first run::

    run = fp.simulate(model, fp.algorithms.fedbabu(optimizer), clients, rounds=100, ...)
    own = fp.algorithms.local(optimizer, train="head")
    tuned = fp.simulate(run.trained, own, clients, rounds=1, clients_per_round=len(clients), ...)
"""

from typing import Literal

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.numerics.roles import head_roles


@checked
def fedbabu(
    optimizer: c.Optimizer,
    *,
    aggregator: c.Aggregator | None = None,
    head: Literal["frozen"] = "frozen",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """FedBABU: adapters are averaged under a fixed random head; fine-tune with local at the end.

    Args:
      aggregator: how adapters combine; by default their mean.
      head: only ``frozen``, which defines the algorithm.
    """
    return averaging("fedbabu", optimizer, head_roles(head), aggregator, weights=weights)
