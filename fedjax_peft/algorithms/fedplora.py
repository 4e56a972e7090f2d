"""Fed-PLoRA (Zhang et al. 2026): each client trains some of R parallel LoRAs of rank one.

    s A B = Σ_j s a_j b_j          a_j: column j of A, b_j: row j of B          (PLoRA, j = 1 … R)
    client:  draw r_i of the R directions, K_i                                  (Select-N-Fold)
             W_i = W + Σ_{j not in K_i} s a_j b_j                                    (fold)
             (a_ij, b_ij), j in K_i  ←  optimizer steps on F_i at  W_i + Σ_{j in K_i} s a_ij b_ij
    server:  a_j ← mean of a_ij,  b_j ← mean of b_ij        over the clients i that drew j
             a direction that nobody drew stays as it was

Every client starts from the whole model of the server, whatever its rank. What it does not train is
a part of its frozen weights. Here that part stays in A and B, without gradient, which is the same
weight. With r_i = R this is FedAvg over LoRA (FedIT), up to weights. FSLoRA (``fslora``) also draws
directions, but leaves the others out while it trains, and its mean is over all clients.

Decisions where the text at hand is silent: each adapted matrix draws its own directions, anew in
every round. The mean is unweighted, as 1/|Q_j| in the paper; ``weights="size"`` weighs the clients
of a direction by their examples. s is the same for all clients: α/R. The head is trained and
averaged over all clients. Directions that a client did not draw do not move, whatever the optimizer
does.

The upload counts the drawn directions; which they are both sides can draw from one seed. The
download counts all R of them, as in the paper.

The full text of the paper could not be read. This was written from its abstract and two public
summaries with its formulas (§3.2-3.5), and checked against a loop over clients and directions in
NumPy. The authors' code (github.com/TNI-playground/Fed-PLoRA) could not be had.
"""

from collections.abc import Sequence
from typing import Annotated

import jax.numpy as jnp
from annotated_types import MinLen
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.common import Local, init_local, replace_server, train
from fedjax_peft.algorithms.directions import Directions, drawn, only, own_rank
from fedjax_peft.contracts.arguments import Count
from fedjax_peft.numerics.lowrank import pairs, required_pairs
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def fedplora(
    optimizer: c.Optimizer,
    *,
    ranks: Count | Annotated[Sequence[Count], MinLen(1)] = 2,
    head: HeadPolicy = "shared",
    weights: c.Weights = "uniform",
) -> c.Algorithm:
    """Fed-PLoRA: each client trains random directions of LoRA beside the others, which rest.

    Args:
      ranks: r_i, the directions of each matrix that a client draws in a round. A list gives each
        client its own; fewer entries than clients are repeated. More than the adapters have means
        all of them.

    Raises:
      InputError: a kept optimizer; on use, a model without LoRA, or ``client_ranks``.
    """
    server = replace_server()._replace(
        update=lambda state, new, context: new["model"],
        template=lambda state: {"model": state, "own": _nobody(state)},
    )
    return c.Algorithm(
        "fedplora",
        head_roles(head),
        lambda context: _client(optimizer, context, ranks),
        c.Aggregator("fedplora", _lift, _finish),
        server,
        local_model=lambda broadcast, upload, private: {**upload["model"], **private},
        weights=weights,
        traffic=c.Traffic(sent_shares=_shares, change_field="model"),
        check=lora_model("fedplora"),
        incompatible={
            c.Feature.CLIENT_RANKS: "Fed-PLoRA has ranks of its own, for directions that change"
            " from round to round: give fedplora(ranks=...) the list instead.",
            c.Feature.CLIENT_PRIVACY: "Fed-PLoRA divides the sum of each direction by the number of"
            " clients that drew it, and so noise on the sum would be larger for some directions"
            " than it is counted for. Use 'fslora', whose mean is over all clients.",
            c.Feature.ASYNCHRONY: "In Fed-PLoRA a direction is the mean of those clients of one"
            " round that drew it. Use 'fslora', which averages changes.",
            c.Feature.KEPT_OPTIMIZER: "In Fed-PLoRA a client draws other directions in every round,"
            " so moments of earlier rounds belong to other directions. Use 'fedavg'.",
        },
    )


def _client(
    optimizer: c.Optimizer, context: c.ClientContext, ranks: int | Sequence[int]
) -> c.ClientUpdate:
    def init(broadcast: c.Params, private: c.Params, key: c.Key) -> Local:
        own = drawn(broadcast, own_rank(ranks, context.client), key)
        return init_local(optimizer, broadcast, private, {"received": broadcast, "own": own})

    def step(local: Local, batch: c.Batch, key: c.Key) -> tuple[Local, c.Metrics]:
        def loss(params: c.Params, batch: c.Batch, key: c.Key) -> tuple[Array, c.Metrics]:
            return context.objective(_folded(params, local), batch, key)

        return train(optimizer, context, local, batch, key, loss=loss)

    def final(local: Local) -> tuple[c.PyTree, c.Params]:
        own = {path: mask.astype(jnp.float32) for path, mask in local.start["own"].items()}
        return {"model": _folded(local.shared, local), "own": own}, local.private

    return c.ClientUpdate(init, step, final)


def _folded(leaves: c.Params, local: Local) -> c.Params:
    """Returns the leaves with the received values in the directions that rest."""
    return only(local.start["own"], leaves, local.start["received"])


def _nobody(shared: c.Params) -> Directions:
    """Returns module path -> which directions a client draws that trains none, float32 ``[r]``."""
    return {path: jnp.zeros(shared[a].shape[1]) for path, (a, _) in pairs(shared).items()}


def _lift(upload: c.PyTree, template: c.PyTree, fixed: c.Params) -> c.PyTree:
    model, own = upload["model"], upload["own"]
    changes = {n: x - template["model"][n] for n, x in model.items()}
    for path, (a, b) in required_pairs(model, "fedplora").items():
        changes[a], changes[b] = changes[a] * own[path][None], changes[b] * own[path][:, None]
    return {"changes": changes, "own": own}


def _finish(
    total: c.Total, template: c.PyTree, context: c.RoundContext, state: c.PyTree
) -> c.Aggregated:
    model, changes = template["model"], total.value["changes"]
    by = dict.fromkeys(model, total.weight)
    for path, (a, b) in pairs(model).items():
        by[a], by[b] = total.value["own"][path][None], total.value["own"][path][:, None]
    new = {
        n: jnp.where(by[n] > 0, x + changes[n] / jnp.where(by[n] > 0, by[n], 1.0), x).astype(
            x.dtype
        )
        for n, x in model.items()
    }
    return c.Aggregated({"model": new, "own": template["own"]}, {})


def _shares(upload: c.PyTree, template: c.PyTree) -> dict[str, Array]:
    """Returns the share of the factors that a client drew, and 0 for which they are."""
    shares = dict.fromkeys(upload["own"], jnp.zeros(()))
    for path, (a, b) in pairs(upload["model"]).items():
        shares[a] = shares[b] = jnp.mean(upload["own"][path])
    return shares
