"""LoRA-A² (Koo et al. 2025): B and A in turn, and each client sends its most important directions.

    odd rounds:   B_k ← optimizer steps on F_k(A, ·)       score of direction i in matrix m:
                                                             S_{m,i} = ‖ΔB_{k,m,i}‖ ‖A_{m,i}‖
    even rounds:  A_k ← optimizer steps on F_k(·, B)         S_{m,i} = ‖ΔA_{k,m,i}‖ ‖B_{m,i}‖
    client:       keep the r_k N directions with the largest scores of all N matrices together,
                  undo the change of the others, send the change of these
    server:       B ← B + Σ w_k ΔB_k   or   A ← A + Σ w_k ΔA_k

(Eq 1-3; the paper counts rounds from 0 and trains B in even ones.) The score is the Frobenius norm
of what the direction adds to the change of A B, a matrix of rank 1. r_k is the client's budget, in
directions for each matrix: a matrix that matters gets more of them than another. Averages are
exact, because one factor is the same for all, as in RoLoRA (``rolora``), which is this method with
a budget of the whole rank.

Decisions where the text at hand is silent or can be read in two ways: the paper selects directions
"for local training"; here the client trains all directions of the factor, which the scores need,
and the mask is put on the result ("multiplied with the updated" factor). Δ is the change of the
round's local work. Weights are those of FedAvg. ``rate_ratio`` is LoRA+'s ratio of the learning
rates of B and A, which the paper takes up without a number in this part: here 1. The head is
trained and sent in every round.

The upload counts the directions that changed, in the factor that was trained, and a bit for each
direction that says which they are. The download counts whole factors: directions of all clients.

This was written from sections of the paper's text (arXiv 2410.22815, versions 1 and 2; Eq 2 is read
from the words around it) and the authors' page. The authors published no code.
"""

from collections.abc import Sequence
from typing import Annotated

import jax.numpy as jnp
from annotated_types import MinLen
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.common import Local
from fedjax_peft.algorithms.directions import own_rank
from fedjax_peft.algorithms.fedavg import averaging, client
from fedjax_peft.algorithms.rolora import taking_turns, turn
from fedjax_peft.contracts.arguments import Count, Positive
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.lowrank import pairs
from fedjax_peft.numerics.roles import HeadPolicy, head_roles


@checked
def lora_a2(
    optimizer: c.Optimizer,
    *,
    budget: Count | Annotated[Sequence[Count], MinLen(1)] = 2,
    rate_ratio: Positive = 1.0,
    aggregator: c.Aggregator | None = None,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """LoRA-A²: B and A in turn; each client sends the directions that change its model most.

    Args:
      budget: directions that a client sends, on average over the adapted matrices; the paper tries
        1, 2, 4 and 8 of 16. A list gives each client its own; fewer entries than clients are
        repeated. More than the adapters have means all of them.
      rate_ratio: the learning rate of B divided by that of A, which is the optimizer's.

    Raises:
      InputError: a kept optimizer; on use, a model without LoRA.
    """

    def bound(context: c.ClientContext) -> c.ClientUpdate:
        on_b = context.round_index % 2 == 1
        faster = _faster_on_b(optimizer, rate_ratio)
        inner = client(faster, context, lambda name: turn(name, context.round_index))
        own = own_rank(budget, context.client)

        def init(broadcast: c.Params, private: c.Params, key: c.Key) -> Local:
            return inner.init(broadcast, private, key)._replace(start=broadcast)

        def final(local: Local) -> tuple[c.Params, c.Params]:
            return _selected(local.shared, local.start, own, on_b), local.private

        return c.ClientUpdate(init, inner.step, final)

    def sent_leaves(broadcast: c.Params, round_index: Array) -> dict[str, Array]:
        odd = round_index % 2 == 1
        found = pairs(broadcast).values()
        return {a: ~odd for a, _ in found} | {b: odd for _, b in found}

    algorithm = averaging("lora_a2", optimizer, head_roles(head), aggregator)
    return algorithm._replace(
        client=bound,
        weights=weights,
        traffic=c.Traffic(sent_leaves, _shares),
        check=lora_model("lora_a2"),
        incompatible=taking_turns("LoRA-A²"),
    )


def _shares(upload: c.Params, template: c.Params) -> dict[str, Array]:
    """Returns the shares of the factors that changed, with a bit for each direction."""
    shares = {}
    for pair in pairs(template).values():
        for name, axis in zip(pair, (0, 1), strict=True):
            changed = jnp.any(upload[name] != template[name], axis=axis)
            which = (len(changed) + 7) // 8 / tree.nbytes(template[name])
            shares[name] = jnp.mean(changed, dtype=jnp.float32) + which
    return shares


def _faster_on_b(optimizer: c.Optimizer, ratio: float) -> c.Optimizer:
    """Returns the optimizer that moves B by ``ratio`` times as much."""

    def update(gradient: c.Params, state: c.PyTree, params: c.Params | None = None) -> tuple:
        steps, state = optimizer.update(gradient, state, params)
        return {n: ratio * x if n.endswith(".lora_b") else x for n, x in steps.items()}, state

    return c.Optimizer(optimizer.init, update)


def _selected(upload: c.Params, received: c.Params, budget: Array, on_b: Array) -> c.Params:
    """Returns the upload with the received values in all but the most important directions.

    Args:
      budget: directions for each matrix, on average; an int32 scalar.
      on_b: whether B was trained, else A; a bool scalar.
    """
    found = pairs(upload)

    def norms(factor: Array, axis: int) -> Array:
        return jnp.sqrt(jnp.sum(factor.astype(jnp.float32) ** 2, axis=axis))

    scores = []
    for a, b in found.values():
        by_b = norms(upload[b] - received[b], 1) * norms(received[a], 0)
        by_a = norms(upload[a] - received[a], 0) * norms(received[b], 1)
        scores.append(jnp.where(on_b, by_b, by_a))
    order = jnp.argsort(-jnp.concatenate(scores))  # stable: the first of equal ones
    first = jnp.arange(len(order)) // len(found) < budget  # a product could overflow
    chosen = jnp.zeros(len(order), bool).at[order].set(first)
    new, start = dict(upload), 0
    for a, b in found.values():
        keep = chosen[start : start + upload[a].shape[1]]
        start += len(keep)
        new[a] = jnp.where(keep[None], upload[a], received[a])
        new[b] = jnp.where(keep[:, None], upload[b], received[b])
    return new
