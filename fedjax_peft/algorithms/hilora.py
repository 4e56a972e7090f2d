"""HiLoRA (Peng et al. 2026): a LoRA of all clients, one of a cluster and one of each client, added.

    layer:   y = x W + s (x A_r) B_r + s (x A_c) B_c + s (x A_l) B_l     (``peft.lora_sum``)
    root, until round R:
      client:  (A_r, B_r)_k ← optimizer steps on F_k
      server:  A_r B_r ← Σ w_k (A_r B_r)_k, cut to rank r by its SVD:  A_r ← V Σ,  B_r ← Uᵀ
               B̄_k ← λ B̄_k + (1-λ) B_k / ‖B_k‖_F,   for the clients of the round
      at its end, clusters of clients whose B̄_k span similar subspaces (clustering.py)
    cluster, until round R + C:
      client:  (A_c, B_c)_k ← steps on F_k + γ_c ‖B_c B_rᵀ‖_F², from its cluster's LoRA
      server:  as before, over the round's clients of each cluster
    leaf, from then on:
      client:  (A_l, B_l)_k ← steps on F_k + γ_c ‖B_l B_rᵀ‖_F² + γ_l ‖B_l B_cᵀ‖_F²;  nothing is sent

(The paper's matrices are [out, in]: its B is our Bᵀ.) Each LoRA rests once its stage has ended, and
has B = 0 before it begins. A client predicts with root + its cluster + its leaf. Distances between
clients are averaged over all adapted layers.

Decided here:
* The paper ends a stage when its steps have become small; here the rounds are given. A stage ends
  with the first round from there on that has an upload.
* B̄_k is B_k / ‖B_k‖_F in the first round of a client. Later means are not normalised again: the
  subspace that B̄_k spans does not depend on its length, but the weight of the next B_k does.
* A client that has not taken part before the clusters are found belongs to the largest one. The
  paper assigns such clients by a few probing steps.
* The penalties are on factors, without LoRA's scale. A shared head is trained and averaged over all
  clients in the first two stages, and rests in the third; a private head is always trained. The
  paper does not say what happens to the head.
The server keeps B̄_k of all clients: r · out numbers for each client and adapted layer, and N² for
each layer while it finds the clusters of N clients. Every lane reads the LoRA of its own cluster
from the broadcast, which holds all; traffic is counted for one (``Traffic.received_part``). Clients
send changes of the factors.

The paper's text could not be read as a whole. This follows two sets of public notes and a public
reimplementation (github.com/boyi-liu/FedLLM-Factory: γ, λ, the numbers of clusters, 15, 20 and 15
rounds). Checked against a loop in NumPy.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_peft import contracts as c
from fedjax_peft.aggregators.fra import truncated_average
from fedjax_peft.algorithms.checks import checked, federation_of
from fedjax_peft.algorithms.clustering import spectral_clusters, subspace_distances
from fedjax_peft.algorithms.common import (
    Local,
    add_to_gradient,
    freeze_where,
    init_local,
    loss_where,
    train,
)
from fedjax_peft.contracts.arguments import Count, Fraction, NotNegative
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.lowrank import matmul, pairs, pairs_by_shape, scale
from fedjax_peft.numerics.measures.aggregation_error import truncation_metrics
from fedjax_peft.numerics.roles import HeadPolicy, with_head
from fedjax_peft.support.errors import InputError

_TIERS = ("root", "cluster", "leaf")
"""The names of the LoRAs, in the order of their stages."""
_ROOT, _CLUSTER, _LEAF = range(3)
_FACTOR = re.compile(r"^(.*\.)(root|cluster|leaf)(\.lora_[ab])$")
"""The name of a leaf of these LoRAs."""


class Start(NamedTuple):
    """What a client had at the start of the round."""

    stage: Array
    """Which LoRA is trained: 0 root, 1 cluster, 2 leaf."""
    received: c.Params
    """The shared leaves, with the LoRA of the client's cluster."""


@checked
def hilora(
    optimizer: c.Optimizer,
    *,
    clients: Count,
    root_rounds: Count,
    cluster_rounds: Count,
    root_penalty: NotNegative = 0.1,
    cluster_penalty: NotNegative = 0.1,
    decay: Fraction = 0.9,
    fewest_clusters: Count = 2,
    most_clusters: Count = 10,
    head: HeadPolicy = "shared",
    weights: c.Weights = "size",
) -> c.Algorithm:
    """HiLoRA: a LoRA of all clients, then one of each cluster, then one of each client.

    Args:
      optimizer: the clients' optimizer, in all stages.
      clients: how many the federation has; the server keeps something of each.
      root_rounds: R, the rounds of the first stage.
      cluster_rounds: C, the rounds of the second stage. The third takes all other rounds.
      root_penalty: γ_c, on what the later LoRAs' B share with the root's.
      cluster_penalty: γ_l, on what the leaf's B shares with the cluster's.
      decay: λ of the smoothed B.
      fewest_clusters: the smallest number of clusters.
      most_clusters: the largest number of clusters; no more than clients.

    Raises:
      InputError: ``fewest_clusters`` above ``most_clusters`` or ``clients``, or a kept optimizer;
        on use, a model without the three LoRAs, another number of clients, or ``client_ranks``.
    """
    if not fewest_clusters <= min(most_clusters, clients):
        raise InputError(
            f"fewest_clusters = {fewest_clusters} must be at most most_clusters ="
            f" {most_clusters}, and at most the number of clients, {clients}."
        )
    clusters = (fewest_clusters, min(most_clusters, clients))
    penalties = (root_penalty, cluster_penalty)
    return c.Algorithm(
        "hilora",
        with_head(
            head,
            shared=r"^adapter:.*\.(root|cluster)\.lora_[ab]$",
            private=r"^adapter:.*\.leaf\.lora_[ab]$",
        ),
        lambda context: _client(optimizer, penalties, head, context),
        _aggregator(),
        _server(clients, root_rounds, root_rounds + cluster_rounds, decay, clusters),
        init_client_state=lambda shared, private: {"model": private, "client": jnp.int32(-1)},
        model=_model,
        local_model=_local_model,
        weights=weights,
        traffic=c.Traffic(
            sent_leaves=lambda broadcast, round_index: _sent(broadcast),
            received_part=lambda broadcast: _part(broadcast, jnp.int32(-1)),
        ),
        check=lambda kinds, count: _check(kinds, count, clients),
        incompatible={
            c.Feature.ASYNCHRONY: "HiLoRA's clients all train the LoRA of the same stage in a"
            " round.",
            c.Feature.KEPT_OPTIMIZER: "The three stages of HiLoRA train different leaves, whose"
            " moments would decay while they rest. Use 'fedavg'.",
        },
    )


def _part(broadcast: c.PyTree, client: Array) -> c.PyTree:
    """Returns what a client receives: the stage, and the model with its own cluster's LoRA."""
    known = broadcast["assignment"][jnp.maximum(client, 0)]
    own = jnp.where(client < 0, broadcast["newcomers"], known)
    cluster = {n: x[own] for n, x in broadcast["clusters"].items()}
    return {"model": {**broadcast["model"], **cluster}, "stage": broadcast["stage"]}


def _model(broadcast: c.PyTree, client_state: c.PyTree) -> c.Params:
    return {**_part(broadcast, client_state["client"])["model"], **client_state["model"]}


def _local_model(broadcast: c.PyTree, upload: c.Params, client_state: c.PyTree) -> c.Params:
    """Returns the leaves after the local work; an upload has changes of the factors."""
    received = _part(broadcast, client_state["client"])["model"]
    shared = {n: received[n] + x if _tier(n) is not None else x for n, x in upload.items()}
    return {**shared, **client_state["model"]}


def _tier(name: str) -> int | None:
    """Returns the stage that trains a leaf; None for a leaf of the head."""
    found = _FACTOR.match(name)
    return None if found is None else _TIERS.index(found[2])


def _of(tier: int, name: str) -> str:
    """Returns the name of a LoRA's leaf with the LoRA of another tier."""
    return _FACTOR.sub(rf"\g<1>{_TIERS[tier]}\g<3>", name)


def _moves(name: str, stage: Array, head: HeadPolicy) -> Array | bool:
    """Returns whether a leaf is trained in a stage."""
    tier = _tier(name)
    if tier is None:
        return head == "private" or stage < _LEAF
    return stage == tier


def _sent(broadcast: c.PyTree) -> dict[str, Array]:
    """Returns which leaves are sent in this stage."""
    stage = broadcast["stage"]
    leaves = (*broadcast["model"], *broadcast["clusters"])
    sent = {n: jnp.asarray(_moves(n, stage, "shared")) for n in leaves}
    return {**sent, "stage": jnp.array(False)}  # the server knows


def _client(
    optimizer: c.Optimizer,
    penalties: tuple[float, float],
    head: HeadPolicy,
    context: c.ClientContext,
) -> c.ClientUpdate:
    def moving(stage: Array) -> c.Optimizer:
        return freeze_where(optimizer, lambda name: _moves(name, stage, head))

    def init(broadcast: c.PyTree, client_state: c.PyTree, key: c.Key) -> Local:
        model, stage = _part(broadcast, client_state["client"]).values()
        return init_local(moving(stage), model, client_state["model"], Start(stage, model))

    def step(local: Local, batch: c.Batch, key: c.Key) -> tuple[Local, c.Metrics]:
        stage = local.start.stage
        loss = loss_where(context, lambda name: _moves(name, stage, head))
        leaves = {**local.shared, **local.private}
        correct = add_to_gradient(_penalty_gradient(leaves, *penalties))
        return train(moving(stage), context, local, batch, key, correct, loss)

    def final(local: Local) -> tuple[c.Params, c.PyTree]:
        received = local.start.received
        upload = {n: x if _tier(n) is None else x - received[n] for n, x in local.shared.items()}
        return upload, {"model": local.private, "client": jnp.int32(context.client)}

    return c.ClientUpdate(init, step, final)


def _penalty_gradient(leaves: c.Params, of_root: float, of_cluster: float) -> c.Params:
    """Returns the gradient of the penalties by the cluster's B and by the leaf's B."""

    def overlap(b: Array, other: Array) -> Array:
        """Returns half the gradient of ``‖b otherᵀ‖_F²`` by ``b``."""
        return matmul(matmul(b, other.T), other)

    gradient = {}
    for name in [n for n in leaves if n.endswith(".root.lora_b")]:
        root, cluster, leaf = (_of(tier, name) for tier in range(3))
        gradient[cluster] = 2 * of_root * overlap(leaves[cluster], leaves[root])
        gradient[leaf] = 2 * of_root * overlap(leaves[leaf], leaves[root])
        gradient[leaf] += 2 * of_cluster * overlap(leaves[leaf], leaves[cluster])
    return gradient


def _aggregator() -> c.Aggregator:
    """Returns the aggregator of ``{"rest": head, "changes": changes of factors, "weights": w}``.

    Only one LoRA changes in a round, so the changes of root and cluster are added, and named as
    those of the root. They are those of single uploads, ``[slots, ...]``: which of them are to be
    averaged depends on the server's clusters.
    """

    def lift(upload: c.Params, template: c.Params, fixed: c.Params) -> c.PyTree:
        rest = {n: x - template[n] for n, x in upload.items() if _tier(n) is None}
        changes = {n: x + upload[_of(_CLUSTER, n)] for n, x in upload.items() if _tier(n) == _ROOT}
        return {"rest": rest, "changes": c.Stacked(changes)}

    def finish(
        total: c.Total, template: c.Params, context: c.RoundContext, state: c.PyTree
    ) -> c.Aggregated:
        by = jnp.where(total.weight > 0, total.weight, 1.0)
        update = {
            "rest": {n: template[n] + x / by for n, x in total.value["rest"].items()},
            "changes": total.value["changes"].value,
            "weights": total.weights / by,
        }
        return c.Aggregated(update, {}, state)

    return c.Aggregator(
        "hilora",
        lift,
        finish,
        unmasked_policy="refused",
        truncates=True,
        refactors=True,
        needs_all_uploads=True,
    )


def _server(
    clients: int, first_end: int, second_end: int, decay: float, clusters: tuple[int, int]
) -> c.ServerUpdate:
    """Returns the server."""

    def start(shared: c.Params) -> c.PyTree:
        own = {n: x for n, x in shared.items() if _tier(n) == _CLUSTER}
        root = [n for n in shared if n.endswith(".root.lora_b")]
        zeros = {n.removesuffix(".root.lora_b"): jnp.zeros(()) for n in root}
        return {
            "model": {n: x for n, x in shared.items() if n not in own},
            "clusters": {n: jnp.repeat(x[None], clusters[1], axis=0) for n, x in own.items()},
            "bases": {n: jnp.zeros((clients, *shared[n].shape)) for n in root},
            "met": jnp.zeros(clients, bool),
            "assignment": jnp.zeros(clients, jnp.int32),
            "newcomers": jnp.int32(0),
            "found": jnp.int32(0),
            "stage": jnp.int32(_ROOT),
            "truncation": dict.fromkeys(("frobenius", "largest", "norms"), zeros),
        }

    def update(state: c.PyTree, new: c.PyTree, context: c.RoundContext) -> c.PyTree:
        received, stage = context.participants > 0, state["stage"]
        state = tree.where(received, _averaged(state, new, context, decay), state)
        found = received & (stage == _ROOT) & (context.round_index >= first_end)
        groups = jax.lax.cond(
            found,
            lambda state: _grouped(state, *clusters),
            lambda state: {n: state[n] for n in ("assignment", "newcomers", "found")},
            state,
        )
        ends = found | (received & (stage == _CLUSTER) & (context.round_index >= second_end))
        return {**state, **groups, "stage": stage + ends}

    def broadcast(state: c.PyTree) -> c.PyTree:
        return {n: state[n] for n in ("model", "clusters", "assignment", "newcomers", "stage")}

    def params(state: c.PyTree) -> c.Params:
        model: c.Params = _part(broadcast(state), jnp.int32(-1))["model"]
        return model

    def template(state: c.PyTree) -> c.Params:
        return {n: x if _tier(n) is None else jnp.zeros_like(x) for n, x in params(state).items()}

    def metrics(state: c.PyTree) -> dict[str, Array]:
        of_average = truncation_metrics(**state["truncation"])
        return {**of_average, "client_clusters": state["found"].astype(jnp.float32)}

    return c.ServerUpdate(start, update, broadcast, params, template, metrics=metrics)


def _averaged(state: c.PyTree, new: c.PyTree, context: c.RoundContext, decay: float) -> c.PyTree:
    """Returns the state with the averages of the stage, and in the first with smoothed bases."""
    stage, counted = state["stage"], new["weights"] > 0
    everyone = len(state["met"])
    who = jnp.minimum(context.clients, everyone - 1)  # slots without a client have weight 0
    uploads = _uploaded(state, new["changes"], who)
    groups, truncation = _cut(state, uploads, _shares(state, new["weights"], who), context.fixed)
    model, clusters = {**state["model"], **new["rest"]}, {}
    for n, x in groups.items():
        own = _of(_CLUSTER, n)
        model[n] = jnp.where(stage == _ROOT, x[0], model[n])
        clusters[own] = jnp.where(stage == _CLUSTER, x, state["clusters"][own])
    places = jnp.where(counted & (stage == _ROOT), who, everyone)
    bases = {}
    for n, old in state["bases"].items():
        norms = jnp.sqrt(jnp.sum(uploads[n] ** 2, axis=(1, 2), keepdims=True))
        unit = uploads[n] / jnp.where(norms > 0, norms, 1.0)
        known = state["met"][who][:, None, None]
        smooth = jnp.where(known, decay * old[who] + (1 - decay) * unit, unit)
        bases[n] = old.at[places].set(smooth, mode="drop")
    met = state["met"].at[places].set(True, mode="drop")
    changed = {"model": model, "clusters": clusters, "bases": bases, "met": met}
    return {**state, **changed, "truncation": truncation}


def _uploaded(state: c.PyTree, changes: c.Params, who: Array) -> c.Params:
    """Returns the factors after the local work, ``[slots, ...]``, by the names of the root's.

    Args:
      changes: of the factors, ``[slots, ...]``, by the names of the root's.
    """
    own, found = state["assignment"][who], {}
    for n, x in changes.items():
        theirs = state["clusters"][_of(_CLUSTER, n)][own]
        found[n] = jnp.where(state["stage"] == _ROOT, state["model"][n][None], theirs) + x
    return found


def _shares(state: c.PyTree, weights: Array, who: Array) -> Array:
    """Returns the weights of uploads in the average of each group, ``[groups, slots]``.

    In the first stage all are in the first group; in the second the groups are the clusters; in the
    third there are none. The weights of a group sum to 1, or are all 0.
    """
    stage, groups = state["stage"], next(len(x) for x in state["clusters"].values())
    group = jnp.arange(groups)[:, None]
    own = state["assignment"][who][None]
    member = jnp.where(stage == _ROOT, group == 0, (own == group) & (stage == _CLUSTER))
    shares = jnp.where(member, weights[None], 0.0)
    total = jnp.sum(shares, axis=1, keepdims=True)
    return shares / jnp.where(total > 0, total, 1.0)


def _cut(
    state: c.PyTree, uploads: c.Params, shares: Array, fixed: c.Params
) -> tuple[c.Params, dict[str, c.Params]]:
    """Returns the factors of every group's average, and the sizes of what the rank cuts off.

    Args:
      uploads: factors ``[slots, ...]``, by the names of the root's.
      shares: ``[groups, slots]``.

    Returns:
      Factors ``[groups, ...]`` by the names of the root's, and the arguments of
      :func:`fedjax_peft.numerics.measures.aggregation_error.truncation_metrics`.
    """
    groups: c.Params = {}
    sizes: dict[str, c.Params] = {"frobenius": {}, "largest": {}, "norms": {}}
    root = {n: state["model"][n] for n in uploads}
    for paths in pairs_by_shape(root).values():
        names = [pairs(root)[p] for p in paths]
        s = jnp.stack([scale(fixed, p) for p in paths])
        a, b = (jnp.stack([uploads[n] for n in factor]) for factor in zip(*names, strict=True))
        old = [
            jnp.stack([state["clusters"][_of(_CLUSTER, n)] for n in factor], axis=1)
            for factor in zip(*names, strict=True)
        ]

        def one(
            arguments: tuple[Array, ...], a: Array = a, b: Array = b, s: Array = s
        ) -> tuple[Array, ...]:
            share, *kept = arguments
            zero = jnp.zeros(len(s))
            return jax.lax.cond(
                jnp.any(share > 0),
                lambda: truncated_average(a, b, share, s, split="A"),
                lambda: (*kept, zero, zero, zero),
            )

        new_a, new_b, *lost = jax.lax.map(one, (shares, *old))
        for i, path in enumerate(paths):
            groups[names[i][0]], groups[names[i][1]] = new_a[:, i], new_b[:, i]
            layer, (frobenius, largest, norms) = path.removesuffix(".root"), (x[:, i] for x in lost)
            sizes["frobenius"][layer] = jnp.sqrt(jnp.sum(frobenius**2))
            sizes["largest"][layer] = jnp.max(largest)
            sizes["norms"][layer] = jnp.sqrt(jnp.sum(norms**2))
    return groups, sizes


def _grouped(state: c.PyTree, fewest: int, most: int) -> c.PyTree:
    """Returns the clusters of all clients, the cluster of newcomers, and how many there are."""
    met = state["met"]
    layers = jnp.stack([subspace_distances(rows) for rows in state["bases"].values()])
    labels, found = spectral_clusters(jnp.mean(layers, axis=0), met, fewest, most)
    sizes = jnp.sum((labels[:, None] == jnp.arange(most)[None]) & met[:, None], axis=0)
    newcomers = jnp.argmax(sizes).astype(jnp.int32)
    assignment = jnp.where(met, labels, newcomers)
    return {"assignment": assignment, "newcomers": newcomers, "found": found}


def _check(kinds: Mapping[str, str], count: int, clients: int) -> None:
    if not {_ROOT, _CLUSTER, _LEAF} <= {_tier(n) for n in kinds}:
        raise InputError(
            "'hilora' needs a LoRA of all clients, of a cluster and of the client at every site:"
            " attach fp.peft.lora_sum()."
        )
    federation_of(clients, "hilora")(kinds, count)
