"""HetLoRA (Cho et al. 2024): clients of different LoRA ranks, which may prune themselves.

    client:  (A_k, B_k) ← (A, B), the directions beyond its rank r_k set to zero
             optimizer steps on F_k + λ ‖A_{k,tail}‖ ‖B_{k,tail}‖,   tail: directions ⌊γ r_k⌋ … r_k
             if ‖A_tail‖ ‖B_tail‖ is now below what it was at the start:  r_k ← ⌊γ r_k⌋, at least 1
    server:  (A, B) ← Σ p_k (A_k, B_k),   p_k ∝ ‖A_k B_k‖_F         (:func:`aggregators.hetlora`)

The initial ranks are ``client_ranks``. The paper defines this for one matrix; here every matrix has
its own rank in the client's state. A direction whose A and B are both zero has no gradient, so
setting both to zero removes it. A direction is no longer sent from the round in which it is pruned.
Norms are Frobenius norms, and the penalty is the sum over matrices.

The upload counts the directions that a client still has; the download those of ``client_ranks``.

This follows the paper's description and two public reimplementations. The authors published no
code.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import aggregators
from fedjax_peft import contracts as c
from fedjax_peft.algorithms.checks import checked, lora_model
from fedjax_peft.algorithms.common import Local, add_to_gradient, init_local, replace_server, train
from fedjax_peft.algorithms.fedavg import averaging
from fedjax_peft.contracts.arguments import NotNegative, Probability
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.hyperparameters import maybe_nonzero
from fedjax_peft.numerics.lowrank import pairs
from fedjax_peft.numerics.roles import HeadPolicy, head_roles
from fedjax_peft.support.errors import InputError

Ranks = dict[str, Array]
"""Module path -> rank, int32."""


@checked
def hetlora(
    optimizer: c.Optimizer,
    *,
    aggregator: c.Aggregator | None = None,
    prune: Probability | None = None,
    penalty: NotNegative = 0.0,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """HetLoRA: clients of different ranks, weighted by their products; ranks may shrink.

    Args:
      aggregator: how uploads combine; by default zero-padded and weighted by product norms.
      prune: γ, the share of its rank that a client keeps when it prunes; by default ranks stay.
      penalty: λ, the weight of the norms of the directions that would be pruned.
      weights: the weights of clients in the aggregate of all leaves but LoRA's factors.

    Raises:
      InputError: ``penalty`` without ``prune``, or a kept optimizer with it; on use, a model
        without LoRA.
    """
    if prune is None and maybe_nonzero(penalty):
        raise InputError("penalty is on the directions that prune would drop: set prune too.")
    check, combine = lora_model("hetlora"), aggregator or aggregators.hetlora()
    if prune is None:
        return averaging(
            "hetlora", optimizer, head_roles(head), combine, weights=weights, check=check
        )
    share = prune
    zeros = (
        "With prune, uploads of HetLoRA hold zeros in the directions that a client has dropped,"
        " which is no change of the model. Leave prune out."
    )
    return c.Algorithm(
        "hetlora",
        head_roles(head),
        lambda context: _client(optimizer, context, share, penalty),
        combine,
        replace_server()._replace(update_norm=_update_norm),
        init_client_state=_full_ranks,
        model=lambda broadcast, client_state: {
            **_cut(broadcast, client_state["ranks"]),
            **client_state["model"],
        },
        weights=weights,
        traffic=c.Traffic(sent_shares=_shares),
        incompatible={
            c.Feature.ASYNCHRONY: zeros,
            c.Feature.TRANSFORMS: zeros,
            c.Feature.KEPT_OPTIMIZER: "With prune, moments of earlier rounds would move directions"
            " that the client has dropped. Leave prune out.",
        },
        check=check,
    )


class Start(NamedTuple):
    """What a client had at the start of the round."""

    ranks: Ranks
    tails: dict[str, Array]
    """``‖A_tail‖ ‖B_tail‖`` of every matrix."""


def _client(
    optimizer: c.Optimizer, context: c.ClientContext, prune: float, penalty: float
) -> c.ClientUpdate:
    """Returns local training of the directions within the client's ranks, then pruning."""

    def init(broadcast: c.Params, client_state: c.PyTree, key: c.Key) -> Local:
        ranks = _owned(client_state["ranks"], context.fixed)
        shared = _cut(broadcast, ranks)
        start = Start(ranks, _tails(shared, ranks, prune))
        return init_local(optimizer, shared, client_state["model"], start)

    def step(local: Local, batch: c.Batch, key: c.Key) -> tuple[Local, c.Metrics]:
        def tails(shared: c.Params) -> Array:
            return penalty * sum(_tails(shared, local.start.ranks, prune).values(), jnp.zeros(()))

        shrink = add_to_gradient(jax.grad(tails)(local.shared))
        return train(optimizer, context, local, batch, key, shrink)

    def final(local: Local) -> tuple[c.Params, c.PyTree]:
        start, tails = local.start, _tails(local.shared, local.start.ranks, prune)
        ranks = {
            p: jnp.where(tails[p] < start.tails[p], _fewer(rank, prune), rank)
            for p, rank in start.ranks.items()
        }
        return _cut(local.shared, ranks), {"model": local.private, "ranks": ranks}

    return c.ClientUpdate(init, step, final)


def _update_norm(upload: c.Params, template: c.Params, fixed: c.Params) -> Array:
    """Returns the norm of an upload's change in the directions that it contains.

    Both factors of a direction beyond the client's rank are zero, which does not mean that the
    client moved it there.
    """
    model = dict(template)
    for (a, b), held in _held(upload):
        model[a] = jnp.where(held[None], template[a], 0)
        model[b] = jnp.where(held[:, None], template[b], 0)
    return tree.distance(upload, model)


def _held(upload: c.Params) -> list[tuple[tuple[str, str], Array]]:
    """Returns for each pair of factors which directions are not zero, bool ``[r]``."""
    return [
        ((a, b), jnp.any(upload[a] != 0, axis=0) | jnp.any(upload[b] != 0, axis=1))
        for a, b in pairs(upload).values()
    ]


def _shares(upload: c.Params, template: c.Params) -> dict[str, Array]:
    """Returns the shares of the factors that a client still has."""
    return {n: jnp.mean(held, dtype=jnp.float32) for pair, held in _held(upload) for n in pair}


def _full_ranks(shared: c.Params, private: c.Params) -> c.PyTree:
    ranks = {p: jnp.array(shared[a].shape[1], jnp.int32) for p, (a, _) in pairs(shared).items()}
    return {"model": private, "ranks": ranks}


def _owned(ranks: Ranks, fixed: c.Params) -> Ranks:
    """Returns ranks that are at most those of ``client_ranks``."""
    scales = {p: fixed[f"{p}.lora_scale"] for p in ranks if f"{p}.lora_scale" in fixed}
    most = {p: jnp.sum(x != 0, dtype=jnp.int32) for p, x in scales.items()}
    return {p: jnp.minimum(rank, most[p]) if p in most else rank for p, rank in ranks.items()}


def _fewer(rank: Array, prune: float) -> Array:
    return jnp.maximum(jnp.floor(prune * rank).astype(jnp.int32), 1)


def _cut(leaves: c.Params, ranks: Ranks) -> c.Params:
    """Returns the leaves with zeros in the directions beyond the ranks."""
    new = dict(leaves)
    for path, (a, b) in pairs(leaves).items():
        own = jnp.arange(leaves[a].shape[1]) < ranks[path]
        new[a] = jnp.where(own[None], leaves[a], 0)
        new[b] = jnp.where(own[:, None], leaves[b], 0)
    return new


def _tails(leaves: c.Params, ranks: Ranks, prune: float) -> dict[str, Array]:
    """Returns ``‖A_tail‖ ‖B_tail‖`` of every matrix."""
    products = {}
    for path, (a, b) in pairs(leaves).items():
        index = jnp.arange(leaves[a].shape[1])
        tail = (index >= _fewer(ranks[path], prune)) & (index < ranks[path])
        products[path] = _norm(jnp.where(tail[None], leaves[a], 0)) * _norm(
            jnp.where(tail[:, None], leaves[b], 0)
        )
    return products


def _norm(x: Array) -> Array:
    """Returns the Frobenius norm, with gradient 0 at 0."""
    square = jnp.sum(x**2)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
