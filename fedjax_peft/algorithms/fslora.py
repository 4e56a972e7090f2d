"""FSLoRA (Fang et al. 2025): each client trains a random sketch of a large LoRA.

    client:  draw k_i of the r directions;  S = (r / k_i) diag(drawn or not)
             (A_i, B_i) ← optimizer steps on F_i at the weights  W + s A S B
             the directions that were not drawn stay as they were received
    server:  A ← A + Σ w_i (A_i - A),   B ← B + Σ w_i (B_i - B),   w_i = 1/K

S has the expectation I, and both gradients contain S: by A it is ``s G Bᵀ S``, by B ``s S Aᵀ G``
with the gradient G of the weight. A client computes with a LoRA of rank k_i, which holds its
columns of A and rows of B. The mean is over all K clients of a round, also in the directions that a
client did not draw. The model of the server is ``W + s A B``, with all directions.

Decisions where the paper is silent: it writes one matrix; here each adapted matrix draws its own
directions, the same for its A and B. (The authors' code draws them apart for A and for B, which
contradicts its text, and scales B while it trains, which is the same for SGD.) A new sketch is
drawn in every round and kept for its local steps. The clients' optimizer is any; directions that
were not drawn do not move, whatever it does. The head is trained and sent whole. A start from the
weights (``lora(init="svd")``) is possible, but a sketch then also drops directions of W.

The upload counts the drawn directions. Which they are need not be sent, because both sides can draw
them from one seed. The download is counted whole, though a client needs its directions only.

Written from the paper's abstract and the authors' code
(github.com/wenzhifang/Federated-Sketching-LoRA-Implementation), whose server has AdamW for the mean
change: that is not here. Checked against a loop over clients in NumPy.
"""

from collections.abc import Sequence
from typing import Annotated

import jax.numpy as jnp
from annotated_types import MinLen
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.common import Local, init_local, loss_beside, train
from fedjax_peft.algorithms.directions import drawn, moved_shares, only, own_rank
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def fslora(
    optimizer: c.Optimizer,
    *,
    ranks: Count | Annotated[Sequence[Count], MinLen(1)] = 2,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "uniform",
) -> c.Algorithm:
    """FSLoRA: each client trains and sends random directions of LoRA, scaled to keep the mean.

    Args:
      ranks: k_i, the directions of each matrix that a client draws in a round. A list gives each
        client its own; fewer entries than clients are repeated. More than the adapters have means
        all of them.

    Raises:
      InputError: a kept optimizer; on use, a model without LoRA, or ``client_ranks``.
    """

    def client(context: c.ClientContext) -> c.ClientUpdate:
        def init(broadcast: c.Params, private: c.Params, key: c.Key) -> Local:
            own = drawn(broadcast, own_rank(ranks, context.client), key)
            start = {"received": broadcast, "own": own}
            return init_local(optimizer, broadcast, private, start)

        def step(local: Local, batch: c.Batch, key: c.Key) -> tuple[Local, c.Metrics]:
            loss = loss_beside(context, _sketched(local.start["own"], context.fixed))
            return train(optimizer, context, local, batch, key, loss=loss)

        def final(local: Local) -> tuple[c.Params, c.Params]:
            upload = only(local.start["own"], local.shared, local.start["received"])
            return upload, local.private

        return c.ClientUpdate(init, step, final)

    algorithm = averaging("fslora", optimizer, head_roles(head), aggregator)
    return algorithm._replace(
        client=client,
        weights=weights,
        traffic=c.Traffic(sent_shares=moved_shares),
        check=lora_model("fslora"),
        incompatible={
            c.Feature.CLIENT_RANKS: "FSLoRA has ranks of its own, for directions that change from"
            " round to round: give fslora(ranks=...) the list instead.",
            c.Feature.KEPT_OPTIMIZER: "In FSLoRA a client draws other directions in every round, so"
            " moments of earlier rounds belong to other directions. Use 'fedavg'.",
        },
    )


def _sketched(own: dict[str, Array], fixed: c.Params) -> c.Params:
    """Returns LoRA's scales times the sketch: ``s r / k`` in the drawn directions, 0 in others."""
    scales = {}
    for path, mask in own.items():
        up = mask.shape[0] / jnp.sum(mask)
        scales[f"{path}.lora_scale"] = fixed[f"{path}.lora_scale"] * jnp.where(mask, up, 0.0)
    return scales
